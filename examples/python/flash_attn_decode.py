"""flash-attention's decode call: only the import differs."""

import torch

from lean_attention import flash_attn_with_kvcache

q = torch.randn(2, 1, 8, 64)  # [B, n_q, Hq, d]
k_cache, v_cache = torch.randn(2, 2, 4096, 2, 64)  # [B, S, Hkv, d]
cache_seqlens = torch.tensor([4096, 1234], dtype=torch.int32)

out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, causal=True, return_softmax_lse=True)
print(out.shape, lse.shape)
