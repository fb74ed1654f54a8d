"""Attention, MultiHeadAttention and PagedAttention for ONNX Runtime: the onnx package's tests, its own operators, the oracle."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from oracle import attention  # noqa: E402
from ort_models import ERRORS, MICROSOFT, OWN, model_of, needs_operators, run_node, run_values, session_of  # noqa: E402
from ort_models import with_readable_outputs  # noqa: E402

pytestmark = needs_operators

ROUNDOFF = 2.0**-24


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
                roundoff = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(y.dtype.name, ROUNDOFF)
                y = y.astype(np.float64)
                if x.shape != y.shape or not np.allclose(x, y, rtol=max(case.rtol, 4 * roundoff), atol=8 * roundoff):
                    failed.append(case.name)
    assert len(node_cases) >= 70 and failed == []


@pytest.mark.parametrize("window", [dict(left_window_size=2), dict(left_window_size=2, right_window_size=1), dict(right_window_size=0), {}])
@pytest.mark.parametrize("queries, tokens, past", [(3, 5, 0), (5, 3, 0), (5, 3, 4), (2, 6, 7), (1, 1, 9), (4, 4, 0)])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("lacks", [0, 1])
def test_attention_positions_count_from_the_past(lacks, causal, queries, tokens, past, window):
    """Also where there are more or fewer new tokens than queries, or a mask lacks the last key, which the library's own rules do not
    say."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, heads, n, 8)).astype(np.float32) for heads, n in ((4, queries), (2, tokens), (2, tokens)))
    old = [random.standard_normal((2, 2, past, 8)).astype(np.float32) if past else None for _ in range(2)]
    feeds = {"Q": q, "K": k, "V": v, "attn_mask": random.random((queries, past + tokens)) < 0.8, "past_key": old[0], "past_value": old[1]}
    if lacks and past + tokens > 2:
        feeds["attn_mask"] = feeds["attn_mask"][:, :-1]
    outputs = ["Y", "present_key", "present_value"] if past else ["Y"]
    ours = run_node("Attention", feeds, outputs, is_causal=causal, **window)
    position, key = past + np.arange(queries)[:, None], np.arange(past + tokens)
    left, right = window.get("left_window_size", -1), window.get("right_window_size", -1)
    seen = np.pad(feeds["attn_mask"], ((0, 0), (0, past + tokens - feeds["attn_mask"].shape[1])))
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
    (dict(attn_mask=np.zeros((1, 1), np.float32)), {}, "attn_mask: 1 key: there are 6, and ONNX broadcasts such an axis in opset 23"),
    (dict(), dict(is_causal=2), "is_causal = 2: allowed 0, 1"),
    (dict(), dict(is_causal=-1), "is_causal = -1: allowed 0, 1"),
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
        np.testing.assert_allclose(x, y, rtol=0, atol=32 * ROUNDOFF * np.abs(y).max(initial=1.0))


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


def test_mha_padding_below_zero_is_hidden():
    feeds = mha_feeds("keys")
    feeds["key_padding_mask"] = np.where(feeds["key_padding_mask"] > 0, 3, -1).astype(np.int32)
    ours, theirs = (run_node("MultiHeadAttention", feeds, ["output"], domain=domain, num_heads=3)[0] for domain in (OWN, MICROSOFT))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("queries, tokens, past", [(1, 7, 0), (7, 7, 0), (5, 5, 3), (1, 1, 4)])
def test_mha_unidirectional_equals_the_built_in(queries, tokens, past):
    """One query sees all keys, wherever they come from."""
    feeds = mha_feeds(past=past, queries=queries, tokens=tokens)
    outputs = ["output", "present_key", "present_value"] if past else ["output"]
    ours, theirs = (
        run_node("MultiHeadAttention", feeds, outputs, domain=domain, num_heads=3, unidirectional=1)[0] for domain in (OWN, MICROSOFT)
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "mask, queries, attributes, message",
    [
        ("none", 2, dict(unidirectional=1), "unidirectional = 1: 2 queries and 7 keys beside the past: allowed one query"),
        ("none", 7, dict(unidirectional=2), "unidirectional = 2: allowed 0, 1"),
        ("keys", 1, dict(mask_filter_value=-1.0), "mask_filter_value = -1: a key that key_padding_mask hides weighs nothing here"),
    ],
)
def test_mha_refuses_by_name_and_value(mask, queries, attributes, message):
    with pytest.raises(ERRORS, match=f"lean_attention: MultiHeadAttention node 'node0': {message}"):
        run_node("MultiHeadAttention", mha_feeds(mask, queries=queries), ["output"], num_heads=3, **attributes)


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

    def run(self, **arguments):
        outputs = ["output", "key_cache_out", "value_cache_out"]
        return run_node("PagedAttention", self.feeds, outputs, num_heads=self.q_heads, kv_num_heads=self.kv_heads, **arguments)

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
    (dict(block_table=np.full((3, 4), 99, np.int32)), {}, "bad_page_index: pages.block_table[0, 0] = 99: allowed 0 to"),
    (dict(block_table=np.full((3, 4), -1, np.int32)), {}, "bad_page_index: pages.block_table[0, 0] = -1: allowed 0 to"),
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
