"""lean_attention.distributed on gloo: 2 and 4 processes compute what one does."""

from __future__ import annotations

import datetime
import os
import pathlib
import random
import re
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import oracle  # noqa: E402
import ranks  # noqa: E402
import torch.distributed as dist  # noqa: E402

import lean_attention  # noqa: E402
from lean_attention import _core  # noqa: E402
from lean_attention.distributed import ContextParallel, Placement, TensorParallel, merge_in_order  # noqa: E402
from lean_attention._arguments import DEFAULTS  # noqa: E402
from lean_attention.distributed import _local_call, _peer_memory  # noqa: E402
from lean_attention.distributed._local_call import (  # noqa: E402
    Form,
    Shard,
    check_arguments,
    global_lengths,
    local_call,
)
from lean_attention.distributed._peer_memory import PeerExchange  # noqa: E402

OPTIONS = lean_attention.Options(workers=2)  # as many on every machine, so that bits may be compared

PLACEMENTS = [Placement(r, block) for r in (1, 2, 3, 4, 7) for block in (1, 2, 3, 16)]


# Placement


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_the_library_says_the_same_of_lengths_as_torch_does(placement):
    tokens = torch.tensor([*range(300), 2**31 - 1], dtype=torch.int32)
    for rank in range(placement.ranks):
        held = torch.full_like(tokens, -1)
        at = (tokens.data_ptr(), held.data_ptr(), tokens.numel())
        _core.shard_lengths(*at, rank, placement.ranks, placement.block_tokens, -1, 0)
        assert torch.equal(held, placement.local_tokens(tokens, rank))
        assert held.tolist() == [placement.local_tokens(n, rank) for n in tokens.tolist()]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_every_token_lies_on_one_rank_in_order(placement):
    tokens = 7 * 16 * 4 + 5
    held = [[] for _ in range(placement.ranks)]
    for token in range(tokens):
        rank = placement.rank_of(token)
        assert placement.local_index(token) == len(held[rank])  # end to end: appended tokens go to the end of a shard
        assert placement.token_at(len(held[rank]), rank) == token
        held[rank].append(token)
        shards = [placement.local_tokens(token + 1, each) for each in range(placement.ranks)]
        assert shards == [len(each) for each in held]
        assert max(shards) - min(shards) <= placement.block_tokens
        assert placement.capacity(token + 1) == max(shards)


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
        shard = placement.shard(x, rank)
        mine = [token for token in range(tokens) if placement.rank_of(token) == rank]
        assert shard.shape[2] == placement.capacity(tokens)
        assert (shard[:, :, : len(mine)] == x[:, :, mine]).all() and (shard[:, :, len(mine) :] == 0).all()


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_shares_of_packed_sequences(placement):
    lens = [0, 5, 41, 1]
    cu = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    x = torch.arange(sum(lens))[None, :, None]
    for rank in range(placement.ranks):
        shard, local_cu = placement.shard_packed(x, cu, rank)
        assert local_cu.dtype == torch.int32 and local_cu[-1] == shard.shape[1]
        for i, length in enumerate(lens):
            mine = [int(cu[i]) + token for token in range(length) if placement.rank_of(token) == rank]
            assert shard[0, local_cu[i] : local_cu[i + 1], 0].tolist() == mine


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


def test_shares_that_are_none_are_refused_by_name():
    placement, x = Placement(3, 4), torch.zeros(1, 2, 9, 4)
    cu = torch.tensor([0, 5, 9])
    for message, call in (
        ("^rank = 3: allowed 0 to 2", lambda: placement.shard(x, 3)),
        ("^rank = -1: ", lambda: placement.shard_packed(x, cu, -1, axis=2)),
        (r"^cu_seqlens = \[0, 5, 12\]: .* 9 tokens of axis 2", lambda: placement.shard_packed(x, torch.tensor([0, 5, 12]), 0, axis=2)),
        (r"^cu_seqlens = \[0, 7, 5, 9\]", lambda: placement.shard_packed(x, torch.tensor([0, 7, 5, 9]), 0, axis=2)),
        (r"^cu_seqlens = \[1, 9\]", lambda: placement.shard_packed(x, torch.tensor([1, 9]), 0, axis=2)),
        ("^page_tokens = 0", lambda: placement.local_block_table(torch.zeros(1, 3).int(), 0, 0)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("arguments, name", [((0,), "ranks"), ((2, 0), "block_tokens"), ((2, 1.5), "block_tokens")])
def test_placements_that_are_none(arguments, name):
    with pytest.raises(ValueError, match=f"^{name} = "):
        Placement(*arguments)


# Rules over shards, drawn at random: in one process, since what a shard is asked depends on lengths and rank alone


def drawn(seed: int) -> tuple:
    """q, k, v and decode()'s arguments."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch, q_tokens = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 7, 33, 40])
    tokens, (q_heads, kv_heads) = draw.choice([q_tokens, q_tokens + 5, 70, 130]), draw.choice([(4, 2), (3, 3), (4, 1)])
    lens = [draw.randint(0 if draw.random() < 0.3 else min(q_tokens, tokens), tokens) for _ in range(batch)]
    axes = [draw.choice([1, size]) for size in (batch, q_heads, q_tokens)]
    rules = {
        "causal": (0.6, lambda: True),
        "window": (0.3, lambda: (draw.randint(-1, 40), draw.randint(-1, 10))),
        "tree_mask": (0.3, lambda: torch.randint(-(2**31), 2**31, (batch, q_tokens, -(-q_tokens // 32))).int()),
        "alibi_slopes": (0.2, lambda: torch.rand(q_heads)),
        "leftpad": (0.3, lambda: torch.tensor([draw.randint(0, length) for length in lens], dtype=torch.int32)),
        "mask": (0.3, lambda: torch.rand(*axes, tokens) < 0.6 if draw.random() < 0.5 else torch.randn(*axes, tokens)),
        "sinks": (0.3, lambda: torch.randn(q_heads)),
    }
    arguments = {name: make() for name, (likelihood, make) in rules.items() if draw.random() < likelihood}
    q, k = torch.randn(batch, q_heads, q_tokens, 8), torch.randn(batch, kv_heads, tokens, 8)
    return q, k, torch.randn_like(k), dict(seqlens=torch.tensor(lens, dtype=torch.int32), **arguments)


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_shards_are_asked_what_the_whole_is(first):
    for seed in range(first, first + 25):
        q, k, v, arguments = drawn(seed)
        whole, whole_lse = lean_attention.decode(q, k, v, **arguments, return_lse=True)
        placement = Placement([1, 2, 3, 5][seed % 4], [1, 2, 4, 16][seed // 4 % 4])
        form = Form.of(q, arguments)
        lengths, states = global_lengths(arguments, form, q.device), []
        for rank in range(placement.ranks):
            own_k, own_v = (placement.shard(x, rank) for x in (k, v))
            check_arguments(arguments, form, own_k, placement)
            call = local_call(Shard(placement, rank), form, lengths, own_k, arguments)
            states.append(lean_attention.decode(q, own_k, own_v, **call, return_lse=True))
        out, lse = merge_in_order(states, q.dtype)
        told = f"seed {seed}: {placement}, {arguments}"
        assert torch.allclose(out, whole, atol=1e-5), told
        assert torch.allclose(lse, whole_lse, atol=1e-5), told  # two -inf are equal


# Context parallel: cases are made on every rank from a seed, so that no data travels with the test.


def case(name: str) -> tuple:
    """q, k, v over whole sequences, and decode()'s arguments."""
    torch.manual_seed(len(name))
    batch, q_heads, kv_heads, dim, tokens = 3, 8, 2, 40, 150
    lens = [150, 3, 61]
    q_tokens = {"several": 5, "tree": 5, "tree causal": 37, "window several": 5, "masks several": 3, "append several": 19}.get(
        name, 1
    )
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
    """On each rank: results of all cases, and the same by one process where shards are plain lengths."""
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
                shard = dict(arguments, seqlens=context.placement.local_tokens(arguments["seqlens"], rank))
                if rank > 0:
                    shard.pop("sinks", None)
                shards = (context.placement.shard(x, rank) for x in (k, v))
                states.append(lean_attention.decode(q, *shards, **shard, return_lse=True))
            expected, expected_lse = merged_in_one_process(states, q.dtype)
            assert torch.equal(out, expected) and torch.equal(lse, expected_lse), name
        found.append((name, out.float().numpy(), lse.numpy()))
    return found


@pytest.mark.parametrize("count, block, exchange", [(2, 16, "all_gather"), (4, 1, "all_gather"), (4, 16, "all_to_all")])
def test_ranks_compute_what_one_process_does(count, block, exchange):
    by_rank = ranks.run(count, every_case, count, block, exchange)
    for of_case in zip(*by_rank):
        name, out, lse = of_case[0]
        for _, other, other_lse in of_case[1:]:
            assert np.array_equal(out, other) and np.array_equal(lse, other_lse), name
        check_by_definition(name, out, lse)


def steps_with_lengths() -> None:
    """Lengths worked out once serve every layer of a step, whatever else a layer asks for."""
    context = ContextParallel(block_tokens=4)
    for name in ("plain", "several", "leftpad", "mask"):
        q, k, v, arguments = case(name)
        k, v = context.shard(k), context.shard(v)
        lengths = context.step_lengths(arguments["seqlens"])
        assert torch.equal(lengths.held, context.placement.local_tokens(arguments["seqlens"], context.rank))
        expected = context.decode(q, k, v, **arguments)
        for given in (lengths, context.step_lengths(arguments["seqlens"].tolist()), context.step_lengths(lengths.seqlens.long())):
            assert torch.equal(context.decode(q, k, v, **{**arguments, "seqlens": given}), expected), name
        with pytest.raises(ValueError, match="^seqlens: .*3 integers"):
            context.decode(q, k, v, **{**arguments, "seqlens": context.step_lengths([1, 2])})
    other = ContextParallel(block_tokens=8)
    with pytest.raises(ValueError, match="^seqlens: of Shard.*block_tokens=8.*this call is of Shard.*block_tokens=4"):
        context.decode(q, k, v, **{**arguments, "seqlens": other.step_lengths(arguments["seqlens"])})


def test_a_steps_lengths_are_worked_out_once():
    ranks.run(2, steps_with_lengths)


def masks_that_are_none() -> None:
    """A mask's columns are chosen by the shard's tokens: one of too few, or of integers, must not come to mean something else."""
    context = ContextParallel(block_tokens=4)
    for name in ("mask", "alibi each"):
        q, k, v, arguments = case(name)
        k, v = context.shard(k), context.shard(v)
        with pytest.raises(ValueError, match="^mask: 148 tokens: a sequence has 150"):  # a shard holds as many of both
            context.decode(q, k, v, **{**arguments, "mask": arguments["mask"][..., :148]})
        with pytest.raises(TypeError, match="^mask: torch.int64: boolean"):
            context.decode(q, k, v, **{**arguments, "mask": arguments["mask"].long()})


def test_masks_that_are_none_are_refused():
    ranks.run(2, masks_that_are_none)


def check_by_definition(name: str, out: np.ndarray, lse: np.ndarray) -> None:
    """Against the whole in one call, and against the oracle where it knows the rule."""
    q, k, v, arguments = case(name)
    whole, whole_lse = lean_attention.decode(q, k, v, **arguments, return_lse=True)
    atol = 2e-2 if name == "bf16" else 2e-6  # two roundings to bfloat16; some of float32
    np.testing.assert_allclose(out, whole.float().numpy(), rtol=atol, atol=atol, err_msg=name)
    np.testing.assert_allclose(lse, whole_lse.numpy(), rtol=2e-6, atol=2e-6, err_msg=name)
    if "tree_mask" in arguments or name == "alibi each":
        return
    arguments.pop("options")
    arguments = {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    oracle.attention(q, k, v, dtype=str(q.dtype).partition(".")[2], **arguments).check(out, lse)


# Where K/V lies, and what is appended


def every_layout() -> None:
    """Each form of K/V gives the bits of the dense one: pages and packed keys of a shard hold the same tokens in the same order."""
    context = ContextParallel(block_tokens=16)
    place, rank = context.placement, context.rank
    q, k, v, arguments = case("plain")
    k_shard, v_shard = context.shard(k), context.shard(v)
    expected = context.decode(q, k_shard, v_shard, **arguments)

    bshd = context.decode(*(x.transpose(1, 2) for x in (q, k_shard, v_shard)), layout="bshd", **arguments)
    assert torch.equal(bshd.transpose(1, 2), expected)
    assert torch.equal(context.decode(q[:, :, 0], k_shard, v_shard, **arguments), expected[:, :, 0])
    cu_q = torch.arange(4, dtype=torch.int32)
    packed_q = context.decode(
        q[:, :, 0].transpose(0, 1), k_shard, v_shard, cu_seqlens_q=cu_q, max_seqlen_q=1, causal=True, **arguments
    )
    assert torch.equal(packed_q.transpose(0, 1), expected[:, :, 0])

    lens = arguments["seqlens"].tolist()
    cu = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    packed = [torch.cat([x[i, :, :length] for i, length in enumerate(lens)], 1) for x in (k, v)]
    shards = [place.shard_packed(x, cu, rank)[0] for x in packed]
    rest = {"options": OPTIONS}
    assert torch.equal(context.decode(q, *shards, cu_seqlens_k=cu, max_seqlen_k=150, **rest), expected)

    page = 8
    pools = torch.zeros(2, 40, 2, page, 40)  # every rank's own, its pages in an order of its own
    table = torch.randperm(40, generator=torch.Generator().manual_seed(rank))[:30].int().view(3, 10)
    for i, j in np.ndindex(3, k_shard.shape[2] // page):
        for pool, shard in zip(pools, (k_shard, v_shard)):
            pool[table[i, j]] = shard[i, :, j * page : (j + 1) * page]
    assert torch.equal(context.decode(q, *pools, block_table=table, **arguments), expected)
    held = [-(-place.local_tokens(length, rank) // page) for length in lens]
    lists = dict(
        page_indptr=torch.tensor([0, *np.cumsum(held)]).int(), page_indices=torch.cat([row[:n] for row, n in zip(table, held)])
    )
    assert torch.equal(context.decode(q, *pools, **lists, max_seqlen_k=150, **arguments), expected)
    masked = context.decode(q, *pools, block_table=table, window=(3, 0), alibi_slopes=torch.ones(8), **arguments)
    assert torch.allclose(
        masked, lean_attention.decode(q, k, v, window=(3, 0), alibi_slopes=torch.ones(8), **arguments), atol=1e-5
    )


def appended(q_tokens: int) -> None:
    """Tokens appended step by step lie where the placement says, nothing else is touched, and results are those of the whole."""
    context = ContextParallel(block_tokens=8)
    place, rank = context.placement, context.rank
    torch.manual_seed(q_tokens)
    lens = torch.tensor([0, 13, 60], dtype=torch.int32)
    capacity, page = 160, 4
    k, v = torch.randn(2, 3, 2, capacity, 16)
    shards = [context.shard(x).clone() for x in (k, v)]
    table = torch.arange(3 * shards[0].shape[2] // page, dtype=torch.int32).flip(0).view(3, -1)
    pools = [x.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)[table.flatten().argsort()].clone() for x in shards]
    slots = [x.transpose(1, 2).flatten(0, 1).clone() for x in shards]
    slot_table = torch.arange(len(slots[0]), dtype=torch.int32).view(3, -1)
    for _ in range(4):
        lens = lens + q_tokens
        q = torch.randn(3, 4, q_tokens, 16)
        new = dict(zip(("append_k", "append_v"), torch.randn(2, 3, 2, q_tokens, 16)))
        call = dict(seqlens=lens, causal=True, options=OPTIONS)
        expected = lean_attention.decode(q, k, v, **new, **call)  # writes to k and v too
        got = context.decode(q, *shards, **new, **call)
        assert torch.allclose(got, expected, atol=2e-6)
        for x, shard in zip((k, v), shards):
            assert torch.equal(place.shard(x, rank), shard)  # to the last element
        for caches, pages in ((pools, table), (slots, slot_table)):
            assert torch.equal(context.decode(q, *caches, block_table=pages, **new, **call), got)
        back = pools[0][table.flatten().long()].view(3, -1, 2, page, 16).transpose(1, 2).flatten(2, 3)
        assert torch.equal(back, shards[0])


@pytest.mark.parametrize("count", [2, 4])
def test_layouts_and_appended_tokens(count):
    ranks.run(count, layouts_and_appends)


def layouts_and_appends() -> None:
    every_layout()
    for q_tokens in (1, 5):
        appended(q_tokens)


# Tensor parallel


def heads(q_heads: int, kv_heads: int) -> tuple:
    """On each rank: its heads, and whether decode() and gather() give those of one process."""
    tensor = TensorParallel(q_heads, kv_heads, block_tokens=4)
    torch.manual_seed(1)
    q, k, v = torch.randn(2, q_heads, 1, 16), torch.randn(2, kv_heads, 70, 16), torch.randn(2, kv_heads, 70, 16)
    rules = dict(seqlens=torch.tensor([70, 9], dtype=torch.int32), options=OPTIONS)
    sinks = torch.linspace(-1, 1, q_heads)
    whole = lean_attention.decode(q, k, v, sinks=sinks, **rules)
    own_k, own_v = (tensor.shard_kv(x) for x in (k, v))
    if tensor.context is not None:
        own_k, own_v = (tensor.context.shard(x) for x in (own_k, own_v))
    out = tensor.decode(tensor.shard_q(q), own_k, own_v, sinks=tensor.shard_q(sinks, axis=0), **rules)
    assert torch.allclose(out, tensor.shard_q(whole), atol=2e-6)
    gathered = tensor.gather(out)
    assert torch.allclose(gathered, whole, atol=2e-6) and torch.equal(tensor.shard_q(gathered), out)
    with pytest.raises(ValueError, match=rf"^q: {q_heads + 1} heads: rank {tensor.rank} has"):
        tensor.decode(q[:, :1].expand(-1, q_heads + 1, -1, -1), own_k, own_v, **rules)
    members = 1 if tensor.context is None else tensor.context.ranks
    return list(tensor.q_heads), list(tensor.kv_heads), members


def every_head_count() -> list:
    return [heads(*counts) for counts in HEAD_COUNTS]


HEAD_COUNTS = [(12, 12), (10, 5), (14, 7), (6, 2), (4, 1), (9, 3)]


@pytest.mark.parametrize("count", [2, 4])
def test_heads_are_dealt_out_and_none_is_copied(count):
    by_rank = ranks.run(count, every_head_count)
    for (q_heads, kv_heads), of_ranks in zip(HEAD_COUNTS, zip(*by_rank)):
        sharing = [members for *_, members in of_ranks]
        owned = [(tuple(q), tuple(kv)) for q, kv, _ in of_ranks]
        assert sorted({head for q, _ in owned for head in q}) == list(range(q_heads))
        if kv_heads >= count:
            assert sharing == [1] * count and sum(len(kv) for _, kv in owned) == kv_heads
            assert max(len(kv) for _, kv in owned) - min(len(kv) for _, kv in owned) <= 1
        else:
            assert [owned.count(each) for each in owned] == sharing and all(len(kv) == 1 for _, kv in owned)
            assert max(sharing) - min(sharing) <= 1


def mesh_of_two_by_two() -> tuple:
    """Heads along one axis, tokens along the other."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "tokens"))
    context = ContextParallel(mesh.get_group("tokens"), block_tokens=16)
    tensor = TensorParallel(8, 2, mesh.get_group("heads"), context=context)
    q, k, v, arguments = case("several")
    whole = lean_attention.decode(q, k, v, **arguments)
    shards = [context.shard(tensor.shard_kv(x)) for x in (k, v)]
    out = tensor.gather(tensor.decode(tensor.shard_q(q), *shards, **arguments))
    assert torch.allclose(out, whole, atol=2e-6)
    with pytest.raises(ValueError, match="^context: 1 K/V heads for 2 ranks"):
        TensorParallel(8, 1, mesh.get_group("heads"), context=context)
    return out.numpy().tobytes(), list(tensor.q_heads), context.rank


def test_heads_and_tokens_make_a_mesh():
    results = ranks.run(4, mesh_of_two_by_two)
    assert len({bits for bits, *_ in results}) == 1
    first, second = list(range(4)), list(range(4, 8))
    assert [rest for _, *rest in results] == [[first, 0], [first, 1], [second, 0], [second, 1]]


# Faults


REFUSED = [
    (NotImplementedError, "rotary_cos", dict(rotary_cos=torch.ones(4, 4), rotary_sin=torch.ones(4, 4))),
    (NotImplementedError, "stream", dict(stream=0)),
    (ValueError, "seqlens", dict(seqlens=None)),
    (ValueError, "append_k, append_v", dict(append_k=torch.zeros(3, 2, 1, 40))),
    (ValueError, "append_k", dict(append_k=torch.zeros(3, 1, 1, 40), append_v=torch.zeros(3, 1, 1, 40))),
    (TypeError, "append_k", dict(append_k=torch.zeros(3, 2, 1, 40).half(), append_v=torch.zeros(3, 2, 1, 40).half())),
    (
        NotImplementedError,
        "append_k",
        dict(append_k=torch.zeros(2, 4), append_v=torch.zeros(2, 4), cu_seqlens_k=torch.zeros(4).int()),
    ),
    (NotImplementedError, "causal", dict(cu_seqlens_q=torch.tensor([0, 2, 2, 3]).int(), causal=True)),
    (ValueError, "mask", dict(mask=torch.ones(1, 1, 1, 500, dtype=torch.bool))),
    (ValueError, "block_tokens = 16", dict(block_table=torch.zeros(3, 1).int())),
    (ValueError, "layout", dict(layout="shbd")),
    (TypeError, "q", dict(q=np.zeros((3, 8, 1, 40), np.float32))),
    (TypeError, "lens", dict(lens=3)),
    (TypeError, "softmax_scale.*'scale'", dict(softmax_scale=3)),
    (ValueError, "exchange = 'all_to_all': 2 ranks do not divide 3 heads", dict(q=torch.zeros(3, 3, 1, 40))),
    (ValueError, "seqlens: 161 tokens are 81 of a shard, which has room for 80", dict(seqlens=[161, 1, 1])),
    (ValueError, r"seqlens = \[True, 1, 1\]: 3 integers are needed", dict(seqlens=[True, 1, 1])),
    (ValueError, "seqlens: .*3 integers", dict(seqlens=[1, 1])),
    (NotImplementedError, "mask", dict(cu_seqlens_q=torch.tensor([0, 2, 2, 3]).int(), mask=torch.ones(3, 1, 1, 160))),
    (NotImplementedError, "alibi_slopes", dict(cu_seqlens_q=torch.tensor([0, 2, 2, 3]).int(), alibi_slopes=torch.ones(8))),
    (ValueError, r"out: shape \(2, 3, 8, 1, 40\): expected \(3, 8, 1, 40\)", dict(out=torch.empty(2, 3, 8, 1, 40))),
    (TypeError, "out: torch.int32: expected torch.float32", dict(out=torch.empty(3, 8, 1, 40, dtype=torch.int32))),
    (TypeError, "out: <class 'numpy.ndarray'>", dict(out=np.empty((3, 8, 1, 40), np.float32))),
    (ValueError, r"lse: shape \(2, 3, 8, 1\): expected \(3, 8, 1\)", dict(lse=torch.empty(2, 3, 8, 1))),
    (TypeError, "lse: torch.float64: expected torch.float32", dict(lse=torch.empty(3, 8, 1, dtype=torch.float64))),
    *((kind, name, {name: value}) for kind, name, value in (
        (TypeError, "window", 5), (TypeError, "window", (5,)), (TypeError, "window", (1, 2, 3)), (TypeError, "window", (2.5, 1)),
        (ValueError, "window", (-2, 0)), (ValueError, "window", (2**31, 0)), (ValueError, "scale", float("nan")),
        (ValueError, "tree_mask", torch.ones(3, 1, 2).int()), (TypeError, "tree_mask", [1]), (TypeError, "mask", [1]),
        (TypeError, "alibi_slopes", [0.5] * 8), (ValueError, "alibi_slopes", torch.ones(7)), (TypeError, "cu_seqlens_q", 5),
        (RuntimeError, "alibi_slopes", torch.ones(8, requires_grad=True)),
        (RuntimeError, "mask", torch.ones(3, 1, 1, 150, requires_grad=True)),
    )),
]  # fmt: skip


def refusals() -> None:
    """The same refusal on every rank, by the argument's name; the ranks go on together."""
    context = ContextParallel(exchange="all_to_all")
    q, k, v, arguments = case("plain")
    k, v = context.shard(k), context.shard(v)
    expected = context.decode(q, k, v, **arguments)
    for kind, message, change in REFUSED:
        call = {**arguments, **change}
        packed = call.get("cu_seqlens_q") is not None
        queries = call.pop("q", q[:, :, 0].transpose(0, 1) if packed else q)
        with pytest.raises(kind, match=f"^{message}"):
            context.decode(queries, k, v, **call)
            pytest.fail(f"taken: {change}")
        assert torch.equal(context.decode(q, k, v, **arguments), expected)
    for wrong in (dict(exchange="nvlink"), dict(block_tokens=0)):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} = "):
            ContextParallel(**wrong)
    with pytest.raises(ValueError, match="^q_heads = 7: must be a multiple of kv_heads = 2"):
        TensorParallel(7, 2)


def disagreements() -> None:
    """What differs between ranks is named on every rank, with the ranks; then they go on together."""
    rank = dist.get_rank()
    context = ContextParallel(compare_every_call=True)
    q, k, v, arguments = case("plain")
    k, v = context.shard(k), context.shard(v)
    expected = context.decode(q, k, v, **arguments)
    different = [
        ("q: rank 1 has torch.float32 \\[3, 8, 2, 40\\]", dict(q=q.expand(3, 8, 2, 40))),
        ("k: rank 1 has torch.float16", dict(k=k.half())),
        ("scale: rank 1 has 2.0, rank 0 has none", dict(scale=2.0)),
        ("softcap: rank 1 has 3.0, rank 0 has none", dict(softcap=3.0)),
        ("append_k: rank 1", dict(append_k=q[:, :2], append_v=q[:, :2])),
        ("window: rank 1 has \\(3, 0\\)", dict(window=(3, 0))),
    ]
    for message, change in different:
        call = {"q": q, "k": k, "v": v, **arguments, **(change if rank == 1 else {})}
        with pytest.raises(ValueError, match=f"^{message}"):
            context.decode(**call)
    lens = arguments["seqlens"] - int(rank == 1)
    with pytest.raises(RuntimeError, match="^seqlens, leftpad or cu_seqlens_k: rank 1 has other values than rank 0"):
        context.decode(q, k, v, **{**arguments, "seqlens": lens})
    table = torch.tensor([[0, 0, 0, 0, 0]] * 3).int() + 99 * rank  # page 99 is none of rank 1's pool
    pools = [x[:1, :, :16] for x in (k, v)]
    kind, message = (ValueError, "^block_table") if rank == 1 else (RuntimeError, "refused on rank 1, which has said why")
    with pytest.raises(kind, match=message):
        context.decode(q, *pools, block_table=table, **arguments)
    with pytest.raises(ValueError, match="^block_tokens: rank 1 has 4, rank 0 has 2"):
        ContextParallel(block_tokens=2 + 2 * rank)
    with pytest.raises(ValueError, match="^kv_heads: rank 1 has 4, rank 0 has 2"):
        TensorParallel(8, 2 + 2 * rank)
    assert torch.equal(context.decode(q, k, v, **arguments), expected)


def wrong_appends() -> None:
    """A refused call has written nothing; a token without a place of its own is written to no other's."""
    context = ContextParallel(block_tokens=4)
    q, new = torch.ones(2, 4, 1, 16), torch.ones(2, 2, 1, 16)
    pages = torch.zeros(6, 2, 4, 16)
    tables = {
        "block_table\\[0, 0\\] = -1: allowed": [[-1, 1], [2, 3]],
        "block_table\\[0, 0\\] = 99: allowed": [[99, 1], [2, 3]],
        "block_table\\[1, 0\\] = 1: this call appends to that page already": [[1, 0], [1, 3]],
    }
    for message, table in tables.items():  # tokens 2 of both sequences, of rank 0's pages
        k, v = pages.clone(), pages.clone()
        with pytest.raises((ValueError, RuntimeError), match=message if context.rank == 0 else "refused on rank 0"):
            context.decode(q, k, v, seqlens=[3, 3], block_table=torch.tensor(table).int(), append_k=new, append_v=new)
        assert not k.any() and not v.any()
    for change, message in (
        (dict(seqlens=[17, 3]), "seqlens: 17 tokens are 9 of a shard, which has room for 8"),
        (dict(softcap=-1.0), "softcap = -1"), (dict(append_v=new[:, :, :, :8]), "append_v"),
        (dict(leftpad=[4, 0]), r"leftpad\[0\]|refused on rank"), (dict(append_k=[1]), "append_k"),
    ):  # fmt: skip
        k, v = torch.zeros(2, 2, 2, 8, 16)
        with pytest.raises((ValueError, TypeError, RuntimeError), match=f"^{message}"):
            context.decode(q, k, v, **{**dict(seqlens=[3, 3], append_k=new, append_v=new), **change})
        assert not k.any() and not v.any(), message
    k, v = torch.zeros(2, 2, 2, 8, 16)
    context.decode(q, k, v, seqlens=[3, 3], leftpad=[3, 0], append_k=new, append_v=new)  # all of the first one is padding
    assert [tuple(at) for at in k[:, 0, :, 0].nonzero().tolist()] == ([(1, 2)] if context.rank == 0 else [])


def refusals_and_disagreements() -> None:
    refusals()
    disagreements()
    wrong_appends()


def test_wrong_calls_are_refused_on_every_rank():
    ranks.run(2, refusals_and_disagreements)


def kinds_that_were_compared_before(gathers: bool) -> str:
    """Ranks that make different calls, each of a kind that all have made: what a rank raises in the end."""
    context, heads = ContextParallel(), TensorParallel(8, 2)
    q, k, v, arguments = case("plain")
    k, v = context.shard(k), context.shard(v)

    def call(sequences: int) -> None:
        if gathers:
            heads.gather(heads.shard_q(q)[:sequences])
        else:
            context.decode(q[:sequences], k[:sequences], v[:sequences], seqlens=arguments["seqlens"][:sequences])

    call(1)
    call(3)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        call(1 if dist.get_rank() == 0 else 3)
    return str(caught.value)


@pytest.mark.parametrize("gathers", [False, True])
def test_messages_of_other_sizes_end_no_process(gathers):
    for text in ranks.run(2, kinds_that_were_compared_before, gathers, timeout_s=5.0):
        assert text is not None, "gloo ended the process"
        assert "did not come within" in text, text


def wrong_heads() -> None:
    heads = TensorParallel(8, 4)
    with pytest.raises(ValueError, match=f"^out: 1 heads: rank {heads.rank} has the model's"):  # and not broadcast
        heads.gather(torch.ones(2, 1, 1, 8))
    with pytest.raises(RuntimeError, match="^out: requires a gradient"):
        heads.gather(torch.ones(2, 4, 1, 8, requires_grad=True))
    q, k = torch.ones(1, 8, 1, 8), torch.ones(1, 4, 3, 8)
    for shard, x, words in ((heads.shard_q, k, "x: 4 heads along axis 1: all 8"), (heads.shard_kv, q, "x: 8 heads along axis 1: all 4")):
        with pytest.raises(ValueError, match=words):  # and not cut
            shard(x)
    with pytest.raises(TypeError, match="^kv_heads = 2.0: an integer"):
        TensorParallel(8, 2.0)
    with pytest.raises(ValueError, match=f"^v: 4 heads: rank {heads.rank} has the model's"):
        heads.decode(heads.shard_q(q), heads.shard_kv(k), k)


def test_other_numbers_of_heads_than_a_ranks_are_refused():
    ranks.run(2, wrong_heads)


def without_peer_memory() -> list:
    """The exchange "fused" on CPUs: it says once why not, and computes the same."""
    q, k, v, arguments = case("plain")
    expected = ContextParallel().decode(q, *(ContextParallel().shard(x) for x in (k, v)), **arguments, return_lse=True)
    context = ContextParallel(exchange="fused")
    shards = [context.shard(x) for x in (k, v)]
    with pytest.warns(RuntimeWarning, match="exchange = 'fused': q is on cpu, and peer memory is of GPUs: .* by 'all_gather'"):
        result = context.decode(q, *shards, **arguments, return_lse=True)
    assert context.exchange == "all_gather" and all(map(torch.equal, result, expected))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(context.decode(q, *shards, **arguments), expected[0])
    context.check_exchange()
    context.reset_exchange()
    with pytest.raises(ValueError, match="^exchange = 'nvlink': allowed all_gather, all_to_all, fused"):
        ContextParallel(exchange="nvlink")
    with pytest.raises(TypeError, match="^fused_limit: <class 'int'>"):
        ContextParallel(exchange="fused", fused_limit=1)
    with pytest.raises(ValueError, match="^fused_limit"):
        ContextParallel(exchange="fused", fused_limit=datetime.timedelta(seconds=-1))
    return peer_memory_that_fails()


def peer_memory_that_fails() -> list:
    """What keeps ranks from each other's memory is found by all of them alike: what _core does is made up, the agreement is not."""
    rank, found = dist.get_rank(), []
    for what in ("no memory", "other host", "not opened", "nothing"):
        def make(*asked: int) -> tuple:
            if what == "no memory" and rank == 1:
                raise RuntimeError("cudaMalloc: out of memory")
            return asked, bytes([rank])

        def open_exchange(memory: tuple, other: int, handle: bytes) -> None:
            assert other != rank and handle == bytes([other]) and memory[1:3] == (rank, 2)
            if what == "not opened" and rank == 1:
                raise RuntimeError("cudaIpcOpenMemHandle: peer access is not supported")

        host = (f"host {rank if what == 'other host' else 0}",)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_core, "make_exchange", make)
            patch.setattr(_core, "open_exchange", open_exchange)
            patch.setattr(_peer_memory, "_host", lambda host=host: host)
            peers = PeerExchange(ContextParallel()._agreement, rank, datetime.timedelta(seconds=1))
            missing = [peers.prepare(torch.device("cuda", 0), rows, 128, torch.bfloat16) for rows in (10, 10**6, 10**5)]
        assert len(set(missing)) == 1
        found.append((what, missing[0], len(peers._held), peers._bytes >= _core.exchange_bytes(2, 10**6, 128, 2)))
    return found


def test_ranks_without_peer_memory_say_why_and_gather():
    by_rank = ranks.run(2, without_peer_memory)
    assert by_rank[0] == by_rank[1] == [
        ("no memory", "rank 1: cudaMalloc: out of memory", 0, False),
        ("other host", "rank 1 is on another host than rank 0", 0, False),
        ("not opened", "rank 1: cudaIpcOpenMemHandle: peer access is not supported", 0, False),
        ("nothing", None, 2, True),
    ]  # fmt: skip


TIMEOUT_S = 2.0


def lost(how: str) -> tuple:
    """One rank of three ends, does not come or asks for something else; the others raise, and say after how long."""
    rank = dist.get_rank()
    q, k, v, arguments = case("plain")

    def late() -> tuple:
        time.sleep(TIMEOUT_S + 2)
        return "late", 0.0

    if rank == 1 and how == "never made":
        return late()
    begin = time.monotonic()
    try:
        context = ContextParallel()
        k, v = context.shard(k), context.shard(v)
        if how in ("never comes", "diverges"):
            context.decode(q, k, v, **arguments)
        if rank == 1 and how == "diverges":
            q = q.expand(-1, -1, 2, -1)
        elif rank == 1:
            return late() if how == "never comes" else os._exit(1)
        begin = time.monotonic()
        context.decode(q, k, v, **arguments)
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "", 0.0


@pytest.mark.parametrize("how", ["ends", "never comes", "never made", "diverges"])
def test_a_lost_rank_is_an_error_within_the_timeout(how):
    results = [result for result in ranks.run(3, lost, how, timeout_s=TIMEOUT_S) if result is not None and result[0] != "late"]
    assert len(results) == 2 + (how == "diverges")
    for message, seconds in results:
        assert re.match(
            r"lean_attention.distributed: .* among ranks 0, 1, 2 failed: a rank ended, or did not come within 2 s", message
        )
        assert seconds < 2 * TIMEOUT_S + 2


# Under torchrun, and inside Transformers


def test_the_example_generates_the_same_tokens_under_torchrun():
    script = pathlib.Path(__file__).parents[2] / "examples" / "python" / "long_context.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    commands = [[sys.executable, *launcher, str(script), "500"] for launcher in ([], torchrun)]
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    running = [subprocess.Popen(command, env=environment, text=True, **pipe) for command in commands]
    outputs = []
    for process in running:
        output, errors = process.communicate(timeout=ranks.LIMIT_S)
        assert process.returncode == 0, errors
        outputs.append(output)
    assert outputs[0].startswith("1 ranks, 516 of 516") and outputs[1].startswith("2 ranks, 260 of 516")
    assert outputs[0].partition(":")[2] == outputs[1].partition(":")[2]


def group_that_is_destroyed() -> tuple:
    """Threads of gloo before and after, and what a call says then."""

    def threads() -> int:
        return sum("gloo_run" in name.read_text() for name in pathlib.Path("/proc/self/task").glob("*/comm"))

    context, heads = ContextParallel(block_tokens=16), TensorParallel(6, 2)
    q, k = torch.ones(1, 6, 16), torch.ones(1, 2, 64, 16)
    context.decode(q, k, k, seqlens=[100])
    before = threads()
    dist.destroy_process_group()
    try:
        context.decode(q, k, k, seqlens=[100])
    except RuntimeError as refusal:
        return before, threads(), str(refusal), heads.rank
    raise AssertionError("a call without a group has a result")


def test_objects_that_are_kept_do_not_keep_a_destroyed_group():
    """Its threads would drop tensors while the interpreter ends, which ended one of the example's ranks by abort() now and then."""
    for rank, (before, after, refusal, own) in enumerate(ranks.run(2, group_that_is_destroyed)):
        assert before > 0 and after == 0 and own == rank
        assert "the process group has been destroyed" in refusal


def generate(model) -> list:
    ids = torch.arange(1, 21)[None]
    with torch.no_grad():
        tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    return tokens[0, 20:].tolist()


def planned_model(folder: str) -> tuple:
    """A model that Transformers shards by its own plan, with this library as its attention; heads of the calls it gets."""
    import transformers

    import lean_attention.hf

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # as torchrun sets them
        os.environ[name] = str(dist.get_world_size() if name == "WORLD_SIZE" else dist.get_rank())
    lean_attention.hf.register()
    called = []
    ours = lean_attention.hf.decode_if_accepted

    def spied(query, key, value, **rules):
        out = ours(query, key, value, **rules)
        called.append((out is not None, query.shape[1], key.shape[1]))
        return out

    lean_attention.hf.decode_if_accepted = spied
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # tp_plan is deprecated where this has another name too
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", attn_implementation="lean_attention")
    return generate(model), set(called)


def test_models_that_transformers_shards_have_our_attention(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    pytest.importorskip("accelerate")  # Transformers wants it for a tp_plan
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)
    config = transformers.LlamaConfig(**sizes, vocab_size=512, eos_token_id=None, pad_token_id=0, bos_token_id=1)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    expected = generate(model)
    for tokens, called in ranks.run(2, planned_model, str(tmp_path)):
        assert tokens == expected
        assert called == {(True, 4, 2)}


def test_every_argument_is_said_of_a_shard_or_refused(monkeypatch):
    assert set(DEFAULTS) == _local_call.SAID | set(_local_call._REFUSED) and not _local_call.SAID & set(_local_call._REFUSED)
    monkeypatch.setitem(DEFAULTS, "block_mask", None)  # one that decode() may learn
    form = _local_call.Form.of(torch.zeros(1, 2, 16), {})
    with pytest.raises(NotImplementedError, match="block_mask: what it is of a shard is not known"):
        _local_call.check_arguments(dict(block_mask=1, seqlens=[3]), form, torch.zeros(1, 2, 4, 16), Placement(2, 4))
    with pytest.raises(NotImplementedError, match="rotary_cos: positions"):
        _local_call.check_arguments(dict(rotary_cos=1, seqlens=[3]), form, torch.zeros(1, 2, 4, 16), Placement(2, 4))
