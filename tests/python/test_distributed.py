"""lean_attention.distributed on gloo: 2 and 4 processes compute what one does."""

from __future__ import annotations

import datetime
import os
import re
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import oracle  # noqa: E402
import ranks  # noqa: E402
import torch.distributed as dist  # noqa: E402

import lean_attention  # noqa: E402
from lean_attention.distributed import ContextParallel, Placement, TensorParallel  # noqa: E402

OPTIONS = lean_attention.Options(workers=2)  # as many on every machine, so that bits may be compared

PLACEMENTS = [Placement(r, block) for r in (1, 2, 3, 4, 7) for block in (1, 2, 3, 16)]


# Placement


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_every_token_lies_on_one_rank_in_order(placement):
    tokens = 7 * 16 * 4 + 5
    held = [[] for _ in range(placement.ranks)]
    for token in range(tokens):
        rank = placement.rank_of(token)
        assert placement.local_index(token) == len(held[rank])  # end to end: appended tokens go to the end of a share
        assert placement.token_at(len(held[rank]), rank) == token
        held[rank].append(token)
        shares = [placement.local_tokens(token + 1, each) for each in range(placement.ranks)]
        assert shares == [len(each) for each in held]
        assert max(shares) - min(shares) <= placement.block_tokens
        assert placement.capacity(token + 1) == max(shares)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_tensors_and_integers_are_placed_alike(placement):
    tokens = torch.arange(300, dtype=torch.int32)
    for method in (placement.rank_of, placement.local_index):
        assert method(tokens).tolist() == [method(token) for token in range(300)]
    for rank in range(placement.ranks):
        local = placement.local_tokens(tokens, rank)
        assert local.dtype == torch.int32 and local.tolist() == [placement.local_tokens(token, rank) for token in range(300)]
        assert placement.token_at(tokens, rank).tolist() == [placement.token_at(token, rank) for token in range(300)]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 37, 129])
def test_shares_of_a_tensor_are_its_tokens(placement, tokens):
    x = torch.randn(2, 3, tokens, 4)
    for rank in range(placement.ranks):
        share = placement.shard(x, rank)
        mine = [token for token in range(tokens) if placement.rank_of(token) == rank]
        assert share.shape[2] == placement.capacity(tokens)
        assert (share[:, :, : len(mine)] == x[:, :, mine]).all() and (share[:, :, len(mine) :] == 0).all()


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_shares_of_packed_sequences(placement):
    lens = [0, 5, 41, 1]
    cu = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    x = torch.arange(sum(lens))[None, :, None]
    for rank in range(placement.ranks):
        share, local_cu = placement.shard_packed(x, cu, rank)
        assert local_cu.dtype == torch.int32 and local_cu[-1] == share.shape[1]
        for i, length in enumerate(lens):
            mine = [int(cu[i]) + token for token in range(length) if placement.rank_of(token) == rank]
            assert share[0, local_cu[i] : local_cu[i + 1], 0].tolist() == mine


@pytest.mark.parametrize("ranks_count, block, page", [(2, 16, 16), (3, 32, 16), (4, 4, 1), (1, 8, 4)])
def test_pages_go_with_their_tokens(ranks_count, block, page):
    placement = Placement(ranks_count, block)
    table = torch.arange(100, 126, dtype=torch.int32).view(2, 13)
    indptr, indices = torch.tensor([0, 13, 26]), table.flatten()
    for rank in range(ranks_count):
        mine = [j for j in range(13) if placement.rank_of(j * page) == rank]
        local = placement.local_block_table(table, page, rank)
        assert local.dtype == table.dtype and (local[:, : len(mine)] == table[:, mine]).all()
        local_indptr, local_indices = placement.local_page_list(indptr, indices, page, rank)
        assert local_indptr.tolist() == [0, len(mine), 2 * len(mine)]
        assert (local_indices.view(2, -1) == table[:, mine]).all()
    with pytest.raises(ValueError, match=rf"^block_tokens = {block}: .*page size, {block * 2}"):
        placement.local_block_table(table, block * 2, 0)


@pytest.mark.parametrize("arguments, name", [((0,), "ranks"), ((2, 0), "block_tokens"), ((2, 1.5), "block_tokens")])
def test_placements_that_are_none(arguments, name):
    with pytest.raises(ValueError, match=f"^{name} = "):
        Placement(*arguments)


# Context parallel: cases are made on every rank from a seed, so that no data travels with the test.


def case(name: str) -> tuple:
    """q, k, v over whole sequences, and decode()'s arguments."""
    torch.manual_seed(len(name))
    batch, q_heads, kv_heads, dim, tokens = 3, 8, 2, 40, 150
    lens = [150, 3, 61]
    q_tokens = {"several": 5, "tree": 5, "tree causal": 37, "window several": 5, "masks several": 3, "append several": 19}.get(name, 1)
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    q = torch.randn(batch, q_heads, q_tokens, dim, dtype=dtype)
    k, v = torch.randn(2, batch, kv_heads, tokens, dim, dtype=dtype)
    arguments = dict(seqlens=torch.tensor(lens, dtype=torch.int32), options=OPTIONS)
    slopes = torch.linspace(0.01, 0.5, q_heads)
    more = {
        "list": dict(seqlens=lens),
        "one token": dict(seqlens=torch.tensor([1, 1, 0], dtype=torch.int32)),
        "softcap": dict(softcap=2.0, scale=0.3),
        "sinks": dict(sinks=torch.linspace(-1, 2, q_heads)),
        "leftpad": dict(leftpad=torch.tensor([17, 0, 61], dtype=torch.int32)),
        "window": dict(window=(20, 0), leftpad=torch.tensor([140, 0, 2], dtype=torch.int32)),
        "alibi": dict(alibi_slopes=slopes),
        "alibi each": dict(alibi_slopes=slopes * torch.tensor([[1.0], [0.5], [2.0]]), mask=torch.rand(1, 1, 1, tokens) < 0.7),
        "mask": dict(mask=torch.rand(batch, 1, 1, tokens) < 0.5),
        "bias": dict(mask=torch.randn(1, q_heads, 1, tokens)),
        "several": dict(causal=True),
        "tree": dict(tree_mask=torch.tensor([1, 3, 5, 9, 25], dtype=torch.int32).repeat(batch, 1)[..., None].contiguous()),
        "tree causal": dict(causal=True, tree_mask=torch.randint(-(2**31), 2**31, (batch, 37, 2)).int()),
        "window several": dict(causal=True, window=(20, -1)),
        "masks several": dict(causal=True, alibi_slopes=slopes, mask=torch.rand(batch, 1, 3, tokens) < 0.5, window=(40, 1)),
    }.get(name, {})
    return q, k, v, {**arguments, **more}


CASES = [
    "plain", "bf16", "list", "one token", "softcap", "sinks", "leftpad", "window", "alibi", "alibi each", "mask", "bias", "several",
    "tree", "tree causal", "window several", "masks several",
]  # fmt: skip


def merged_in_one_process(states: list, dtype: torch.dtype) -> tuple:
    """Written out once more: rank by rank, in float32, rounded at the end."""
    out, lse = states[0][0].float(), states[0][1]
    for other, other_lse in states[1:]:
        out, lse = lean_attention.merge_states(out, lse, other.float(), other_lse)
    return out.to(dtype), lse


def every_case(count: int, block: int, exchange: str) -> list:
    """On each rank: results of all cases, and the same by one process where shares are plain lengths."""
    context = ContextParallel(block_tokens=block, exchange=exchange)
    assert (context.rank, context.ranks) == (dist.get_rank(), count)
    found = []
    for name in CASES:
        q, k, v, arguments = case(name)
        out, lse = context.decode(q, context.shard(k), context.shard(v), **arguments, return_lse=True)
        assert out.shape == q.shape and out.dtype == q.dtype and lse.shape == q.shape[:3] and out.is_contiguous()
        if name in ("plain", "bf16", "softcap", "sinks"):
            states = []
            for rank in range(count):
                share = dict(arguments, seqlens=context.placement.local_tokens(arguments["seqlens"], rank))
                if rank > 0:
                    share.pop("sinks", None)
                shards = (context.placement.shard(x, rank) for x in (k, v))
                states.append(lean_attention.decode(q, *shards, **share, return_lse=True))
            expected, expected_lse = merged_in_one_process(states, q.dtype)
            assert torch.equal(out, expected) and torch.equal(lse, expected_lse), name
        found.append((name, out.float().numpy(), lse.numpy()))
    return found


@pytest.mark.parametrize("count, block, exchange", [(2, 16, "all_gather"), (4, 1, "all_gather"), (4, 16, "all_to_all")])
def test_ranks_compute_what_one_process_does(count, block, exchange):
    by_rank = ranks.run(count, every_case, count, block, exchange)
    for of_case in zip(*by_rank):
        for name, out, lse in of_case[1:]:  # the same bits on every rank
            assert np.array_equal(out, of_case[0][1]) and np.array_equal(lse, of_case[0][2]), name
        name, out, lse = of_case[0]
        q, k, v, arguments = case(name)
        whole, whole_lse = lean_attention.decode(q, k, v, **arguments, return_lse=True)
        atol = 2e-2 if name == "bf16" else 2e-6
        np.testing.assert_allclose(out, whole.float().numpy(), rtol=atol, atol=atol, err_msg=name)
        np.testing.assert_allclose(lse, whole_lse.numpy(), rtol=2e-6, atol=2e-6, err_msg=name)
        if not {"tree_mask", "options"} & set(arguments) - {"options"} and name != "alibi each":
            arguments.pop("options")
            arguments = {key: value.tolist() if key in ("seqlens", "leftpad") and hasattr(value, "tolist") else value
                         for key, value in arguments.items()}
            arguments = {key: oracle.as_float64(value) if hasattr(value, "detach") and value.dtype != torch.bool
                         else value.numpy() if hasattr(value, "numpy") else value for key, value in arguments.items()}
            oracle.attention(q, k, v, dtype=str(q.dtype)[6:], **arguments).check(out, lse)
