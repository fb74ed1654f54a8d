"""What the plug-in for vLLM does without vLLM: caches in the engine's layouts, and one layer's calls over them."""

import pathlib

import numpy as np
import oracle
import pytest
from conftest import needs

torch = pytest.importorskip("torch")

from lean_attention import _vllm_call as call
from lean_attention import _vllm_seams as seams
from lean_attention import vllm as plugin

Q_HEADS, KV_HEADS, DIM, PAGE, PAGES = 6, 2, 24, 8, 40
LENGTHS, NEW = [37, 1, 20, 61], [5, 1, 20, 1]  # tokens of each sequence, and how many of them are new
LAYOUTS = {
    "halves": (PAGES, KV_HEADS, PAGE, 2 * DIM),
    "side_by_side": (PAGES, KV_HEADS, PAGE, 2 * DIM),
    "keys_then_values": (2, PAGES, KV_HEADS, PAGE, DIM),
    "token_rows_of_keys_then_values": (2, PAGES, PAGE, KV_HEADS, DIM),
    "pairs_of_token_rows": (PAGES, 2, PAGE, KV_HEADS, DIM),
}
RULES = {
    "plain": {},
    "window": dict(window=9),
    "softcap": dict(softcap=3.0),
    "alibi": dict(alibi_slopes=[2.0 ** -(i + 1) for i in range(Q_HEADS)]),
    "sinks": dict(sinks=torch.linspace(-1, 2, Q_HEADS)),
    "all": dict(window=17, softcap=5.0, alibi_slopes=[0.1] * Q_HEADS, sinks=torch.ones(Q_HEADS)),
}
pytestmark = needs("pages", "append")


class Step:
    """Sequences of uneven lengths, their tokens of old in pages, the new ones packed end to end."""

    def __init__(self, layout, dtype=torch.float32, fp8=None, scales=(1.0, 1.0)):
        torch.manual_seed(4)
        made = torch.full(LAYOUTS[layout], float("nan"), dtype=dtype)
        cache = made.to(fp8).view(torch.uint8) if fp8 else made
        self.pages = getattr(call, layout)(cache)
        self.kv = torch.randn(2, len(LENGTHS), max(LENGTHS), KV_HEADS, DIM).to(dtype)
        if fp8:  # numbers that float8 holds, so that the oracle sees what the cache does
            for x, scale in zip(self.kv, scales):
                x.copy_(((x / scale).to(fp8).to(dtype) * scale))
        order, used = 1 + torch.randperm(PAGES - 1), 0  # page 0 is nobody's, as in the engine
        table = torch.full((len(LENGTHS), max(LENGTHS) // PAGE + 1), PAGES + 7, dtype=torch.int32)
        for b, length in enumerate(LENGTHS):
            count = -(-length // PAGE)
            table[b, :count] = order[used : used + count]
            used += count
        stored = [(pool.view(fp8) if fp8 else pool, x, scale) for pool, x, scale in zip(self.pages, self.kv, scales)]
        for b, (length, new) in enumerate(zip(LENGTHS, NEW)):
            for token in range(length - new):
                for pool, x, scale in stored:
                    pool[table[b, token // PAGE], :, token % PAGE] = (x[b, token] / scale).to(pool.dtype)
        starts = torch.tensor([0, *np.cumsum(NEW)], dtype=torch.int32)
        self.batch = call.Batch(sum(NEW), max(NEW), starts, max(LENGTHS), torch.tensor(LENGTHS, dtype=torch.int32), table, None)
        self.batch.slot_mapping = self.slots()
        self.query = torch.randn(sum(NEW) + 3, Q_HEADS, DIM).to(dtype)  # three tokens of no sequence
        spans = [(b, slice(length - new, length)) for b, (length, new) in enumerate(zip(LENGTHS, NEW))] + [(0, slice(3))]
        self.key, self.value = (torch.cat([x[b, span] for b, span in spans]) for x in self.kv)

    def slots(self):
        """Of the new tokens, as the engine works them out."""
        places = [(b, token) for b, (length, new) in enumerate(zip(LENGTHS, NEW)) for token in range(length - new, length)]
        return torch.tensor([int(self.batch.block_table[b, token // PAGE]) * PAGE + token % PAGE for b, token in places])

    def check(self, out, **rules):
        """Each sequence against the definition; the padding is left alone."""
        dtype = str(out.dtype).removeprefix("torch.")
        if "window" in rules:
            rules["window"] = (rules["window"] - 1, -1)
        for name in ("alibi_slopes", "sinks"):
            if name in rules:
                rules[name] = np.asarray(rules[name], np.float32)
        for b, (length, new) in enumerate(zip(LENGTHS, NEW)):
            first = int(self.batch.query_start_loc[b])
            q = self.query[first : first + new].transpose(0, 1)[None]
            k, v = (x[b, :length].transpose(0, 1)[None] for x in self.kv)
            answer = oracle.attention(q, k, v, causal=True, scale=0.2, dtype=dtype, **rules)
            answer.check(out[first : first + new].transpose(0, 1)[None])
        assert out[sum(NEW) :].isnan().all()

    def attend(self, **settings):
        layer = call.PagedLayer(scale=0.2, **settings)
        layer.to(torch.device("cpu"))
        out = torch.full_like(self.query, float("nan"))
        layer.attend(self.query, self.key, self.value, self.pages, self.batch, out)
        return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_layer_writes_and_reads_every_layout(layout, dtype):
    step = Step(layout, dtype)
    step.check(step.attend(writes=True))
    step.check(step.attend())  # what the first call wrote


#: get_kv_cache_shape(pages, page, Hkv, d) of the engine's classes: FlashAttention's of 0.22.1, 0.25.1 and 0.28.0, CPU_ATTN's of 0.22.1.
SHAPES = {
    "token_rows_of_keys_then_values": lambda pages, page, heads, dim: (2, pages, page, heads, dim),
    "pairs_of_token_rows": lambda pages, page, heads, dim: (pages, 2, page, heads, dim),
    "side_by_side": lambda pages, page, heads, dim: (pages, heads, page, 2 * dim),
    "keys_then_values": lambda pages, page, heads, dim: (2, pages, heads, page, dim),
}


@pytest.mark.parametrize("layout", SHAPES)
def test_what_a_backend_says_of_its_cache_chooses_how_it_is_read(layout):
    backend = type("Backend", (), {"get_kv_cache_shape": staticmethod(SHAPES[layout])})
    assert seams.reader_of(backend, call.side_by_side) is getattr(call, layout)
    assert backend.get_kv_cache_shape(PAGES, PAGE, KV_HEADS, DIM) == LAYOUTS[layout]


def test_a_backend_that_says_nothing_has_packed_caches_and_other_shapes_are_refused():
    assert seams.reader_of(type("Backend", (), {}), call.halves) is call.halves
    backend = type("Backend", (), {"get_kv_cache_shape": staticmethod(lambda pages, page, heads, dim: (pages, page, heads, dim))})
    with pytest.raises(NotImplementedError, match=r"Backend: caches of shape \[pages, page, Hkv, d\]: lean_attention reads \[2, "):
        seams.reader_of(backend, call.halves)


@pytest.mark.parametrize("rules", RULES)
def test_a_layer_has_its_rules(rules):
    step = Step("halves")
    step.check(step.attend(writes=True, **RULES[rules]), **RULES[rules])


def test_bits_do_not_depend_on_the_batch_where_that_is_asked_for():
    step = Step("halves")
    together = step.attend(writes=True, batch_invariant=True)
    alone = torch.full_like(step.query, float("nan"))
    for b, new in enumerate(NEW):
        first = int(step.batch.query_start_loc[b])
        batch = call.Batch(
            new, new, torch.tensor([0, new], dtype=torch.int32), LENGTHS[b], step.batch.seq_lens[b : b + 1],
            step.batch.block_table[b : b + 1], None,
        )  # fmt: skip
        rows = slice(first, first + new)
        call.PagedLayer(scale=0.2, batch_invariant=True).attend(step.query[rows], None, None, step.pages, batch, alone[rows])
    assert torch.equal(together[: sum(NEW)], alone[: sum(NEW)])


@needs("fp8")
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_a_float8_cache_is_written_and_read_by_its_scales(fp8):
    scales = (0.5, 2.0)
    step = Step("halves", torch.bfloat16, fp8, scales)
    layer = call.PagedLayer(scale=0.2, fp8=fp8, writes=True)
    out = torch.full_like(step.query, float("nan"))
    layer.attend(step.query, step.key, step.value, step.pages, step.batch, out, scales)
    step.check(out)


@needs("fp8")
@pytest.mark.parametrize("fp8", [None, torch.float8_e4m3fn], ids=["fp32", "e4m3"])
def test_keys_go_to_the_slots_that_the_engine_names_where_these_are_others(fp8):
    """A step of a draft model: a token that must leave no key, and two requests that have no page for theirs yet, but page 0."""
    scales = (0.5, 2.0) if fp8 else (1.0, 1.0)
    step = Step("halves", torch.bfloat16 if fp8 else torch.float32, fp8, scales)
    pools = [pool.view(fp8) if fp8 else pool for pool in step.pages]
    assert step.batch.is_in_place(PAGE)
    last = int(step.batch.block_table[0, (LENGTHS[0] - 1) // PAGE]), (LENGTHS[0] - 1) % PAGE
    before = [pool[last[0], :, last[1]].float() for pool in pools]
    step.batch.block_table[2, (LENGTHS[2] - 1) // PAGE] = step.batch.block_table[3, (LENGTHS[3] - 1) // PAGE] = 0
    step.batch.slot_mapping, step.batch.in_place = step.slots(), None
    step.batch.slot_mapping[NEW[0] - 1] = -1
    layer = call.PagedLayer(scale=0.2, fp8=fp8, writes=True)
    layer.attend(step.query, step.key, step.value, step.pages, step.batch, torch.empty_like(step.query), scales)
    for pool, old, given, scale in zip(pools, before, (step.key, step.value), scales):
        for token, slot in enumerate(step.batch.slot_mapping.tolist()):
            if slot >= PAGE:
                assert torch.equal(pool[slot // PAGE, :, slot % PAGE].float() * scale, given[token].float())
        assert torch.equal(pool[last[0], :, last[1]].float(), old) or bool(old.isnan().all())
        assert pool[last[0], :, last[1]].float().isnan().equal(old.isnan())


def test_keys_that_a_model_stores_outside_of_a_step_are_stored():
    step = Step("halves")
    call.PagedLayer(scale=0.2, writes=True).store(step.key, step.value, step.pages, step.batch.slot_mapping)
    step.check(step.attend())


@pytest.mark.parametrize("first", [0, 1], ids=["reads first", "writes first"])
def test_a_request_sees_what_another_of_the_same_step_writes(first):
    """Two requests with one prefix that come together: the engine gives the second the page that the first fills."""
    torch.manual_seed(5)
    length = PAGE + 3
    k, v = torch.randn(2, length, KV_HEADS, DIM)
    q = torch.randn(length + 3, Q_HEADS, DIM)
    pages = call.halves(torch.full((6, KV_HEADS, PAGE, 2 * DIM), float("nan")))
    requests = [dict(new=3, table=[1, 3]), dict(new=length, table=[1, 2])][:: 1 if first == 0 else -1]
    news = [request["new"] for request in requests]
    starts = torch.tensor([0, *np.cumsum(news)], dtype=torch.int32)
    table = torch.tensor([request["table"] for request in requests], dtype=torch.int32)
    slots = [row[t // PAGE] * PAGE + t % PAGE for row, new in zip(table.tolist(), news) for t in range(length - new, length)]
    lengths = torch.full((2,), length, dtype=torch.int32)
    batch = call.Batch(sum(news), max(news), starts, length, lengths, table, torch.tensor(slots))
    key, value = (torch.cat([x[length - new :] for new in news]) for x in (k, v))
    out = torch.full_like(q, float("nan"))
    call.PagedLayer(scale=0.2, writes=True).attend(q, key, value, pages, batch, out)
    for begin, new in zip(starts.tolist(), news):
        rows = slice(begin, begin + new)
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q[rows], k, v))
        oracle.attention(queries, keys, values, causal=True, scale=0.2, dtype="float32").check(out[rows].transpose(0, 1)[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sinks_that_are_loaded_anew_in_their_memory_count(dtype):
    step = Step("halves")
    sinks = torch.zeros(Q_HEADS, dtype=dtype)
    layer = call.PagedLayer(scale=0.2, sinks=sinks, writes=True)
    layer.to(torch.device("cpu"))
    for loaded in (torch.linspace(-1, 2, Q_HEADS), torch.linspace(3, -2, Q_HEADS)):
        sinks.copy_(loaded)
        out = torch.full_like(step.query, float("nan"))
        layer.attend(step.query, step.key, step.value, step.pages, step.batch, out)
        step.check(out, sinks=sinks.float())


def test_slopes_are_in_their_memory_again_after_a_sleep_that_lost_them():
    layer = call.PagedLayer(scale=0.2, writes=True, **RULES["alibi"])
    layer.to(torch.device("cpu"))
    held = layer._rules["alibi_slopes"]
    held.fill_(float("nan"))
    layer.to(torch.device("cpu"))  # as the engine has it when weights are loaded anew
    assert layer._rules["alibi_slopes"].data_ptr() == held.data_ptr()
    assert held.tolist() == RULES["alibi"]["alibi_slopes"]


def test_caches_of_another_shape_are_refused():
    for layout in LAYOUTS:
        with pytest.raises(ValueError, match="kv_cache: shape"):
            getattr(call, layout)(torch.zeros(3, 3, 3, 3, 3) if len(LAYOUTS[layout]) == 5 else torch.zeros(3, 3))


def test_a_window_of_a_batch_that_is_not_causal_is_refused():
    step = Step("halves")
    step.batch.causal = False
    with pytest.raises(NotImplementedError, match="sliding_window = 4"):
        step.attend(window=4)


@pytest.mark.parametrize(
    "version, device, words",
    [
        ("0.32.0", "cpu", ""),
        ("0.32.1+cpu", "cuda", ""),
        ("0.22.1", "cpu", ""),
        ("0.33.0", "cuda", ""),
        ("0.33rc1.dev5+g1a2b3c4", "cuda", ""),
        ("0.21.0", "cpu", "vllm 0.21.0 is not served, vllm 0.22 to 0.33 is"),
        ("0.34.0", "cuda", "vllm 0.34.0 is not served"),
        ("0.19.1", "cpu", "vllm 0.19.1 is not served"),
        ("1.0.0", "cuda", "vllm 1.0.0 is not served"),
        ("dev", "cuda", "vllm dev is not served"),
        ("0.32.0", "xpu", "platform 'xpu' is not served"),
    ],
)
def test_versions_and_platforms_that_are_not_served_are_named(version, device, words):
    assert plugin.refusal(version, device) == "" if not words else words in plugin.refusal(version, device)


def test_vllm_finds_the_plug_in():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["lean_attention"].partition(":")
    assert module == plugin.__name__ and callable(getattr(plugin, function))
