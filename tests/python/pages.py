"""What the tests of the drop-ins share: torch tensors, and pages of them."""

import math

import torch
from conftest import arrays


def tensors(**sizes):
    return [torch.from_numpy(x) for x in arrays(**sizes)]


def to_bshd(*given):
    return [x.transpose(1, 2).contiguous() for x in given]


def paged(k, v, page, seed=5):
    """k, v [B, H, n, d] in shuffled pages [P, page, H, d] and the table; pages nobody owns hold NaN."""
    batch, _, tokens, _ = k.shape
    pages = tokens // page
    order = torch.randperm(batch * pages + 2, generator=torch.Generator().manual_seed(seed))[: batch * pages]
    pools = []
    for x in (k, v):
        pool = torch.full((batch * pages + 2, page, x.shape[1], x.shape[3]), math.nan, dtype=x.dtype)
        pool[order] = x.transpose(1, 2).reshape(batch * pages, page, x.shape[1], x.shape[3])
        pools.append(pool)
    return *pools, order.to(torch.int32).view(batch, pages)


def csr(table, lengths, page):
    pages = [-(-length // page) for length in lengths]
    indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32)
    indices = torch.cat([table[b, :n] for b, n in enumerate(pages)])
    last = torch.tensor([(length - 1) % page + 1 if length else 0 for length in lengths], dtype=torch.int32)
    return indptr, indices, last
