"""The operators for ONNX Runtime on its CUDA provider: each against ONNX Runtime's own or this library's on the CPU, in fp16."""

from __future__ import annotations

import numpy as np
import pytest

onnxruntime = pytest.importorskip("onnxruntime")
if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
    pytest.skip("this onnxruntime has no CUDA provider", allow_module_level=True)

torch = pytest.importorskip("torch")  # brings the CUDA libraries
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from ort_decoder import KINDS, VOCABULARY, decoder, generate  # noqa: E402
from ort_models import CPU, CUDA, ERRORS, MICROSOFT, OWN, model_of, needs_operators, run_node, session_of  # noqa: E402
from test_ort import GQA_OUTPUTS, GqaCase  # noqa: E402
from test_ort_attention import PagedCase, mha_feeds  # noqa: E402



def _on_gpu() -> bool:
    """In a build without the CUDA backend the nodes would run on the CPU, where float32 is not refused."""
    feeds = dict.fromkeys(["query", "key", "value"], np.zeros((1, 1, 8), np.float32))
    try:
        session_of(model_of("MultiHeadAttention", feeds, ["output"], num_heads=1), provider=CUDA)
    except ERRORS:
        return True
    return False


pytestmark = [needs_operators, pytest.mark.skipif(not _on_gpu(), reason="a build without the CUDA backend")]
HALF = 2.0**-11
GRAPH = (CUDA, {"enable_cuda_graph": "1"})


def halved(feeds):
    return {name: x.astype(np.float16) if x is not None and x.dtype == np.float32 else x for name, x in feeds.items()}


def close(ours, theirs):
    """Both sides round what they rotate, the probabilities and the sums."""
    for x, y in zip(ours, theirs, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        allowed = 32 * HALF * np.abs(y[np.isfinite(y)]).max(initial=1.0)
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol=0, atol=allowed)


def on_both(op, feeds, outputs, **arguments):
    """This library's operator on the GPU and on the CPU."""
    close(*(run_node(op, feeds, outputs, provider=provider, **arguments) for provider in (CUDA, CPU)))


# --- GroupQueryAttention ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [48, 64, 128])
@pytest.mark.parametrize("kind", ["decode", "prompt", "chunk"])
@pytest.mark.parametrize("seed", range(8))
def test_gqa_equals_onnxruntimes_on_the_cpu(seed, kind, dim):
    case = GqaCase(seed, "float16", kind)
    case.dim = dim
    feeds = case.feeds(packed=seed % 3 == 0, past=kind != "prompt" or seed % 2 == 0)
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads, **case.options(feeds))
    bias = feeds["attention_bias"]
    if bias is not None and bias[0].size % 2:
        feeds["attention_bias"] = bias[:1]
    constants = [name for name in ("cos_cache", "sin_cache", "head_sink") if seed % 2 and feeds[name] is not None]
    ours, theirs = (
        run_node("GroupQueryAttention", feeds, GQA_OUTPUTS, domain=domain, provider=provider, constants=constants, **attributes)
        for domain, provider in ((OWN, CUDA), (MICROSOFT, CPU))
    )
    case.check(ours, theirs)


def test_gqa_query_seqlens_says_which_rows_are_tokens():
    case = GqaCase(2, "float16", "chunk")
    case.batch, case.totals, case.rows, case.tokens, case.capacity = 3, np.array([9, 4, 20], np.int32), np.array([2, 0, 4]), 4, 24
    feeds = case.feeds()
    feeds.update(dict.fromkeys(["cos", "sin", "ids", "bias", "sink", "k_scale", "v_scale", "q_norm", "k_norm"]))
    feeds["query_seqlens"] = case.rows.astype(np.int32)
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads)
    ours, theirs = (run_node("GroupQueryAttention", feeds, GQA_OUTPUTS, provider=p, **attributes) for p in (CUDA, CPU))
    case.check(ours, theirs)


@pytest.mark.parametrize("kind", ["decode", "prompt", "chunk"])
@pytest.mark.parametrize("packed", [False, True])
def test_gqa_normalises_heads_as_on_the_cpu(packed, kind):
    case = GqaCase(6, "float16", kind)
    case.dim = 64
    feeds = case.feeds(packed)
    feeds.update(dict.fromkeys(["cos", "sin", "ids", "bias", "sink", "k_scale", "v_scale"]))
    feeds.update(q_norm_weight=case.normal(case.dim), k_norm_weight=case.normal(case.dim))
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads, qk_norm_epsilon=0.5)
    ours, theirs = (run_node("GroupQueryAttention", feeds, GQA_OUTPUTS, provider=provider, **attributes) for provider in (CUDA, CPU))
    case.check(ours, theirs)
    if kind == "decode":
        case.check(ours, run_node("GroupQueryAttention", feeds, GQA_OUTPUTS, domain=MICROSOFT, provider=CUDA, **attributes))


class BoundSteps:
    """A decode step on buffers of the GPU, past and present the same; lengths are changed in place between runs."""

    def __init__(self, feeds, provider, **attributes):
        model = model_of("GroupQueryAttention", feeds, GQA_OUTPUTS, **attributes)
        self.session = session_of(model, provider=provider)
        self.binding, self.buffers = self.session.io_binding(), {}
        for name, x in feeds.items():
            if x is None:
                continue
            on_host = name == "total_sequence_length"
            tensor = self.buffers[name] = torch.from_numpy(x.copy()).to("cpu" if on_host else "cuda")
            place = ("cpu", 0) if on_host else ("cuda", 0)
            self.binding.bind_input(name, *place, x.dtype, x.shape, tensor.data_ptr())
        self.output = torch.full_like(self.buffers["query"], float("nan"))
        self.binding.bind_output("output", "cuda", 0, np.float16, tuple(self.output.shape), self.output.data_ptr())
        for side in ("key", "value"):
            past = self.buffers[f"past_{side}"]
            self.binding.bind_output(f"present_{side}", "cuda", 0, np.float16, tuple(past.shape), past.data_ptr())

    def run(self, totals):
        self.buffers["seqlens_k"].copy_(torch.from_numpy(totals - 1))
        torch.cuda.synchronize()
        self.session.run_with_iobinding(self.binding)
        torch.cuda.synchronize()
        return [x.cpu().numpy().copy() for x in (self.output, self.buffers["past_key"], self.buffers["past_value"])]


@pytest.mark.parametrize("provider", [CUDA, GRAPH], ids=["eager", "graph"])
def test_gqa_follows_lengths_that_change_on_the_device(provider):
    """Under a graph the first runs capture and the later ones replay; nothing but the arrays on the device changes."""
    case = GqaCase(3, "float16", "decode")
    case.batch, case.q_heads, case.kv_heads, case.dim, case.capacity = 3, 8, 2, 64, 300
    case.totals = np.array([7, 100, 290], np.int32)
    feeds = case.feeds()
    attributes = dict(num_heads=8, kv_num_heads=2)
    steps = BoundSteps(feeds, provider, **attributes)
    expected = dict(feeds)
    for step in range(8):
        totals = case.totals + np.array([step, 5 * step, step], np.int32)
        expected["seqlens_k"], expected["total_sequence_length"] = totals - 1, np.array([totals.max()], np.int32)
        reference = run_node("GroupQueryAttention", expected, GQA_OUTPUTS, **attributes)
        ours = steps.run(totals)
        close(ours[:1], reference[:1])
        for b, total in enumerate(totals):
            np.testing.assert_array_equal(ours[1][b, :, total - 1], reference[1][b, :, total - 1])
        expected["past_key"], expected["past_value"] = ours[1], ours[2]


# --- the others ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["past", "valid", "mask", "rows", "window"])
@pytest.mark.parametrize("queries", [1, 4])
def test_attention_is_that_of_the_cpu(form, queries):
    random = np.random.default_rng(0)
    tokens = queries if form == "past" else 37
    q, k, v = (random.standard_normal((2, heads, n, 64)).astype(np.float16) for heads, n in ((6, queries), (2, tokens), (2, tokens)))
    feeds, attributes, outputs = dict(Q=q, K=k, V=v, attn_mask=None, past_key=None, past_value=None), {}, ["Y"]
    if form == "past":
        feeds.update({name: random.standard_normal((2, 2, 29, 64)).astype(np.float16) for name in ("past_key", "past_value")})
        attributes, outputs = dict(is_causal=1, softcap=2.0), ["Y", "present_key", "present_value"]
    elif form == "valid":
        feeds["nonpad_kv_seqlen"], attributes = np.array([37, 12]), dict(is_causal=1)
    elif form == "mask":
        feeds["attn_mask"] = random.random((2, 1, queries, 37)) < 0.7
    elif form == "rows":
        for name in "QKV":
            feeds[name] = np.ascontiguousarray(feeds[name].transpose(0, 2, 1, 3)).reshape(2, feeds[name].shape[2], -1)
        attributes = dict(q_num_heads=6, kv_num_heads=2, scale=0.3)
    else:
        feeds["nonpad_kv_seqlen"], attributes = np.array([30, 37]), dict(is_causal=1, left_window_size=9)
    on_both("Attention", feeds, outputs, **attributes)


def attention_feeds(queries, tokens, past, dim=64, value_dim=64):
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.standard_normal(shape).astype(np.float16)

    feeds = dict(Q=normal(2, 6, queries, dim), K=normal(2, 2, tokens, dim), V=normal(2, 2, tokens, value_dim), attn_mask=None)
    feeds.update(past_key=normal(2, 2, past, dim) if past else None, past_value=normal(2, 2, past, value_dim) if past else None)
    return feeds


@pytest.mark.parametrize("dim, value_dim", [(64, 64), (40, 40), (128, 64), (5, 7)])
@pytest.mark.parametrize("queries, past", [(1, 300), (5, 29), (1, 1)])
def test_attention_joins_past_and_new_tokens(queries, past, dim, value_dim):
    """In pieces of 16 bytes where heads are that wide, else byte by byte; present is what was joined, to the bit."""
    feeds, outputs = attention_feeds(queries, queries, past, dim, value_dim), ["Y", "present_key", "present_value"]
    on_both("Attention", feeds, outputs, is_causal=1)
    _, *present = run_node("Attention", feeds, outputs, provider=CUDA, is_causal=1)
    for side, old, new in zip(present, ("past_key", "past_value"), "KV"):
        np.testing.assert_array_equal(side, np.concatenate([feeds[old], feeds[new]], 2))
    alone = run_node("Attention", feeds, ["Y"], provider=CUDA, is_causal=1)  # nobody asks for present
    close(alone, run_node("Attention", feeds, ["Y"], is_causal=1))


@pytest.mark.parametrize("window", [dict(left_window_size=2), dict(left_window_size=2, right_window_size=1), dict(right_window_size=0), {}])
@pytest.mark.parametrize("queries, tokens, past", [(3, 5, 0), (5, 3, 4), (2, 6, 7), (4, 4, 0)])
@pytest.mark.parametrize("mask", ["none", "all keys", "few keys", "of heads"])
def test_attention_positions_count_from_the_past(mask, queries, tokens, past, window):
    """Also where there are more or fewer new tokens than queries, or a mask is shorter than the keys."""
    feeds, random, keys = attention_feeds(queries, tokens, past), np.random.default_rng(1), past + tokens
    if mask == "of heads":
        feeds["attn_mask"] = random.standard_normal((2, 6, queries, keys)).astype(np.float16)
    elif mask != "none":
        feeds["attn_mask"] = random.random((queries, keys - 2 * (mask == "few keys"))) < 0.8
    for causal in (0, 1):
        on_both("Attention", feeds, ["Y", "present_key", "present_value"] if past else ["Y"], is_causal=causal, **window)


def test_attention_counts_back_from_valid_tokens_under_a_short_mask():
    feeds = attention_feeds(2, 37, 0)
    feeds["attn_mask"] = np.random.default_rng(1).random((2, 1, 2, 35)) < 0.8
    feeds["nonpad_kv_seqlen"] = np.array([36, 12])
    on_both("Attention", feeds, ["Y"], is_causal=1, left_window_size=20)


@pytest.mark.parametrize("queries, past", [(1, 400), (6, 11)])
def test_mha_joins_past_and_new_tokens(queries, past):
    feeds = halved(mha_feeds("none", "rows", past, queries=queries, tokens=queries))
    outputs = ["output", "present_key", "present_value"]
    on_both("MultiHeadAttention", feeds, outputs, num_heads=3, unidirectional=1)
    _, *present = run_node("MultiHeadAttention", feeds, outputs, provider=CUDA, num_heads=3)
    for side, old, new in zip(present, ("past_key", "past_value"), ("key", "value")):
        heads = feeds[new].reshape(2, queries, 3, 16).transpose(0, 2, 1, 3)
        np.testing.assert_array_equal(side, np.concatenate([feeds[old], heads], 2))


@pytest.mark.parametrize("layout, past", [("rows", 0), ("rows", 11), ("heads", 0)])
@pytest.mark.parametrize("mask", ["none", "bias", "lengths", "keys"])
def test_mha_is_that_of_the_cpu(mask, layout, past):
    feeds = halved(mha_feeds(mask, layout, past, tokens=1 if past else 7))
    on_both("MultiHeadAttention", feeds, ["output", "present_key", "present_value"] if past else ["output"], num_heads=3)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bounds", [None, [3, 0], [3, 16]])
def test_paged_attention_is_that_of_the_cpu(bounds, packed):
    case = PagedCase(packed, page=16)
    case.feeds = halved(case.feeds)
    if bounds:
        case.feeds.update(dict.fromkeys(["cos", "sin", "slots", "sink", "q_norm", "k_norm", "k_scale", "v_scale"]))
        case.feeds["attention_metadata"] = np.array(bounds, np.int32)
    for rules in ({}, dict(softcap=2.0, local_window_size=3)):
        ours, theirs = (case.run(provider=provider, **rules) for provider in (CUDA, CPU))
        close([np.nan_to_num(x) for x in ours], [np.nan_to_num(x) for x in theirs])


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_generates_the_same_64_tokens_with_and_without(kind):
    model = decoder(kind, np.float16)
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, (2, 5))
    without = CUDA if kind == "gqa" else CPU  # ONNX Runtime's own Attention does not serve every form on a GPU
    sessions = [session_of(model, override=True, provider=CUDA), session_of(model, ours=False, provider=without)]
    ours, theirs = (generate(session, kind, prompt, steps=64)[0] for session in sessions)
    np.testing.assert_array_equal(ours, theirs)
    assert len(np.unique(ours)) > 8


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_node_that_a_gpu_does_not_do_is_refused_when_the_session_is_made():
    case = GqaCase(4, "float32", "decode")
    attributes = dict(num_heads=case.q_heads, kv_num_heads=case.kv_heads)
    with pytest.raises(ERRORS, match="query: is float32: allowed float16, bfloat16 on the CUDA provider"):
        session_of(model_of("GroupQueryAttention", case.feeds(), GQA_OUTPUTS, **attributes), provider=CUDA)
    case.dtype = np.dtype(np.float16)
    feeds = case.feeds()
    table = np.ones((case.capacity, case.dim // 2), np.float16)
    feeds.update(cos_cache=table, sin_cache=table, position_ids=np.zeros((case.batch, 1), np.int64))
    with pytest.raises(ERRORS, match="position_ids: a token is rotated by its place in the cache"):
        session_of(model_of("GroupQueryAttention", feeds, GQA_OUTPUTS, do_rotary=1, **attributes), provider=CUDA)


def test_a_ragged_prompt_whose_cache_has_an_odd_number_of_elements_a_sequence_is_refused():
    """Strides are halved there: from the second sequence on another's keys were read, and written."""
    feeds = dict.fromkeys(["query", "key", "value"], np.ones((2, 3, 5), np.float16))
    feeds.update(past_key=None, past_value=None, seqlens_k=np.array([2, 1], np.int32), total_sequence_length=np.array(3, np.int32))
    with pytest.raises(ERRORS, match="past_key, present_key: an odd number of elements for each of 2 sequences that bring 3 rows"):
        run_node("GroupQueryAttention", feeds, GQA_OUTPUTS, provider=CUDA, num_heads=1, kv_num_heads=1)
