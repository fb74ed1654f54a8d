"""The classes behind ``--attention-backend CUSTOM`` with the engine's own metadata over paged caches, on CPU tensors.

The library's CPU backend stands in for its CUDA kernel; what the engine hands over and what is made of it is the same. Runs
where vLLM is, of any version that is served: caches have the shape that its FlashAttention class asks for.
"""

import concurrent.futures
import dataclasses
import importlib
import importlib.util
import inspect
import threading
import types

import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("no vllm", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadataBuilder
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
CHUNKS = {"long chunks": ([200, 50], [90, 50]), "a chunk beside decode rows": ([300, 1, 33, 64], [1, 1, 30, 1])}
NOT_A_NUMBER = 0x7F  # as E4M3 and as E5M2


def empty_cache(head_major, kv_heads=KV_HEADS, dtype=torch.bfloat16):
    """A cache as FlashAttention wants it; all heads of a token together in memory, or all tokens of a page and head. Of float8
    the engine declares bytes."""
    shape_of = getattr(FlashAttentionBackend, "get_kv_cache_shape", None)
    shape = shape_of(PAGES, PAGE, kv_heads, DIM) if shape_of else (PAGES, kv_heads, PAGE, 2 * DIM)
    by_token = shape[-2] == kv_heads  # as axes are named; the memory's order is another matter
    cache = torch.full(shape, NOT_A_NUMBER if dtype == torch.uint8 else float("nan"), dtype=dtype)
    swapped = head_major if by_token else not head_major
    axes = (-3, -2)
    return cache.transpose(*axes).contiguous().transpose(*axes) if swapped else cache


class Step:
    def __init__(
        self, lengths, new, head_major, owned=lambda token: True, heads=(Q_HEADS, KV_HEADS), dtype=torch.bfloat16, fp8=None,
        scales=(1.0, 1.0), shared=0,
    ):  # fmt: skip
        """Only tokens that are owned lie in the cache, close together, as on a rank of context parallelism.

        fp8, scales: of a float8 cache, into which keys and values are rounded as the engine's write does it. `kv` holds what the
        cache does. shared: tokens at the beginning, whole pages of them, that all have in the same pages.
        """
        generator = torch.Generator().manual_seed(3)
        self.lengths, self.new = lengths, new
        self.kv = torch.randn(2, len(lengths), max(lengths), heads[1], DIM, generator=generator).to(dtype)
        self.kv[:, :, :shared] = self.kv[:, :1, :shared]
        self.query = torch.randn(sum(new), heads[0], DIM, generator=generator).to(dtype)
        self.scales = tuple(torch.tensor(scale) for scale in scales)  # as the engine has them: no axis, or one of kv heads
        stored = self.kv
        if fp8:
            factors = torch.stack([scale.expand(heads[1]) for scale in self.scales])[:, None, None, :, None]
            stored = (self.kv / factors).to(fp8)
            self.kv = (stored.float() * factors).to(dtype)
        self.cache = empty_cache(head_major, heads[1], torch.uint8 if fp8 else dtype)
        pools = [pool.view(fp8) if fp8 else pool for pool in reader_of(FlashAttentionBackend, _vllm_call.side_by_side)(self.cache)]
        pages = torch.randperm(PAGES, generator=generator).tolist()
        self.table = torch.zeros(len(lengths), max(lengths) // PAGE + 1, dtype=torch.int32)
        for b, length in enumerate(lengths):
            for place, token in enumerate(filter(owned, range(length))):
                if place % PAGE == 0:
                    self.table[b, place // PAGE] = self.table[0, place // PAGE] if b > 0 and token < shared else pages.pop()
                for pool, x in zip(pools, stored):
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

    def expected(self, lengths, new_tokens=None):
        """Eager attention in fp64."""
        rows, first = [], 0
        for b, (length, new) in enumerate(zip(lengths, new_tokens or self.new)):
            q = self.query[first : first + new].double().transpose(0, 1)
            k, v = (x[b, :length].double().transpose(0, 1).repeat_interleave(q.shape[0] // self.kv.shape[3], 0) for x in self.kv)
            hidden = torch.ones(new, length, dtype=torch.bool).triu(length - new + 1)
            rows.append((SCALE * q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v)
            first += new
        return torch.cat(rows, 1).transpose(0, 1)


def builder_and_layer(graphs=CUDAGraphMode.FULL_AND_PIECEWISE, **rules):
    """Without an engine's configuration: what its base classes read of it concerns FlashAttention alone."""
    builder = object.__new__(_vllm_cuda.LeanCudaBuilder)
    builder.is_ours = True
    builder.vllm_config = types.SimpleNamespace(compilation_config=types.SimpleNamespace(cudagraph_mode=graphs))
    layer = object.__new__(_vllm_cuda.LeanCudaImpl)
    layer.lean, layer._bound = _vllm_call.PagedLayer(scale=SCALE, **rules), (None, None)
    layer._pages_of = reader_of(layer.engine_backend, layer.reads_packed)
    return builder, layer


def forward(layer, step, batch, query=None, key=None, value=None):
    query = step.query if query is None else query
    out = torch.full_like(query, float("nan"))
    of_engine = types.SimpleNamespace(_k_scale=step.scales[0], _v_scale=step.scales[1])
    layer.forward(of_engine, query, key, value, step.cache, batch, out)
    return out


@pytest.mark.parametrize("head_major", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("kind", STEPS)
def test_a_step_of_the_engine_over_its_cache_is_eager_attention(kind, head_major):
    step = Step(*STEPS[kind], head_major)
    builder, layer = builder_and_layer()
    batch = builder.build(PAGE, step.metadata())  # a prefix that all share, said to be one page long, is read as any page
    assert isinstance(batch, _vllm_call.Batch)
    torch.testing.assert_close(forward(layer, step, batch).double(), step.expected(step.lengths), atol=0.02, rtol=0.02)


SCALES = {"scales of the tensor": (0.5, 2.0), "scales of each head": ([0.5, 0.25], [2.0, 1.0])}
float8 = pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])


@float8
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("head_major", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("kind", [*STEPS, *CHUNKS])
def test_a_float8_cache_is_read_by_the_engines_scales(kind, head_major, scales, fp8, engines_builds):
    """Every step, where FlashAttention does not read the cache; queries are bf16."""
    step = Step(*(STEPS | CHUNKS)[kind], head_major, fp8=fp8, scales=SCALES[scales])
    builder, layer = builder_and_layer(fp8=fp8)
    builder.keeps_all = True
    out = forward(layer, step, builder.build(0, step.metadata()))
    assert out.dtype == torch.bfloat16 and not engines_builds
    torch.testing.assert_close(out.double(), step.expected(step.lengths), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("fp8", [None, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("head_major", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("new", [[1, 1, 1], [4, 2, 16]], ids=["decode", "uneven"])
def test_pages_that_requests_share_are_read_by_each(new, head_major, fp8):
    shared = 4 * PAGE
    step = Step([100, shared + 16, 83], new, head_major, fp8=fp8, scales=(0.5, 2.0), shared=shared)
    assert torch.equal(step.table[:, :4], step.table[:1, :4].expand(3, 4)) and len(step.table[:, 4].unique()) == 3
    builder, layer = builder_and_layer(fp8=fp8)
    out = forward(layer, step, builder.build(shared, step.metadata()))  # the engine would cascade
    torch.testing.assert_close(out.double(), step.expected(step.lengths), atol=0.02, rtol=0.02)


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


REPLAYED = {  # of a graph of 40 tokens and 4 requests: the tokens of each that are new, of lengths as long as these or longer
    "one chunk": [40, 0, 0, 0],
    "a chunk beside decode rows": [1, 37, 1, 1],
    "decode": [1, 1, 1, 1],
    "fewer requests and tokens": [20, 0, 3, 0],
    "as captured": [10, 10, 10, 10],
}


@pytest.mark.parametrize("fp8", [None, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("said", [1, 10, 40])
def test_a_graph_of_steps_of_any_kind_is_right_in_every_replay(said, fp8):
    """Captured with ten tokens for each request; engines differ in what they say of the longest, and one says 1 for as many requests
    as tokens. Replayed with query starts, lengths and tables written to the same tensors, and a batch that is filled up."""
    lengths, tokens = [70, 49, 200, 16], 40
    step = Step(lengths, [10] * 4, head_major=True, fp8=fp8, scales=(0.5, 2.0))
    builder, layer = builder_and_layer(CUDAGraphMode.FULL, fp8=fp8)
    given = step.metadata(torch.full((4,), 10, dtype=torch.int32))
    given.max_query_len = said
    batch = builder.build_for_cudagraph_capture(given)
    assert isinstance(batch, _vllm_call.Batch) and batch.max_query_len == tokens
    table = step.table.clone()
    for new in REPLAYED.values():
        kept = [length if count else 0 for length, count in zip(lengths, new)]
        given.seq_lens.copy_(torch.tensor(kept))
        given.query_start_loc.copy_(torch.tensor([0, *new]).cumsum(0))
        step.table.copy_(torch.where(torch.tensor(kept)[:, None] > 0, table, 0))
        # Kernels pass rows over that belong to no request; the host, which reads the starts here, wants none.
        out = forward(layer, step, dataclasses.replace(batch, num_actual_tokens=sum(new)))
        torch.testing.assert_close(out[: sum(new)].double(), step.expected(kept, new), atol=0.02, rtol=0.02)


def test_steps_of_a_size_with_graphs_are_described_here_and_longer_ones_by_the_rule(engines_builds):
    """A replay reads nothing of the engine's description, whose preparation each step would wait for."""
    builder, _ = builder_and_layer(CUDAGraphMode.FULL)
    of_size = {tokens: Step([300, 90], [tokens - 1, 1], head_major=False).metadata() for tokens in (40, 41)}
    assert builder.build(0, of_size[40]) is ENGINES_OWN
    builder.build_for_cudagraph_capture(Step([40, 8], [39, 1], head_major=False).metadata())
    assert builder.build(0, of_size[40]).max_query_len == 39  # and run eagerly it is right too
    assert builder.build(0, of_size[41]) is ENGINES_OWN


def test_graphs_of_steps_of_any_kind_are_refused_where_another_would_compute_them_without(engines_builds, monkeypatch):
    """vLLM asks the class of a builder what its graphs may hold, before there are layers that stay FlashAttention's."""
    builder, _ = builder_and_layer(CUDAGraphMode.FULL)
    builder.is_ours = False
    step = Step([40, 8], [39, 1], head_major=False).metadata()
    for has in ("UNIFORM_BATCH", "ALWAYS"):
        monkeypatch.setattr(FlashAttentionMetadataBuilder, "_cudagraph_support", AttentionCGSupport[has])
        if has == "ALWAYS":
            assert builder.build_for_cudagraph_capture(step) is ENGINES_OWN and builder.captured_tokens == 0
        else:
            with pytest.raises(NotImplementedError, match="cudagraph_mode = FULL: a layer is FlashAttention's"):
                builder.build_for_cudagraph_capture(step)


@pytest.mark.parametrize("graphs", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY])
def test_graphs_of_decode_steps_alone_have_a_decode_steps_kernels(graphs, engines_builds):
    builder, _ = builder_and_layer(graphs)
    for new in (1, 4):
        batch = builder.build_for_cudagraph_capture(Step([70, 9], [new, new], head_major=False).metadata())
        assert batch.max_query_len == new and builder.captured_tokens == 0


@pytest.mark.parametrize(
    "model, ranks, support",
    [({}, 1, "ALWAYS"), ({}, 2, "UNIFORM_BATCH"), ({"is_mm_prefix_lm": True}, 1, "UNIFORM_BATCH"), ({"rswa_window": 7}, 1, "UNIFORM_BATCH")],
)
def test_what_full_graphs_may_hold(model, ranks, support, monkeypatch):
    parallel = types.SimpleNamespace(decode_context_parallel_size=ranks)
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(**model), parallel_config=parallel, speculative_config=None)
    assert _vllm_cuda.LeanCudaBuilder.get_cudagraph_support(config, None) == AttentionCGSupport[support]
    derived = type("OfTheEngine", (_vllm_cuda.LeanCudaBuilder,), {"__module__": "vllm.somewhere"})
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "_cudagraph_support", AttentionCGSupport.NEVER)
    assert derived.get_cudagraph_support(config, None) == AttentionCGSupport.NEVER  # its steps are FlashAttention's
    # Graphs of 17 query tokens a request are FlashAttention's too.
    for guesses, flashs, answer in ((15, "NEVER", support), (16, "NEVER", "NEVER"), (16, "ALWAYS", support)):
        monkeypatch.setattr(FlashAttentionMetadataBuilder, "_cudagraph_support", AttentionCGSupport[flashs])
        config.speculative_config = types.SimpleNamespace(num_speculative_tokens=guesses)
        assert _vllm_cuda.LeanCudaBuilder.get_cudagraph_support(config, None) == AttentionCGSupport[answer]


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


CHUNK = dict(query_heads=32, new=[512], length=8192)


@pytest.mark.parametrize(
    "step, ours",
    [
        ({}, True),
        (dict(new=[8192], length=131072), True),
        (dict(new=[511]), False),
        (dict(length=8191), False),
        (dict(new=[512, 1]), False),  # beside a decode row
        (dict(new=[512, 512]), False),
        (dict(query_heads=8), False),  # of a rank: a quarter of the rows
        (dict(query_heads=8, new=[2048]), True),
        (dict(query_heads=0), False),  # layers that are not those measured
    ],
)
def test_long_chunks_are_computed_here_where_that_was_measured_to_be_no_slower(step, ours, engines_builds):
    chunk = CHUNK | step
    builder, _ = builder_and_layer()
    builder.long_chunk_heads = chunk["query_heads"]
    given = Step([16] * len(chunk["new"]), [1] * len(chunk["new"]), head_major=False).metadata()
    given.max_query_len, given.num_actual_tokens, given.max_seq_len = max(chunk["new"]), sum(chunk["new"]), chunk["length"]
    assert (builder.build(0, given) is ENGINES_OWN) != ours
    given.causal = False
    assert builder.build(0, given) is ENGINES_OWN


def long_chunk_layer(heads=(32, 8), head_size=128, version=3, **rules):
    lean = _vllm_call.PagedLayer(scale=SCALE, **rules)
    return types.SimpleNamespace(vllm_flash_attn_version=version, head_size=head_size, num_heads=heads[0], num_kv_heads=heads[1], lean=lean)


@pytest.mark.parametrize(
    "layer, heads",
    [
        ({}, 32),
        (dict(heads=(64, 8)), 64),
        (dict(heads=(4, 1)), 4),
        (dict(heads=(16, 8)), 0),
        (dict(head_size=64), 0),
        (dict(version=2), 0),
        (dict(version=4), 0),
        (dict(window=4096), 0),
        (dict(softcap=30.0), 0),
        (dict(alibi_slopes=[0.5] * 32), 0),
        (dict(sinks=torch.ones(32)), 0),
        (dict(fp8=torch.float8_e4m3fn), 0),
        (dict(ranks=_vllm_call.Ranks(None, None)), 0),
    ],
)
def test_long_chunks_of_layers_that_were_not_measured_stay_the_engines(layer, heads, monkeypatch):
    asked = []
    monkeypatch.setattr(type(_vllm_cuda.current_platform), "is_device_capability", lambda *a, **k: asked.append(a[-1]) or a[-1] == hopper)
    for hopper in (90, 80):
        found = _vllm_cuda.long_chunk_heads([long_chunk_layer(), long_chunk_layer(**layer)])
        assert found == (min(heads, 32) if hopper == 90 else 0)
    assert set(asked) == {90}


def layer_of_engine(**arguments):
    """As the engine builds it, of its own class underneath, on a platform without FlashAttention."""
    with set_current_vllm_config(VllmConfig()):
        return _vllm_cuda.LeanCudaImpl(Q_HEADS, DIM, SCALE, KV_HEADS, **arguments)


@pytest.fixture
def flash_reads(monkeypatch):
    """Sets what FlashAttention says of the types of caches that it reads, and the version that a layer gets."""

    def says(kinds, version=3):
        monkeypatch.setattr(FlashAttentionBackend, "supports_kv_cache_dtype", classmethod(lambda cls, kind: kind in kinds))
        monkeypatch.setattr(importlib.import_module(FlashAttentionImpl.__module__), "get_flash_attn_version", lambda *a, **k: version)

    return says


@pytest.mark.parametrize("kind, fp8", [("auto", None), ("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_a_layer_takes_queries_as_they_are_whatever_its_cache_is(kind, fp8, flash_reads):
    """The engine asks a layer that it has built whether it should make queries float8, and writes the cache by its type."""
    flash_reads(("auto", "fp8"))
    layer = layer_of_engine(kv_cache_dtype=kind)
    assert layer.supports_quant_query_input is False
    assert layer.kv_cache_dtype == kind and layer.lean.fp8 == fp8


@pytest.mark.parametrize(
    "kind, version, ranks, reads",
    [("auto", 2, None, True), ("fp8", 3, None, True), ("fp8_e4m3", 3, None, True), ("fp8_e5m2", 3, None, False), ("fp8", 2, None, False),
     ("fp8", 3, _vllm_call.Ranks(None, None), False), ("auto", 3, _vllm_call.Ranks(None, None), True)],
)  # fmt: skip
def test_a_layer_knows_whether_flash_attention_reads_its_cache(kind, version, ranks, reads, flash_reads):
    flash_reads(("auto", "fp8", "fp8_e4m3"), version)
    layer = layer_of_engine(kv_cache_dtype=kind)
    layer.lean.ranks = ranks
    assert layer.flash_reads_cache == reads
    flash_reads(("auto",), version)  # another GPU
    assert layer.flash_reads_cache == (kind == "auto")


def test_a_layer_that_stays_the_engines_is_refused_a_cache_that_flash_attention_does_not_read(flash_reads):
    flash_reads(("auto",))
    with pytest.raises(NotImplementedError, match="fp8_e5m2"):  # newer classes say so themselves
        layer_of_engine(kv_cache_dtype="fp8_e5m2", attn_type="encoder_decoder")
    layer = layer_of_engine(attn_type="encoder_decoder")
    assert layer.lean is None
    with pytest.raises(NotImplementedError, match="kv_cache_dtype = 'fp8_e5m2': a layer of type encoder_decoder stays FlashAttention's"):
        layer.hand_over("encoder_decoder", "fp8_e5m2")


@pytest.mark.parametrize("scale", [0.25, [0.25, 2.0]], ids=["of the tensor", "of each head"])
def test_a_long_chunk_over_a_float8_cache_is_handed_over_with_float8_queries(scale, flash_reads, monkeypatch):
    """As the engine's layer would have made them for FlashAttention, which multiplies by their scale where it takes such queries."""

    def scaled_fp8_quant(x, factors, group_shape=None):  # stands for the engine's kernel
        rows, columns = group_shape
        assert x.dim() == 2 and rows == -1 and columns == (-1 if factors.numel() == 1 else x.shape[1] // factors.numel())
        each = factors.reshape(-1).repeat_interleave(x.shape[1] // factors.numel())
        return (x.float() / each).to(torch.float8_e4m3fn), factors

    given = []

    def of_flash_attention(self, layer, query, key, value, kv_cache, metadata, output, *others):
        given.append((query, self.supports_quant_query_input))
        return output

    monkeypatch.setattr(_vllm_cuda.ops, "scaled_fp8_quant", scaled_fp8_quant)
    monkeypatch.setattr(FlashAttentionImpl, "forward", of_flash_attention)
    flash_reads(("auto", "fp8"))
    packed = torch.randn(40, 2 * Q_HEADS * DIM).to(torch.bfloat16)
    query = packed[:, : Q_HEADS * DIM].view(40, Q_HEADS, DIM)  # part of wider rows, as a projection gives them
    of_engine = types.SimpleNamespace(_q_scale=torch.tensor(scale))
    arguments = (None, None, None, ENGINES_OWN, torch.empty_like(query))
    layer = layer_of_engine(kv_cache_dtype="fp8")
    layer.forward(of_engine, query, *arguments)
    (seen, multiplies), *_ = given
    factors = torch.tensor(scale).reshape(-1).repeat_interleave(Q_HEADS // torch.tensor(scale).numel())[:, None]
    assert seen.dtype == torch.float8_e4m3fn and seen.shape == query.shape and multiplies
    assert torch.equal(seen.float(), (query.float() / factors).to(torch.float8_e4m3fn).float())
    assert layer.supports_quant_query_input is False
    layer.forward(of_engine, query, None, None, None, None, torch.empty_like(query))  # the engine measures its memory
    layer_of_engine().forward(of_engine, query, *arguments)  # no float8 cache
    assert [each[0] is query for each in given] == [False, True, True]


def builder_of(monkeypatch, layers, derived=False, speculation=None, **model):
    """The builder as the engine makes it, but for FlashAttention's own part."""
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "__init__", lambda self, *arguments: None)
    named = {f"layer.{i}": types.SimpleNamespace(impl=impl) for i, impl in enumerate(layers)}
    monkeypatch.setattr(importlib.import_module("lean_attention._vllm_layers"), "get_layers_from_vllm_config", lambda *a: named)
    cls = _vllm_cuda.LeanCudaBuilder
    cls = type("OfTheEngine", (cls,), {"__module__": "vllm.somewhere"}) if derived else cls
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(**model), parallel_config=types.SimpleNamespace(cp_kv_cache_interleave_size=1),
        scheduler_config=types.SimpleNamespace(max_num_seqs=8), speculative_config=speculation,
    )  # fmt: skip
    return cls(None, list(named), config, torch.device("cpu"))


def test_a_builder_keeps_all_steps_where_flash_attention_does_not_read_the_cache(flash_reads, monkeypatch):
    flash_reads(("auto", "fp8"))
    of_kind = {kind: layer_of_engine(kv_cache_dtype=kind) for kind in ("auto", "fp8", "fp8_e5m2")}
    assert [builder_of(monkeypatch, [layer]).keeps_all for layer in of_kind.values()] == [False, False, True]
    step = Step(*CHUNKS["long chunks"], head_major=False)
    builder = builder_of(monkeypatch, [of_kind["fp8_e5m2"]])
    assert isinstance(builder.build(0, step.metadata()), _vllm_call.Batch)
    asked = step.metadata()
    asked.mm_req_doc_ranges = {0: [(0, 3)]}
    with pytest.raises(NotImplementedError, match="mm_req_doc_ranges: tokens of images .* not computed by lean_attention"):
        builder.build(0, asked)
    assert not builder_of(monkeypatch, [of_kind["fp8"]], derived=True).is_ours  # steps of the engine's making
    with pytest.raises(NotImplementedError, match="kv_cache_dtype = 'fp8_e5m2': OfTheEngine hands steps to FlashAttention"):
        builder_of(monkeypatch, [of_kind["fp8_e5m2"]], derived=True)
    with pytest.raises(NotImplementedError, match="kv_cache_dtype = 'fp8_e5m2': is_mm_prefix_lm hands steps to FlashAttention"):
        builder_of(monkeypatch, [of_kind["fp8_e5m2"]], is_mm_prefix_lm=True)
    assert not builder_of(monkeypatch, [of_kind["fp8"]], is_mm_prefix_lm=True).keeps_all
    with pytest.raises(NotImplementedError, match="share a cache"):
        builder_of(monkeypatch, [of_kind["auto"], layer_of_engine(attn_type="encoder_decoder")])


@pytest.mark.parametrize("guesses, adaptive, ours", [(15, True, True), (16, False, True), (16, True, False)])
def test_a_step_that_may_replay_a_graph_of_flash_attentions_is_described_for_it(guesses, adaptive, ours, engines_builds, monkeypatch):
    """Adaptive verification replays a graph of 17 tokens a request for any number of them: the few of this step, too."""
    speculation = types.SimpleNamespace(num_speculative_tokens=guesses, enable_adaptive_verification=adaptive)
    builder = builder_of(monkeypatch, [layer_of_engine()], speculation=speculation)
    builder.vllm_config = types.SimpleNamespace(compilation_config=types.SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE))
    captured, replayed = (Step([70, 90], [new, new], head_major=False).metadata() for new in (guesses + 1, 3))
    assert (builder.build_for_cudagraph_capture(captured) is ENGINES_OWN) == (guesses == 16)
    assert (builder.build(0, replayed) is ENGINES_OWN) != ours


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


@pytest.mark.parametrize(
    "dtype, bound, fp8",
    [(torch.float32, 2e-6, None), (torch.bfloat16, 0.02, None), (torch.bfloat16, 0.02, torch.float8_e4m3fn)],
    ids=["fp32", "bf16", "bf16 over e4m3"],
)
@pytest.mark.parametrize("interleave", [1, 4, PAGE])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", STEPS_OVER_RANKS)
def test_ranks_that_share_the_tokens_give_what_one_gives(kind, count, interleave, dtype, bound, fp8, monkeypatch):
    """Decode context parallelism: each rank has every n-th run of tokens, in a cache of its own, and its own query heads. New keys
    of several tokens are seen as they came, not as a float8 cache holds them; here they are the same."""
    lengths, new = STEPS_OVER_RANKS[kind]
    heads, group = (4, 1), GroupOfThreads(count)
    all_heads = (count * heads[0], 1)
    monkeypatch.setattr(_vllm_cuda, "get_dcp_group", lambda: group)
    monkeypatch.setattr(_vllm_cuda.LeanCudaImpl, "dcp_combine", staticmethod(combine_in_torch), raising=False)
    monkeypatch.setattr(_vllm_cuda.LeanCudaImpl, "head_size", DIM, raising=False)
    none_of_these = dict.fromkeys(("alibi_slopes", "sliding_window", "sinks", "kv_sharing_target_layer_name"))

    def of_rank(rank):
        step = Step(lengths, new, True, lambda token: token // interleave % count == rank, all_heads, dtype, fp8, (0.5, 2.0))
        builder, layer = builder_and_layer(softcap=20.0, fp8=fp8)
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
    whole = Step(lengths, new, True, heads=all_heads, dtype=dtype, fp8=fp8, scales=(0.5, 2.0))
    builder, layer = builder_and_layer(softcap=20.0, fp8=fp8)
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


def test_every_group_counts_the_tokens_of_its_rank_itself(flash_reads, monkeypatch):
    """Engines describe a step to a group by a copy of what another of its kind made, where its builder allows that: what a graph of
    this group reads would be the last step's."""
    flash_reads(("auto",))
    layer = layer_of_engine()
    assert builder_of(monkeypatch, [layer]).supports_update_block_table
    layer.lean.ranks, layer.dcp_world_size, layer.dcp_rank = _vllm_call.Ranks(None, None), 2, 1
    assert not builder_of(monkeypatch, [layer]).supports_update_block_table


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


def test_types_of_a_cache_are_taken_and_refused_by_every_version():
    """Some FlashAttention classes take float8 caches on some GPUs, whatever the list of types says, and some none on others."""
    backend = _vllm_cuda.LeanCudaBackend
    taken = ("auto", "bfloat16", None, "fp8", "fp8_e4m3", "fp8_e5m2")
    assert all(backend.supports_kv_cache_dtype(kind) for kind in taken)
    assert not any(backend.supports_kv_cache_dtype(kind) for kind in ("fp8_inc", "fp8_ds_mla", "int8_per_token_head", "nvfp4"))
    asked = dict(head_size=128, dtype=torch.bfloat16, block_size=16, use_mla=False, has_sink=False, use_sparse=False, use_mm_prefix=False,
                 device_capability=(8, 0))  # fmt: skip
    named = inspect.signature(FlashAttentionBackend.supports_combination).parameters
    asked = {name: value for name, value in asked.items() if name in named}
    assert all(backend.supports_combination(kv_cache_dtype=kind, **asked) is None for kind in taken)
