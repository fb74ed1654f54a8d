"""flash_attn_with_kvcache, FlashInfer's decode wrapper, and scaled_dot_product_attention."""

import math

import pytest

torch = pytest.importorskip("torch")

from conftest import arrays, needs  # noqa: E402
from oracle import attention  # noqa: E402

import lean_attention  # noqa: E402
from lean_attention import flash_attn_with_kvcache, sdpa  # noqa: E402
from lean_attention.compat.flash_attn import flash_attn_func, flash_attn_varlen_func  # noqa: E402
from lean_attention.compat.flashinfer import (  # noqa: E402
    BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan, merge_state, merge_state_in_place, merge_states, single_decode_with_kv_cache, single_prefill_with_kv_cache,
)  # fmt: skip


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


def rotated(x, positions, dims=16):
    """x [..., n, d] turned by angle = position x (pair + 1), the pairs beside each other: flash-attention's default."""
    angles = positions[..., None].double() * torch.arange(1, dims // 2 + 1)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., 0:dims:2].double(), x[..., 1:dims:2].double()
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((turned, x[..., dims:].double()), -1).float()


def rotary_tables(rows=60, dims=16):
    angles = torch.arange(rows)[:, None].double() * torch.arange(1, dims // 2 + 1)
    return dict(rotary_cos=angles.cos().float(), rotary_sin=angles.sin().float())


def test_flash_attn_rotary_positions_do_not_count_from_the_left_padding():
    """flash-attention's own rule, its smallest case: k[0, 3] is turned by position 3."""
    angle = torch.arange(4.0)[:, None]
    cache_k, cache_v = torch.zeros(2, 1, 4, 1, 16)
    new = torch.zeros(1, 1, 1, 16)
    new[..., 0] = 1
    arguments = dict(cache_seqlens=3, cache_leftpad=torch.tensor([2], dtype=torch.int32))
    flash_attn_with_kvcache(new, cache_k, cache_v, new, new, angle.cos(), angle.sin(), **arguments)
    torch.testing.assert_close(cache_k[0, 3, 0, :2], torch.tensor([math.cos(3), math.sin(3)]))


def append_by_hand(k, v, new_k, new_v, seqlens):
    """The caches [B, H, n, d] with the new tokens in their places, and the lengths after."""
    k, v = k.clone(), v.clone()
    for b, (length, keys, values) in enumerate(zip(seqlens.tolist(), new_k, new_v)):
        k[b, :, length : length + keys.shape[1]], v[b, :, length : length + keys.shape[1]] = keys, values
    return k, v, seqlens + torch.tensor([keys.shape[1] for keys in new_k], dtype=torch.int32)


@needs("append", "pages")
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("new_tokens", [1, 3, 5])
@pytest.mark.parametrize("ahead", [None, 4])
def test_flash_attn_new_tokens_rotary_and_padding(pages, causal, new_tokens, ahead):
    """Any number of new tokens beside any number of queries; positions from cache_seqlens, or from rotary_seqlens."""
    q, k, v = tensors(q_tokens=3, kv_tokens=48)
    new_k, new_v = (x[:, :, :new_tokens] for x in tensors(seed=8, kv_tokens=48)[1:])
    seqlens, leftpad = torch.tensor([20, 7], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    start = seqlens if ahead is None else seqlens + ahead
    of_q = start[:, None] + (torch.arange(3) if causal else torch.zeros(3))
    turned_q = rotated(q, of_q[:, None])
    turned_k = rotated(new_k, (start[:, None] + torch.arange(new_tokens))[:, None])
    expected_k, expected_v, after = append_by_hand(k, v, turned_k, new_v, seqlens)
    cache = to_bshd(k, v)
    arguments = {}
    if pages:
        *cache, arguments["block_table"] = paged(k, v, 6)
    out = flash_attn_with_kvcache(
        q.transpose(1, 2), *cache, *to_bshd(new_k, new_v), **rotary_tables(), cache_seqlens=seqlens, cache_leftpad=leftpad,
        causal=causal, rotary_seqlens=None if ahead is None else start, **arguments,
    )
    attention(turned_q, expected_k, expected_v, seqlens=after, leftpad=leftpad, causal=causal).check(out.transpose(1, 2))
    if pages:
        cache = [x[arguments["block_table"].long()].flatten(1, 2) for x in cache]
    torch.testing.assert_close(cache[0].transpose(1, 2), expected_k, rtol=0, atol=1e-5)
    assert torch.equal(cache[1].transpose(1, 2), expected_v)


@needs("append")
@pytest.mark.parametrize("rotary", [False, True])
def test_flash_attn_packed_new_tokens(rotary):
    q, k, v = tensors(q_tokens=3)
    new_k, new_v = tensors(seed=8)[1:]
    counts_q, counts_k = [1, 3], [4, 2]
    seqlens = torch.tensor([20, 3], dtype=torch.int32)
    pack = lambda x, counts: torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(counts)])  # noqa: E731
    cu = lambda counts: torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)  # noqa: E731
    cache_k, cache_v = to_bshd(k, v)
    out, lse = flash_attn_with_kvcache(
        pack(q, counts_q), cache_k, cache_v, pack(new_k, counts_k), pack(new_v, counts_k), cache_seqlens=seqlens, causal=True,
        cu_seqlens_q=cu(counts_q), cu_seqlens_k_new=cu(counts_k), max_seqlen_q=3, return_softmax_lse=True,
        **(rotary_tables() if rotary else {}),
    )
    for b in range(2):
        turned_q, turned_k = q[b : b + 1, :, : counts_q[b]], new_k[b : b + 1, :, : counts_k[b]]
        if rotary:
            turned_q = rotated(turned_q, seqlens[b] + torch.arange(counts_q[b]))
            turned_k = rotated(turned_k, seqlens[b] + torch.arange(counts_k[b]))
        one = slice(b, b + 1)
        keys, values, after = append_by_hand(k[one], v[one], turned_k, new_v[one, :, : counts_k[b]], seqlens[one])
        rows = slice(*cu(counts_q)[b : b + 2].tolist())
        attention(turned_q, keys, values, seqlens=after, causal=True).check(out[rows].transpose(0, 1)[None], lse[None, :, rows])
        torch.testing.assert_close(cache_k[one, : after[0]].transpose(1, 2), keys[:, :, : after[0]], rtol=0, atol=1e-5)


@needs("pages")
def test_flash_attn_cache_batch_idx_with_a_table():
    q, k, v = tensors(batch=3, kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, 6)
    rows = torch.tensor([2, 0])
    out = flash_attn_with_kvcache(q[:2].transpose(1, 2), pool_k, pool_v, cache_batch_idx=rows, page_table=table)
    attention(q[:2], k[rows], v[rows]).check(out.transpose(1, 2))


@needs("alibi")
@pytest.mark.parametrize("packed", [False, True])
def test_flash_attn_alibi_slopes_of_each_sequence(packed):
    q, k, v = tensors(q_tokens=2)
    slopes = torch.linspace(0.05, 0.6, 12).view(2, 6)
    arguments = dict(causal=True, alibi_slopes=slopes)
    if packed:
        cu = torch.tensor([0, 2, 4], dtype=torch.int32)
        out = flash_attn_with_kvcache(q.transpose(1, 2).flatten(0, 1), *to_bshd(k, v), cu_seqlens_q=cu, max_seqlen_q=2, **arguments)
        out = out.view(2, 2, 6, 40)
    else:
        out = flash_attn_with_kvcache(*to_bshd(q, k, v), **arguments)
    for b in range(2):
        one = slice(b, b + 1)
        attention(q[one], k[one], v[one], causal=True, alibi_slopes=slopes[b]).check(out[one].transpose(1, 2))


@needs("fp8")
@pytest.mark.parametrize("shape", ["number", "expanded", "heads", "sequences"])
def test_flash_attn_fp8_queries_and_descales(shape):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors())
    factors = {
        "number": [0.5, 0.25, 2.0],
        "expanded": [torch.tensor(x).expand(2, 2) for x in (0.5, 0.25, 2.0)],
        "heads": [torch.tensor([[0.5, 1.5]]).expand(2, 2), torch.tensor([[0.25, 0.75]]).expand(2, 2), torch.tensor([[2.0, 3.0]]).expand(2, 2)],
        "sequences": [torch.tensor([[0.5, 1.5], [0.7, 0.9]]), torch.tensor([[0.25, 0.75], [1, 2]]), torch.tensor([[2.0, 3.0], [4, 5]])],
    }[shape]
    of_q, of_k, of_v = (torch.as_tensor(factor).expand(2, 2)[:, :, None, None] for factor in factors)
    out, lse = flash_attn_with_kvcache(
        *to_bshd(q, k, v), cache_seqlens=torch.tensor([37, 12], dtype=torch.int32), return_softmax_lse=True,
        q_descale=factors[0], k_descale=factors[1], v_descale=factors[2],
    )
    assert out.dtype == torch.bfloat16
    expected = attention(
        q.float() * of_q.repeat_interleave(3, 1), k.float() * of_k, v.float() * of_v, seqlens=[37, 12], dtype="bfloat16"
    )
    expected.check(out.transpose(1, 2), lse)


@needs("fp8", "append")
def test_flash_attn_new_fp8_tokens_are_kept_as_they_are():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors())
    cache_k, cache_v = to_bshd(k, v)
    new = to_bshd(k[:, :, :1], v[:, :, :1])
    flash_attn_with_kvcache(q.transpose(1, 2), cache_k, cache_v, *new, cache_seqlens=9, k_descale=0.3, v_descale=0.7)
    assert torch.equal(cache_k[:, 9].view(torch.uint8), new[0][:, 0].view(torch.uint8))
    assert torch.equal(cache_v[:, 9].view(torch.uint8), new[1][:, 0].view(torch.uint8))


@needs("mask")
@pytest.mark.parametrize("q_tokens", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_flash_attn_attention_chunk(q_tokens, packed):
    q, k, v = tensors(q_tokens=q_tokens)
    seqlens, leftpad = torch.tensor([37, 12], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    position = (seqlens - leftpad)[:, None, None] - q_tokens + torch.arange(q_tokens)[:, None]
    key = torch.arange(37) - leftpad[:, None, None]
    mask = (key // 5 == position // 5)[:, None]
    arguments = dict(cache_seqlens=seqlens, cache_leftpad=leftpad, causal=True, attention_chunk=5)
    if packed:
        arguments.update(cu_seqlens_q=torch.tensor([0, q_tokens, 2 * q_tokens], dtype=torch.int32), max_seqlen_q=q_tokens)
    queries = q.transpose(1, 2).flatten(0, 1) if packed else q.transpose(1, 2)
    out = flash_attn_with_kvcache(queries, *to_bshd(k, v), **arguments).view(2, q_tokens, 6, 40)
    expected = attention(q, k, v, seqlens=seqlens, leftpad=leftpad, causal=True, mask=mask.numpy())
    expected.check(out.transpose(1, 2))


@pytest.mark.parametrize("window", [[4, 0], torch.tensor([4, 0]), (4, None)])
def test_flash_attn_windows_of_any_kind(window):
    q, k, v = tensors()
    out = flash_attn_with_kvcache(*to_bshd(q, k, v), window_size=window)
    attention(q, k, v, window=(4, -1)).check(out.transpose(1, 2))


@pytest.mark.parametrize("window", [None, [-1, -1]])
def test_flash_attn_no_window(window):
    q, k, v = tensors()
    attention(q, k, v).check(flash_attn_with_kvcache(*to_bshd(q, k, v), window_size=window).transpose(1, 2))


@pytest.mark.parametrize(
    "name, error, arguments",
    [
        ("qv", NotImplementedError, dict(qv=torch.ones(1))),
        ("seqused_q", NotImplementedError, dict(seqused_q=torch.ones(1))),
        ("window_size", ValueError, dict(window_size=(1, 2, 3))),
        ("causl", TypeError, dict(causl=None)),
        ("block_table, page_table", ValueError, dict(block_table=torch.ones(1), page_table=torch.ones(1))),
        ("cache_seqlens", ValueError, dict(k=torch.ones(2, 1, 2, 40), v=torch.ones(2, 1, 2, 40))),
        ("v", ValueError, dict(k=torch.ones(2, 1, 2, 40), cache_seqlens=3)),
        ("rotary_sin", ValueError, dict(k=torch.ones(2, 1, 2, 40), v=torch.ones(2, 1, 2, 40), cache_seqlens=3, rotary_cos=torch.ones(9, 8))),
    ],
)  # fmt: skip
def test_flash_attn_refuses_by_name(name, error, arguments):
    with pytest.raises(error, match=f"^{name}(:| =)"):
        flash_attn_with_kvcache(*to_bshd(*tensors()), **arguments)


@needs("fp8")
def test_flash_attn_refuses_a_descale_without_its_float8():
    q, k, v = to_bshd(*tensors())
    with pytest.raises(NotImplementedError, match="^q_descale: q is torch.float16"):
        flash_attn_with_kvcache(q.half(), *(x.to(torch.float8_e4m3fn) for x in (k, v)), q_descale=0.5)


def test_flash_attn_a_position_outside_the_tables_is_refused():
    q, k, v = to_bshd(*tensors(q_tokens=2))
    new = k[:, :1].clone(), v[:, :1].clone()
    with pytest.raises(ValueError, match="^rotary_cos: shape .* position 8"):
        flash_attn_with_kvcache(q, k, v, *new, **rotary_tables(rows=8), cache_seqlens=8)


def test_flash_attn_takes_what_means_nothing():
    q, k, v = to_bshd(*tensors())
    hints = dict(qv=None, attention_chunk=0, pack_gqa=True, sm_margin=8, fa_version=3, gqa_parallel=True, max_seqlen_k_hint=37)
    same = flash_attn_with_kvcache(q, k, v, k_descale=torch.ones(2, 2), **hints)  # a cache that is not float8 has no scale
    assert torch.equal(same, flash_attn_with_kvcache(q, k, v))


def test_flash_attn_func():
    q, k, v = tensors(q_tokens=5)
    expected = attention(q, k, v, causal=True, window=(9, -1), scale=0.3)
    arguments = dict(causal=True, window_size=[9, -1], softmax_scale=0.3)
    out, lse, none = flash_attn_func(*to_bshd(q, k, v), return_attn_probs=True, deterministic=True, **arguments)
    expected.check(out.transpose(1, 2), lse)
    assert none is None and torch.equal(flash_attn_func(*to_bshd(q, k, v), 0.0, 0.3, True, [9, -1]), out)
    with pytest.raises(NotImplementedError, match="^dropout_p: "):
        flash_attn_func(*to_bshd(q, k, v), 0.1)


@needs("pages")
@pytest.mark.parametrize("pages", [None, "seqused_k", "cu_seqlens_k"])
def test_flash_attn_varlen_func(pages):
    """Prefill and decode in one call; vLLM's arguments by name, flash-attention's by place."""
    q, k, v = tensors(q_tokens=4, kv_tokens=48)
    counts, lengths = [4, 1], [13, 48]
    cu_q = torch.tensor([0, 4, 5], dtype=torch.int32)
    cu_k = torch.tensor([0, 13, 61], dtype=torch.int32)
    packed_q = torch.cat([q[0, :, :4].transpose(0, 1), q[1, :, :1].transpose(0, 1)])
    if pages is None:
        keys, values = (torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)]) for x in (k, v))
        out, lse, _ = flash_attn_varlen_func(packed_q, keys, values, cu_q, cu_k, 4, 48, 0.0, None, True, return_attn_probs=True)
    else:
        keys, values, table = paged(k, v, 6)
        given = dict(cu_seqlens_k=cu_k) if pages == "cu_seqlens_k" else dict(seqused_k=cu_k.diff(), scheduler_metadata=None)
        out, lse = flash_attn_varlen_func(
            q=packed_q, k=keys, v=values, max_seqlen_q=4, cu_seqlens_q=cu_q, max_seqlen_k=48, causal=True, block_table=table,
            return_softmax_lse=True, fa_version=3, window_size=[-1, -1], **given,
        )
    for b, (count, length) in enumerate(zip(counts, lengths)):
        one, rows = slice(b, b + 1), slice(*cu_q[b : b + 2].tolist())
        expected = attention(q[one, :, :count], k[one], v[one], seqlens=[length], causal=True)
        expected.check(out[rows].transpose(0, 1)[None], lse[None, :, rows])


def test_flash_attn_varlen_func_refuses_by_name():
    q = torch.ones(3, 2, 8)
    cu = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="^cu_seqlens_k: "):
        flash_attn_varlen_func(q, q, q, cu)
    with pytest.raises(NotImplementedError, match="^seqused_q: "):
        flash_attn_varlen_func(q, q, q, cu, cu, seqused_q=cu)


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
    assert captured == wrapper._seqlens.data_ptr() and wrapper._kept["indptr"] is buffers[0]


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
    fast_decode_plan(wrapper, *tables, 6, 2, 40, page, q_len_per_req=3, o_data_type=torch.float32, global_override_indptr_cpu=None)
    rows = q.transpose(1, 2).flatten(0, 1)
    out, lse = wrapper.run(rows, cache, return_lse=True, out=torch.empty_like(rows), lse=torch.empty(6, 6))
    expected = attention(q, k, v, seqlens=lengths, causal=True)
    expected.check(out.view(2, 3, 6, 40).transpose(1, 2), lse.view(2, 3, 6).transpose(1, 2) / math.log2(math.e))
    with pytest.raises(ValueError, match="^q: shape"):
        wrapper.run(rows[:2], cache)
    if graph:
        with pytest.raises(ValueError, match="^q_len_per_req = 1"):
            wrapper.plan(*tables, 6, 2, 40, page)


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
    out = single_decode_with_kv_cache(q[0, :, 0], keys, values, layout, v_scale=2.0)
    attention(q[:, :, :1], k, 2 * v).check(out[None, :, None])


def test_flashinfer_states():
    q, k, v = tensors(batch=1, q_tokens=3)
    parts = []
    for begin, end in ((0, 5), (5, 5), (5, 37)):
        given = q[0].transpose(0, 1), k[0, :, begin:end].transpose(0, 1), v[0, :, begin:end].transpose(0, 1)
        parts.append(single_prefill_with_kv_cache(*given, return_lse=True) if end > begin else (torch.full((3, 6, 40), math.nan), torch.full((3, 6), -math.inf)))
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
