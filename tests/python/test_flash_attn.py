"""flash_attn_with_kvcache(), flash_attn_func(), flash_attn_varlen_func()."""

import functools
import math

import pytest

torch = pytest.importorskip("torch")

from conftest import needs  # noqa: E402
from oracle import attention  # noqa: E402
from pages import paged, tensors, to_bshd  # noqa: E402

from lean_attention import flash_attn_with_kvcache  # noqa: E402
from lean_attention.compat.flash_attn import flash_attn_func, flash_attn_varlen_func  # noqa: E402


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
@pytest.mark.parametrize("lengths", [None, [11, 48]])
def test_flash_attn_cache_batch_idx_with_a_table(lengths):
    """Without lengths all of a row counts: of the table, as of a cache without one."""
    q, k, v = tensors(batch=3, kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, 6)
    rows, given = torch.tensor([2, 0]), dict(cache_seqlens=None if lengths is None else torch.tensor(lengths, dtype=torch.int32))
    out = flash_attn_with_kvcache(q[:2].transpose(1, 2), pool_k, pool_v, cache_batch_idx=rows, page_table=table, **given)
    attention(q[:2], k[rows], v[rows], seqlens=lengths).check(out.transpose(1, 2))
    out = flash_attn_with_kvcache(q[:2].transpose(1, 2), pool_k, pool_v, block_table=table[rows], **given)
    attention(q[:2], k[rows], v[rows], seqlens=lengths).check(out.transpose(1, 2))


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
        "heads": [torch.tensor([x]).expand(2, 2) for x in ([0.5, 1.5], [0.25, 0.75], [2.0, 3.0])],
        "sequences": [torch.tensor(x) for x in ([[0.5, 1.5], [0.7, 0.9]], [[0.25, 0.75], [1, 2]], [[2.0, 3.0], [4, 5]])],
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


@needs("fp8", "append")
@pytest.mark.parametrize("new_tokens", [1, 3])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_flash_attn_new_16_bit_tokens_are_stored_in_the_units_of_a_scaled_cache(new_tokens, q_dtype):
    q, k, v = (x.bfloat16() for x in tensors())
    q, new = q.transpose(1, 2).to(q_dtype), to_bshd(k[:, :, :new_tokens], v[:, :, :new_tokens])
    caches = [(x / 8).to(torch.float8_e4m3fn) for x in to_bshd(k, v)]
    theirs, expected = ([x.clone() for x in caches] for _ in range(2))
    of_q = 0.5 if q_dtype == torch.float8_e4m3fn else None
    descales = dict(q_descale=of_q, k_descale=0.5, v_descale=torch.tensor([0.25, 2.0]))
    out = flash_attn_with_kvcache(q, *theirs, *new, cache_seqlens=9, causal=True, **descales)
    for cache, x, scale in zip(expected, new, (torch.full((2,), 0.5), descales["v_descale"])):
        cache[:, 9 : 9 + new_tokens] = (x.float() / scale[:, None]).to(cache.dtype)
    for cache, stored in zip(theirs, expected):
        assert torch.equal(cache.view(torch.uint8), stored.view(torch.uint8))
    read = flash_attn_with_kvcache(q, *expected, cache_seqlens=9 + new_tokens, causal=True, **descales)
    assert torch.equal(out, read)


@needs("fp8", "append")
def test_flash_attn_new_tokens_that_a_scaled_cache_does_not_take():
    q, k, v = to_bshd(*(x.bfloat16() for x in tensors()))
    caches = [x.to(torch.float8_e4m3fn) for x in (k, v)]
    given = dict(k=k[:, :1], v=v[:, :1], cache_seqlens=9)
    with pytest.raises(NotImplementedError, match="^k: torch.bfloat16: a cache with descales of each sequence"):
        flash_attn_with_kvcache(q, *caches, **given, k_descale=torch.rand(2, 2) + 0.5)
    with pytest.raises(TypeError, match="^v: torch.bfloat16: new keys are torch.float8_e4m3fn"):
        flash_attn_with_kvcache(q, *caches, **(given | dict(k=caches[0][:, :1])), k_descale=0.5)


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


NEW = torch.ones(2, 1, 2, 40)


@pytest.mark.parametrize(
    "name, error, arguments",
    [
        ("qv", NotImplementedError, dict(qv=torch.ones(1))),
        ("seqused_q", NotImplementedError, dict(seqused_q=torch.ones(1))),
        ("window_size", ValueError, dict(window_size=(1, 2, 3))),
        ("causl", TypeError, dict(causl=None)),
        ("block_table, page_table", ValueError, dict(block_table=torch.ones(1), page_table=torch.ones(1))),
        ("cache_seqlens", ValueError, dict(k=NEW, v=NEW)),
        ("v", ValueError, dict(k=NEW, cache_seqlens=3)),
        ("rotary_sin", ValueError, dict(k=NEW, v=NEW, cache_seqlens=3, rotary_cos=torch.ones(9, 8))),
        ("rotary_cos", ValueError, dict(rotary_cos=torch.ones(9, 8), rotary_sin=torch.ones(9, 8))),  # q would not be turned
        ("v", ValueError, dict(v=NEW, cache_seqlens=3)),
    ],
)  # fmt: skip
def test_flash_attn_names_what_it_refuses(name, error, arguments):
    with pytest.raises(error, match=f"^{name}(:| =)"):
        flash_attn_with_kvcache(*to_bshd(*tensors()), **arguments)


@pytest.mark.parametrize("name", ["s_aux", "learnable_sink", "alibi_slopes"])
def test_r50_flash_attn_loses_no_gradient(name):
    """Sinks and slopes are made float32 on their way: of those that are learned nothing would come back."""
    q, k, v = to_bshd(*tensors())
    meant = "alibi_slopes" if name == "alibi_slopes" else "sinks"
    for dtype in (torch.float32, torch.bfloat16):
        learned = torch.ones(q.shape[2], dtype=dtype, requires_grad=True)
        with pytest.raises(RuntimeError, match=f"^{meant}: requires a gradient"):
            flash_attn_with_kvcache(q, k, v, **{name: learned})
        with torch.no_grad():
            out = flash_attn_with_kvcache(q, k, v, **{name: learned})
        assert torch.equal(out, flash_attn_with_kvcache(q, k, v, **{name: learned.detach()}))


@needs("fp8")
def test_flash_attn_refuses_a_descale_without_its_float8():
    q, k, v = to_bshd(*tensors())
    with pytest.raises(NotImplementedError, match="^q_descale: q is torch.float16"):
        flash_attn_with_kvcache(q.half(), *(x.to(torch.float8_e4m3fn) for x in (k, v)), q_descale=0.5)


@needs("fp8")
def test_flash_attn_refuses_descales_of_other_batches_and_float8_queries_alone():
    q, k, v = to_bshd(*tensors())
    k8, v8 = (x.to(torch.float8_e4m3fn) for x in (k, v))
    for name, rows in (("k_descale", 3), ("v_descale", 4)):
        with pytest.raises(ValueError, match=rf"^{name}: shape \({rows}, 2\): expected \[2, 2\]"):
            flash_attn_with_kvcache(q.bfloat16(), k8, v8, **{name: torch.ones(rows, 2)})
    with pytest.raises(TypeError, match="^q: torch.float8_e4m3fn: k and v are torch.bfloat16"):
        flash_attn_with_kvcache(q.to(torch.float8_e4m3fn), k.bfloat16(), v.bfloat16(), q_descale=0.5)
    cu = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 37, 74], dtype=torch.int32)
    with pytest.raises(TypeError, match="^q: torch.float8_e4m3fn: k and v are torch.bfloat16"):
        flash_attn_varlen_func(q.flatten(0, 1).to(torch.float8_e4m3fn), k.flatten(0, 1).bfloat16(), v.flatten(0, 1).bfloat16(), *cu)


@pytest.mark.parametrize(
    "message, arguments",
    [
        (r"window_size = \(3.7, 0\): two integers are needed", dict(window_size=(3.7, 0))),
        (r"window_size = \(True, 0\): two integers are needed", dict(window_size=(True, 0))),
        (r"window_size = 3: expected \(left, right\)", dict(window_size=3)),
        ("scale: True: a number is needed", dict(softmax_scale=True)),  # flash-attention 3's causal, by place
        (r"cache_seqlens\[0\] = True: an integer is needed", dict(cache_seqlens=True)),
        ("cache_batch_idx: <class 'list'>: a torch tensor of int32 or int64", dict(cache_batch_idx=[0, 1])),
        ("cache_batch_idx: torch.float32: a torch tensor", dict(cache_batch_idx=torch.tensor([0.5, 1]))),
        ("output_scale: ", dict(output_scale=torch.ones(1))),
        ("block_sparse_tensors: ", dict(block_sparse_tensors=(1, 2))),
        ("aux_scalars: ", dict(aux_scalars=(1,))),
    ],
)
def test_flash_attn_refuses_by_name(message, arguments):
    q, k, v = to_bshd(*tensors())
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^{message}"):
        flash_attn_with_kvcache(q, k, v, **arguments)


def test_flash_attn_lengths_have_the_callers_name():
    q, k, v = to_bshd(*tensors())
    new, cu = dict(k=k[:, :2].clone(), v=v[:, :2].clone()), torch.tensor([0, 1, 2], dtype=torch.int32)
    pools, table = (k[:, :16], v[:, :16]), torch.tensor([[0], [1]], dtype=torch.int32)
    for message, call in (
        (r"cache_seqlens\[0\] = 38: allowed 0 to 37", lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=38)),
        (r"cache_seqlens\[0\] = -1: allowed 0", lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=-1, **new)),
        (r"cache_seqlens with the new tokens: lengths\[0\] = 38", lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=36, **new)),
        (r"cache_leftpad: its length is 1", lambda: flash_attn_with_kvcache(q, k, v, cache_leftpad=cu[:1])),
        (r"seqused_k\[1\] = 17", lambda: flash_attn_varlen_func(q[:, 0], *pools, cu, block_table=table, seqused_k=16 + cu[:2])),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


@needs("fp8")
def test_flash_attn_descales_of_no_sequence():
    q, k, v = (x[:0].to(torch.float8_e4m3fn) for x in to_bshd(*tensors()))
    out = flash_attn_with_kvcache(q, k, v, k_descale=torch.ones(0, 2), v_descale=torch.ones(0, 2))
    assert out.shape == q.shape


@needs("fp8")
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", ["number", "heads", "v alone", "no sequence"])
def test_flash_attn_descales_are_float32_whatever_torchs_default_is(shape, default):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in to_bshd(*tensors()))
    if shape == "no sequence":
        q, k, v = q[:0], k[:0], v[:0]
    heads = torch.tensor([0.7, 1.3])
    descales = {
        "number": dict(q_descale=3.1234567, k_descale=0.1237, v_descale=1.2347),
        "heads": dict(q_descale=3.1234567, k_descale=heads, v_descale=heads),
        "v alone": dict(v_descale=heads),
        "no sequence": dict(k_descale=torch.ones(0, 2), v_descale=torch.ones(0, 2)),
    }[shape]
    expected = flash_attn_with_kvcache(q, k, v, **descales)
    torch.set_default_dtype(default)
    try:
        out = flash_attn_with_kvcache(q, k, v, **descales)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(out, expected)


def test_flash_attn_takes_what_one_rank_asks_for():
    q, k, v = to_bshd(*tensors())
    alone = dict(cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None)
    assert torch.equal(flash_attn_with_kvcache(q, k, v, **alone), flash_attn_with_kvcache(q, k, v))
    with pytest.raises(NotImplementedError, match="^cp_world_size: "):
        flash_attn_with_kvcache(q, k, v, cp_world_size=2)


TABLES = rotary_tables()


@pytest.mark.parametrize(
    "message, arguments",
    [
        (r"q: shape \(2, 6, 40\): expected \[B, n_q, Hq, d\]", dict(q=torch.ones(2, 6, 40))),
        (r"q: shape \(2, 1, 6, 40\): expected \[total, heads, d\]", dict(cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32))),
        (r"k: shape \(2, 2, 40\): expected \[B, n_new, Hkv, d\]", dict(k=NEW[:, 0], v=NEW[:, 0])),
        (r"v: shape \(2, 2, 40\): expected \[B, n_new, Hkv, d\]", dict(v=NEW[:, 0])),
        (r"k: shape \(1, 1, 2, 40\): expected \(2, 1, 2, 40\)", dict(k=NEW[:1], v=NEW[:1])),
        (r"v: shape \(2, 3, 2, 40\): expected \(2, 1, 2, 40\)", dict(v=NEW.expand(2, 3, 2, 40))),
        (r"k: shape \(2, 1, 1, 40\): expected \(2, 1, 2, 40\)", dict(k=NEW[:, :, :1])),
        (r"v: shape \(2, 1, 2, 39\): expected \(2, 1, 2, 40\)", dict(v=NEW[..., 1:])),
        (r"k: shape \(2, 1, 2, 40\): expected \[total, heads, d\]", dict(cu_seqlens_k_new=torch.tensor([0, 1, 2], dtype=torch.int32))),
        (r"cu_seqlens_k_new: shape \(2,\): expected \(3,\)", dict(cu_seqlens_k_new=torch.tensor([0, 2], dtype=torch.int32))),
        (r"rotary_seqlens: shape \(1,\): expected \(2,\)", dict(TABLES, rotary_seqlens=torch.tensor([4], dtype=torch.int32))),
        (r"rotary_seqlens\[1\] = -3: allowed 0 and more", dict(TABLES, rotary_seqlens=[4, -3])),
        (r"rotary_cos: shape \(1, 60, 8\): expected \[positions, rotary_dim / 2\]", dict(TABLES, rotary_cos=torch.ones(1, 60, 8))),
        (r"rotary_sin: shape \(60, 1\): expected \(60, 8\)", dict(TABLES, rotary_sin=torch.ones(60, 1))),
        (r"rotary_sin: shape \(9, 8\): expected \(60, 8\)", dict(TABLES, rotary_sin=torch.ones(9, 8), rotary_seqlens=4)),
        (r"rotary_cos: shape \(60, 21\): head dim is 40", dict(rotary_cos=torch.ones(60, 21), rotary_sin=torch.ones(60, 21))),
        (r"cache_seqlens: shape \(1,\): expected \(2,\)", dict(cache_seqlens=torch.tensor([5], dtype=torch.int32))),
    ],
)
def test_flash_attn_an_axis_that_is_missing_is_not_taken_for_another(message, arguments):
    """Without their axis of tokens k [2, 2, 40] would be two tokens, written elsewhere; and nothing is written of what is refused."""
    q, k, v = to_bshd(*tensors())
    given = dict(dict(q=q, k_cache=k.clone(), v_cache=v.clone(), k=NEW, v=NEW, cache_seqlens=5), **arguments)
    with pytest.raises(ValueError, match=f"^{message}"):
        flash_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"], k) and torch.equal(given["v_cache"], v)


@needs("append")
@pytest.mark.parametrize(
    "error, message, arguments",
    [
        (ValueError, "out: shape", dict(out=torch.ones(2, 1, 6, 39))),
        (ValueError, "alibi_slopes: ", dict(alibi_slopes=torch.ones(5))),
        (ValueError, "softcap = -1", dict(softcap=-1.0)),
        (ValueError, r"cache_leftpad\[0\] = 99: ", dict(cache_leftpad=[99, 0])),
        (ValueError, r"cache_seqlens with the new tokens: lengths\[1\] = 38: ", dict(cache_seqlens=[1, 35])),
        (RuntimeError, "sinks: requires a gradient", dict(s_aux=torch.ones(6, requires_grad=True))),
        (TypeError, "scale: True: a number is needed", dict(softmax_scale=True)),
    ],
)
def test_flash_attn_writes_no_new_tokens_of_a_call_that_is_refused(error, message, arguments):
    """Three tokens beside one query are written by a call ahead of the query's."""
    q, k, v = to_bshd(*tensors())
    cache = k.clone(), v.clone()
    new = NEW.expand(2, 3, 2, 40)
    with pytest.raises(error, match=f"^{message}"):
        flash_attn_with_kvcache(q, *cache, new, new, **{"cache_seqlens": 5, **arguments})
    assert torch.equal(cache[0], k) and torch.equal(cache[1], v)


@needs("append", "fp8")
def test_flash_attn_writes_nothing_of_sequences_before_one_that_is_refused():
    """Scales of each sequence are a call each."""
    q, k, v = to_bshd(*tensors())
    cache = [x.to(torch.float8_e4m3fn) for x in (k, v)]
    before, new, out = [x.clone() for x in cache], cache[0][:, :3].clone(), torch.zeros(2, 1, 6, 40)
    with pytest.raises(ValueError, match=r"^cache_leftpad\[0\] = 99: "):
        flash_attn_with_kvcache(
            q, *cache, new, new, cache_seqlens=5, cache_leftpad=[0, 99], k_descale=torch.rand(2, 2) + 0.5, out=out
        )
    assert not out.any() and all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(cache, before))


@needs("append")
def test_flash_attn_packed_new_tokens_are_as_many_as_the_queries_that_say_where_they_are():
    q, k, v = to_bshd(*tensors())
    cu = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^k: shape \(3, 2, 40\): expected \(2, 2, 40\)"):
        flash_attn_with_kvcache(q[:, 0], k, v, torch.ones(3, 2, 40), torch.ones(3, 2, 40), cu_seqlens_q=cu, cache_seqlens=5)


@needs("append", "mask")
def test_flash_attn_lengths_may_be_lists_or_numbers_whatever_is_counted_with_them():
    q, k, v = to_bshd(*tensors(q_tokens=3))
    new, of_int32 = dict(k=NEW.expand(2, 3, 2, 40), v=NEW.expand(2, 3, 2, 40)), functools.partial(torch.tensor, dtype=torch.int32)
    for arguments in (new, dict(new, causal=True, **rotary_tables()), dict(attention_chunk=4), dict(new, attention_chunk=4)):
        results = [
            flash_attn_with_kvcache(q, k.clone(), v.clone(), cache_seqlens=seqlens, cache_leftpad=leftpad, **arguments)
            for seqlens, leftpad in ((of_int32([20, 7]), of_int32([2, 2])), ([20, 7], (2, 2)), ((20, 7), 2))
        ]
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
        for error, message, seqlens in (
            (TypeError, r"cache_seqlens\[1\] = 0.5: an integer is needed", [20, 0.5]),
            (TypeError, r"cache_seqlens\[0\] = True: an integer is needed", True),
            (ValueError, r"cache_seqlens\[0\] = 1099511627776: must fit 32 bits", 2**40),
        ):
            with pytest.raises(error, match=f"^{message}"):
                flash_attn_with_kvcache(q, k, v, cache_seqlens=seqlens, **arguments)


@needs("append")
@pytest.mark.parametrize("packed", [False, True])
def test_flash_attn_no_new_tokens_are_none(packed):
    q, k, v = to_bshd(*tensors())
    none = k[0, :0] if packed else k[:, :0]
    given = dict(cu_seqlens_k_new=torch.zeros(3, dtype=torch.int32)) if packed else {}
    cache = k.clone(), v.clone()
    out = flash_attn_with_kvcache(q, *cache, none, none, **rotary_tables(), cache_seqlens=9, softmax_scale=0.0, **given)
    attention(*(x.transpose(1, 2) for x in (q, k, v)), seqlens=[9, 9], scale=0.0).check(out.transpose(1, 2))
    assert torch.equal(cache[0], k) and torch.equal(cache[1], v)


@needs("fp8", "append")
@pytest.mark.parametrize("new_tokens", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_flash_attn_new_float8_tokens_beside_queries_of_any_type(dtype, new_tokens):
    q, k, v = to_bshd(*tensors())
    caches = [x.to(torch.float8_e4m3fn) for x in (k, v)]
    new = [x[:, 9 : 9 + new_tokens].clone() for x in caches]
    expected = flash_attn_with_kvcache(q.to(dtype), *(x.clone() for x in caches), cache_seqlens=9 + new_tokens)
    assert torch.equal(flash_attn_with_kvcache(q.to(dtype), *caches, *new, cache_seqlens=9), expected)


@needs("mask", "pages")
@pytest.mark.parametrize("longest", [None, 0, 1])
def test_flash_attn_chunks_of_no_query(longest):
    pools, table, none = torch.ones(2, 4, 2, 40), torch.tensor([[0], [1]], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    out = flash_attn_varlen_func(
        torch.ones(0, 6, 40), pools, pools, none, max_seqlen_q=longest, block_table=table, seqused_k=[3, 4], attention_chunk=2
    )
    assert out.shape == (0, 6, 40)


def test_flash_attn_pools_have_an_axis_of_pages():
    q, k, v = to_bshd(*tensors())
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^k_cache: shape \(74, 2, 40\): expected \[pages, page, Hkv, d\]"):
        flash_attn_with_kvcache(q, k.flatten(0, 1), v.flatten(0, 1), block_table=table)
    cu = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^k: shape \(74, 2, 40\): expected \[pages, page, Hkv, d\]"):
        flash_attn_varlen_func(q[:, 0], k.flatten(0, 1), v.flatten(0, 1), cu, seqused_k=cu[1:], block_table=table, attention_chunk=4)


@needs("pages")
@pytest.mark.parametrize("row", [-1, 2, 2**32 + 1])
def test_flash_attn_a_row_that_is_not_there_is_refused(row):
    """Indexing would take -1 for the last one, and 32 bits 2^32 + 1 for 1."""
    q, k, v = tensors(kv_tokens=48)
    pool_k, pool_v, table = paged(k, v, 6)
    arguments = dict(cache_batch_idx=torch.tensor([0, row]), cache_seqlens=torch.tensor([48, 13], dtype=torch.int32))
    for cache in ((pool_k, pool_v, table), (*to_bshd(k, v), None)):
        with pytest.raises(ValueError, match=r"^block_table\[1, 0\] = -1: allowed 0 to"):
            flash_attn_with_kvcache(q.transpose(1, 2), *cache[:2], block_table=cache[2], **arguments)


def test_flash_attn_a_position_outside_the_tables_is_refused():
    q, k, v = to_bshd(*tensors(q_tokens=2))
    new = k[:, :1].clone(), v[:, :1].clone()
    with pytest.raises(ValueError, match="^rotary_cos: shape .* position 8"):
        flash_attn_with_kvcache(q, k, v, *new, **rotary_tables(rows=8), cache_seqlens=8)


def test_flash_attn_takes_what_means_nothing():
    q, k, v = to_bshd(*tensors())
    none = dict.fromkeys(("output_scale", "mask_mod", "aux_tensors", "aux_tensor_leading_dims", "block_sparse_tensors", "dynamic_causal"))
    hints = dict(none, qv=None, attention_chunk=0, pack_gqa=True, sm_margin=8, fa_version=3, gqa_parallel=True, max_seqlen_k_hint=37)
    same = flash_attn_with_kvcache(q, k, v, k_descale=torch.ones(2, 2), **hints)  # a cache that is not float8 has no scale
    assert torch.equal(same, flash_attn_with_kvcache(q, k, v))


def test_flash_attn_func():
    q, k, v = tensors(q_tokens=5)
    expected = attention(q, k, v, causal=True, window=(9, -1), scale=0.3)
    arguments = dict(causal=True, window_size=[9, -1], softmax_scale=0.3)
    out, lse, none = flash_attn_func(*to_bshd(q, k, v), return_attn_probs=True, deterministic=True, **arguments)
    expected.check(out.transpose(1, 2), lse)
    assert none is None and torch.equal(flash_attn_func(*to_bshd(q, k, v), 0.0, 0.3, True, [9, -1]), out)
    both = flash_attn_func(*to_bshd(q, k, v), return_attn_probs=True, return_softmax_lse=True, **arguments)
    assert torch.equal(both[0], out) and torch.equal(both[1], lse) and both[2] is None
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
