"""The operators for ONNX Runtime, against its own and against the onnx package's tests."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from oracle import attention  # noqa: E402
from ort_models import ERRORS, MICROSOFT, OWN, model_of, needs_operators, run_node, session_of  # noqa: E402

import lean_attention.ort  # noqa: E402

pytestmark = needs_operators
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11}
GQA_OUTPUTS = ["output", "present_key", "present_value"]


def as_ort_value(array):
    narrow = {"bfloat16": (np.uint16, onnx.TensorProto.BFLOAT16), "float8_e4m3fn": (np.uint8, onnx.TensorProto.FLOAT8E4M3FN)}
    if array.dtype.name in narrow:
        storage, dtype = narrow[array.dtype.name]
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(storage), dtype)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def with_readable_outputs(model):
    """NumPy has no bfloat16 or fp8: such outputs are cast to float32."""
    for output in model.graph.output:
        if output.type.tensor_type.elem_type not in (onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT8E4M3FN):
            continue
        node = model.graph.node[0]
        node.output[list(node.output).index(output.name)] = output.name + "_narrow"
        cast = onnx.helper.make_node("Cast", [output.name + "_narrow"], [output.name], to=onnx.TensorProto.FLOAT)
        model.graph.node.append(cast)
        output.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return model.SerializeToString()


def run_values(session, feeds):
    """run(), with inputs of such types too."""
    values = {name: as_ort_value(array)._ortvalue for name, array in feeds.items() if array is not None}
    return [x.numpy() for x in session._sess.run_with_ort_values(values, [o.name for o in session.get_outputs()], None)]


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


# --- Attention -------------------------------------------------------------------------------------------------------


def attention_cases():
    from onnx.backend.test.case.node import collect_testcases

    cases = [case for case in collect_testcases("Attention") if case.model.graph.node[0].op_type == "Attention"]
    assert len(cases) > 80
    return [case for case in cases if len(case.model.graph.node[0].output) < 4 and "_expanded" not in case.name]


@pytest.fixture(scope="module")
def node_cases():
    return attention_cases()


def test_attention_node_tests_of_the_onnx_package(node_cases):
    failed = []
    for case in node_cases:
        session = session_of(with_readable_outputs(case.model), override=True)
        for inputs, expected in case.data_sets:
            feeds = dict(zip([x.name for x in case.model.graph.input], inputs))
            for x, y in zip(run_values(session, feeds), expected):
                roundoff = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(y.dtype.name, 2.0**-24)
                y = y.astype(np.float64)
                if x.shape != y.shape or not np.allclose(x, y, rtol=max(case.rtol, 4 * roundoff), atol=8 * roundoff):
                    failed.append(case.name)
    assert len(node_cases) >= 70 and failed == []


@pytest.mark.parametrize("window", [dict(left_window_size=2), dict(left_window_size=2, right_window_size=1), dict(right_window_size=0), {}])
@pytest.mark.parametrize("queries, tokens, past", [(3, 5, 0), (5, 3, 0), (5, 3, 4), (2, 6, 7), (1, 1, 9), (4, 4, 0)])
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_positions_count_from_the_past(causal, queries, tokens, past, window):
    """Also where there are more or fewer new tokens than queries, which the library's own rules do not say."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, heads, n, 8)).astype(np.float32) for heads, n in ((4, queries), (2, tokens), (2, tokens)))
    old = [random.standard_normal((2, 2, past, 8)).astype(np.float32) if past else None for _ in range(2)]
    feeds = {"Q": q, "K": k, "V": v, "attn_mask": random.random((queries, past + tokens)) < 0.8, "past_key": old[0], "past_value": old[1]}
    outputs = ["Y", "present_key", "present_value"] if past else ["Y"]
    ours = run_node("Attention", feeds, outputs, is_causal=causal, **window)
    position, key = past + np.arange(queries)[:, None], np.arange(past + tokens)
    left, right = window.get("left_window_size", -1), window.get("right_window_size", -1)
    seen = feeds["attn_mask"].copy()
    seen &= (key <= position) | (not causal)
    seen &= ((position - key) <= left) | (left < 0)
    seen &= ((key - position) <= right) | (right < 0)
    keys, values = (np.concatenate([x, y], 2) if past else y for x, y in zip(old, (k, v)))
    attention(q, keys, values, mask=seen[None, None]).check(ours[0])
    if past:
        np.testing.assert_array_equal(ours[1], keys)
        np.testing.assert_array_equal(ours[2], values)


ATTENTION_REFUSALS = [
    (dict(), dict(scale=0.0), "scale = 0: every score would be 0"),
    (dict(), dict(softmax_precision=11), "softmax_precision = 11: the softmax is in fp32"),
    (dict(), dict(left_window_size=-2), "left_window_size = -2: allowed -1"),
    (dict(), dict(q_num_heads=3), "q_num_heads = 3: Q [2, 4, 1, 8], K [2, 2, 6, 8], V [2, 2, 6, 8]"),
    (dict(K=np.zeros((2, 3, 6, 8), np.float32)), {}, "Q [2, 4, 1, 8], K [2, 3, 6, 8], V [2, 2, 6, 8]: do not fit"),
    (dict(Q=np.zeros((2, 1, 32), np.float32)), {}, "Q [2, 1, 32], K [2, 2, 6, 8], V [2, 2, 6, 8]: all three must have 3 axes, or 4"),
    (dict(V=np.zeros((2, 2, 6, 8), np.float16)), {}, "V: is float16: must be float32 as Q"),
    (dict(attn_mask=np.zeros((3, 1, 6), np.float32)), {}, "attn_mask: shape [3, 1, 6]: must broadcast to [2, 4, 1, keys]"),
    (dict(attn_mask=np.zeros((1, 7), np.float32)), {}, "attn_mask: 7 keys: there are 6"),
    (dict(attn_mask=np.zeros((1, 6), np.int64)), {}, "attn_mask: is int64: allowed float32, float16, bfloat16"),
    (dict(nonpad_kv_seqlen=np.array([3, 7])), {}, "nonpad_kv_seqlen[1] = 7: allowed 0 to 6"),
]


@pytest.mark.parametrize("changed, attributes, message", ATTENTION_REFUSALS, ids=[x[-1] for x in ATTENTION_REFUSALS])
def test_attention_refuses_by_name_and_value(changed, attributes, message):
    shapes = dict(Q=(2, 4, 1, 8), K=(2, 2, 6, 8), V=(2, 2, 6, 8))
    feeds = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    feeds.update({"attn_mask": None, "past_key": None, "past_value": None, "nonpad_kv_seqlen": None, **changed})
    with pytest.raises(ERRORS) as refusal:
        run_node("Attention", feeds, ["Y"], **attributes)
    assert f"lean_attention: Attention node 'node0': {message}" in str(refusal.value)


# --- MultiHeadAttention ----------------------------------------------------------------------------------------------


def mha_feeds(mask="none", layout="rows", past=0, queries=1, tokens=7):
    random = np.random.default_rng(1)
    batch, heads, dim, keys = 2, 3, 16, past + tokens

    def normal(*shape):
        return random.standard_normal(shape).astype(np.float32)

    q, k, v = normal(batch, queries, heads, dim), normal(batch, tokens, heads, dim), normal(batch, tokens, heads, dim)
    inputs = {
        "rows": [x.reshape(*x.shape[:2], -1) for x in (q, k, v)],
        "heads": [q.reshape(batch, queries, -1), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)],
        "packed kv": [q.reshape(batch, queries, -1), np.stack([k, v], 3), None],
        "packed qkv": [np.stack([q, k, v], 3) if queries == tokens else None, None, None],
    }[layout]
    padding = {"lengths": np.array([keys, keys - 2]), "keys": random.random((batch, keys)) < 0.7}.get(mask)
    return {
        **dict(zip(("query", "key", "value"), inputs)),
        "bias": None,
        "key_padding_mask": None if padding is None else padding.astype(np.int32),
        "attention_bias": normal(batch, heads, queries, keys) if mask == "bias" else None,
        "past_key": normal(batch, heads, past, dim) if past else None,
        "past_value": normal(batch, heads, past, dim) if past else None,
    }


@pytest.mark.parametrize("layout, past", [("rows", 0), ("rows", 11), ("heads", 0)])
@pytest.mark.parametrize("mask", ["none", "bias", "lengths", "keys"])
def test_mha_equals_the_built_in(mask, layout, past):
    feeds = mha_feeds(mask, layout, past, tokens=1 if past else 7)
    outputs = ["output", "present_key", "present_value"] if past else ["output"]
    ours, theirs = (run_node("MultiHeadAttention", feeds, outputs, domain=domain, num_heads=3) for domain in (OWN, MICROSOFT))
    for x, y in zip(ours, theirs):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=0, atol=32 * ROUNDOFF["float32"] * np.abs(y).max(initial=1.0))


@pytest.mark.parametrize("layout", ["packed kv", "packed qkv"])
def test_mha_reads_packed_inputs_as_they_are(layout):
    """ONNX Runtime's own takes these on a GPU alone."""
    packed, rows = (run_node("MultiHeadAttention", mha_feeds(layout=x, queries=7), ["output"], num_heads=3) for x in (layout, "rows"))
    np.testing.assert_array_equal(packed[0], rows[0])


@pytest.mark.parametrize("name, message", [("bias", "bias: is not added here"), ("cache_indirection", "cache_indirection: beams")])
def test_mha_refuses_a_node_when_the_session_is_made(name, message):
    inputs = ["query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key", "past_value", "length", "cache_indirection"]
    feeds = dict.fromkeys(inputs)
    feeds.update({x: np.zeros((1, 1, 16), np.float32) for x in ("query", "key", "value")}, **{name: np.zeros(48, np.float32)})
    with pytest.raises(ERRORS, match=f"lean_attention: MultiHeadAttention node 'node0': {message}"):
        session_of(model_of("MultiHeadAttention", feeds, ["output"], num_heads=2))


# --- PagedAttention --------------------------------------------------------------------------------------------------


class PagedCase:
    """Sequences with `past` tokens in shuffled pages and `fresh` new ones; rows of pages nobody owns hold NaN."""

    def __init__(self, packed: bool = False, page: int = 4):
        random = np.random.default_rng(7)
        self.q_heads, self.kv_heads, self.dim, self.page = 4, 2, 16, page
        self.past, self.fresh = np.array([5, 0, 12], np.int32), np.array([1, 3, 2], np.int32)
        self.totals = self.past + self.fresh
        self.starts = np.concatenate([[0], np.cumsum(self.fresh)]).astype(np.int32)
        most = -(-self.totals.max() // page)
        self.table = np.full((3, most), -1, np.int32)
        order = iter(random.permutation(3 * most + 1))
        for b, total in enumerate(self.totals):
            self.table[b, : -(-total // page)] = [next(order) for _ in range(-(-total // page))]
        self.tokens = [random.standard_normal((3, self.totals.max(), self.kv_heads, self.dim)).astype(np.float32) for _ in range(2)]
        self.query = random.standard_normal((self.starts[-1], self.q_heads * self.dim)).astype(np.float32)
        self.feeds = self._feeds(packed, 3 * most + 1)

    def _feeds(self, packed: bool, pages: int) -> dict:
        caches = [np.full((pages, self.page, self.kv_heads, self.dim), np.nan, np.float32) for _ in range(2)]
        for cache, tokens in zip(caches, self.tokens):
            for b, i in ((b, i) for b in range(3) for i in range(self.past[b])):
                cache[self.table[b, i // self.page], i % self.page] = tokens[b, i]
        key, value = (
            np.concatenate([x[b, self.past[b] : self.totals[b]] for b in range(3)]).reshape(self.starts[-1], -1) for x in self.tokens
        )
        return {
            "query": np.concatenate([self.query, key, value], 1) if packed else self.query,
            "key": None if packed else key,
            "value": None if packed else value,
            "key_cache": caches[0],
            "value_cache": caches[1],
            "cumulative_sequence_length": self.starts,
            "past_seqlens": self.past,
            "block_table": self.table,
        }

    def run(self, **attributes):
        outputs = ["output", "key_cache_out", "value_cache_out"]
        return run_node("PagedAttention", self.feeds, outputs, num_heads=self.q_heads, kv_num_heads=self.kv_heads, **attributes)

    def check(self, results, **rules) -> None:
        for b in range(3):
            rows = slice(self.starts[b], self.starts[b + 1])
            q = self.query[rows].reshape(1, -1, self.q_heads, self.dim).transpose(0, 2, 1, 3)
            k, v = (x[b : b + 1, : self.totals[b]].transpose(0, 2, 1, 3) for x in self.tokens)
            attention(q, k, v, causal=True, **rules).check(
                results[0][rows].reshape(1, -1, self.q_heads, self.dim).transpose(0, 2, 1, 3)
            )
            for cache, tokens in zip(results[1:], self.tokens):
                for i in range(self.totals[b]):
                    np.testing.assert_array_equal(cache[self.table[b, i // self.page], i % self.page], tokens[b, i])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("attributes, rules", [({}, {}), (dict(softcap=2.0, local_window_size=3, scale=0.3), dict(softcap=2.0, window=(2, -1), scale=0.3))])
def test_paged_attention_over_shuffled_pages(attributes, rules, packed):
    case = PagedCase(packed)
    case.check(case.run(**attributes), **rules)


def test_paged_attention_takes_a_slot_mapping_that_agrees_with_the_table():
    case = PagedCase()
    places = [(b, i) for b in range(3) for i in range(case.past[b], case.totals[b])]
    slots = np.array([case.table[b, i // case.page] * case.page + i % case.page for b, i in places], np.int32)
    case.feeds.update(cos_cache=None, sin_cache=None, slot_mapping=slots)
    case.check(case.run())
    slots[2] = -1
    with pytest.raises(ERRORS, match=r"slot_mapping\[2\] = -1: a token goes where block_table says"):
        case.run()


PAGED_REFUSALS = [
    (dict(past_seqlens=np.array([5, 0, 15], np.int32)), {}, "past_seqlens[2] = 15: with 2 new tokens allowed 0 to 14"),
    (dict(past_seqlens=np.array([-1, 0, 12], np.int32)), {}, "past_seqlens[0] = -1: with 1 new tokens allowed 0 to 15"),
    (dict(cumulative_sequence_length=np.array([0, 5, 4, 6], np.int32)), {}, "cumulative_sequence_length[2] = 4: is below the one before"),
    (dict(cumulative_sequence_length=np.array([0, 1, 4, 7], np.int32)), {}, "cumulative_sequence_length: from 0 to 7: must be from 0 to the 6"),
    (dict(block_table=np.zeros((2, 4), np.int32)), {}, "block_table: is int32 [2, 4]: must be int32 [3, pages of a sequence]"),
    ({}, dict(kv_cache_layout="LATENT"), 'kv_cache_layout = "LATENT": allowed "SEPARATE"'),
    ({}, dict(k_cache_dtype="int4"), 'k_cache_dtype = "int4": allowed the type of query'),
    ({}, dict(rotary_offset=8), "rotary_offset = 8: allowed 0"),
]


@pytest.mark.parametrize("changed, attributes, message", PAGED_REFUSALS, ids=[x[-1] for x in PAGED_REFUSALS])
def test_paged_attention_refuses_by_name_and_value(changed, attributes, message):
    case = PagedCase()
    case.feeds.update(changed)
    with pytest.raises(ERRORS) as refusal:
        case.run(**attributes)
    assert f"lean_attention: PagedAttention node 'node0': {message}" in str(refusal.value)


def test_an_older_onnx_runtime_is_told_what_is_missing():
    """A table of functions as 1.20 has it: interface 21 is not there, of the first there is what makes a status."""
    import ctypes

    told = []
    create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(lambda code, message: told.append((code, message)) or 77)
    first = (ctypes.c_void_p * 1)(ctypes.cast(create, ctypes.c_void_p))
    asked = []
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(
        lambda version: asked.append(version) or (ctypes.addressof(first) if version <= 20 else None)
    )
    version = ctypes.CFUNCTYPE(ctypes.c_char_p)(lambda: b"1.20.1")
    base = (ctypes.c_void_p * 2)(ctypes.cast(get_api, ctypes.c_void_p), ctypes.cast(version, ctypes.c_void_p))
    entry = ctypes.CDLL(lean_attention.ort.library_path()).RegisterCustomOps
    entry.restype = ctypes.c_void_p
    assert entry(None, ctypes.byref(base)) == 77
    assert asked == [21, 1]
    message = "lean_attention: this is ONNX Runtime 1.20.1: its interface 21 is needed, which 1.21 and newer have"
    assert told == [(9, message.encode())]


def test_library_exports_one_name():
    command = ["nm", "-D", "--defined-only", lean_attention.ort.library_path()]
    lines = subprocess.run(command, text=True, capture_output=True, check=True).stdout.splitlines()
    assert [line.split()[-1] for line in lines if " A " not in line] == ["RegisterCustomOps"]
