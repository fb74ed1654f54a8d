"""FlashInfer's decode wrapper over a paged cache: only the import differs."""

import torch

from lean_attention.compat.flashinfer import BatchDecodeWithPagedKVCacheWrapper

pages, page = 100, 16
cache = torch.randn(pages, 2, page, 2, 64)  # keys and values, "NHD"
indptr = torch.tensor([0, 60, 75], dtype=torch.int32)  # the first request has 60 pages, the second 15
indices = torch.randperm(pages)[:75].to(torch.int32)
last_page_len = torch.tensor([16, 3], dtype=torch.int32)

wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "NHD")
wrapper.plan(indptr, indices, last_page_len, 8, 2, 64, page)
print(wrapper.run(torch.randn(2, 8, 64), cache).shape)
