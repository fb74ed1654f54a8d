"""Two sequences of up to 4096 tokens, 8 query heads that share 2 key/value heads."""

import numpy as np

import lean_attention

random = np.random.default_rng(0)
q = random.standard_normal((2, 8, 64), np.float32)  # [B, Hq, d]: one new token of each
k, v = random.standard_normal((2, 2, 2, 4096, 64), np.float32)  # [B, Hkv, n_kv, d]

out, lse = lean_attention.decode(q, k, v, seqlens=[4096, 1234], return_lse=True)
print(out.shape, lse.shape)

print(lean_attention.schedule([4096, 1234], q_heads=8, kv_heads=2, head_dim=64, options=lean_attention.Options(workers=6)))
