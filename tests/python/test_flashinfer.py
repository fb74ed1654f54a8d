"""FlashInfer's wrappers of batches, its functions for one sequence, its states."""

import functools
import math

import pytest

torch = pytest.importorskip("torch")

from conftest import needs  # noqa: E402
from oracle import attention  # noqa: E402
from pages import csr, paged, tensors  # noqa: E402

from lean_attention.compat.flashinfer import (  # noqa: E402
    BatchDecodeWithPagedKVCacheWrapper, BatchDecodeWithSharedPrefixPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper, BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper, MultiLevelCascadeAttentionWrapper, fast_decode_plan, merge_state,
    merge_state_in_place, merge_states, single_decode_with_kv_cache, single_prefill_with_kv_cache,
)  # fmt: skip


@needs("pages")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("one_tensor", [False, True])
def test_flashinfer(layout, one_tensor):
    page, lengths = 4, [48, 0, 13]
    q, k, v = tensors(batch=3, kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, page)
    if layout == "HND":
        pool_k, pool_v = pool_k.transpose(1, 2), pool_v.transpose(1, 2)
    cache = torch.stack([pool_k, pool_v], 1) if one_tensor else (pool_k, pool_v)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), layout)
    wrapper.plan(*csr(table, lengths, page), 6, 2, 40, page, sm_scale=0.2)
    out, lse = wrapper.run(q[:, :, 0], cache, return_lse=True)
    attention(q, k, v, seqlens=lengths, scale=0.2).check(out[:, :, None], lse[:, :, None] / math.log2(math.e))
    assert torch.equal(wrapper.run(q[:, :, 0], cache, v_scale=2.0), 2 * out)
    assert torch.equal(wrapper.forward_return_lse(q[:, :, 0], cache, sm_scale=0.2)[1], lse)


@needs("pages")
def test_flashinfer_buffers_of_a_graph_see_the_next_plan():
    page = 4
    q, k, v = tensors(kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, page)
    buffers = [torch.zeros(3, dtype=torch.int32), torch.zeros(24, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "NHD", True, False, *buffers)
    for lengths in ([48, 13], [5, 20]):
        wrapper.plan(*csr(table, lengths, page), 6, 2, 40, page)
        captured = wrapper._seqlens.data_ptr()
        attention(q, k, v, seqlens=lengths).check(wrapper.run(q[:, :, 0], (pool_k, pool_v))[:, :, None])
    assert captured == wrapper._seqlens.data_ptr() and wrapper._kept["indptr"] is buffers[0]


@needs("pages", "window", "softcap")
def test_flashinfer_forward_has_rules_of_its_own():
    """Deprecated there: what it leaves out is not what plan() was told."""
    q, k, v = tensors(q_tokens=2, kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, 4)
    tables, queries = csr(table, [48, 48], 4), torch.tensor([0, 2, 4], dtype=torch.int32)
    planned = dict(window_left=5, logits_soft_cap=3.0, sm_scale=0.2)
    decode, prefill = BatchDecodeWithPagedKVCacheWrapper(), BatchPrefillWithPagedKVCacheWrapper()
    ragged = BatchPrefillWithRaggedKVCacheWrapper()
    for wrapper in (decode, prefill, ragged):
        with pytest.raises(RuntimeError, match="plan"):
            wrapper.forward(q, (pool_k, pool_v)) if wrapper is not ragged else wrapper.forward(q, k, v)
    decode.plan(*tables, 6, 2, 40, 4, **planned)
    prefill.plan(queries, *tables, 6, 2, 40, 4, causal=True, **planned)
    ragged.plan(queries, 24 * queries, 6, 2, 40, causal=True, **planned)
    packed_q, *packed_kv = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    attention(q[:, :, :1], k, v).check(decode.forward(q[:, :, 0], (pool_k, pool_v))[:, :, None])
    rules, theirs = dict(causal=True, scale=0.4, softcap=2.0), ("NONE", False, 9, 2.0, 0.4)
    for wrapper, cache in ((prefill, ((pool_k, pool_v),)), (ragged, packed_kv)):
        attention(q, k, v).check(wrapper.forward(packed_q, *cache).unflatten(0, (2, 2)).transpose(1, 2))
        places = theirs if wrapper is ragged else (*theirs[:2], None, None, *theirs[2:])
        out, _ = wrapper.forward_return_lse(packed_q, *cache, True, *places)
        attention(q, k, v, window=(9, -1), **rules).check(out.unflatten(0, (2, 2)).transpose(1, 2))


@needs("pages")
def test_flashinfer_tables_on_the_host_may_be_filled_anew_after_plan():
    page, (q, k, v) = 4, tensors(kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, page)
    tables, first_query = csr(table, [48, 13], page), torch.tensor([0, 1, 2], dtype=torch.int32)
    decode, prefill = BatchDecodeWithPagedKVCacheWrapper(), BatchPrefillWithPagedKVCacheWrapper()
    prefix = BatchPrefillWithSharedPrefixPagedKVCacheWrapper()
    decode.plan(*tables, 6, 2, 40, page)
    prefill.plan(first_query, *tables, 6, 2, 40, page)
    prefix.begin_forward(first_query, *tables, 6, 2, 40, page)
    for table in (first_query, *tables):
        table.zero_()
    for wrapper in (decode, prefill):
        attention(q, k, v, seqlens=[48, 13]).check(wrapper.run(q[:, :, 0], (pool_k, pool_v))[:, :, None])
    none = torch.empty(0, 2, 40)
    attention(q, k, v, seqlens=[48, 13]).check(prefix.forward(q[:, :, 0], none, none, (pool_k, pool_v))[:, :, None])


@needs("pages", "window", "softcap", "sinks")
def test_flashinfer_score_rules():
    q, k, v = tensors(kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, 4)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(*csr(table, [48, 13], 4), 6, 2, 40, 4, window_left=5, logits_soft_cap=3.0)
    out = wrapper.run(q[:, :, 0], (pool_k, pool_v), sinks=torch.ones(6))
    attention(q, k, v, seqlens=[48, 13], window=(5, -1), softcap=3.0, sinks=torch.ones(6)).check(out[:, :, None])


@needs("pages")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("graph", [False, True])
def test_flashinfer_several_queries_of_each_request(layout, graph):
    page, lengths = 4, [48, 13]
    q, k, v = tensors(q_tokens=3, kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, page)
    cache = (pool_k, pool_v) if layout == "NHD" else (pool_k.transpose(1, 2), pool_v.transpose(1, 2))
    tables = csr(table, lengths, page)
    if graph:
        wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *(torch.zeros_like(x) for x in tables), kv_layout=layout)
    else:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(None, layout, use_tensor_cores=True)
    wrapper.plan = functools.partial(fast_decode_plan, wrapper)  # as SGLang does
    wrapper.plan(*tables, 6, 2, 40, page, q_len_per_req=3, o_data_type=torch.float32, global_override_indptr_cpu=None)
    rows = q.transpose(1, 2).flatten(0, 1)
    out, lse = wrapper.run(rows, cache, return_lse=True, out=torch.empty_like(rows), lse=torch.empty(6, 6))
    expected = attention(q, k, v, seqlens=lengths, causal=True)
    expected.check(out.view(2, 3, 6, 40).transpose(1, 2), lse.view(2, 3, 6).transpose(1, 2) / math.log2(math.e))
    with pytest.raises(ValueError, match="^q: shape .* q_len_per_req = 3"):
        wrapper.run(rows[:2], cache)
    if graph:
        with pytest.raises(ValueError, match="^q_len_per_req = 1"):
            wrapper.plan(*tables, 6, 2, 40, page)
        return
    wrapper.plan(*tables, 6, 2, 40, page)
    with pytest.raises(ValueError, match=r"^q: shape \(2, 3, 6, 40\): .* q_len_per_req = 1"):  # they would not be causal
        wrapper.run(q.transpose(1, 2), cache)


def llama(x, positions, theta=1e4, scale=1.0):
    """x [..., n, d] turned by halves, element i by position x theta^(-2 i / d) / scale."""
    half = x.shape[-1] // 2
    angles = positions[..., None].double() * theta ** (-torch.arange(half).double() / half) / scale
    a, b = x[..., :half].double(), x[..., half:].double()
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1).float()


@needs("pages")
@pytest.mark.parametrize("q_tokens", [1, 3])
def test_flashinfer_rope_llama(q_tokens):
    page, lengths = 4, [48, 0, 13]
    q, k, v = tensors(batch=3, q_tokens=q_tokens, kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, page)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    arguments = dict(pos_encoding_mode="ROPE_LLAMA", rope_theta=5e3, rope_scale=2.0)
    wrapper.plan(*csr(table, lengths, page), 6, 2, 40, page, q_len_per_req=q_tokens, **arguments)
    before = pool_k.clone()
    out = wrapper.run(q.transpose(1, 2).flatten(0, 1), (pool_k, pool_v)).view(3, q_tokens, 6, 40)
    position = torch.tensor(lengths)[:, None] - q_tokens + torch.arange(q_tokens)
    turned = llama(q, position[:, None], 5e3, 2.0), llama(k, torch.arange(48), 5e3, 2.0)
    expected = attention(*turned, v, seqlens=lengths, causal=True)
    torch.testing.assert_close(out.transpose(1, 2), torch.from_numpy(expected.out).float(), rtol=0, atol=2e-5)
    assert torch.equal(pool_k.nan_to_num(), before.nan_to_num())


@needs("pages", "alibi")
def test_flashinfer_alibi():
    q, k, v = tensors(kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, 4)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(*csr(table, [48, 13], 4), 6, 2, 40, 4, pos_encoding_mode="ALIBI")
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])  # of 4 heads, then of 8 every other one
    out = wrapper.run(q[:, :, 0], (pool_k, pool_v))
    attention(q, k, v, seqlens=[48, 13], alibi_slopes=slopes).check(out[:, :, None])


def test_flashinfer_alibi_with_softcap_is_refused():
    """There the cap is over the sum of both."""
    rules, n = dict(pos_encoding_mode="ALIBI", logits_soft_cap=5.0), torch.tensor([0, 1], dtype=torch.int32)
    q, k = torch.ones(1, 6, 40), torch.ones(9, 2, 40)
    for call in (
        lambda: BatchDecodeWithPagedKVCacheWrapper().plan(n, n[:1], n[1:], 6, 2, 40, 4, **rules),
        lambda: BatchPrefillWithPagedKVCacheWrapper().plan(n, n, n[:1], n[1:], 6, 2, 40, 4, causal=True, **rules),
        lambda: BatchPrefillWithRaggedKVCacheWrapper().plan(n, n, 6, 2, 40, causal=True, **rules),
        lambda: single_decode_with_kv_cache(q[0], k, k, **rules),
        lambda: single_prefill_with_kv_cache(q, k, k, **rules),
    ):
        with pytest.raises(NotImplementedError, match="^logits_soft_cap: .*'ALIBI'"):
            call()


def test_flashinfer_alibi_beside_a_mask_is_refused_but_for_one_query():
    """The mask stands in causal's place, and keys after a query would gain."""
    q, k, v = tensors(batch=1, q_tokens=3)
    packed_q, packed_k, packed_v = (x[0].transpose(0, 1) for x in (q, k, v))
    rules, mask = dict(pos_encoding_mode="ALIBI", causal=True), torch.rand(3, 37) > 0.3
    with pytest.raises(NotImplementedError, match="^pos_encoding_mode = 'ALIBI': without causal"):
        single_prefill_with_kv_cache(packed_q, packed_k, packed_v, custom_mask=mask, **rules)
    out = single_prefill_with_kv_cache(packed_q[:1], packed_k, packed_v, custom_mask=mask[:1], **rules)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    attention(q[:, :, :1], k, v, mask=mask[:1].numpy(), alibi_slopes=slopes).check(out.transpose(0, 1)[None])


@needs("fp8")
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_flashinfer_scales_are_float32_whatever_torchs_default_is(default):
    q, k, v = tensors(batch=1)
    given = (q[0, :, 0].half(), *(x[0].transpose(0, 1).to(torch.float8_e4m3fn) for x in (k, v)))
    heads = torch.tensor([0.7, 1.3])
    kinds = [dict(k_scale=0.1237, v_scale=1.2347), dict(k_scale=heads), dict(q_scale=3.1234567, k_scale=heads, v_scale=1.2347)]
    expected = [single_decode_with_kv_cache(*given, **scales) for scales in kinds]
    torch.set_default_dtype(default)
    try:
        results = [single_decode_with_kv_cache(*given, **scales) for scales in kinds]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, results, expected))


@needs("pages", "fp8")
@pytest.mark.parametrize("tensor", [False, True])
def test_flashinfer_scales(tensor):
    q, k, v = tensors(kv_tokens=48)
    q, k, v = q.half(), k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    pool_k, pool_v, table = (x.to(torch.float8_e4m3fn) if x.is_floating_point() else x for x in paged(k.float(), v.float(), 4))
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(*csr(table, [48, 13], 4), 6, 2, 40, 4, q_data_type="float16", o_data_type="float16")
    scales = dict(q_scale=0.5, k_scale=0.7, v_scale=1.7)
    of_k, of_v = torch.full((2,), 0.7), torch.full((2,), 1.7)
    if tensor:
        of_k, of_v = torch.tensor([0.7, 0.2]), torch.tensor([1.7, 3.0])
        scales.update(k_scale=of_k, v_scale=of_v)
    out = wrapper.run(q[:, :, 0], (pool_k, pool_v), **scales)
    expected = attention(
        q.float() * 0.5, k.float() * of_k[:, None, None], v.float() * of_v[:, None, None], seqlens=[48, 13], dtype="float16"
    )
    expected.check(out[:, :, None])
    with pytest.raises(NotImplementedError, match="^o_data_type"):
        wrapper.plan(*csr(table, [48, 13], 4), 6, 2, 40, 4, o_data_type=torch.bfloat16)
        wrapper.run(q[:, :, 0], (pool_k, pool_v))


@needs("pages")
@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA"])
def test_flashinfer_prefill(mode):
    page, lengths, counts = 4, [48, 13], [1, 4]
    q, k, v = tensors(q_tokens=4, kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, page)
    indptr = torch.tensor([0, 1, 5], dtype=torch.int32)
    rows = torch.cat([q[0, :, :1].transpose(0, 1), q[1].transpose(0, 1)])
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None, "HND")
    wrapper.plan(indptr, *csr(table, lengths, page), 6, 2, 40, page, causal=True, window_left=9, pos_encoding_mode=mode)
    out, lse = wrapper.run_return_lse(rows, (pool_k.transpose(1, 2), pool_v.transpose(1, 2)))
    for b, (count, length) in enumerate(zip(counts, lengths)):
        one, part = slice(b, b + 1), slice(*indptr[b : b + 2].tolist())
        queries, keys = q[one, :, :count], k[one]
        if mode == "ROPE_LLAMA":
            queries, keys = llama(queries, length - count + torch.arange(count)), llama(keys, torch.arange(48))
        expected = attention(queries, keys, v[one], seqlens=[length], causal=True, window=(9, -1))
        ours = out[part].transpose(0, 1)[None]
        if mode == "NONE":
            expected.check(ours, lse[part].t()[None] / math.log2(math.e))
        torch.testing.assert_close(ours, torch.from_numpy(expected.out).float(), rtol=0, atol=2e-5)
    with pytest.raises(NotImplementedError, match="^custom_mask: "):
        wrapper.plan(indptr, *csr(table, lengths, page), 6, 2, 40, page, custom_mask=torch.ones(9))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_flashinfer_ragged_prefill(layout, mode, causal, graph):
    q, k, v = tensors(batch=3, q_tokens=4, kv_tokens=48)
    buffers = [torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)] if graph else []
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(None, layout, graph, *buffers)
    for counts, lengths in (([1, 4, 2], [48, 13, 7]), ([4, 1, 3], [9, 0, 48])):
        queries, keys = ([0, *torch.tensor(x).cumsum(0).tolist()] for x in (counts, lengths))
        rows = torch.cat([q[b, :, :count].transpose(0, 1) for b, count in enumerate(counts)])
        packed = [torch.cat([x[b, :, :length] for b, length in enumerate(lengths)], 1) for x in (k, v)]
        packed = [x.transpose(0, 1) if layout == "NHD" else x for x in packed]
        indptr = [torch.tensor(x, dtype=torch.int32) for x in (queries, keys)]
        wrapper.plan(*indptr, 6, 2, 40, 40, causal=causal, pos_encoding_mode=mode, logits_soft_cap=3.0, sm_scale=0.2)
        out, lse = wrapper.run(rows, *packed, return_lse=True, out=torch.empty_like(rows))
        for b, (count, length) in enumerate(zip(counts, lengths)):
            one, part = slice(b, b + 1), slice(*queries[b : b + 2])
            mine, others = q[one, :, :count], k[one]
            if mode == "ROPE_LLAMA":
                mine, others = llama(mine, length - count + torch.arange(count)), llama(others, torch.arange(48))
            expected = attention(mine, others, v[one], seqlens=[length], causal=causal, softcap=3.0, scale=0.2)
            ours = out[part].transpose(0, 1)[None]
            if mode == "NONE":
                expected.check(ours, lse[part].t()[None] / math.log2(math.e))
            torch.testing.assert_close(ours, torch.from_numpy(expected.out).float(), rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match=r"^q, k: \(query heads, kv heads, head dim\) = \(6, 2, 40\): plan\(\) was told \(6, 3, 40\)"):
        wrapper.plan(*indptr, 6, 3, 40)
        wrapper.run(rows, *packed)
    for name in ("custom_mask", "v_indptr", "prefix_len_ptr"):
        with pytest.raises(NotImplementedError, match=f"^{name}: "):
            wrapper.plan(*indptr, 6, 2, 40, **{name: torch.ones(9)})


@needs("pages")
@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("graph", [False, True])
def test_flashinfer_levels_are_the_keys_of_all_of_them(levels, graph):
    """Level 0: keys of all four requests; 1: of two each; 2: of one, causal. Every level in pages of one pool."""
    page, of_level = 4, [[20], [6, 0], [9, 3, 12, 5]]
    if levels < 3:
        of_level = of_level[3 - levels :]
    counts = [2, 1, 3, 1]
    q, k, v = tensors(batch=sum(map(len, of_level)), q_tokens=3, kv_tokens=20)
    pool_k, pool_v, table = paged(k, v, page)
    rows = torch.cat([q[b, :, :count].transpose(0, 1) for b, count in enumerate(counts)])
    ends = [0, *torch.tensor(counts).cumsum(0).tolist()]
    tables, first = [], 0
    for lengths in of_level:
        own = slice(first, first + len(lengths))
        queries = torch.tensor(ends[:: 4 // len(lengths)], dtype=torch.int32)
        tables.append((queries, *csr(table[own], lengths, page)))
        first += len(lengths)
    tables = list(zip(*tables))
    buffers = [[torch.zeros_like(x) for x in of_kind] for of_kind in tables] if graph else []
    wrapper = MultiLevelCascadeAttentionWrapper(levels, None, "NHD", graph, *buffers)
    wrapper.plan(*tables, 6, 2, 40, page, causal=True, sm_scale=0.2)
    out = wrapper.run(rows, (pool_k, pool_v))
    for b, count in enumerate(counts):
        parts, first = [], 0
        for lengths in of_level:
            group = b * len(lengths) // 4
            parts.append((first + group, lengths[group]))
            first += len(lengths)
        own_k, own_v = (torch.cat([x[at, :, :length] for at, length in parts], 1)[None] for x in (k, v))
        expected = attention(q[b : b + 1, :, :count], own_k, own_v, causal=True, scale=0.2)
        ours = out[ends[b] : ends[b + 1]].transpose(0, 1)[None]
        torch.testing.assert_close(ours, torch.from_numpy(expected.out).float(), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=f"^paged_kv_indptr_arr: 0 entries: num_levels = {levels}"):
        wrapper.plan(tables[0], [], *tables[2:], 6, 2, 40, page)


@needs("pages")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("counts, causal", [((1, 1, 1), False), ((2, 1, 3), True), ((2, 1, 3), False)])
def test_flashinfer_a_prefix_that_all_share_comes_first(layout, counts, causal):
    page, own, prefix = 4, [9, 0, 12], 20
    q, k, v = tensors(batch=4, q_tokens=3, kv_tokens=20)
    pool_k, pool_v, table = paged(k, v, page)
    shared = [x[3] if layout == "HND" else x[3].transpose(0, 1) for x in (k, v)]
    pools = (pool_k, pool_v) if layout == "NHD" else (pool_k.transpose(1, 2), pool_v.transpose(1, 2))
    rows = torch.cat([q[b, :, :count].transpose(0, 1) for b, count in enumerate(counts)])
    tables = csr(table[:3], own, page)
    if counts == (1, 1, 1):
        wrapper = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(torch.empty(1), layout)
        wrapper.begin_forward(*tables, 6, 2, 40, page, data_type="float32")
        out, scale = wrapper.forward(rows, *shared, pools), 40**-0.5
    else:
        wrapper = BatchPrefillWithSharedPrefixPagedKVCacheWrapper(torch.empty(1), layout)
        with pytest.raises(RuntimeError, match="begin_forward"):
            wrapper.forward(rows, *shared, pools)
        wrapper.begin_forward(torch.tensor([0, *counts]).cumsum(0).int(), *tables, 6, 2, 40, page)
        out, scale = wrapper.forward(rows, *shared, pools, causal=causal, sm_scale=0.2), 0.2
    for b, (count, result) in enumerate(zip(counts, out.split(list(counts)))):
        if causal and own[b] < count:
            continue  # queries that are no tokens of the request's own keys
        keys, values = (torch.cat([x[3, :, :prefix], x[b, :, : own[b]]], 1)[None] for x in (k, v))
        expected = attention(q[b : b + 1, :, :count], keys, values, causal=causal, scale=scale)
        torch.testing.assert_close(result.transpose(0, 1)[None], torch.from_numpy(expected.out).float(), rtol=0, atol=1e-5)


def test_flashinfer_names_that_are_not_here_say_what_does_the_same():
    from lean_attention.compat import flashinfer

    with pytest.raises(AttributeError, match="^PODWithPagedKVCacheWrapper: .* BatchPrefillWithPagedKVCacheWrapper"):
        flashinfer.PODWithPagedKVCacheWrapper
    with pytest.raises(AttributeError, match="^rmsnorm: FlashInfer's function is not here: there are BatchDecode"):
        flashinfer.rmsnorm
    assert not hasattr(flashinfer, "BatchAttention") and flashinfer.__name__


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_flashinfer_single(layout):
    q, k, v = tensors(batch=1, q_tokens=3)
    keys, values = (x[0] if layout == "HND" else x[0].transpose(0, 1) for x in (k, v))
    mask = torch.rand(3, 37) > 0.3
    for arguments, expected in (
        (dict(), attention(q, k, v)),
        (dict(causal=True, window_left=4, sm_scale=0.3), attention(q, k, v, causal=True, window=(4, -1), scale=0.3)),
        (dict(custom_mask=mask, causal=True, logits_soft_cap=2.0), attention(q, k, v, mask=mask.numpy(), softcap=2.0)),
        (dict(pos_encoding_mode="ROPE_LLAMA"), attention(llama(q, 34 + torch.arange(3)), llama(k, torch.arange(37)), v)),
    ):
        out, lse = single_prefill_with_kv_cache(q[0].transpose(0, 1), keys, values, kv_layout=layout, return_lse=True, **arguments)
        torch.testing.assert_close(out.transpose(0, 1), torch.from_numpy(expected.out[0]).float(), rtol=0, atol=2e-5)
        torch.testing.assert_close(lse.t() / math.log2(math.e), torch.from_numpy(expected.lse[0]).float(), rtol=0, atol=2e-5)
    given = (q[0].transpose(0, 1), keys, values)
    in_a_row = single_prefill_with_kv_cache(*given, kv_layout=layout, custom_mask=mask.flatten())
    assert torch.equal(in_a_row, single_prefill_with_kv_cache(*given, kv_layout=layout, custom_mask=mask.t().contiguous().t()))
    with pytest.raises(ValueError, match=r"^custom_mask: shape \(37, 3\): expected \(3, 37\)"):
        single_prefill_with_kv_cache(*given, kv_layout=layout, custom_mask=mask.t())
    with pytest.raises(TypeError, match="^custom_mask: torch.float32: boolean is needed"):  # 0 is seen there, and True here
        single_prefill_with_kv_cache(*given, kv_layout=layout, custom_mask=torch.where(mask, 0.0, -torch.inf))
    assert torch.equal(in_a_row, single_prefill_with_kv_cache(*given, kv_layout=layout, custom_mask=mask.to(torch.uint8)))
    out = single_decode_with_kv_cache(q[0, :, 0], keys, values, layout, v_scale=2.0)
    attention(q[:, :, :1], k, 2 * v).check(out[None, :, None])


def test_flashinfer_states():
    q, k, v = tensors(batch=1, q_tokens=3)
    parts = []
    for begin, end in ((0, 5), (5, 5), (5, 37)):
        part = (torch.full((3, 6, 40), math.nan), torch.full((3, 6), -math.inf))  # no keys, and nothing to be read
        if end > begin:
            given = q[0].transpose(0, 1), k[0, :, begin:end].transpose(0, 1), v[0, :, begin:end].transpose(0, 1)
            part = single_prefill_with_kv_cache(*given, return_lse=True)
        parts.append(part)
    expected = attention(q, k, v)
    out, lse = merge_states(torch.stack([o for o, _ in parts], 1), torch.stack([s for _, s in parts], 1))
    torch.testing.assert_close(out.transpose(0, 1), torch.from_numpy(expected.out[0]).float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.t() / math.log2(math.e), torch.from_numpy(expected.lse[0]).float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(merge_state(*parts[0], *parts[2])[0], out)
    o, s = parts[0][0].clone(), parts[0][1].clone()
    merge_state_in_place(o, s, *parts[2], mask=torch.tensor([True, False, True]))
    torch.testing.assert_close(o[[0, 2]], out[[0, 2]])
    assert torch.equal(o[1], parts[0][0][1]) and torch.equal(s[1], parts[0][1][1])
    empty, empty_s = merge_state(*parts[1], *parts[1])
    assert torch.equal(empty, torch.zeros(3, 6, 40)) and (empty_s == -math.inf).all()
    positive = (parts[1][0], torch.full((3, 6), math.inf))  # FlashAttention's word for no keys
    for merged in (merge_state(*positive, *parts[0]), merge_state(*parts[0], *positive)):
        assert torch.equal(merged[0], parts[0][0]) and torch.equal(merged[1], parts[0][1])
    assert merge_state(parts[0][0], torch.full((3, 6), math.nan), *parts[0])[0].isnan().all()  # not empty


def test_flashinfer_states_that_do_not_fit_are_refused_by_name():
    v, s = torch.zeros(2, 4, 8), torch.zeros(2, 4)
    for message, call in (
        (r"^v, s: shapes .*one state or more", lambda: merge_states(v[:, None][:, :0], s[:, None][:, :0])),
        (r"^v_a, v_b: .*torch.float16", lambda: merge_state(v, s, v.half(), s)),
        (r"^s_a, s_b: shapes \(2, 4\), \(2, 1\)", lambda: merge_state(v, s, v, s[:, :1])),
        (r"^mask: shape \(1,\): expected \(2,\)", lambda: merge_state_in_place(v, s, v, s, mask=torch.tensor([True]))),
        (r"^q: shape \(1, 2, 4, 8\)", lambda: single_decode_with_kv_cache(v, v, v)),
        (r"^k: shape \(4, 8\)", lambda: single_prefill_with_kv_cache(v, v[0], v[0])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


def test_flashinfer_takes_what_means_nothing():
    table = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0], [1])]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, use_tensor_cores=True, backend="fa2")
    assert wrapper.use_tensor_cores and wrapper.workspace_size(*table, 1, 1, 8, 1) == (0, 0)
    wrapper.reset_workspace_buffer(torch.empty(1), torch.empty(1))
    wrapper.plan(*table, 1, 1, 8, 1, seq_lens=None, non_blocking=False, block_tables=None)
    out = wrapper.run(torch.ones(1, 1, 8), (torch.ones(1, 1, 1, 8),) * 2, enable_pdl=True, skip_softmax_threshold_scale_factor=1.0)
    assert torch.equal(out, torch.ones(1, 1, 8))


def test_flashinfer_refuses_by_name():
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(torch.ones(1, 1, 8), (torch.ones(1, 1, 1, 8),) * 2)
    table = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0], [1])]
    with pytest.raises(ValueError, match="^pos_encoding_mode"):
        wrapper.plan(*table, 1, 1, 8, 1, pos_encoding_mode="ROPE")
    with pytest.raises(NotImplementedError, match="^window_right: "):
        wrapper.plan(*table, 1, 1, 8, 1, window_right=3)
    with pytest.raises(TypeError, match="^rope_thetta: "):
        wrapper.plan(*table, 1, 1, 8, 1, rope_thetta=None)
    wrapper.plan(*table, 1, 1, 8, 1)
    with pytest.raises(ValueError, match="^q, paged_kv_cache"):
        wrapper.run(torch.ones(1, 2, 8), (torch.ones(1, 1, 1, 8),) * 2)
    with pytest.raises(NotImplementedError, match="^kv_cache_sf: "):
        wrapper.run(torch.ones(1, 1, 8), (torch.ones(1, 1, 1, 8),) * 2, kv_cache_sf=torch.ones(1))
    with pytest.raises(NotImplementedError, match="^k_scale: shape"):
        wrapper.run(torch.ones(1, 1, 8), (torch.ones(1, 1, 1, 8),) * 2, k_scale=torch.ones(2))
    with pytest.raises(ValueError, match="^kv_layout"):
        BatchDecodeWithPagedKVCacheWrapper(kv_layout="NDH")
    with pytest.raises(NotImplementedError, match="^jit_args: "):
        BatchDecodeWithPagedKVCacheWrapper(jit_args=[])


@needs("pages")
def test_a_plan_that_is_refused_leaves_no_old_constants_beside_new_tables():
    q, k, v = tensors(kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, 4)
    given, other = csr(table, [48, 13], 4), csr(table, [5, 20], 4)
    none = torch.zeros(3, dtype=torch.int32)
    for graph in (False, True):
        buffers = [torch.zeros(3, dtype=torch.int32), torch.zeros(24, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)]
        wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "NHD", graph, False, *(buffers if graph else ()))
        for wrong, arguments in (
            ("pos_encoding_mode", dict(pos_encoding_mode="ROPE")),
            ("last_page_len: shape \\(3,\\): expected \\(2,\\)|last_page_len: shape \\(3,\\): the buffer has", dict(last_page_len=none)),
            ("indptr: <class 'list'>: a torch tensor", dict(indptr=[0, 12, 16])),
            ("last_page_len: torch.float32: a torch tensor of int32", dict(last_page_len=torch.ones(2))),
        ):
            wrapper.plan(*given, 6, 2, 40, 4)
            tables = dict(zip(("indptr", "indices", "last_page_len"), other))
            with pytest.raises((ValueError, TypeError), match=f"^({wrong})"):
                wrapper.plan(**{**tables, **arguments}, num_qo_heads=6, num_kv_heads=2, head_dim=40, page_size=4)
            try:
                out = wrapper.run(q[:, :, 0], (pool_k, pool_v))
            except RuntimeError as refusal:
                assert "call plan() first" in str(refusal)
            else:  # the refusal came before anything was taken
                attention(q, k, v, seqlens=[48, 13]).check(out[:, :, None])


@needs("pages")
def test_lse_goes_where_it_is_wanted_and_is_not_resized():
    q, k, v = tensors(kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, 4)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(*csr(table, [48, 13], 4), 6, 2, 40, 4)
    call = (q[:, :, 0], (pool_k, pool_v))
    expected = wrapper.run_return_lse(*call)[1]
    lse = torch.full((2, 6), torch.nan)
    assert isinstance(wrapper.run(*call, lse=lse), torch.Tensor) and torch.equal(lse, expected)
    out = torch.zeros(2, 6, 40)
    with pytest.raises(ValueError, match=r"^lse: shape \(7,\): expected \(2, 6\)"):
        wrapper.run_return_lse(*call, out=out, lse=torch.empty(7))
    with pytest.raises(TypeError, match="^lse: torch.float64"):
        wrapper.run_return_lse(*call, out=out, lse=torch.empty(2, 6, dtype=torch.float64))
    assert not out.any()
    with pytest.raises(ValueError, match="^paged_kv_cache: 3 tensors"):
        wrapper.run(call[0], (pool_k, pool_v, pool_v))
    natural, across = torch.empty(2, 6), torch.empty(6, 2)
    torch.testing.assert_close(wrapper.run_return_lse(*call, lse_base="ln", lse=natural)[1] * math.log2(math.e), expected)
    returned = wrapper.run_return_lse(*call, lse_layout="HN", lse=across)[1]
    assert torch.equal(returned, expected.t()) and torch.equal(across, expected.t()) and returned.is_contiguous()
    for name in ("lse_base", "lse_layout"):
        with pytest.raises(ValueError, match=f"^{name} = 'e': allowed '"):
            wrapper.run_return_lse(*call, **{name: "e"})


@needs("pages")
def test_a_last_page_holds_no_more_than_a_page():
    q, k, v = tensors(kv_tokens=48)
    _, _, table = paged(k, v, 4)
    indptr, indices, last = csr(table, [48, 13], 4)
    for wrong in (-1, 5):
        last[1] = wrong
        with pytest.raises(ValueError, match=rf"^last_page_len\[1\] = {wrong}: allowed 0 to 4"):
            BatchDecodeWithPagedKVCacheWrapper().plan(indptr, indices, last, 6, 2, 40, 4)


def test_head_dims_of_values_are_those_that_were_planned():
    cu = torch.tensor([0, 1], dtype=torch.int32)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper()
    wrapper.plan(cu, cu, 1, 1, 8, 4, uniform_q_len=1)
    assert wrapper.run(torch.ones(1, 1, 8), torch.ones(1, 1, 8), torch.ones(1, 1, 4)).shape == (1, 1, 4)
    with pytest.raises(ValueError, match="^k: head dim of v = 8: plan\\(\\) was told head_dim_vo = 4"):
        wrapper.run(torch.ones(1, 1, 8), torch.ones(1, 1, 8), torch.ones(1, 1, 8))


@pytest.mark.parametrize("requests", [0, 2])
def test_requests_without_a_page_are_empty_where_pages_are_copied(requests):
    """Keys that are turned, and latent keys in two tensors: a pool of the listed pages, of which there are none."""
    from lean_attention.compat import flashinfer

    none, zeros = torch.zeros(0, dtype=torch.int32), torch.zeros(requests + 1, dtype=torch.int32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(zeros, none, zeros[1:], 2, 1, 16, 4, pos_encoding_mode="ROPE_LLAMA")
    out, lse = wrapper.run(torch.randn(requests, 2, 16), torch.randn(3, 2, 4, 1, 16), return_lse=True)
    assert out.shape == (requests, 2, 16) and (out == 0).all() and (lse == -torch.inf).all()
    latent = flashinfer.BatchMLAPagedAttentionWrapper()
    latent.plan(torch.arange(requests + 1, dtype=torch.int32), zeros, none, zeros[1:], 2, 16, 8, 4, False, 1.0)
    q, caches = (torch.randn(requests, 2, 16), torch.randn(requests, 2, 8)), (torch.randn(3, 4, 16), torch.randn(3, 4, 8))
    out, lse = latent.run(*q, *caches, return_lse=True)
    assert out.shape == (requests, 2, 16) and (out == 0).all() and (lse == -torch.inf).all()
