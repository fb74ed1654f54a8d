"""The inputs of a row, in any form that a library wants, and what is right: softmax from its definition in fp64.

All K and V are carved out of one pair of flat buffers of N(0, 1) numbers, so a call's copies and forms cost no memory beside each other.
"""
import functools
import math

import torch

from peers.rows import ELEMENT_BYTES, Form, Row

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
CHUNK = 1 << 24  # elements that are drawn at a time
#: Largest difference / largest value, by bytes of an element of the cache: a wrong answer is near 1.
ERROR_LIMIT = {1: 0.15, 2: 0.05, 4: 1e-3}
MOST_COPIES, MOST_BYTES = 1024, 16e9  # of one row


def copies_of(row: Row, cold_bytes: int) -> int:
    """So many caches that their reads in turn find none of them in a cache of the machine."""
    whole = 2 * sum(row.lens) * row.kv_heads * row.head_dim * ELEMENT_BYTES[row.kv_dtype]  # a window reads a part of its cache
    return max(1, min(MOST_COPIES, -(-cold_bytes // row.kv_bytes), int(MOST_BYTES // whole)))


def pages_of(row: Row, page: int) -> list:
    return [-(-n // page) for n in row.lens]


def shape_of(row: Row, form: Form, dim: int = 0) -> tuple:
    heads, dim = row.kv_heads, dim or row.head_dim
    if form.page:
        pages = sum(pages_of(row, form.page))
        return (pages, heads, form.page, dim) if form.kind == "hnd" else (pages, form.page, heads, dim)
    return {"bhsd": (row.batch, heads, row.longest, dim), "bshd": (row.batch, row.longest, heads, dim),
            "htd": (heads, sum(row.lens), dim), "thd": (sum(row.lens), heads, dim), "blocks": (sum(row.lens) * heads * dim,)}[form.kind]


class Pool:
    """K's and V's numbers, of one type at a time."""

    def __init__(self, device: str):
        self.device, self.dtype, self.buffers = device, None, ()

    def fill(self, dtype: str, elements: int, seed: int = 1) -> None:
        """At least so many in each buffer. MemoryError: there is not enough memory."""
        if self.dtype == dtype and self.buffers[0].numel() >= elements:
            return
        self.dtype, self.buffers = None, ()
        needed, free = 2 * elements * ELEMENT_BYTES[dtype], free_bytes(self.device)
        if needed > 0.8 * free:
            raise MemoryError(f"K and V need {needed / 1e9:.1f} GB of {free / 1e9:.1f} that are free")
        generator = torch.Generator(self.device).manual_seed(seed)
        buffers = tuple(torch.empty(elements, dtype=DTYPES[dtype], device=self.device) for _ in "kv")
        for part in (part for buffer in buffers for part in buffer.split(CHUNK)):
            part.copy_(torch.randn(part.numel(), generator=generator, device=self.device))
        self.dtype, self.buffers = dtype, buffers


def free_bytes(device: str) -> int:
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def offsets(counts, device: str) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)


class Tensors:
    """A row's inputs in one form. q: [tokens, Hq, d], sequences end to end; k[i], v[i]: copy i."""

    def __init__(self, row: Row, form: Form, pool: Pool, copies: int):
        self.row, self.form, self.device, self.copies = row, form, pool.device, copies
        self.k, self.v = (self.views(buffer, shape_of(row, form, dim)) for buffer, dim in zip(pool.buffers, (row.head_dim, row.value_dim)))
        if row.latent:
            self.v = [k[..., :row.value_dim] for k in self.k]
        generator = torch.Generator().manual_seed(7)
        self.q = torch.randn((sum(row.n_q), row.q_heads, row.head_dim), generator=generator).to(self.device, DTYPES[row.dtype])
        self.dtype, self.kv_dtype = DTYPES[row.dtype], DTYPES[row.kv_dtype]
        self.lens = torch.tensor(row.lens, dtype=torch.int32, device=self.device)
        self.pages = pages_of(row, form.page) if form.page else []
        if form.page:  # a sequence's pages lie scattered, as in a server that has run for a while
            ids = torch.randperm(sum(self.pages), generator=torch.Generator().manual_seed(11)).to(torch.int32)
            self.page_ids, self.page_starts = ids.to(self.device), torch.tensor([0, *self.pages]).cumsum(0).int()
            self.last_page_lens = torch.tensor([(n - 1) % form.page + 1 for n in row.lens], dtype=torch.int32)
            self.table = torch.nn.utils.rnn.pad_sequence(ids.split(self.pages), batch_first=True).to(self.device)

    def views(self, buffer: torch.Tensor, shape: tuple) -> list:
        elements = math.prod(shape)
        return [buffer[i * elements:(i + 1) * elements].view(shape) for i in range(self.copies)]

    @functools.cached_property
    def kv_starts(self) -> torch.Tensor:
        return offsets(self.row.lens, self.device)

    @functools.cached_property
    def q_starts(self) -> torch.Tensor:
        return offsets(self.row.n_q, self.device)

    @functools.cached_property
    def slopes(self) -> torch.Tensor:
        """ALiBi's, [Hq], as the command has them."""
        heads = self.row.q_heads
        return torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)], dtype=torch.float32, device=self.device)

    @functools.cached_property
    def sinks(self) -> torch.Tensor:
        """[Hq] logits of 0, as the command has them."""
        return torch.zeros(self.row.q_heads, dtype=torch.float32, device=self.device)

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """[B, 1, n_q, longest], the same for all heads: boolean, of which seven tenths and the last key are seen, or N(0, 1)."""
        generator = torch.Generator(self.device).manual_seed(13)
        shape, kind = (self.row.batch, 1, self.row.n_q[0], self.row.longest), self.row.feature("mask")
        if kind != "boolean":
            return torch.randn(shape, generator=generator, device=self.device).to(DTYPES[kind])
        seen = torch.rand(shape, generator=generator, device=self.device) < 0.7
        for b, n in enumerate(self.row.lens):
            seen[b, ..., n - 1] = True
        return seen

    @functools.cached_property
    def drafts(self) -> torch.Tensor:
        """[B, n_q, n_q]: which of the last n_q keys a query sees, its own and some ahead of it."""
        generator = torch.Generator(self.device).manual_seed(17)
        n_q = self.row.n_q[0]
        drawn = torch.rand((self.row.batch, n_q, n_q), generator=generator, device=self.device) < 0.6
        return drawn.tril() | torch.eye(n_q, dtype=torch.bool, device=self.device)

    @functools.cached_property
    def tree_words(self) -> torch.Tensor:
        """The same as this library has it: [B, n_q, ceil(n_q / 32)], bit i of a word for one key, as uint32."""
        batch, n_q, _ = self.drafts.shape
        bits = torch.zeros((batch, n_q, -(-n_q // 32) * 32), dtype=torch.int64, device=self.device)
        bits[..., :n_q] = self.drafts
        words = (bits.view(batch, n_q, -1, 32) << torch.arange(32, device=self.device)).sum(-1)
        return (words - (words >> 31 << 32)).to(torch.int32).view(torch.uint32)

    def bias(self, b: int) -> torch.Tensor:
        """All rules of sequence b but softcap and sinks as a mask: [Hq or 1, n_q, its keys], boolean where none adds numbers, else fp32. For peers; what
        is right has the rules by itself (expected())."""
        row, n_q = self.row, self.row.n_q[b]
        keys, positions = torch.arange(row.lens[b], device=self.device), torch.arange(row.lens[b] - n_q, row.lens[b], device=self.device)
        seen = torch.stack([~hidden_keys(row, keys, position) for position in positions])[None]
        numbers = None
        if row.feature("tree"):
            seen = seen.clone()
            seen[..., -n_q:] &= self.drafts[b]
        if row.feature("alibi"):
            numbers = -self.slopes[:, None, None] * (positions[:, None] - keys).abs()
        if row.feature("mask") == "boolean":
            seen = seen & self.mask[b, :, :, :row.lens[b]]
        elif row.feature("mask"):
            numbers = self.mask[b, :, :, :row.lens[b]].float() + (0 if numbers is None else numbers)
        return seen if numbers is None else numbers.masked_fill(~seen, -math.inf)

    @property
    def q_bshd(self) -> torch.Tensor:
        """[B, n_q, Hq, d]; of even queries alone."""
        return self.q.view(self.row.batch, self.row.n_q[0], self.row.q_heads, self.row.head_dim)

    def output(self) -> torch.Tensor:
        """Where a call may write: NaN at first, so that what nobody writes shows."""
        return torch.full((*self.q.shape[:2], self.row.value_dim), math.nan, dtype=self.dtype, device=self.device)

    def sequence(self, x: torch.Tensor, b: int) -> torch.Tensor:
        """[Hkv, tokens, d] of sequence b, a view; not of pages."""
        row, kind = self.row, self.form.kind
        n, begin = row.longest if self.form.padded else row.lens[b], sum(row.lens[:b])
        if kind == "blocks":
            dim = x.numel() // (sum(row.lens) * row.kv_heads)
            return x[begin * row.kv_heads * dim:(begin + n) * row.kv_heads * dim].view(row.kv_heads, n, dim)
        return {"bhsd": lambda: x[b, :, :n], "bshd": lambda: x[b, :n].transpose(0, 1), "htd": lambda: x[:, begin:begin + n],
                "thd": lambda: x[begin:begin + n].transpose(0, 1)}[kind]()

    def tokens(self, x: torch.Tensor, b: int, head: int) -> torch.Tensor:
        """[tokens, d] of sequence b and K/V head `head`, in fp64."""
        raw = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
        if self.form.page:
            ids = self.table[b, :self.pages[b]].long()
            picked = (raw[ids, head] if self.form.kind == "hnd" else raw[ids, :, head]).reshape(-1, x.shape[-1])[:self.row.lens[b]]
        else:
            picked = self.sequence(raw, b)[head]
        return picked.contiguous().view(x.dtype).double()

    def error(self, copy: int, out) -> float:
        """Largest difference from fp64 / largest value, over a sample of sequences, heads and query tokens."""
        row = self.row
        out = (torch.cat([part.reshape(-1, row.q_heads, row.value_dim) for part in out]) if isinstance(out, list) else out)
        out = out.reshape(-1, row.q_heads, row.value_dim)
        if not torch.isfinite(out).all():
            return math.inf
        worst = largest = 0.0
        by_length = sorted(range(row.batch), key=lambda b: row.lens[b])
        for b in sorted({0, row.batch - 1, by_length[0], by_length[row.batch // 2], by_length[-1]}):
            for head in sorted({0, row.kv_heads // 2, row.kv_heads - 1}):
                found = self.expected(copy, b, head)
                begin, heads = sum(row.n_q[:b]), slice(head * row.group, (head + 1) * row.group)
                for i, expected in found.items():
                    worst = max(worst, float((out[begin + i, heads].double() - expected).abs().max()))
                    largest = max(largest, float(expected.abs().max()))
        return worst / largest if largest else worst

    def expected(self, copy: int, b: int, head: int) -> dict:
        """Query token -> [group, dv] in fp64: of the first, the middle and the last one."""
        row, n_q = self.row, self.row.n_q[b]
        k, v = (self.tokens(x[copy], b, head) for x in (self.k, self.v))
        begin, found, heads = sum(row.n_q[:b]), {}, slice(head * row.group, (head + 1) * row.group)
        for i in sorted({0, n_q // 2, n_q - 1}):
            scores = self.q[begin + i, heads].double() @ k.T * row.scale
            if row.feature("softcap"):
                scores = row.feature("softcap") * torch.tanh(scores / row.feature("softcap"))
            position, keys = len(k) - n_q + i, torch.arange(len(k), device=k.device)
            if row.feature("alibi"):
                scores = scores - self.slopes[heads, None].double() * (position - keys).abs()
            scores = scores.masked_fill(hidden_keys(row, keys, position), -math.inf)
            if row.feature("mask"):
                of_query = self.mask[b, :, i, :len(k)]
                scores = scores.masked_fill(~of_query, -math.inf) if of_query.dtype == torch.bool else scores + of_query.double()
            if row.feature("tree"):
                scores[:, len(k) - n_q:] = scores[:, len(k) - n_q:].masked_fill(~self.drafts[b, i], -math.inf)
            if row.feature("sinks"):
                sink = self.sinks[heads, None].double()
                found[i] = torch.softmax(torch.cat([scores, sink], -1), -1)[:, :-1] @ v
            else:
                found[i] = torch.softmax(scores, -1) @ v
        return found


def hidden_keys(row: Row, keys: torch.Tensor, position: int) -> torch.Tensor:
    """Which keys a query at a position does not see."""
    left, right = row.feature("window", (-1, -1))
    hidden = keys > position if row.causal else torch.zeros_like(keys, dtype=torch.bool)
    hidden = hidden | (keys < position - left) if left >= 0 else hidden
    return hidden | (keys > position + right) if right >= 0 else hidden
