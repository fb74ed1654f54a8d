"""A serving loop of one layer: requests come and go, their keys and values lie in pages, each step is one call for all of them."""

import numpy as np

import lean_attention

Q_HEADS, KV_HEADS, DIM, PAGE, PAGES, MOST_TOKENS = 8, 2, 64, 16, 64, 256
random = np.random.default_rng(0)
k_pool, v_pool = np.zeros((2, PAGES, PAGE, KV_HEADS, DIM), np.float32)  # "bshd": tokens before heads
free_pages = list(range(PAGES))

angles = np.arange(MOST_TOKENS)[:, None] / 10_000 ** (np.arange(DIM // 2) / (DIM // 2))  # [positions, rotary_dim / 2]
rotary_cos, rotary_sin = np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)


class Request:
    def __init__(self, prompt_tokens: int, new_tokens: int) -> None:
        self.to_prefill, self.to_decode = prompt_tokens, new_tokens
        self.tokens, self.pages = 0, []

    def grow(self, tokens: int) -> None:
        """Room for tokens that the next call appends."""
        self.tokens += tokens
        while len(self.pages) * PAGE < self.tokens:
            self.pages.append(free_pages.pop())


def model_layer(tokens: int) -> tuple:
    """What a model's projections give for so many tokens: q, k, v, not yet rotated."""
    return tuple(random.standard_normal((tokens, heads, DIM), np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))


def step(batch: list) -> np.ndarray:
    """One call for prompts and decode steps alike: new tokens are rotated, written to their pages, and attended to."""
    counts = [request.to_prefill or 1 for request in batch]
    for request, count in zip(batch, counts):
        request.grow(count)
    table = np.zeros((len(batch), max(len(request.pages) for request in batch)), np.int32)
    for row, request in zip(table, batch):
        row[: len(request.pages)] = request.pages
    q, new_k, new_v = model_layer(sum(counts))
    out = lean_attention.decode(
        q, k_pool, v_pool, layout="bshd", causal=True, block_table=table,
        seqlens=[request.tokens for request in batch],  # they count the new tokens
        cu_seqlens_q=[0, *np.cumsum(counts).tolist()], append_k=new_k, append_v=new_v,
        rotary_cos=rotary_cos, rotary_sin=rotary_sin,
    )  # fmt: skip
    for request in batch:
        if request.to_prefill:
            request.to_prefill = 0
        else:
            request.to_decode -= 1
    return out


waiting = [Request(40, 5), Request(7, 9), Request(100, 3), Request(1, 12)]
running, steps = [], 0
while waiting or running:
    if waiting:
        running.append(waiting.pop(0))  # one more request joins at each step
    out = step(running)
    assert np.isfinite(out).all()
    for request in [request for request in running if not request.to_decode]:
        running.remove(request)
        free_pages += request.pages
    steps += 1
print(f"{steps} steps, all pages are free again: {len(free_pages) == PAGES}")
assert len(free_pages) == PAGES
