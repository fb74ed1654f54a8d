"""The operators for ONNX Runtime in whichever release is installed, against the oracle: older ones get operators of fixed types."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from oracle import attention  # noqa: E402
from ort_models import ERRORS, MICROSOFT, OWN, RELEASE, model_of, needs_operators, run_node, session_of  # noqa: E402
from test_ort import GQA_OUTPUTS, GqaCase  # noqa: E402

import lean_attention.ort  # noqa: E402

pytestmark = needs_operators


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("override", [False, True])
def test_gqa_attends_to_its_cache(override, dtype, packed):
    case = GqaCase(4, dtype, "decode")
    feeds = case.feeds(packed)
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads)
    model = model_of("GroupQueryAttention", feeds, GQA_OUTPUTS, domain=MICROSOFT if override else OWN, **attributes)
    session = session_of(model, override=override)
    output, *caches = session.run(None, {name: x for name, x in feeds.items() if x is not None})
    assert {x.dtype for x in (output, *caches)} == {case.dtype}
    rows = np.concatenate([x for name in ("query", "key", "value") if (x := feeds[name]) is not None], 2)
    heads = rows.reshape(case.batch, -1, 1, case.dim)
    for b, total in enumerate(case.totals):
        q, k, v = np.split(heads[b : b + 1], [case.q_heads, case.q_heads + case.kv_heads], 1)
        kept = [feeds[name][b : b + 1, :, : total - 1] for name in ("past_key", "past_value")]
        keys, values = (np.concatenate([old, new], 2) for old, new in zip(kept, (k, v)))
        attention(q, keys, values, dtype=dtype).check(output[b].reshape(1, case.q_heads, 1, case.dim))
        for cache, expected in zip(caches, (keys, values)):
            np.testing.assert_array_equal(cache[b : b + 1, :, :total], expected)


def test_mha_leaves_optional_outputs_away():
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, n, 48)).astype(np.float32) for n in (1, 9, 9))
    output = run_node("MultiHeadAttention", {"query": q, "key": k, "value": v}, ["output"], num_heads=3)[0]
    heads = [x.reshape(2, -1, 3, 16).transpose(0, 2, 1, 3) for x in (q, k, v)]
    attention(*heads).check(output.reshape(2, 1, 3, 16).transpose(0, 2, 1, 3))


def test_a_node_is_refused_when_the_session_is_made():
    case = GqaCase(4, "float32", "decode")
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads, sliding_window_cache=1)
    with pytest.raises(ERRORS, match="sliding_window_cache = 1: the cache is as long as the sequence here"):
        session_of(model_of("GroupQueryAttention", case.feeds(), GQA_OUTPUTS, **attributes))


def test_what_the_release_defines_is_known():
    """What fails here with a new release is to be served or refused by name (docs/how-to-add.md)."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    assert lean_attention.ort._unknown() == ()
    schemas = [x for x in get_all_operator_schema() if (x.domain, x.name) in lean_attention.ort.SERVED]
    assert len({x.name for x in schemas}) >= 2  # the oldest have no PagedAttention, and Attention of com.microsoft alone
    most = {"GroupQueryAttention": (17, 4), "Attention": (7, 4), "MultiHeadAttention": (10, 4), "PagedAttention": (17, 3)}
    for schema in schemas:
        inputs, outputs = most[schema.name]
        assert len(schema.inputs) <= inputs and len(schema.outputs) <= outputs


def test_what_the_installed_onnx_defines_is_known():
    newest = onnx.defs.onnx_opset_version()
    assert newest <= lean_attention.ort.NEWEST_OPSET
    assert onnx.defs.get_schema("Attention", newest).since_version <= lean_attention.ort.NEWEST_DEFINITION


@pytest.mark.skipif(RELEASE >= (1, 28), reason="the operator says the type of each output")
def test_an_fp8_cache_is_refused_where_outputs_have_the_type_of_the_query():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    case = GqaCase(4, "float16", "decode")
    feeds = {name: x.astype(ml_dtypes.float8_e4m3fn) if "past" in name else x for name, x in case.feeds().items()}
    feeds.update(dict.fromkeys(["cos", "sin", "ids", "bias", "sink"]), k_scale=np.ones(1, np.float32), v_scale=np.ones(1, np.float32))
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads, k_quant_type="PER_TENSOR", v_quant_type="PER_TENSOR")
    with pytest.raises(ERRORS, match="past_key: is float8e4m3fn: allowed with ONNX Runtime 1.28 and newer"):
        session_of(model_of("GroupQueryAttention", feeds, ["output"], **attributes))
