"""lean_attention.distributed on NCCL: as many GPUs as there are, two at least. `make multi-gpu-test` runs it."""

from __future__ import annotations

import datetime
import os
import time

import pytest

torch = pytest.importorskip("torch")
import ranks  # noqa: E402
import torch.distributed as dist  # noqa: E402

import lean_attention  # noqa: E402
from lean_attention.distributed import ContextParallel, TensorParallel, merge_in_order  # noqa: E402
from lean_attention.distributed._exchange import EXCHANGES, Message, Rows  # noqa: E402

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} GPUs, 2 are needed")
COUNTS = [count for count in (2, 4, 8) if count <= GPUS]
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


def computed(exchange: str) -> bytes:
    """All rules that a shard expresses in another way; without rules the bits of one GPU that computes the same shards."""
    context = None
    sinks, slopes = torch.linspace(-1, 3, 16), torch.linspace(0.001, 0.1, 16)
    for rules in (dict(), dict(softcap=5.0), dict(window=(300, 0)), dict(sinks=sinks), dict(alibi_slopes=slopes)):
        q, k, v, lens = case()
        context = context or ContextParallel(exchange=exchange)
        rules = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in rules.items()}
        out, lse = context.decode(q, context.shard(k), context.shard(v), seqlens=lens, return_lse=True, **rules)
        whole, whole_lse = lean_attention.decode(q, k, v, seqlens=lens, return_lse=True, **rules)
        near(out, whole)
        assert (lse - whole_lse).abs().max().item() < 1e-3
        assert context.exchange == exchange  # "fused" has not become another
        if not rules:
            place, states = context.placement, []
            for rank in range(context.ranks):
                shard = dict(seqlens=place.local_tokens(lens, rank), return_lse=True)
                states.append(lean_attention.decode(q, place.shard(k, rank), place.shard(v, rank), **shard))
            expected, expected_lse = merge_in_order(states, q.dtype)
            assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
            bits = out.float().cpu().numpy().tobytes()
    q, k, v, lens = case(q_tokens=4)
    near(context.decode(q, context.shard(k), context.shard(v), seqlens=lens, causal=True),
         lean_attention.decode(q, k, v, seqlens=lens, causal=True))  # fmt: skip
    return bits


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "fused"])
def test_ranks_compute_what_one_gpu_does(count, exchange):
    assert len(set(ranks.run(count, computed, exchange, backend="nccl"))) == 1


def captured(exchange: str) -> None:
    """A step in a CUDA graph: one new token appended, lengths counted on the device, replayed over blocks of every rank."""
    q, k, v, lens = case(tokens=200)
    lens = torch.tensor([20, 5, 77], dtype=torch.int32, device="cuda")
    context = ContextParallel(block_tokens=4, exchange=exchange)
    shards = [context.shard(x).clone() for x in (k, v)]
    out = torch.empty_like(q)
    new_k, new_v = k[:, :, :1].clone(), v[:, :, :1].clone()

    def step() -> None:
        lens.add_(1)
        context.decode(q, *shards, seqlens=lens, append_k=new_k, append_v=new_v, out=out)

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
@pytest.mark.parametrize("exchange", ["all_gather", "fused"])
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


def late() -> tuple:
    """Rank 1 does not come to a call: rank 0's ends after the limit, with NaN, and the next one raises; after a reset all is well."""
    q, k, v, lens = case()
    limit = datetime.timedelta(seconds=0.5)
    context = ContextParallel(exchange="fused", fused_limit=limit)
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


def test_a_late_rank_of_a_fused_exchange_is_an_error_within_the_limit():
    (seconds, text), _ = ranks.run(2, late, backend="nccl")
    assert 0.4 < seconds < 1.5
    assert "over peer memory among ranks 0, 1 failed" in text and "did not come within 0.5 s" in text
    assert "exchange.rank = 1: did not come within the limit" in text


def ended() -> float:
    """Rank 1's process ends between two calls."""
    q, k, v, lens = case()
    context = ContextParallel(exchange="fused")
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


def test_a_rank_of_a_fused_exchange_that_ends_is_an_error_within_the_limit():
    seconds, gone = ranks.run(2, ended, backend="nccl")
    assert gone is None and seconds < 3.0


def sharded_heads() -> None:
    q, k, v, lens = case()
    for kv_heads in (8, 5, 1):  # even, uneven, fewer than ranks
        tensor = TensorParallel(2 * kv_heads, kv_heads)
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
