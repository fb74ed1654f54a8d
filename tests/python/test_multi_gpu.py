"""lean_attention.distributed on NCCL: as many GPUs as there are, two at least. `make multi-gpu-test` runs it."""

from __future__ import annotations

import datetime
import os
import time
import warnings
from typing import Optional

import pytest

torch = pytest.importorskip("torch")
import ranks  # noqa: E402
import torch.distributed as dist  # noqa: E402

import lean_attention  # noqa: E402
from lean_attention import _core  # noqa: E402
from lean_attention.distributed import ContextParallel, TensorParallel, merge_in_order  # noqa: E402
from lean_attention.distributed._exchange import EXCHANGES, Message, Rows  # noqa: E402

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} GPUs, 2 are needed")
COUNTS = [count for count in (2, 4, 8) if count <= GPUS]
MOST = max(COUNTS, default=2)
TOLERANCE = 0.02  # bf16, values of a normal distribution


def case(q_tokens: int = 1, tokens: int = 3000) -> tuple:
    """The same on every rank, on its own GPU."""
    torch.manual_seed(7)
    torch.cuda.set_device(dist.get_rank())
    q = torch.randn(3, 16, q_tokens, 128)
    k, v = torch.randn(2, 3, 8, tokens, 128)
    lens = torch.tensor([tokens, 5, 777], dtype=torch.int32)
    return *(x.bfloat16().cuda() for x in (q, k, v)), lens.cuda()


def near(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert (result.float() - expected.float()).abs().max().item() < TOLERANCE


def context_by(exchange: str, **arguments: object) -> ContextParallel:
    """`exchange` may be "fused, apart": the exchange over peer memory by a launch behind decode()'s, whatever the call."""
    name, _, apart = exchange.partition(", ")
    context = ContextParallel(exchange=name, **arguments)
    context._peers.in_launch = not apart
    return context


def spied() -> list:
    """What each call from now on that might exchange in decode()'s own launch was told: whether it did."""
    told, asked = [], _core.decode_exchanged

    def decode_exchanged(*arguments: object) -> bool:
        told.append(asked(*arguments))
        return told[-1]

    _core.decode_exchanged = decode_exchanged
    return told


def computed(exchange: str) -> bytes:
    """All rules that a shard expresses in another way; without rules the bits of one GPU that computes the same shards."""
    context, told = None, spied()
    sinks, slopes = torch.linspace(-1, 3, 16), torch.linspace(0.001, 0.1, 16)
    for rules in (dict(), dict(softcap=5.0), dict(window=(300, 0)), dict(sinks=sinks), dict(alibi_slopes=slopes)):
        q, k, v, lens = case()
        context = context or context_by(exchange)
        rules = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in rules.items()}
        out, lse = context.decode(q, context.shard(k), context.shard(v), seqlens=lens, return_lse=True, **rules)
        whole, whole_lse = lean_attention.decode(q, k, v, seqlens=lens, return_lse=True, **rules)
        near(out, whole)
        assert (lse - whole_lse).abs().max().item() < 1e-3
        assert context.exchange == exchange.partition(",")[0]  # "fused" has not become another
        if not rules:
            place, states = context.placement, []
            for rank in range(context.ranks):
                shard = dict(seqlens=place.local_tokens(lens, rank), return_lse=True)
                states.append(lean_attention.decode(q, place.shard(k, rank), place.shard(v, rank), **shard))
            expected, expected_lse = merge_in_order(states, q.dtype)
            assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
            assert told == ([True] if exchange == "fused" else [])
            bits = out.float().cpu().numpy().tobytes()
    q, k, v, lens = case(q_tokens=4)
    near(context.decode(q, context.shard(k), context.shard(v), seqlens=lens, causal=True),
         lean_attention.decode(q, k, v, seqlens=lens, causal=True))  # fmt: skip
    return bits


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "fused", "fused, apart"])
def test_ranks_compute_what_one_gpu_does(count, exchange):
    assert len(set(ranks.run(count, computed, exchange, backend="nccl"))) == 1


def captured(exchange: str) -> None:
    """A step in a CUDA graph: one new token appended, lengths counted on the device, replayed over blocks of every rank."""
    q, k, v, lens = case(tokens=200)
    lens = torch.tensor([20, 5, 77], dtype=torch.int32, device="cuda")
    context = context_by(exchange, block_tokens=4)
    shards = [context.shard(x).clone() for x in (k, v)]
    out = torch.empty_like(q)
    new_k, new_v = k[:, :, :1].clone(), v[:, :, :1].clone()

    def step() -> None:
        lens.add_(1)
        lengths = context.step_lengths(lens)
        context.decode(q, *shards, seqlens=lengths, append_k=new_k, append_v=new_v, out=out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # NCCL's watchdog is another thread
        step()
    for x, new in ((k, new_k), (v, new_v)):  # what the warm-up appended; the capture ran nothing
        for i, token in enumerate((20, 5, 77)):
            x[i, :, token] = new[i, :, 0]
    for done in range(1, 20):
        new_k.normal_(generator=torch.Generator("cuda").manual_seed(done))
        graph.replay()
        for x, new in ((k, new_k), (v, new_v)):
            for i, token in enumerate((20, 5, 77)):
                x[i, :, token + done] = new[i, :, 0]
        assert lens.tolist() == [21 + done, 6 + done, 78 + done]
        near(out, lean_attention.decode(q, k, v, seqlens=lens))
        assert torch.equal(shards[0], context.shard(k))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("exchange", ["all_gather", "fused", "fused, apart"])
def test_steps_are_captured(count, exchange):
    ranks.run(count, captured, exchange, backend="nccl")


def exchanged() -> None:
    """exchange="fused" alone: many calls without a wait between them, ranks apart by some, of all types, shapes and layouts of rows:
    the bits of an exchange by NCCL. Some calls have more words than a GPU holds threads."""
    torch.cuda.set_device(dist.get_rank())
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    fused, gathered = ContextParallel(exchange="fused"), ContextParallel()
    shapes = [(1, 32, 128), (3, 16, 40), (5, 7, 59), (40, 64, 512), (1, 1, 1)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for batch, heads, dim in shapes:
            assert fused._peers.prepare(torch.device("cuda", dist.get_rank()), batch * heads, dim, dtype) is None
    for round in range(60):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[round % 3]
        batch, heads, dim = shapes[round % len(shapes)]
        out = torch.randn(batch, heads, dim, device="cuda", generator=generator).to(dtype)
        lse = 20 * torch.randn(batch, heads, device="cuda", generator=generator)
        lse[torch.rand(batch, heads, device="cuda", generator=generator) < 0.2] = -torch.inf
        out[lse == -torch.inf] = torch.nan
        message = Message.of(Rows(heads, batch, dim, dtype), (out.transpose(0, 1), lse.transpose(0, 1)), (0, 0), out.device)
        expected, expected_lse = EXCHANGES["all_gather"](message, gathered.group)
        if round % 7 == dist.get_rank():
            torch.cuda._sleep(3_000_000)  # cycles: this rank comes late
        got, got_lse = fused._peers(out.clone(), lse)
        assert torch.equal(got.nan_to_num(123.0), expected.transpose(0, 1).nan_to_num(123.0)), (round, dtype, batch, heads, dim)
        assert torch.equal(got_lse, expected_lse.transpose(0, 1)), (round, dtype, batch, heads, dim)
    fused.check_exchange()
    results = [torch.empty(2, 32, 128, device="cuda") for _ in range(2)]
    out, lse = torch.randn(2, 32, 128, device="cuda", generator=generator), torch.zeros(2, 32, device="cuda")
    for i in range(2000):  # as fast as they come: epochs and slots in turn
        results[i % 2] = fused._peers(out.clone(), lse)[0]
    torch.cuda.synchronize()
    fused.check_exchange()
    assert torch.equal(*results)


@pytest.mark.parametrize("count", COUNTS)
def test_fused_exchanges_have_the_bits_of_gathered_ones(count):
    ranks.run(count, exchanged, backend="nccl")


def in_one_launch() -> None:
    """Decode steps that exchange in their own launch: the bits of a launch behind, over one memory and in any order; uneven and empty
    sequences, ranks apart by some, more words than a GPU has CTAs for, and calls without a wait between them."""
    torch.cuda.set_device(dist.get_rank())
    context, told = ContextParallel(exchange="fused"), spied()
    lens_of = torch.Generator().manual_seed(5)
    shapes = [(1, 32, 8, 128), (3, 16, 16, 64), (40, 64, 8, 128), (2, 64, 4, 64), (1, 8, 1, 128)]
    cases = []
    for number, (batch, q_heads, kv_heads, dim) in enumerate(shapes):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        generator = torch.Generator("cuda").manual_seed(number)  # the same on every rank
        q = torch.randn(batch, q_heads, 1, dim, device="cuda", generator=generator).to(dtype)
        k, v = torch.randn(2, batch, kv_heads, 700, dim, device="cuda", generator=generator).to(dtype)
        lens = torch.randint(0, 700, (batch,), generator=lens_of).int().cuda()
        lens[0] = 0 if batch > 1 else 700
        cases.append((q, context.shard(k), context.shard(v), lens))

    def called(i: int, in_launch: bool) -> tuple:
        q, k, v, lens = cases[i]
        context._peers.in_launch = in_launch
        # As many workers either way: a step of many outputs that exchanges in no launch of its own would have twice as many.
        options = lean_attention.Options(workers=torch.cuda.get_device_properties(q.device).multi_processor_count)
        return context.decode(q, k, v, seqlens=lens, return_lse=True, options=options)

    expected = [called(i, False) for i in range(len(cases))]
    for round in range(60):
        i = round * 7 % len(cases)
        if round % 9 == dist.get_rank():
            torch.cuda._sleep(3_000_000)  # cycles: this rank comes late
        out, lse = called(i, round % 4 != 3)
        assert torch.equal(out, expected[i][0]) and torch.equal(lse, expected[i][1]), (round, shapes[i])
    assert told and all(told)
    context.check_exchange()
    results = [called(round % 2, True) for round in range(1000)][-2:]  # as fast as they come: epochs and slots in turn
    torch.cuda.synchronize()
    context.check_exchange()
    for got, (out, lse) in zip(results, expected):
        assert torch.equal(got[0], out) and torch.equal(got[1], lse)


@pytest.mark.parametrize("count", COUNTS)
def test_steps_that_exchange_in_one_launch_have_the_bits_of_two(count):
    ranks.run(count, in_one_launch, backend="nccl")


def paged(exchange: str) -> None:
    """Pages of a rank's own pool, by a table over whole sequences."""
    q, k, v, lens = case(tokens=1024)
    context, page = context_by(exchange, block_tokens=64), 64
    table = torch.arange(3 * 1024 // page, dtype=torch.int32, device="cuda").view(3, -1)
    own = context.local_block_table(table, page)
    pools = []
    for x in (k, v):  # the rank's pages, at places of its own
        pages = x.unflatten(2, (-1, page)).movedim(2, 1).flatten(0, 1)
        pools.append(pages[own.flatten().long()].contiguous())
    places = torch.arange(own.numel(), dtype=torch.int32, device="cuda").view(own.shape)
    got = context.decode(q, *pools, block_table=places, seqlens=lens)
    near(got, lean_attention.decode(q, k, v, seqlens=lens))


@pytest.mark.parametrize("count", COUNTS)
def test_pages_lie_on_one_rank(count):
    ranks.run(count, all_paged, backend="nccl")


def all_paged() -> None:
    for exchange in ("all_gather", "fused"):
        paged(exchange)


def late(exchange: str) -> tuple:
    """Rank 1 does not come to a call: rank 0's ends after the limit, with NaN, and the next one raises; after a reset all is well."""
    q, k, v, lens = case()
    limit = datetime.timedelta(seconds=0.5)
    context = context_by(exchange, fused_limit=limit)
    shards = [context.shard(x) for x in (k, v)]
    expected = context.decode(q, *shards, seqlens=lens)
    torch.cuda.synchronize()
    dist.barrier()
    seconds, text = 0.0, ""
    if dist.get_rank() == 0:
        begin = time.monotonic()
        out = context.decode(q, *shards, seqlens=lens)
        torch.cuda.synchronize()
        seconds = time.monotonic() - begin
        assert out.isnan().all()
        with pytest.raises(RuntimeError) as error:
            context.decode(q, *shards, seqlens=lens)
        text = str(error.value)
        with pytest.raises(RuntimeError):
            context.check_exchange()
    context.reset_exchange()
    assert torch.equal(context.decode(q, *shards, seqlens=lens), expected)
    context.check_exchange()
    return seconds, text


@pytest.mark.parametrize("exchange", ["fused", "fused, apart"])
def test_a_late_rank_of_a_fused_exchange_is_an_error_within_the_limit(exchange):
    (seconds, text), _ = ranks.run(2, late, exchange, backend="nccl")
    assert 0.4 < seconds < 1.5
    assert "over peer memory among ranks 0, 1 failed" in text and "did not come within 0.5 s" in text
    assert "exchange.rank = 1: did not come within the limit" in text


def ended(exchange: str) -> Optional[float]:
    """Rank 1's process ends between two calls."""
    q, k, v, lens = case()
    context = context_by(exchange)
    shards = [context.shard(x) for x in (k, v)]
    context.decode(q, *shards, seqlens=lens)
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(1)
    begin = time.monotonic()
    context.decode(q, *shards, seqlens=lens)
    with pytest.raises(RuntimeError):  # by the limit, or because the driver took the memory away
        context.check_exchange()
    return time.monotonic() - begin


@pytest.mark.parametrize("exchange", ["fused", "fused, apart"])
def test_a_rank_of_a_fused_exchange_that_ends_is_an_error_within_the_limit(exchange):
    seconds = ranks.run(MOST, ended, exchange, backend="nccl")
    assert seconds.pop(1) is None and max(seconds) < 3.0


def unreachable() -> list:
    """The last rank cannot open the others' memory, as without peer access: every rank takes "all_gather", and says so once."""
    q, k, v, lens = case()
    context = ContextParallel(exchange="fused")
    if context.rank == context.ranks - 1:

        def open_exchange(*_: object) -> None:
            raise RuntimeError("exchange: cudaIpcOpenMemHandle: peer access is not supported between these two devices")

        _core.open_exchange = open_exchange
    shards = [context.shard(x) for x in (k, v)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            near(context.decode(q, *shards, seqlens=lens), lean_attention.decode(q, k, v, seqlens=lens))
    assert context.exchange == "all_gather"
    return [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]


def test_gpus_without_peer_access_exchange_by_nccl_and_say_so_once():
    reason = f"rank {MOST - 1}: exchange: cudaIpcOpenMemHandle: peer access is not supported between these two devices"
    expected = f"exchange = 'fused': {reason}: states are exchanged by 'all_gather'"
    assert ranks.run(MOST, unreachable, backend="nccl") == [[expected]] * MOST


def sharded_heads() -> None:
    q, k, v, lens = case()
    for kv_heads, exchange in ((8, "all_gather"), (5, "all_gather"), (1, "all_gather"), (1, "fused"), (2, "fused"), (3, "fused")):
        # even, uneven, fewer than ranks: these deal out the tokens of a head, over two ranks and one, or three
        tensor = TensorParallel(2 * kv_heads, kv_heads, exchange=exchange)
        whole = lean_attention.decode(q[:, : 2 * kv_heads], k[:, :kv_heads], v[:, :kv_heads], seqlens=lens)
        own = [tensor.shard_kv(x[:, :kv_heads]) for x in (k, v)]
        if tensor.context is not None:
            own = [tensor.context.shard(x) for x in own]
        near(tensor.gather(tensor.decode(tensor.shard_q(q[:, : 2 * kv_heads]), *own, seqlens=lens)), whole)


@pytest.mark.parametrize("count", COUNTS)
def test_heads_are_sharded(count):
    ranks.run(count, sharded_heads, backend="nccl")


def differing() -> None:
    q, k, v, lens = case()
    context = ContextParallel()
    with pytest.raises(ValueError, match="^q: rank 1 has"):
        context.decode(q if dist.get_rank() != 1 else q.half(), context.shard(k), context.shard(v), seqlens=lens)
    near(context.decode(q, context.shard(k), context.shard(v), seqlens=lens), lean_attention.decode(q, k, v, seqlens=lens))


def test_what_differs_is_refused():
    ranks.run(2, differing, backend="nccl")
