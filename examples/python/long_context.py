"""Long-context generation with K/V sharded over the ranks there are: `torchrun --nproc-per-node 2 long_context.py [TOKENS]`.

A Llama-shaped decoder with random weights. Every rank has the weights and a shard of every sequence's keys and values; the prompt's
are placed by ContextParallel.shard(), those of new tokens by decode(). On GPUs by NCCL, on CPUs by gloo; alone it is one rank.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm, silu

from lean_attention.distributed import ContextParallel

LAYERS, HIDDEN, Q_HEADS, KV_HEADS, DIM, VOCABULARY, NEW_TOKENS = 2, 256, 8, 2, 32, 1000, 16
PROMPT = int(sys.argv[1]) if len(sys.argv) > 1 else 4096

cuda = torch.cuda.is_available()
if "RANK" in os.environ:
    dist.init_process_group("nccl" if cuda else "gloo")
else:
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dtype = torch.bfloat16 if cuda else torch.float32

torch.manual_seed(0)  # the same weights on every rank


def weight(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns) * columns**-0.5).to(device, dtype)


layers = [
    dict(
        qkv=weight((Q_HEADS + 2 * KV_HEADS) * DIM, HIDDEN), out=weight(HIDDEN, Q_HEADS * DIM),
        gate_up=weight(8 * HIDDEN, HIDDEN), down=weight(HIDDEN, 4 * HIDDEN),
    )
    for _ in range(LAYERS)
]  # fmt: skip
embedding = weight(VOCABULARY, HIDDEN)
angles = torch.outer(torch.arange(PROMPT + NEW_TOKENS), 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)).to(device)

# [example]
context = ContextParallel(block_tokens=64)
room = context.placement.capacity(PROMPT + NEW_TOKENS)  # tokens of the shard that every rank needs room for
caches = [torch.zeros(2, 1, KV_HEADS, room, DIM, device=device, dtype=dtype) for _ in layers]


def attend(cache: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """One new token's attention over all `tokens` of its sequence; its own k and v go to the rank they belong to."""
    return context.decode(q, cache[0], cache[1], append_k=k, append_v=v, seqlens=tokens)
# [example]


def rotated(x: torch.Tensor, positions: slice) -> torch.Tensor:
    """Rotary embedding, by halves, of x [B, heads, tokens, d] at these positions."""
    cos, sin = (f(angles[positions]).to(dtype) for f in (torch.cos, torch.sin))
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def forward(ids: torch.Tensor, first: int, tokens: torch.Tensor) -> torch.Tensor:
    """The most likely next token, after ids [1, n] that stand at position `first` and later."""
    x = embedding[ids]
    for layer, cache in zip(layers, caches):
        heads = (rms_norm(x, (HIDDEN,)) @ layer["qkv"].T).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = heads.split((Q_HEADS, KV_HEADS, KV_HEADS), 1)
        positions = slice(first, first + ids.shape[1])
        q, k = rotated(q, positions), rotated(k, positions)
        if ids.shape[1] == 1:
            attended = attend(cache, q, k, v, tokens)
        else:  # the prompt: every rank computes it whole and keeps its shard
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            for kept, new in zip(cache, (k, v)):
                shard = context.shard(new)
                kept[:, :, : shard.shape[2]] = shard
        x = x + attended.transpose(1, 2).flatten(2) @ layer["out"].T
        gate, up = (rms_norm(x, (HIDDEN,)) @ layer["gate_up"].T).chunk(2, -1)
        x = x + (silu(gate) * up) @ layer["down"].T
    return (rms_norm(x[:, -1], (HIDDEN,)) @ embedding.T).argmax(-1, keepdim=True)


with torch.no_grad():
    prompt = torch.randint(VOCABULARY, (1, PROMPT)).to(device)
    tokens = torch.tensor([PROMPT], dtype=torch.int32, device=device)
    generated = [forward(prompt, 0, tokens)]
    for step in range(NEW_TOKENS - 1):
        tokens += 1
        generated.append(forward(generated[-1], PROMPT + step, tokens))
if context.rank == 0:
    print(f"{context.ranks} ranks, {room} of {PROMPT + NEW_TOKENS} tokens on each:", torch.cat(generated, 1)[0].tolist())
dist.destroy_process_group()
