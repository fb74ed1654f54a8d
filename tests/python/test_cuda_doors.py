"""The doors on a GPU: flash-attention, FlashInfer, PyTorch's attention, merge_states(), CuPy."""

import math

import numpy as np
import pytest
from gpu import lengths, tensors, torch
from oracle import attention

import lean_attention
from lean_attention import decode, flash_attn_with_kvcache, sdpa
from lean_attention.compat.flash_mla import flash_mla_with_kvcache, flash_mla_with_kvcache_fp8, get_mla_metadata
from lean_attention.compat.flashinfer import BatchDecodeWithPagedKVCacheWrapper


def bshd(*given):
    return [x.transpose(1, 2).contiguous() for x in given]


def test_flash_attn():
    q, k, v = tensors(q_tokens=2, kv_tokens=300)
    seqlens, leftpad = lengths(300, 40), lengths(0, 7)
    out, lse = flash_attn_with_kvcache(*bshd(q, k, v), cache_seqlens=seqlens, cache_leftpad=leftpad, causal=True, return_softmax_lse=True)
    attention(q, k, v, seqlens=seqlens, leftpad=leftpad, causal=True, dtype="bfloat16").check(out.transpose(1, 2), lse)


@pytest.mark.parametrize("dim", [64, 128])
def test_flash_attn_of_a_chunk(dim):
    """450 and 240 packed rows of a kv head: kernels of many rows, where there are any."""
    q, k, v = tensors(q_tokens=150, kv_tokens=300, dim=dim)
    seqlens = lengths(300, 180)
    out, lse = flash_attn_with_kvcache(*bshd(q, k, v), cache_seqlens=seqlens, causal=True, return_softmax_lse=True)
    attention(q, k, v, seqlens=seqlens, causal=True, dtype="bfloat16").check(out.transpose(1, 2), lse)


@pytest.mark.parametrize("heads, q_tokens", [(16, 1), (64, 2), (128, 1), (5, 3)])
@pytest.mark.parametrize("apart", [False, True])
def test_flash_mla(heads, q_tokens, apart):
    """Latent keys whose first 512 dims are the values; `apart`: those in memory of their own, by another kernel."""
    q, k, _ = tensors(batch=3, q_heads=heads, kv_heads=1, q_tokens=q_tokens, kv_tokens=256, dim=576)
    pool = k.transpose(1, 2).reshape(12, 64, 1, 576)
    table = torch.arange(12, dtype=torch.int32, device="cuda").view(3, 4)
    seqlens = lengths(256, 70, 9)
    exact = attention(q, k, k[..., :512], seqlens=seqlens, scale=0.1, causal=True, dtype="bfloat16")
    if apart:
        exact.check(decode(q, k, k[..., :512].contiguous(), seqlens=seqlens, scale=0.1, causal=True))
        return
    metadata = get_mla_metadata(seqlens, heads, 1)
    out, lse = flash_mla_with_kvcache(q.transpose(1, 2), pool, table, seqlens, 512, *metadata, causal=True, softmax_scale=0.1)
    exact.check(out.transpose(1, 2), lse)


@pytest.mark.parametrize("heads, q_tokens", [(16, 1), (64, 2), (128, 1), (5, 3)])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_flash_mla_of_float8_rows(heads, q_tokens, dtype):
    """Both kinds of float8, with a scale on the device that is read when the call runs; float8 queries are E4M3."""
    q, k, _ = tensors(batch=3, q_heads=heads, kv_heads=1, q_tokens=q_tokens, kv_tokens=256, dim=576)
    of_k = torch.tensor([0.25], device="cuda")
    k = (k / of_k).to(getattr(torch, dtype))
    pool = k.transpose(1, 2).reshape(12, 64, 1, 576)
    table = torch.arange(12, dtype=torch.int32, device="cuda").view(3, 4)
    seqlens = lengths(256, 70, 9)
    keys = k.float() * of_k
    exact = attention(q, keys, keys[..., :512], seqlens=seqlens, scale=0.1, causal=True, dtype="bfloat16")
    out, lse = flash_mla_with_kvcache_fp8(q.transpose(1, 2), pool, table, seqlens, 512, None, None, 0.1, True, None, of_k)
    exact.check(out.transpose(1, 2), lse)
    codes = q.to(torch.float8_e4m3fn)
    out, lse = flash_mla_with_kvcache_fp8(codes.transpose(1, 2), pool, table, seqlens, 512, None, None, 0.1, True, of_k, of_k)
    exact = attention(codes.float() * of_k, keys, keys[..., :512], seqlens=seqlens, scale=0.1, causal=True, dtype="bfloat16")
    exact.check(out.transpose(1, 2), lse)


def test_flash_attn_rows_of_a_cache():
    q, k, v = tensors(batch=3, kv_tokens=64)
    rows = torch.tensor([2, 0], device="cuda")
    out = flash_attn_with_kvcache(q[:2].transpose(1, 2), *bshd(k, v), cache_batch_idx=rows, cache_seqlens=31)
    attention(q[:2], k[rows], v[rows], seqlens=[31, 31], dtype="bfloat16").check(out.transpose(1, 2))


def test_flash_attn_pages():
    q, k, v = tensors(kv_tokens=64)
    pools = [x.transpose(1, 2).reshape(8, 16, 2, 64) for x in (k, v)]
    table = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
    out = flash_attn_with_kvcache(q.transpose(1, 2), *pools, cache_seqlens=lengths(64, 19), page_table=table)
    attention(q, k, v, seqlens=[64, 19], dtype="bfloat16").check(out.transpose(1, 2))


def test_flashinfer_tables_may_be_on_the_host():
    q, k, v = tensors(kv_tokens=64)
    cache = tuple(x.transpose(1, 2).reshape(8, 16, 2, 64) for x in (k, v))
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    host = [torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 6], [0, 1, 2, 3, 4, 5], [16, 4])]
    for _ in range(2):  # plan() once more: new tables are brought anew
        wrapper.plan(*host, 6, 2, 64, 16)
        for _ in range(2):
            out, lse = wrapper.run(q[:, :, 0], cache, return_lse=True)
            attention(q, k, v, seqlens=[64, 20], dtype="bfloat16").check(out[:, :, None], lse[:, :, None] / math.log2(math.e))


def test_flashinfer_in_a_graph():
    """plan() fills the wrapper's buffers, which the captured call reads."""
    q, k, v = tensors(kv_tokens=64)
    cache = tuple(x.transpose(1, 2).reshape(8, 16, 2, 64) for x in (k, v))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "NHD", True, False, lengths(0, 0, 0), lengths(*[0] * 8), lengths(0, 0))

    def plan(first, second):
        pages = [-(-n // 16) for n in (first, second)]
        indices = [*range(pages[0]), *range(4, 4 + pages[1])]
        last = [(n - 1) % 16 + 1 for n in (first, second)]
        wrapper.plan(lengths(0, pages[0], sum(pages)), lengths(*indices), lengths(*last), 6, 2, 64, 16)

    plan(64, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = wrapper.run(q[:, :, 0], cache, return_lse=True)
    for sizes in ((64, 20), (3, 49)):
        plan(*sizes)
        graph.replay()
        expected = attention(q, k, v, seqlens=sizes, dtype="bfloat16")
        expected.check(out[:, :, None], lse[:, :, None] / math.log2(math.e))


@pytest.fixture
def enabled(monkeypatch):
    """PyTorch's attention with ours behind flash attention; the list has an entry for each of our calls."""
    calls = []
    monkeypatch.setattr(sdpa, "decode", lambda *a, **k: (calls.append(1), decode(*a, **k))[1])
    lean_attention.enable_sdpa()
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        yield calls
    sdpa.disable_sdpa()


needs_hook = pytest.mark.skipif(not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="torch below 2.11")
attend = torch.nn.functional.scaled_dot_product_attention


@needs_hook
def test_sdpa(enabled):
    q, k, v = tensors()
    assert torch.equal(attend(q, k, v, enable_gqa=True), decode(q, k, v)) and len(enabled) == 1


@needs_hook
@pytest.mark.parametrize("arguments, q_tokens", [(dict(), 3), (dict(is_causal=True), 37)])
def test_sdpa_hands_back_the_rest(enabled, arguments, q_tokens):
    q, k, v = tensors(q_tokens=q_tokens)
    ours = attend(q, k, v, enable_gqa=True, **arguments)
    sdpa.disable_sdpa()
    assert torch.equal(ours, attend(q, k, v, enable_gqa=True, **arguments)) and not enabled


@needs_hook
def test_sdpa_compiles(enabled):
    q, k, v = tensors()
    step = torch.compile(lambda q, k, v: attend(q, k, v, enable_gqa=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(step(q, k, v), decode(q, k, v))


@pytest.mark.parametrize("cut", [0, 100, 300])
def test_merge_states(cut):
    q, k, v = tensors(kv_tokens=300)
    halves = [decode(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(0, cut), slice(cut, 300))]
    out, lse = lean_attention.merge_states(*halves[0], *halves[1])
    whole, whole_lse = decode(q, k, v, return_lse=True)
    torch.testing.assert_close(out, whole, atol=1e-2, rtol=2e-2)
    torch.testing.assert_close(lse, whole_lse, atol=1e-4, rtol=1e-5)


def test_cupy():
    cupy = pytest.importorskip("cupy")
    q, k, v = tensors(torch.float16, kv_tokens=300)
    given = [cupy.asarray(x) for x in (q, k, v)]
    out, lse = decode(*given, seqlens=[300, 41], return_lse=True)
    assert isinstance(out, cupy.ndarray)
    attention(q, k, v, seqlens=[300, 41], dtype="float16").check(cupy.asnumpy(out), cupy.asnumpy(lse))


def test_cupy_streams():
    cupy = pytest.importorskip("cupy")
    q, k, v = (cupy.asarray(x) for x in tensors(torch.float16))
    expected = cupy.asnumpy(decode(q, k, v))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = decode(q, k, v)
        stream.synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(out), expected)
