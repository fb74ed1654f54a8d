"""Whole models under ONNX Runtime, with and without this library's operators; and whatever a session may be fed."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from ort_decoder import KINDS, VOCABULARY, decoder, generate  # noqa: E402
from ort_models import ERRORS, model_of, needs_operators, session_of  # noqa: E402

import lean_attention.ort  # noqa: E402

pytestmark = needs_operators


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_generates_the_same_64_tokens_with_and_without(kind):
    model = decoder(kind)
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, (2, 5))
    (ours, logits), (theirs, expected) = (
        generate(session_of(model, ours=x, override=x), kind, prompt, steps=64) for x in (True, False)
    )
    np.testing.assert_array_equal(ours, theirs)
    assert len(np.unique(ours)) > 8  # no decoder that says one thing for ever
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_one_session_serves_two_threads():
    """A kernel keeps nothing of a run."""
    import concurrent.futures

    session = session_of(decoder("gqa"), override=True)
    prompts = [np.random.default_rng(seed).integers(0, VOCABULARY, (2, 5)) for seed in range(4)]
    alone = [generate(session, "gqa", prompt, 8)[0] for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: generate(session, "gqa", prompt, 8)[0], prompts))
    for x, y in zip(alone, together):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_pool_of_the_session_is_used_whatever_its_size(threads):
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, (1, 5))
    results = [
        generate(session_of(decoder("gqa"), override=True, intra_op_num_threads=n), "gqa", prompt, 6)[1] for n in (2, threads)
    ]
    np.testing.assert_allclose(*results, rtol=0, atol=1e-5)


# --- fuzz ------------------------------------------------------------------------------------------------------------

FUZZED = {
    "GroupQueryAttention": (
        dict(query=(2, 1, 32), key=(2, 1, 16), value=(2, 1, 16), past_key=(2, 2, 6, 8), past_value=(2, 2, 6, 8), seqlens_k=[3, 5],
             total_sequence_length=[6], cos_cache=(6, 4), sin_cache=(6, 4), position_ids=None, attention_bias=(1, 1, 1, 6),
             head_sink=(4,), k_scale=None, v_scale=None, q_norm_weight=None, k_norm_weight=None, query_seqlens=[1, 1]),
        ["output", "present_key", "present_value"],
        dict(num_heads=4, kv_num_heads=2, do_rotary=1),
    ),
    "Attention": (
        dict(Q=(2, 4, 1, 8), K=(2, 2, 3, 8), V=(2, 2, 3, 8), attn_mask=(1, 6), past_key=(2, 2, 3, 8), past_value=(2, 2, 3, 8),
             nonpad_kv_seqlen=None),
        ["Y", "present_key", "present_value"],
        dict(is_causal=1, left_window_size=4),
    ),
    "MultiHeadAttention": (
        dict(query=(2, 1, 32), key=(2, 3, 32), value=(2, 3, 32), bias=None, key_padding_mask=None, attention_bias=(1, 1, 1, 6),
             past_key=(2, 4, 3, 8), past_value=(2, 4, 3, 8)),
        ["output", "present_key", "present_value"],
        dict(num_heads=4),
    ),
    "PagedAttention": (
        dict(query=(3, 32), key=(3, 16), value=(3, 16), key_cache=(4, 4, 2, 8), value_cache=(4, 4, 2, 8),
             cumulative_sequence_length=[0, 1, 3], past_seqlens=[3, 5], block_table=[[0, 1], [2, 3]], cos_cache=(8, 4),
             sin_cache=(8, 4), slot_mapping=None, head_sink=(4,)),
        ["output", "key_cache_out", "value_cache_out"],
        dict(num_heads=4, kv_num_heads=2, do_rotary=1),
    ),
}  # fmt: skip


def spoiled(array: np.ndarray, random: np.random.Generator):
    """Another type, shape or number, or no input at all."""
    choice = random.integers(6)
    if choice == 0:
        return None
    if choice == 1:
        return array.astype(random.choice([np.float16, np.int32, np.int64, np.float64]))
    if choice == 2 and array.ndim:
        shape = list(array.shape)
        shape[random.integers(array.ndim)] = int(random.choice([0, 1, 2, 5, 7]))
        return np.zeros(shape, array.dtype)
    if choice == 3:
        return np.zeros([int(random.integers(0, 4)) for _ in range(random.integers(0, 6))], array.dtype)
    if choice == 4 and array.dtype.kind == "i":
        return random.choice([-(2**31), -2, -1, 0, 1, 5, 6, 7, 100, 2**31 - 1], array.shape).astype(array.dtype)
    if choice == 5 and array.dtype.kind == "f":
        return random.choice([np.nan, np.inf, -np.inf, 0.0, 1e30], array.shape).astype(array.dtype)
    return array


@pytest.mark.parametrize("op", FUZZED)
def test_fuzzed_shapes_types_numbers_and_attributes_are_answered_or_refused(op):
    forms, outputs, attributes = FUZZED[op]
    answered = refused = 0
    for seed in range(250):
        random = np.random.default_rng(seed)
        feeds = {
            name: None if x is None else np.array(x, np.int32) if isinstance(x, list) else random.standard_normal(x).astype(np.float32)
            for name, x in forms.items()
        }
        for name in random.choice([n for n in feeds if feeds[n] is not None], random.integers(0, 3), replace=False):
            feeds[name] = spoiled(feeds[name], random)
        changed = dict(attributes)
        if random.random() < 0.3:
            values = [-(2**63), -1, 0, 1, 3, 7, 2**31, 2**63 - 1]
            changed[random.choice([*attributes, "local_window_size", "right_window_size", "q_num_heads"])] = int(random.choice(values))
        try:
            session = session_of(model_of(op, feeds, outputs, **changed))
            session.run(None, {name: x for name, x in feeds.items() if x is not None})
            answered += 1
        except ERRORS as error:
            refused += 1
            assert "lean_attention" in str(error) or "ONNXRuntimeError" in str(error)
    assert answered > 25 and refused > 25


# --- rewrite ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rewrite_moves_attention_and_leaves_the_results(kind):
    rewritten, report = lean_attention.ort.rewrite(onnx.load_from_string(decoder(kind)))
    ours = [node.name for node in rewritten.graph.node if node.domain == "lean_attention"]
    assert report.rewritten == ours and len(ours) == 2 and report.left == {}
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, (2, 5))
    tokens = [
        generate(session, kind, prompt, 6)[0]
        for session in (session_of(rewritten.SerializeToString()), session_of(decoder(kind), ours=False))
    ]
    np.testing.assert_array_equal(*tokens)


def test_rewrite_says_why_it_leaves_a_node():
    model = onnx.load_from_string(decoder("gqa"))
    attention = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    attention[1].attribute.append(onnx.helper.make_attribute("sliding_window_cache", 1))
    attention[1].attribute.append(onnx.helper.make_attribute("local_window_size", 8))
    rewritten, report = lean_attention.ort.rewrite(model)
    assert report.rewritten == [attention[0].name]
    assert report.left[attention[1].name].startswith("sliding_window_cache = 1: the cache is as long")
    assert "1 rewritten, 1 left" in str(report)
    assert {node.domain for node in rewritten.graph.node if node.op_type == "GroupQueryAttention"} == {"lean_attention", "com.microsoft"}


def test_rewrite_leaves_a_node_with_an_attribute_that_the_operator_does_not_ask_for():
    model = onnx.load_from_string(decoder("gqa"))
    attention = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    attention[0].attribute.append(onnx.helper.make_attribute("attention_chunk_size", 8))
    _, report = lean_attention.ort.rewrite(model)
    assert report.rewritten == [attention[1].name]
    assert report.left == {attention[0].name: "attention_chunk_size: GroupQueryAttention has no such attribute here"}


def test_rewrite_leaves_the_attention_of_an_opset_that_nobody_has_looked_at():
    model = onnx.load_from_string(decoder("concat"))
    next(x for x in model.opset_import if x.domain == "").version = lean_attention.ort.NEWEST_OPSET + 1
    _, report = lean_attention.ort.rewrite(model)
    assert report.rewritten == [] and len(report.left) == 2
    assert set(report.left.values()) == {f"opset {lean_attention.ort.NEWEST_OPSET + 1}: allowed 23 to {lean_attention.ort.NEWEST_OPSET}"}


# --- what a later release may bring ----------------------------------------------------------------------------------


class Schema:
    def __init__(self, domain, name, attributes, since_version=1):
        self.domain, self.name, self.attributes, self.since_version = domain, name, dict.fromkeys(attributes), since_version


@pytest.fixture
def later_release(monkeypatch):
    """An ONNX Runtime whose GroupQueryAttention has attributes that nothing here knows."""
    import onnxruntime.capi.onnxruntime_pybind11_state as state

    known = state.get_all_operator_schema
    added = [Schema("com.microsoft", "GroupQueryAttention", ["num_heads", "made_up_number", "made_up_words"]), Schema("", "Relu", ["new"])]
    monkeypatch.setattr(state, "get_all_operator_schema", lambda: [*known(), *added])
    lean_attention.ort._unknown.cache_clear()
    yield
    monkeypatch.undo()
    lean_attention.ort._unknown.cache_clear()


@pytest.mark.parametrize("name, value", [("made_up_number", 1), ("made_up_words", "yes"), ("made_up_number", [1.0, 2.0])])
@pytest.mark.parametrize("domain, override", [("com.microsoft", True), ("lean_attention", False)])
def test_an_attribute_of_a_later_release_is_refused_by_name(later_release, domain, override, name, value):
    assert lean_attention.ort._unknown() == ("GroupQueryAttention.made_up_number", "GroupQueryAttention.made_up_words")
    forms, outputs, attributes = FUZZED["GroupQueryAttention"]
    feeds = {x: None if y is None else np.zeros(np.shape(y) if isinstance(y, list) else y, np.int32 if isinstance(y, list) else np.float32)
             for x, y in forms.items()}  # fmt: skip
    session_of(model_of("GroupQueryAttention", feeds, outputs, domain=domain, **attributes), override=override)
    model = model_of("GroupQueryAttention", feeds, outputs, domain=domain, **attributes, **{name: value})
    with pytest.raises(ERRORS, match=f"GroupQueryAttention node 'node0': {name}: GroupQueryAttention has no such attribute here"):
        session_of(model, override=override)


LATER_DEFINITION = """
import sys
sys.path.insert(0, sys.argv[1])
import onnxruntime.capi.onnxruntime_pybind11_state as state
from test_ort_models import ERRORS, Schema, decoder, lean_attention, onnx, session_of
known = state.get_all_operator_schema
state.get_all_operator_schema = lambda: [*known(), Schema("", "Attention", ["is_causal"], 29)]
assert lean_attention.ort._unknown() == ("Attention@29",)
session_of(decoder("gqa"), override=True)
session_of(lean_attention.ort.rewrite(onnx.load_from_string(decoder("concat")))[0].SerializeToString())
try:
    session_of(decoder("concat"), override=True)
except ERRORS as refusal:
    assert "ONNX Runtime has a definition of opset 29, which is not known here" in str(refusal)
    print("refused")
"""


def test_attention_is_refused_under_the_built_in_name_where_a_later_definition_exists():
    """In a process of its own: what is unknown stays so."""
    here = str(pathlib.Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", LATER_DEFINITION, here], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["refused"], done.stderr[-2000:]


def test_register_names_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(lean_attention.ort, "__file__", str(tmp_path / "ort.py"))
    with pytest.raises(ImportError, match="build it with LEAN_ORT=ON"):
        lean_attention.ort.register(onnxruntime.SessionOptions())
