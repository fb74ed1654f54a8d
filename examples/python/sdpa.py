"""PyTorch's own attention function, decode calls by this library."""

import torch

import lean_attention

lean_attention.enable_sdpa()
q = torch.randn(2, 8, 1, 64)
k, v = torch.randn(2, 2, 2, 4096, 64)
with torch.inference_mode():
    print(torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).shape)
lean_attention.sdpa.disable_sdpa()
