"""The classes behind ``--attention-backend CUSTOM`` with the engine's own metadata over paged caches, on CPU tensors.

The library's CPU backend stands in for its CUDA kernel; what the engine hands over and what is made of it is the same. Runs
where vLLM is, of any version that is served: caches have the shape that its FlashAttention class asks for.
"""

import concurrent.futures
import dataclasses
import importlib.util
import threading
import types

import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("no vllm", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from lean_attention import _vllm_call, _vllm_cuda
from lean_attention._vllm_seams import reader_of
from lean_attention.distributed import Placement, merge_in_order
from lean_attention.distributed._local_call import Shard

Q_HEADS, KV_HEADS, DIM, PAGE, PAGES, SCALE = 8, 2, 64, 16, 60, 0.125
STEPS = {  # tokens of each request, and how many of them are new
    "decode": ([300, 1, 33, 64], [1, 1, 1, 1]),
    "guessed tokens": ([70, 9, 200, 16], [4, 4, 4, 4]),
    "uneven": ([70, 9, 200, 16], [1, 9, 3, 16]),
}


def empty_cache(head_major, kv_heads=KV_HEADS, dtype=torch.bfloat16):
    """A cache as FlashAttention wants it; all heads of a token together in memory, or all tokens of a page and head."""
    shape_of = getattr(FlashAttentionBackend, "get_kv_cache_shape", None)
    shape = shape_of(PAGES, PAGE, kv_heads, DIM) if shape_of else (PAGES, kv_heads, PAGE, 2 * DIM)
    by_token = shape[-2] == kv_heads  # as axes are named; the memory's order is another matter
    cache = torch.full(shape, float("nan"), dtype=dtype)
    swapped = head_major if by_token else not head_major
    axes = (-3, -2)
    return cache.transpose(*axes).contiguous().transpose(*axes) if swapped else cache


class Step:
    def __init__(self, lengths, new, head_major, owned=lambda token: True, heads=(Q_HEADS, KV_HEADS), dtype=torch.bfloat16):
        """Only tokens that are owned lie in the cache, close together, as on a rank of context parallelism."""
        generator = torch.Generator().manual_seed(3)
        self.lengths, self.new = lengths, new
        self.kv = torch.randn(2, len(lengths), max(lengths), heads[1], DIM, generator=generator).to(dtype)
        self.query = torch.randn(sum(new), heads[0], DIM, generator=generator).to(dtype)
        self.cache = empty_cache(head_major, heads[1], dtype)
        pools = reader_of(FlashAttentionBackend, _vllm_call.side_by_side)(self.cache)
        pages = torch.randperm(PAGES, generator=generator).tolist()
        self.table = torch.zeros(len(lengths), max(lengths) // PAGE + 1, dtype=torch.int32)
        for b, length in enumerate(lengths):
            for place, token in enumerate(filter(owned, range(length))):
                if place % PAGE == 0:
                    self.table[b, place // PAGE] = pages.pop()
                for pool, x in zip(pools, self.kv):
                    pool[self.table[b, place // PAGE], :, place % PAGE] = x[b, token]

    def metadata(self, lengths=None):
        starts = torch.tensor([0, *self.new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        given = dict(
            query_start_loc=starts, query_start_loc_cpu=starts, num_reqs=len(self.new), num_actual_tokens=sum(self.new),
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32) if lengths is None else lengths, max_query_len=max(self.new),
            max_seq_len=max(self.lengths), block_table_tensor=self.table, slot_mapping=torch.zeros(sum(self.new), dtype=torch.int64),
        )  # fmt: skip
        needed = {
            field.name
            for field in dataclasses.fields(CommonAttentionMetadata)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        }
        assert needed <= given.keys(), f"this vLLM's steps say more: {needed - given.keys()}"
        return CommonAttentionMetadata(**given)

    def expected(self, lengths):
        """Eager attention in fp64."""
        rows, first = [], 0
        for b, (length, new) in enumerate(zip(lengths, self.new)):
            q = self.query[first : first + new].double().transpose(0, 1)
            k, v = (x[b, :length].double().transpose(0, 1).repeat_interleave(q.shape[0] // self.kv.shape[3], 0) for x in self.kv)
            hidden = torch.ones(new, length, dtype=torch.bool).triu(length - new + 1)
            rows.append((SCALE * q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v)
            first += new
        return torch.cat(rows, 1).transpose(0, 1)


def builder_and_layer(**rules):
    """Without an engine's configuration: what its base classes read of it concerns FlashAttention alone."""
    builder = object.__new__(_vllm_cuda.LeanCudaBuilder)
    builder.is_ours = True
    layer = object.__new__(_vllm_cuda.LeanCudaImpl)
    layer.lean, layer._bound = _vllm_call.PagedLayer(scale=SCALE, **rules), (None, None)
    layer._pages_of = reader_of(layer.engine_backend, layer.reads_packed)
    return builder, layer


def forward(layer, step, batch, query=None, key=None, value=None):
    query = step.query if query is None else query
    out = torch.full_like(query, float("nan"))
    layer.forward(types.SimpleNamespace(_k_scale=None, _v_scale=None), query, key, value, step.cache, batch, out)
    return out


@pytest.mark.parametrize("head_major", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("kind", STEPS)
def test_a_step_of_the_engine_over_its_cache_is_eager_attention(kind, head_major):
    step = Step(*STEPS[kind], head_major)
    builder, layer = builder_and_layer()
    batch = builder.build(PAGE, step.metadata())  # a prefix that all share, said to be one page long, is read as any page
    assert isinstance(batch, _vllm_call.Batch)
    torch.testing.assert_close(forward(layer, step, batch).double(), step.expected(step.lengths), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("new", [1, 4])
def test_what_a_graph_captured_reads_lengths_anew(new):
    """A graph is captured with lengths of its own and replayed with others, written to the same tensors."""
    lengths = [70, 9, 200, 16]
    step = Step(lengths, [new] * 4, head_major=True)
    builder, layer = builder_and_layer()
    captured = torch.full((4,), new, dtype=torch.int32)
    batch = builder.build_for_cudagraph_capture(step.metadata(captured))
    for replayed in ([new] * 4, lengths, [60, 8, 151, 9]):
        captured.copy_(torch.tensor(replayed))
        torch.testing.assert_close(forward(layer, step, batch).double(), step.expected(replayed), atol=0.02, rtol=0.02)


class Operations(TorchDispatchMode):
    """Names of the operations on tensors, views among them, for as long as it is entered."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


OPERATIONS_OF_BUILD = 0  # FlashAttention's of vLLM 0.25.1 has five or six, and one that prepares its kernel's schedule
ENGINES_OWN = object()


@pytest.fixture
def engines_builds(monkeypatch):
    """Stands for FlashAttention's build: notes that it was asked."""
    asked = []
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", lambda *arguments: asked.append(arguments) or ENGINES_OWN)
    return asked


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_is_described_once_and_without_an_operation_on_a_tensor(kind, engines_builds):
    """Builders run on the host's way to each step, one that replays a graph too: what they do there, every step waits for."""
    step = Step(*STEPS[kind], head_major=False)
    builder, _ = builder_and_layer()
    given = step.metadata()
    with Operations() as seen:
        batch = builder.build(0, given)
    assert len(seen.names) <= OPERATIONS_OF_BUILD, seen.names
    assert isinstance(batch, _vllm_call.Batch) and not engines_builds
    assert batch.seq_lens is given.seq_lens and batch.query_start_loc is given.query_start_loc  # which a graph's replay reads


def test_rows_beyond_the_requests_are_left_out(engines_builds):
    """Some runners hand over tables and lengths of more rows than the step has requests."""
    step = Step(*STEPS["decode"], head_major=False)
    builder, layer = builder_and_layer()
    given = step.metadata()
    given.seq_lens = torch.cat([given.seq_lens, given.seq_lens])
    given.query_start_loc = torch.cat([given.query_start_loc, given.query_start_loc])
    given.block_table_tensor = torch.cat([step.table, torch.full_like(step.table, PAGES + 7)])
    batch = builder.build(0, given)
    assert (batch.seq_lens.data_ptr(), batch.block_table.data_ptr()) == (given.seq_lens.data_ptr(), given.block_table_tensor.data_ptr())
    torch.testing.assert_close(forward(layer, step, batch).double(), step.expected(step.lengths), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("ours, new, described", [(True, 16, False), (True, 17, True), (False, 1, True)])
def test_the_engines_own_description_is_made_where_its_layers_read_it(ours, new, described, engines_builds):
    """That of a long chunk, which FlashAttention computes, and that of layers which stay the engine's."""
    step = Step([40, 90], [1, new], head_major=False)
    builder, _ = builder_and_layer()
    builder.is_ours = ours
    assert (builder.build(0, step.metadata()) is ENGINES_OWN) == described
    assert len(engines_builds) == int(described)


class GroupOfThreads:
    """Stands for the engine's group of ranks (GroupCoordinator): its ranks are threads of this process."""

    def __init__(self, world_size):
        self.world_size, self._rank, self._given = world_size, threading.local(), [None] * world_size
        self._all_there = threading.Barrier(world_size, timeout=60)

    @property
    def rank_in_group(self):
        return self._rank.number

    def run(self, function):
        """function(rank) on each; what they returned."""

        def ranked(rank):
            self._rank.number = rank
            try:
                return function(rank)
            except BaseException:
                self._all_there.abort()
                raise

        with concurrent.futures.ThreadPoolExecutor(self.world_size) as pool:
            return [each.result() for each in [pool.submit(ranked, rank) for rank in range(self.world_size)]]

    def given_by_all(self, value):
        self._given[self.rank_in_group] = value
        self._all_there.wait()
        given = list(self._given)
        self._all_there.wait()  # nobody gives the next before all have these
        return given

    def all_gather(self, x, dim):
        return torch.cat(self.given_by_all(x), dim)


def combine_in_torch(out, lse, group, return_lse):
    """Stands for the engine's cp_lse_ag_out_rs, whose arithmetic is a Triton kernel: the same by this library's merge."""
    assert return_lse and out.shape[:2] == lse.shape
    whole, lse = merge_in_order(group.given_by_all((out.clone(), lse.contiguous())), out.dtype)
    return tuple(x.chunk(group.world_size, 1)[group.rank_in_group] for x in (whole, lse))


STEPS_OVER_RANKS = {  # of the first some have fewer tokens than there are ranks
    "decode": ([300, 1, 3, 64, 129, 2], [1] * 6),
    "guessed tokens": ([70, 4, 200, 16, 5], [4] * 5),
    "uneven": ([70, 9, 200, 16, 3, 1], [1, 9, 3, 16, 3, 1]),
}


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 0.02)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("interleave", [1, 4, PAGE])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", STEPS_OVER_RANKS)
def test_ranks_that_share_the_tokens_give_what_one_gives(kind, count, interleave, dtype, bound, monkeypatch):
    """Decode context parallelism: each rank has every n-th run of tokens, in a cache of its own, and its own query heads."""
    lengths, new = STEPS_OVER_RANKS[kind]
    heads, group = (4, 1), GroupOfThreads(count)
    all_heads = (count * heads[0], 1)
    monkeypatch.setattr(_vllm_cuda, "get_dcp_group", lambda: group)
    monkeypatch.setattr(_vllm_cuda.LeanCudaImpl, "dcp_combine", staticmethod(combine_in_torch), raising=False)
    monkeypatch.setattr(_vllm_cuda.LeanCudaImpl, "head_size", DIM, raising=False)
    none_of_these = dict.fromkeys(("alibi_slopes", "sliding_window", "sinks", "kv_sharing_target_layer_name"))

    def of_rank(rank):
        step = Step(lengths, new, True, lambda token: token // interleave % count == rank, all_heads, dtype)
        builder, layer = builder_and_layer(softcap=20.0)
        layer.lean.ranks = layer.ranks_of(count, none_of_these)
        builder.shard, builder._held = Shard(Placement(count, interleave), rank), torch.full((8,), -7, dtype=torch.int32)
        given = step.metadata()
        batch = builder.build(0, given)
        if kind == "decode":  # what the engine itself counts
            assert torch.equal(batch.held, get_dcp_local_seq_lens(given.seq_lens, count, rank, interleave))
        assert batch.held.data_ptr() == builder._held.data_ptr()
        fresh = [torch.cat([x[b, n - m : n] for b, (n, m) in enumerate(zip(lengths, new))]) for x in step.kv]
        return forward(layer, step, batch, step.query.chunk(count, 1)[rank], *fresh)

    out = torch.cat(group.run(of_rank), 1)
    whole = Step(lengths, new, True, heads=all_heads, dtype=dtype)
    builder, layer = builder_and_layer(softcap=20.0)
    one = forward(layer, whole, builder.build(0, whole.metadata()))
    torch.testing.assert_close(out.double(), one.double(), atol=bound, rtol=bound)


def test_what_a_graph_captured_over_ranks_reads_anew(monkeypatch):
    """Tokens that a rank holds are counted in each step, in the memory that the graph reads."""
    lengths, count = [70, 9, 200, 16], 2
    builder, _ = builder_and_layer()
    builder.shard, builder._held = Shard(Placement(count, 1), 1), torch.zeros(8, dtype=torch.int32)
    step = Step(lengths, [1] * 4, head_major=True)
    captured = builder.build_for_cudagraph_capture(step.metadata(torch.ones(4, dtype=torch.int32)))
    assert captured.held.tolist() == [0, 0, 0, 0]
    builder.build(0, step.metadata())
    assert captured.held.tolist() == [35, 4, 100, 8]
    idle = torch.tensor([70, 0, 0, 0], dtype=torch.int32)  # a batch that is filled up to the graph's
    builder.build(0, step.metadata(idle))
    assert captured.held.tolist() == [35, 0, 0, 0]


def test_what_is_not_computed_over_ranks_is_refused_by_name(monkeypatch):
    _, layer = builder_and_layer()
    monkeypatch.setattr(_vllm_cuda, "get_dcp_group", lambda: None)
    layer.head_size = 64
    assert layer.ranks_of(2, {"sinks": None}) is not None
    for name in ("alibi_slopes", "sliding_window", "sinks", "kv_sharing_target_layer_name"):
        with pytest.raises(NotImplementedError, match=f"{name}: not with decode_context_parallel_size = 2"):
            layer.ranks_of(2, {name: 3})
    layer.head_size = 80
    with pytest.raises(NotImplementedError, match="head_size = 80: with decode_context_parallel_size = 2"):
        layer.ranks_of(2, {})
    layer.head_size = 64
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(NotImplementedError, match="VLLM_BATCH_INVARIANT: not with decode_context_parallel_size = 2"):
        layer.ranks_of(2, {})


def test_what_is_refused_is_refused_by_every_version():
    """Some FlashAttention classes take float8 caches on some GPUs, whatever the list of types says."""
    backend = _vllm_cuda.LeanCudaBackend
    assert all(backend.supports_kv_cache_dtype(kind) for kind in ("auto", "bfloat16", None))
    assert not any(backend.supports_kv_cache_dtype(kind) for kind in ("fp8", "fp8_e4m3", "fp8_e5m2"))
