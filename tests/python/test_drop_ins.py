"""flash_attn_with_kvcache, FlashInfer's decode wrapper, and scaled_dot_product_attention."""

import math

import pytest

torch = pytest.importorskip("torch")

from conftest import arrays, needs  # noqa: E402
from oracle import attention  # noqa: E402

import lean_attention  # noqa: E402
from lean_attention import flash_attn_with_kvcache, sdpa  # noqa: E402
from lean_attention.compat.flashinfer import BatchDecodeWithPagedKVCacheWrapper  # noqa: E402


def tensors(**sizes):
    return [torch.from_numpy(x) for x in arrays(**sizes)]


def to_bshd(*given):
    return [x.transpose(1, 2).contiguous() for x in given]


def paged(k, v, page, seed=5):
    """k, v [B, H, n, d] in shuffled pages [P, page, H, d] and the table; pages nobody owns hold NaN."""
    batch, _, tokens, _ = k.shape
    pages = tokens // page
    order = torch.randperm(batch * pages + 2, generator=torch.Generator().manual_seed(seed))[: batch * pages]
    pools = []
    for x in (k, v):
        pool = torch.full((batch * pages + 2, page, x.shape[1], x.shape[3]), math.nan)
        pool[order] = x.transpose(1, 2).reshape(batch * pages, page, x.shape[1], x.shape[3])
        pools.append(pool)
    return *pools, order.to(torch.int32).view(batch, pages)


# --- flash_attn_with_kvcache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_tokens, causal", [(1, False), (1, True), (3, True)])
def test_flash_attn(q_tokens, causal):
    q, k, v = tensors(q_tokens=q_tokens)
    seqlens, leftpad = torch.tensor([37, 12], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        *to_bshd(q, k, v), cache_seqlens=seqlens, cache_leftpad=leftpad, softmax_scale=0.3, causal=causal, return_softmax_lse=True
    )
    expected = attention(q, k, v, seqlens=seqlens, leftpad=leftpad, scale=0.3, causal=causal)
    expected.check(out.transpose(1, 2), lse)


def test_flash_attn_one_number_as_length():
    q, k, v = tensors()
    out = flash_attn_with_kvcache(*to_bshd(q, k, v), cache_seqlens=9)
    attention(q, k, v, seqlens=[9, 9]).check(out.transpose(1, 2))


def test_flash_attn_ragged_queries():
    q, k, v = tensors()
    rows = torch.stack([q[0, :, 0], q[1, :, 0], q[1, :, 0]])
    out = flash_attn_with_kvcache(rows, *to_bshd(k, v), cu_seqlens_q=torch.tensor([0, 1, 3], dtype=torch.int32), max_seqlen_q=2)
    attention(q, k, v).check(out[:2].reshape(2, 6, 1, 40))
    assert torch.equal(out[1], out[2])


@pytest.mark.parametrize("splits", [1, 3])
def test_flash_attn_splits(splits):
    q, k, v = tensors(kv_tokens=700)
    attention(q, k, v).check(flash_attn_with_kvcache(*to_bshd(q, k, v), num_splits=splits).transpose(1, 2))


@needs("window", "softcap", "sinks", "alibi")
@pytest.mark.parametrize("name", ["s_aux", "learnable_sink"])
def test_flash_attn_score_rules(name):
    q, k, v = tensors(q_tokens=2)
    sinks, slopes = torch.linspace(-1, 3, 6), torch.linspace(0.1, 0.6, 6)
    out = flash_attn_with_kvcache(
        *to_bshd(q, k, v), causal=True, window_size=(4, -1), softcap=2.0, alibi_slopes=slopes, **{name: sinks.to(torch.bfloat16)}
    )
    expected = attention(
        q, k, v, causal=True, window=(4, -1), softcap=2.0, alibi_slopes=slopes, sinks=sinks.to(torch.bfloat16).float()
    )
    expected.check(out.transpose(1, 2))


@needs("pages")
@pytest.mark.parametrize("name", ["block_table", "page_table"])
def test_flash_attn_pages(name):
    q, k, v = tensors(kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, 6)
    seqlens = torch.tensor([48, 13], dtype=torch.int32)
    out = flash_attn_with_kvcache(q.transpose(1, 2), pool_k, pool_v, cache_seqlens=seqlens, **{name: table})
    attention(q, k, v, seqlens=seqlens).check(out.transpose(1, 2))


@needs("pages")
def test_flash_attn_cache_batch_idx():
    q, k, v = tensors(batch=3)
    rows = torch.tensor([2, 0])
    out = flash_attn_with_kvcache(q[:2].transpose(1, 2), *to_bshd(k, v), cache_batch_idx=rows)
    attention(q[:2], k[rows], v[rows]).check(out.transpose(1, 2))


@needs("append")
def test_flash_attn_appends():
    q, k, v = tensors()
    new_k, new_v = (x[:, :, :1] for x in tensors(seed=8)[1:])
    seqlens = torch.tensor([20, 3], dtype=torch.int32)
    expected_k, expected_v = k.clone(), v.clone()
    for b in range(2):
        expected_k[b, :, seqlens[b]], expected_v[b, :, seqlens[b]] = new_k[b, :, 0], new_v[b, :, 0]
    cache_k, cache_v = to_bshd(k, v)
    out = flash_attn_with_kvcache(q.transpose(1, 2), cache_k, cache_v, *to_bshd(new_k, new_v), cache_seqlens=seqlens)
    assert torch.equal(cache_k, expected_k.transpose(1, 2)) and torch.equal(cache_v, expected_v.transpose(1, 2))
    attention(q, expected_k, expected_v, seqlens=seqlens + 1).check(out.transpose(1, 2))


@needs("append")
def test_flash_attn_refuses_what_append_does_not_do():
    q, k, v = to_bshd(*tensors(q_tokens=2))
    with pytest.raises(NotImplementedError, match="^k: shape"):
        flash_attn_with_kvcache(q, k, v, k[:, :1], v[:, :1], cache_seqlens=3)
    tables = dict(rotary_cos=torch.ones(37, 8), rotary_sin=torch.ones(37, 8))
    with pytest.raises(NotImplementedError, match="^rotary_cos"):
        flash_attn_with_kvcache(q, k, v, k[:, :2], v[:, :2], cache_seqlens=3, **tables)


@pytest.mark.parametrize(
    "name, error, arguments",
    [
        ("qv", NotImplementedError, dict(qv=torch.ones(1))),
        ("attention_chunk", NotImplementedError, dict(attention_chunk=4)),
        ("k_descale", NotImplementedError, dict(k_descale=torch.ones(1))),
        ("rotary_seqlens", NotImplementedError, dict(rotary_seqlens=torch.ones(1))),
        ("block_table, page_table", ValueError, dict(block_table=torch.ones(1), page_table=torch.ones(1))),
        ("cache_seqlens", ValueError, dict(k=torch.ones(2, 1, 2, 40), v=torch.ones(2, 1, 2, 40))),
        ("cache_batch_idx", ValueError, dict(cache_batch_idx=torch.tensor([0, 1]), block_table=torch.ones(2, 1))),
    ],
)
def test_flash_attn_refuses_by_name(name, error, arguments):
    with pytest.raises(error, match=f"^{name}:"):
        flash_attn_with_kvcache(*to_bshd(*tensors()), **arguments)


def test_flash_attn_takes_what_means_nothing():
    q, k, v = to_bshd(*tensors())
    same = flash_attn_with_kvcache(q, k, v, qv=None, attention_chunk=0, pack_gqa=True, sm_margin=8)
    assert torch.equal(same, flash_attn_with_kvcache(q, k, v))


# --- FlashInfer ------------------------------------------------------------------------------------------------------


def csr(table, lengths, page):
    pages = [-(-length // page) for length in lengths]
    indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32)
    indices = torch.cat([table[b, :n] for b, n in enumerate(pages)])
    last = torch.tensor([(length - 1) % page + 1 if length else 0 for length in lengths], dtype=torch.int32)
    return indptr, indices, last


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
    assert torch.equal(wrapper.forward_return_lse(q[:, :, 0], cache)[1], lse)


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
    assert captured == wrapper._seqlens.data_ptr() and wrapper._indptr is buffers[0]


@needs("pages", "window", "softcap", "sinks")
def test_flashinfer_score_rules():
    q, k, v = tensors(kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, 4)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(*csr(table, [48, 13], 4), 6, 2, 40, 4, window_left=5, logits_soft_cap=3.0)
    out = wrapper.run(q[:, :, 0], (pool_k, pool_v), sinks=torch.ones(6))
    attention(q, k, v, seqlens=[48, 13], window=(5, -1), softcap=3.0, sinks=torch.ones(6)).check(out[:, :, None])


def test_flashinfer_refuses_by_name():
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(torch.ones(1, 1, 8), (torch.ones(1, 1, 1, 8),) * 2)
    table = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0], [1])]
    with pytest.raises(NotImplementedError, match="^pos_encoding_mode"):
        wrapper.plan(*table, 1, 1, 8, 1, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(NotImplementedError, match="^rope_theta"):
        wrapper.plan(*table, 1, 1, 8, 1, rope_theta=1e4)
    wrapper.plan(*table, 1, 1, 8, 1)
    with pytest.raises(ValueError, match="^q, paged_kv_cache"):
        wrapper.run(torch.ones(1, 2, 8), (torch.ones(1, 1, 1, 8),) * 2)
    with pytest.raises(ValueError, match="^kv_layout"):
        BatchDecodeWithPagedKVCacheWrapper(kv_layout="NDH")


# --- scaled_dot_product_attention ------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    calls = []
    original = sdpa.decode
    monkeypatch.setattr(sdpa, "decode", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    return calls


needs_hook = pytest.mark.skipif(not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="torch below 2.11")


@pytest.fixture
def enabled():
    lean_attention.enable_sdpa()
    yield torch.nn.functional.scaled_dot_product_attention
    sdpa.disable_sdpa()


@needs_hook
def test_sdpa_decode_is_ours(enabled, counted):
    q, k, v = tensors()
    with torch.no_grad():
        out = enabled(q, k, v, enable_gqa=True, scale=0.2)
    assert len(counted) == 1
    attention(q, k, v, scale=0.2).check(out)


@needs_hook
def test_sdpa_compiles(enabled):
    q, k, v = tensors()
    with torch.no_grad():
        out = torch.compile(lambda q, k, v: enabled(q, k, v, enable_gqa=True), fullgraph=True, backend="aot_eager")(q, k, v)
    attention(q, k, v).check(out)


@needs("mask")
@needs_hook
@pytest.mark.parametrize("boolean", [False, True])
def test_sdpa_masks_are_ours(enabled, counted, boolean):
    q, k, v = tensors()
    mask = torch.rand(2, 1, 1, 37) > 0.4 if boolean else torch.randn(1, 37)
    with torch.no_grad():
        out = enabled(q, k, v, attn_mask=mask, enable_gqa=True)
    assert len(counted) == 1
    attention(q, k, v, mask=mask.numpy()).check(out)


@needs_hook
@pytest.mark.parametrize(
    "arguments, q_tokens", [(dict(is_causal=True), 1), (dict(), 3), (dict(is_causal=True), 5)], ids=["causal", "several", "prefill"]
)
def test_sdpa_hands_back_the_rest(enabled, counted, arguments, q_tokens):
    q, k, v = tensors(q_tokens=q_tokens)
    sdpa.disable_sdpa()
    with torch.no_grad():
        expected = enabled(q, k, v, enable_gqa=True, **arguments)
        lean_attention.enable_sdpa()
        assert torch.equal(enabled(q, k, v, enable_gqa=True, **arguments), expected)
    assert not counted


@needs_hook
def test_sdpa_gradients_are_pytorchs(enabled, counted):
    q, k, v = (x.requires_grad_() for x in tensors())
    enabled(q, k, v, enable_gqa=True).sum().backward()
    assert not counted and v.grad is not None


@needs_hook
def test_sdpa_is_given_back(counted):
    q, k, v = tensors()
    with torch.no_grad():
        before = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        lean_attention.enable_sdpa()
        lean_attention.enable_sdpa()
        sdpa.disable_sdpa()
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), before)
    assert not counted and torch.nn.attention.current_flash_attention_impl() is None


def test_sdpa_function_without_the_hook(counted):
    q, k, v = tensors()
    attention(q, k, v).check(sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert len(counted) == 1
    q, k, v = tensors(q_tokens=3)
    attention(q, k, v).check(sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    with pytest.raises(RuntimeError):
        sdpa.scaled_dot_product_attention(q, k, v)  # as PyTorch does: heads differ without enable_gqa
    assert len(counted) == 1
