"""GroupQueryAttention for ONNX Runtime, against its own; and the library that the operators are in."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from oracle import attention  # noqa: E402
from ort_models import ERRORS, MICROSOFT, OWN, model_of, needs_operators, run_node, run_values, session_of  # noqa: E402
from ort_models import with_readable_outputs  # noqa: E402

import lean_attention.ort  # noqa: E402

pytestmark = needs_operators
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11}
GQA_OUTPUTS = ["output", "present_key", "present_value"]


# --- GroupQueryAttention ---------------------------------------------------------------------------------------------


class GqaCase:
    """Random inputs and attributes of one call. `rows`: the tokens each sequence brings; others of the S are padding."""

    def __init__(self, seed: int, dtype: str, kind: str):
        random = self.random = np.random.default_rng(seed)
        self.batch = 1 if kind == "chunk" else int(random.integers(1, 4))
        self.kv_heads, group = int(random.integers(1, 4)), int(random.integers(1, 5))
        self.q_heads = self.kv_heads * group
        self.dim = int(random.choice([16, 48, 64]))
        self.tokens = 1 if kind == "decode" else int(random.integers(2, 12))
        longest = self.tokens if kind == "prompt" else int(random.integers(self.tokens + 1, 90))
        totals = random.integers(1, longest + 1, self.batch) if kind != "chunk" else np.array([longest])
        totals[random.integers(self.batch)] = longest
        self.totals = totals.astype(np.int32)
        self.rows = np.minimum(self.tokens, self.totals)
        self.capacity = longest + int(random.integers(0, 9))
        self.dtype = np.dtype(dtype)

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape).astype(self.dtype)

    def feeds(self, packed: bool = False, past: bool = True) -> dict:
        width, kv_width = self.q_heads * self.dim, self.kv_heads * self.dim
        cache = (self.batch, self.kv_heads, self.capacity, self.dim)
        query, key, value = (self.normal(self.batch, self.tokens, w) for w in (width, kv_width, kv_width))
        return {
            "query": np.concatenate([query, key, value], 2) if packed else query,
            "key": None if packed else key,
            "value": None if packed else value,
            "past_key": self.normal(*cache) if past else None,
            "past_value": self.normal(*cache) if past else None,
            "seqlens_k": self.totals - 1,
            "total_sequence_length": np.array([self.totals.max()], np.int32),
        }

    def options(self, feeds: dict) -> dict:
        """Adds optional inputs; returns attributes."""
        random, attributes = self.random, {}
        names = ["cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink"]
        feeds.update(dict.fromkeys(names))
        if random.random() < 0.5:
            half = self.dim // 2
            angles = np.outer(np.arange(self.capacity), 100.0 ** (-np.arange(half) / half))
            feeds["cos_cache"], feeds["sin_cache"] = np.cos(angles).astype(self.dtype), np.sin(angles).astype(self.dtype)
            attributes.update(do_rotary=1, rotary_interleaved=int(random.integers(2)))
        if random.random() < 0.3:
            attributes["local_window_size"] = int(random.integers(1, 20))
        if random.random() < 0.3:
            attributes["softcap"] = 3.0
        if random.random() < 0.3:
            attributes["scale"] = 0.3
        if random.random() < 0.3:
            shape = random.choice([1, self.batch]), random.choice([1, self.q_heads]), self.tokens, self.totals.max()
            feeds["attention_bias"] = self.normal(*shape)
        choice = random.integers(4)
        if choice == 0:
            feeds["head_sink"] = self.normal(self.q_heads)
        elif choice == 1:
            attributes["smooth_softmax"] = 1
        return attributes

    def check(self, ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
        """Rows of tokens, and the cache up to them. Both sides round what they rotate, the probabilities and the sums."""
        for b in range(self.batch):
            rows, total = self.rows[b], self.totals[b]
            for x, y, what in zip(ours, theirs, GQA_OUTPUTS):
                x, y = (z[b, :rows] if what == "output" else z[b, :, :total] for z in (x, y))
                assert x.shape == y.shape
                allowed = 32 * ROUNDOFF[self.dtype.name] * np.abs(y).max(initial=1.0)
                np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol=0, atol=allowed, err_msg=what)
            assert not ours[0][b, rows:].any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["decode", "prompt", "chunk"])
@pytest.mark.parametrize("seed", range(12))
def test_gqa_equals_the_built_in(seed, kind, dtype):
    case = GqaCase(seed, dtype, kind)
    feeds = case.feeds(packed=seed % 3 == 0)
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads, **case.options(feeds))
    constants = [name for name in ("cos_cache", "sin_cache") if seed % 2 and feeds[name] is not None]
    ours, theirs = (
        run_node("GroupQueryAttention", feeds, GQA_OUTPUTS, domain=domain, constants=constants, **attributes)
        for domain in (OWN, MICROSOFT)
    )
    case.check(ours, theirs)


def bound_run(model, feeds, ours, buffers):
    """present_key and present_value are the buffers that past_key and past_value are."""
    session = session_of(model, ours=ours)
    binding = session.io_binding()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(x) for name, x in feeds.items() if x is not None and "past" not in name}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("output")  # results come in the order of binding
    for past, present in (("past_key", "present_key"), ("past_value", "present_value")):
        binding.bind_ortvalue_input(past, buffers[past])
        binding.bind_ortvalue_output(present, buffers[past])
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0].numpy().copy()


@pytest.mark.parametrize("kind", ["decode", "prompt", "chunk"])
def test_gqa_appends_to_a_shared_buffer_in_place(kind):
    case = GqaCase(3, "float32", kind)
    feeds = case.feeds()
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads)
    results = []
    for domain in (OWN, MICROSOFT):
        model = model_of("GroupQueryAttention", feeds, GQA_OUTPUTS, domain=domain, **attributes)
        buffers = {name: onnxruntime.OrtValue.ortvalue_from_numpy(feeds[name].copy()) for name in ("past_key", "past_value")}
        output = bound_run(model, feeds, domain == OWN, buffers)
        results.append([output, *(buffers[name].numpy().copy() for name in ("past_key", "past_value"))])
    case.check(*results)
    for b, total in enumerate(case.totals):  # what lies behind the tokens is not touched
        np.testing.assert_array_equal(results[0][1][b, :, total:], feeds["past_key"][b, :, total:])


@pytest.mark.parametrize("packed", [False, True])
def test_gqa_of_a_first_prompt_without_past(packed):
    case = GqaCase(5, "float32", "prompt")
    feeds = case.feeds(packed=packed, past=False)
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads)
    ours, theirs = (run_node("GroupQueryAttention", feeds, GQA_OUTPUTS, domain=d, **attributes) for d in (OWN, MICROSOFT))
    case.check(ours, theirs)
    assert ours[1].shape == theirs[1].shape


LONG_PROMPTS = [
    ("float32", {}),
    ("float16", {}),
    ("float32", dict(do_rotary=1, rotary_interleaved=1)),
    ("float16", dict(do_rotary=1)),
    ("float32", dict(local_window_size=33, softcap=3.0)),
    ("float16", dict(smooth_softmax=1)),
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype, attributes", LONG_PROMPTS, ids=str)
def test_gqa_of_a_long_prompt_then_of_single_tokens(dtype, attributes, shared):
    """Rows of a kv head that fill several row blocks, a sequence shorter than the prompt; then two tokens in the cache it left."""
    random, dtype = np.random.default_rng(7), np.dtype(dtype)
    batch, q_heads, kv_heads, dim, tokens = 2, 8, 2, 48, 150
    totals, capacity = np.array([150, 97], np.int32), 160
    attributes = dict(num_heads=q_heads, kv_num_heads=kv_heads, **attributes)
    angles = np.outer(np.arange(capacity), 100.0 ** (-np.arange(dim // 2) / (dim // 2)))
    tables = dict(cos_cache=np.cos(angles).astype(dtype), sin_cache=np.sin(angles).astype(dtype)) if "do_rotary" in attributes else {}
    kept = {domain: [np.zeros((batch, kv_heads, capacity, dim), dtype) for _ in range(2)] for domain in (OWN, MICROSOFT)}
    for step in range(3):
        rows = tokens if step == 0 else 1
        widths = dict(query=q_heads, key=kv_heads, value=kv_heads)
        fresh = {name: random.standard_normal((batch, rows, heads * dim)).astype(dtype) for name, heads in widths.items()}
        results = {}
        for domain, caches in kept.items():
            lengths = dict(seqlens_k=totals + step - 1, total_sequence_length=np.array([totals.max() + step], np.int32))
            feeds = dict(fresh, past_key=caches[0], past_value=caches[1], **lengths, **tables)
            model = model_of("GroupQueryAttention", feeds, GQA_OUTPUTS, domain=domain, **attributes)
            if shared:
                buffers = {f"past_{x}": onnxruntime.OrtValue.ortvalue_from_numpy(y.copy()) for x, y in zip(("key", "value"), caches)}
                output = bound_run(model, feeds, domain == OWN, buffers)
                kept[domain] = [value.numpy().copy() for value in buffers.values()]
            else:
                output, *kept[domain] = session_of(model, ours=domain == OWN).run(None, feeds)
            results[domain] = [output, *kept[domain]]
        for b, total in enumerate(totals + step):
            for ours, theirs, what in zip(results[OWN], results[MICROSOFT], GQA_OUTPUTS):
                x, y = (z[b, : min(rows, total)] if what == "output" else z[b, :, :total] for z in (ours, theirs))
                allowed = 32 * ROUNDOFF[dtype.name] * np.abs(y).max()
                np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol=0, atol=allowed, err_msg=f"{what}, step {step}")


def test_gqa_zeroes_what_lies_behind_the_tokens_of_a_new_present():
    case = GqaCase(1, "float32", "decode")
    ours = run_node("GroupQueryAttention", case.feeds(), GQA_OUTPUTS, num_heads=case.q_heads, kv_num_heads=case.kv_heads)
    for b, total in enumerate(case.totals):
        assert not ours[1][b, :, total:].any() and not ours[2][b, :, total:].any()


def test_gqa_query_seqlens_says_which_rows_are_tokens():
    case = GqaCase(2, "float32", "chunk")
    case.batch, case.totals, case.rows, case.tokens, case.capacity = 3, np.array([9, 4, 20], np.int32), np.array([2, 0, 4]), 4, 24
    feeds = case.feeds()
    feeds.update(dict.fromkeys(["cos", "sin", "ids", "bias", "sink", "k_scale", "v_scale", "q_norm", "k_norm"]))
    feeds["query_seqlens"] = case.rows.astype(np.int32)
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads)
    ours, theirs = (run_node("GroupQueryAttention", feeds, GQA_OUTPUTS, domain=d, **attributes) for d in (OWN, MICROSOFT))
    case.check(ours, theirs)


@pytest.mark.parametrize("domain, override", [(OWN, False), (OWN, True), (MICROSOFT, True)])
def test_override_decides_whose_operator_serves_the_built_in_name(domain, override):
    case = GqaCase(4, "float32", "decode")
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads, sliding_window_cache=1, local_window_size=3)
    model = model_of("GroupQueryAttention", case.feeds(), GQA_OUTPUTS, domain=domain, **attributes)
    with pytest.raises(ERRORS, match="lean_attention: GroupQueryAttention node 'node0': sliding_window_cache = 1"):
        session_of(model, override=override)


def test_without_override_the_built_in_stays():
    case = GqaCase(4, "float32", "decode")
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads, sliding_window_cache=1, local_window_size=3)
    model = model_of("GroupQueryAttention", case.feeds(), GQA_OUTPUTS, domain=MICROSOFT, **attributes)
    session_of(model)


def test_operators_that_are_not_served_stay_the_built_in_ones_under_override():
    """Attention of com.microsoft is not ONNX's."""
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in (("x", (2, 5, 12)), ("w", (12, 36)), ("bias", (36,)))}
    model = model_of("Attention", feeds, ["output"], domain=MICROSOFT, num_heads=3)
    ours, theirs = (session_of(model, ours=ours, override=ours).run(None, feeds)[0] for ours in (True, False))
    np.testing.assert_array_equal(ours, theirs)
    assert {name for domain, name in lean_attention.ort.SERVED if domain == MICROSOFT}.isdisjoint({"SparsePagedAttention", "LinearAttention"})


GQA_NODE_REFUSALS = [
    (dict(num_heads=5), "kv_num_heads = 2: must divide num_heads = 5"),
    (dict(qk_output=1), "qk_output: scores are not given out"),
    (dict(sliding_window_cache=1), "sliding_window_cache = 1: the cache is as long as the sequence here"),
    (dict(kv_cache_bit_width=4), "kv_cache_bit_width: int8 and int4 caches are not read"),
    (dict(k_quant_type="PER_TENSOR"), 'k_quant_type = "PER_TENSOR": allowed "NONE"'),
    (dict(local_window_size=0), "local_window_size = 0: allowed -1"),
    (dict(causal=0, local_window_size=4), "local_window_size = 4: must be -1 with causal = 0"),
    (dict(do_rotary=1), "do_rotary = 1: needs cos_cache and sin_cache"),
    (dict(scale=2), "scale: "),
]


@pytest.mark.parametrize("attributes, message", GQA_NODE_REFUSALS, ids=lambda x: x if isinstance(x, str) else "")
def test_gqa_refuses_a_node_when_the_session_is_made(attributes, message):
    case = GqaCase(4, "float32", "decode")
    case.q_heads, case.kv_heads = 4, 2
    model = model_of("GroupQueryAttention", case.feeds(), GQA_OUTPUTS, **{"num_heads": 4, "kv_num_heads": 2, **attributes})
    with pytest.raises(ERRORS) as refusal:
        session_of(model)
    assert f"lean_attention: GroupQueryAttention node 'node0': {message}" in str(refusal.value)


def gqa_feeds_with(**changed):
    case = GqaCase(4, "float32", "decode")
    case.batch, case.q_heads, case.kv_heads, case.dim, case.tokens, case.capacity = 2, 4, 2, 8, 1, 10
    case.totals = np.array([4, 7], np.int32)
    feeds = case.feeds()
    return {**feeds, **changed}


GQA_RUN_REFUSALS = [
    (dict(seqlens_k=np.array([3, 10], np.int32)), "seqlens_k[1] = 10: allowed 0 to 9"),
    (dict(seqlens_k=np.array([-1, 3], np.int32)), "seqlens_k[0] = -1: allowed 0 to 9"),
    (dict(seqlens_k=np.array([3], np.int32)), "seqlens_k: is int32 [1]: must be int32 [2]"),
    (dict(seqlens_k=np.array([3, 3], np.int64)), "seqlens_k: is int64 [2]: must be int32 [2]"),
    (dict(key=np.zeros((2, 1, 8), np.float32)), "key: shape [2, 1, 8]: must be [2, 1, 16]"),
    (dict(past_value=np.zeros((2, 2, 9, 8), np.float32)), "past_value: shape [2, 2, 9, 8]: must be [2, 2, 10, 8]"),
    (dict(query=np.zeros((2, 1, 33), np.float32)), "query: width 33: must be a multiple of 4 heads"),
    (dict(query=np.zeros((2, 32), np.float32)), "query: shape [2, 32]: must be [B, S, width]"),
    (dict(total_sequence_length=np.array([0], np.int32)), "total_sequence_length = 0: must be at least the 1 tokens of query"),
]


@pytest.mark.parametrize("changed, message", GQA_RUN_REFUSALS, ids=[message for _, message in GQA_RUN_REFUSALS])
def test_gqa_refuses_inputs_by_name_and_value(changed, message):
    with pytest.raises(ERRORS) as refusal:
        run_node("GroupQueryAttention", gqa_feeds_with(**changed), GQA_OUTPUTS, num_heads=4, kv_num_heads=2)
    assert f"lean_attention: GroupQueryAttention node 'node0': {message}" in str(refusal.value)


def normalised(rows, weight, epsilon):
    """Each head of [B, S, heads x d] by its root of the mean square."""
    heads = rows.reshape(*rows.shape[:2], -1, len(weight)).astype(np.float64)
    factor = 1 / np.sqrt((heads**2).mean(-1, keepdims=True) + epsilon)
    return (heads * factor * weight.astype(np.float64)).astype(rows.dtype).reshape(rows.shape)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["decode", "prompt", "chunk"])
@pytest.mark.parametrize("packed", [False, True])
def test_gqa_normalises_heads_of_queries_and_new_keys(packed, kind, dtype):
    """ONNX Runtime's own does it on a GPU alone, so the same node on inputs that NumPy normalised is what counts."""
    case = GqaCase(6, dtype, kind)
    feeds = case.feeds(packed=False)
    half = case.dim // 2
    angles = np.outer(np.arange(case.capacity), 100.0 ** (-np.arange(half) / half))
    feeds.update(cos_cache=np.cos(angles).astype(case.dtype), sin_cache=np.sin(angles).astype(case.dtype))
    weights = [(1 + case.normal(case.dim) / 4).astype(case.dtype) for _ in range(2)]
    epsilons = dict(qk_norm_epsilon=0.5, k_norm_epsilon=0.125)
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads, do_rotary=1)
    before = dict(feeds, query=normalised(feeds["query"], weights[0], 0.5), key=normalised(feeds["key"], weights[1], 0.125))
    expected = run_node("GroupQueryAttention", before, GQA_OUTPUTS, **attributes)
    if packed:
        query = np.concatenate([feeds[name] for name in ("query", "key", "value")], 2)
        feeds.update(query=query, key=None, value=None)
    feeds.update(dict.fromkeys(["ids", "bias", "sink", "k_scale", "v_scale"]), q_norm_weight=weights[0], k_norm_weight=weights[1])
    constants = ["q_norm_weight", "k_norm_weight"] if kind == "chunk" else []
    ours = run_node("GroupQueryAttention", feeds, GQA_OUTPUTS, constants=constants, **attributes, **epsilons)
    case.check(ours, expected)
    assert np.abs(ours[1].astype(np.float64) - run_node("GroupQueryAttention", feeds, GQA_OUTPUTS, **attributes)[1]).max() > 0.01


NORM_REFUSALS = [
    (dict(k_norm_weight=None), {}, "q_norm_weight and k_norm_weight: both or neither"),
    (dict(q_norm_weight=np.ones(7, np.float32)), {}, "q_norm_weight: shape [7]: must be [8]"),
    (dict(k_norm_weight=np.ones(8, np.int32)), {}, "k_norm_weight: is int32: allowed float32, float16, bfloat16"),
    ({}, dict(qk_norm_epsilon=0.0), "qk_norm_epsilon = 0: must be finite and more than 0"),
    ({}, dict(q_norm_epsilon=float("inf")), "q_norm_epsilon = inf: must be finite and more than 0"),
]


@pytest.mark.parametrize("changed, attributes, message", NORM_REFUSALS, ids=[x[-1] for x in NORM_REFUSALS])
def test_gqa_refuses_norms_by_name_and_value(changed, attributes, message):
    feeds = gqa_feeds_with(**dict.fromkeys(["cos", "sin", "ids", "bias", "sink", "k_scale", "v_scale"]))
    feeds.update(dict(q_norm_weight=np.ones(8, np.float32), k_norm_weight=np.ones(8, np.float32)) | changed)
    with pytest.raises(ERRORS) as refusal:
        run_node("GroupQueryAttention", feeds, GQA_OUTPUTS, num_heads=4, kv_num_heads=2, **attributes)
    assert f"lean_attention: GroupQueryAttention node 'node0': {message}" in str(refusal.value)


def test_gqa_position_ids_must_be_the_places_in_the_cache():
    table = np.ones((10, 4), np.float32)
    right = np.array([[3], [6]], np.int64)
    for ids in (right, right + 1):
        feeds = gqa_feeds_with(cos_cache=table, sin_cache=0 * table, position_ids=ids)
        arguments = dict(num_heads=4, kv_num_heads=2, do_rotary=1)
        if ids is right:
            run_node("GroupQueryAttention", feeds, GQA_OUTPUTS, **arguments)
            continue
        with pytest.raises(ERRORS, match=r"position_ids\[0\]\[0\] = 4: a token is rotated by its place in the cache, here 3"):
            run_node("GroupQueryAttention", feeds, GQA_OUTPUTS, **arguments)


@pytest.mark.parametrize("query_type, cache_type", [("bfloat16", "bfloat16"), ("float16", "float8_e4m3fn"), ("float32", "float8_e4m3fn")])
def test_gqa_in_bfloat16_and_with_an_fp8_cache(query_type, cache_type):
    """ONNX Runtime's own has neither on the CPU, so the oracle judges; NumPy has no such types, so results are cast."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtypes = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in (query_type, cache_type)}
    fp8 = cache_type.startswith("float8")
    scales = dict(k=0.5, v=2.0) if fp8 else dict(k=1.0, v=1.0)
    case = GqaCase(4, "float32", "decode")
    feeds = {
        name: x if x is None or x.dtype == np.int32 else x.astype(dtypes[cache_type if "past" in name else query_type])
        for name, x in case.feeds().items()
    }
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads)
    if fp8:
        feeds.update(dict.fromkeys(["cos", "sin", "ids", "bias", "sink"]))
        feeds.update({f"{name}_scale": np.array([scale], np.float32) for name, scale in scales.items()})
        attributes.update(k_quant_type="PER_TENSOR", v_quant_type="PER_TENSOR")
    model = onnx.load_from_string(model_of("GroupQueryAttention", feeds, GQA_OUTPUTS, **attributes))
    values = dict(zip(GQA_OUTPUTS, run_values(session_of(with_readable_outputs(model)), feeds)))

    caches = {}
    for name, scale in scales.items():
        cache = feeds[{"k": "past_key", "v": "past_value"}[name]].astype(np.float64) * scale
        fresh = feeds[{"k": "key", "v": "value"}[name]].reshape(case.batch, case.kv_heads, case.dim).astype(np.float64)
        for b, total in enumerate(case.totals):  # what an fp8 cache keeps of a token is what attention sees of it
            cache[b, :, total - 1] = (fresh[b] / scale).astype(dtypes[cache_type]).astype(np.float64) * scale
        caches[name] = cache
    rows = (case.batch, 1, case.q_heads, case.dim)
    expected = attention(
        feeds["query"].astype(np.float64).reshape(rows).transpose(0, 2, 1, 3), caches["k"], caches["v"],
        seqlens=case.totals, dtype=query_type,
    )  # fmt: skip
    expected.check(values["output"].reshape(rows).transpose(0, 2, 1, 3))
    for b, total in enumerate(case.totals):
        np.testing.assert_array_equal(values["present_key"][b, :, :total] * scales["k"], caches["k"][b, :, :total])


def test_an_older_onnx_runtime_is_told_what_is_missing():
    """A table of functions that has nothing but what makes a status."""
    import ctypes

    told = []
    create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(lambda code, message: told.append((code, message)) or 77)
    first = (ctypes.c_void_p * 1)(ctypes.cast(create, ctypes.c_void_p))
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(lambda version: ctypes.addressof(first) if version == 1 else None)
    version = ctypes.CFUNCTYPE(ctypes.c_char_p)(lambda: b"1.21.2")
    base = (ctypes.c_void_p * 2)(ctypes.cast(get_api, ctypes.c_void_p), ctypes.cast(version, ctypes.c_void_p))
    entry = ctypes.CDLL(lean_attention.ort.library_path()).RegisterCustomOps
    entry.restype = ctypes.c_void_p
    assert entry(None, ctypes.byref(base)) == 77
    assert told[0][0] == 9
    assert told[0][1].startswith(b"lean_attention: this is ONNX Runtime 1.21.2: allowed 1.22 and newer")


LATER_RELEASE = """
import ctypes, sys
import lean_attention.ort
runtime = ctypes.CDLL(sys.argv[1])
runtime.OrtGetApiBase.restype = ctypes.POINTER(ctypes.c_void_p * 2)
get_api = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p * 285), ctypes.c_uint32)(runtime.OrtGetApiBase().contents[0])
version = ctypes.CFUNCTYPE(ctypes.c_char_p)(lambda: b"1.33.0")
base = (ctypes.c_void_p * 2)(ctypes.cast(get_api, ctypes.c_void_p), ctypes.cast(version, ctypes.c_void_p))
api = get_api(21).contents  # functions are only ever added at its end
create_options = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))(api[10])
add_entry = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)(api[130])
message_of = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(api[2])
entry = ctypes.CDLL(lean_attention.ort.library_path()).RegisterCustomOps
entry.restype = ctypes.c_void_p
for entries in ({}, {b"lean_attention.override": b"1"}, {b"lean_attention.override": b"1", b"lean_attention.unknown": b""}):
    options = ctypes.c_void_p()
    assert not create_options(ctypes.byref(options))
    for key, value in entries.items():
        assert not add_entry(options, key, value)
    status = entry(options, ctypes.byref(base))
    print(message_of(status).decode() if status else "taken")
"""


def test_a_later_release_is_overridden_where_somebody_says_what_it_has():
    """In a process of its own, with a copy of the runtime that says to be the next release."""
    runtimes = sorted(pathlib.Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.1*"))
    if not runtimes:
        pytest.skip("this onnxruntime has no library of its own")
    done = subprocess.run([sys.executable, "-c", LATER_RELEASE, str(runtimes[0])], text=True, capture_output=True, check=False)
    own, overriding, vouched = done.stdout.splitlines() or [done.stderr, "", ""]
    assert (own, vouched) == ("taken", "taken")
    assert overriding.startswith('lean_attention: lean_attention.override = "1" with ONNX Runtime 1.33: its operators are known up to 1.32')


def test_library_exports_one_name():
    command = ["nm", "-D", "--defined-only", lean_attention.ort.library_path()]
    lines = subprocess.run(command, text=True, capture_output=True, check=True).stdout.splitlines()
    assert [line.split()[-1] for line in lines if " A " not in line] == ["RegisterCustomOps"]


# --- attributes of 0 and 1 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["do_rotary", "rotary_interleaved", "causal", "smooth_softmax"])
@pytest.mark.parametrize("value", [2, -2])
def test_gqa_refuses_numbers_that_are_no_flag(name, value):
    """ONNX Runtime takes them for 0; they were taken for 1."""
    case = GqaCase(3, "float32", "decode")
    feeds = case.feeds()
    feeds.update(cos_cache=np.ones((case.capacity, case.dim // 2), np.float32), sin_cache=np.zeros((case.capacity, case.dim // 2), np.float32))
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads, do_rotary=1) | {name: value}
    with pytest.raises(ERRORS, match=f"node 'node0': {name} = {value}: allowed"):
        session_of(model_of("GroupQueryAttention", feeds, GQA_OUTPUTS, **attributes))


def test_gqa_smooth_softmax_of_minus_one_is_off():
    """The default in ONNX Runtime's schema."""
    case = GqaCase(3, "float32", "decode")
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads)
    feeds = case.feeds()
    off, without = (run_node("GroupQueryAttention", feeds, GQA_OUTPUTS, **attributes, **more) for more in (dict(smooth_softmax=-1), {}))
    np.testing.assert_array_equal(off[0], without[0])
