"""Whole models under ONNX Runtime, with and without this library's operators; and whatever a session may be fed."""

from __future__ import annotations

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


def test_register_names_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(lean_attention.ort, "__file__", str(tmp_path / "ort.py"))
    with pytest.raises(ImportError, match="build it with LEAN_ORT=ON"):
        lean_attention.ort.register(onnxruntime.SessionOptions())
