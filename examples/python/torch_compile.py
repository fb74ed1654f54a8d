"""On torch tensors: eager, and as one node of a compiled graph."""

import torch

import lean_attention

q = torch.randn(2, 8, 1, 64)  # [B, Hq, n_q, d]
k, v = torch.randn(2, 2, 2, 4096, 64)  # [B, Hkv, n_kv, d]
seqlens = torch.tensor([4096, 1234], dtype=torch.int32)


@torch.compile(fullgraph=True)
def layer(q, k, v, seqlens):
    return lean_attention.decode(q * 0.5, k, v, seqlens=seqlens) + 1


with torch.inference_mode():
    print((layer(q, k, v, seqlens) - lean_attention.decode(q * 0.5, k, v, seqlens=seqlens) - 1).abs().max().item())
