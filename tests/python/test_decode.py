"""decode() on host arrays of every kind, against the oracle."""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import arrays, needs
from oracle import attention

import lean_attention
from lean_attention import Options, decode


class DlpackOnly:
    """An array another library made: nothing but __dlpack__."""

    def __init__(self, array, versioned=True):
        self._array, self._versioned = array, versioned
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack__(self, **keywords):
        if not self._versioned and "max_version" in keywords:
            raise TypeError("unexpected keyword max_version")
        return self._array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("q_heads, kv_heads, dim, value_dim", [(1, 1, 1, 1), (6, 2, 40, 24), (8, 8, 64, 64), (5, 1, 100, 128)])
def test_one_token_of_each_sequence(q_heads, kv_heads, dim, value_dim):
    q, k, v = arrays(3, q_heads, kv_heads, 1, 301, dim, value_dim)
    seqlens = np.array([301, 0, 17], np.int32)
    out, lse = decode(q[:, :, 0], k, v, seqlens=seqlens, return_lse=True)
    attention(q, k, v, seqlens=seqlens).check(out[:, :, None], lse[:, :, None])
    assert (out[1] == 0).all() and (lse[1] == -np.inf).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_several_tokens_in_both_layouts(layout, causal):
    q, k, v = arrays(q_tokens=5, kv_tokens=53)
    expected = attention(q, k, v, seqlens=[53, 21], leftpad=[4, 0], causal=causal)
    if layout == "bshd":
        q, k, v = (x.transpose(0, 2, 1, 3).copy() for x in (q, k, v))
    out, lse = decode(q, k, v, seqlens=[53, 21], leftpad=[4, 0], causal=causal, layout=layout, return_lse=True)
    expected.check(out.transpose(0, 2, 1, 3) if layout == "bshd" else out, lse)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_ragged_queries_and_keys(layout):
    q_cu, k_cu = [0, 3, 3, 5], [0, 40, 41, 70]
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal(s, np.float32) for s in [(5, 6, 32), (70, 2, 32), (70, 2, 16)])
    given = (q, k, v) if layout == "bshd" else [x.transpose(1, 0, 2).copy() for x in (q, k, v)]
    out, lse = decode(*given, cu_seqlens_q=q_cu, cu_seqlens_k=k_cu, causal=True, layout=layout, return_lse=True)
    assert lse.shape == (6, 5)
    out = out if layout == "bshd" else out.transpose(1, 0, 2)
    for b in range(3):
        rows, keys = slice(q_cu[b], q_cu[b + 1]), slice(k_cu[b], k_cu[b + 1])
        sequence = [x.transpose(1, 0, 2)[None] for x in (q[rows], k[keys], v[keys])]
        attention(*sequence, causal=True).check(out[rows].transpose(1, 0, 2)[None], lse[None, :, rows])


def test_strided_views_are_read_and_written_in_place():
    q, k, v = arrays(kv_tokens=60, dim=48)
    wide_k = np.full((2, 60, 2, 96), np.nan, np.float32)
    wide_k[..., ::2] = k.transpose(0, 2, 1, 3)
    backwards_v = v[:, :, ::-1].copy()[:, :, ::-1]
    holder = np.full((2, 6, 1, 96), 7.0, np.float32)
    out = holder[..., 1::2]
    result = decode(q, wide_k.transpose(0, 2, 1, 3)[..., ::2], backwards_v, out=out)
    assert result is out and (holder[..., ::2] == 7).all()
    attention(q, k, v).check(out)


def test_broadcast_keys_need_no_copy():
    q, k, v = arrays(batch=3, q_heads=4, kv_heads=1)
    shared_k, shared_v = (np.broadcast_to(x[:1], (3, *x.shape[1:])) for x in (k, v))
    attention(q, shared_k, shared_v).check(decode(q, shared_k, shared_v))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, list])
def test_lengths_of_any_integer_type(dtype):
    q, k, v = arrays()
    seqlens = [37, 5] if dtype is list else np.array([37, 0, 5, 0], dtype)[::2]
    attention(q, k, v, seqlens=[37, 5]).check(decode(q, k, v, seqlens=seqlens))


def test_one_length_for_all():
    q, k, v = arrays()
    np.testing.assert_array_equal(decode(q, k, v, seqlens=9, leftpad=2), decode(q, k, v, seqlens=[9, 9], leftpad=[2, 2]))


def test_scale_0_is_a_number_and_none_the_default():
    q, k, v = arrays()
    mean = np.broadcast_to(v.mean(2, keepdims=True).repeat(3, 1), q.shape)
    for zero in (0.0, 0, -0.0, 1e-60, np.float32(0)):
        np.testing.assert_allclose(decode(q, k, v, scale=zero), mean, atol=1e-6)
    np.testing.assert_array_equal(decode(q, k, v, scale=None), decode(q, k, v))
    assert abs(decode(q, k, v) - mean).max() > 0.01


def doors_with_scale(torch, q, k, v):
    """decode() by every door, of [B, H, n, d] tensors with one query, to (B, H, 1, d)."""
    from lean_attention.compat.flash_attn import flash_attn_with_kvcache
    from lean_attention.compat.flashinfer import BatchDecodeWithPagedKVCacheWrapper
    from lean_attention.sdpa import scaled_dot_product_attention

    swapped = [x.transpose(1, 2) for x in (q, k, v)]

    def flashinfer(scale):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "HND")
        begins, pages, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [0, 1], [37, 37]))
        wrapper.plan(begins, pages, last, 6, 2, 40, 37, sm_scale=scale)
        return wrapper.run(q[:, :, 0], (k, v))[:, :, None]

    def compiled(scale):
        return torch.compile(lambda: decode(q, k, v, scale=scale), fullgraph=True, backend="aot_eager")()

    yield "sdpa", lambda scale: scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    yield "flash_attn", lambda scale: flash_attn_with_kvcache(*swapped, softmax_scale=scale).transpose(1, 2)
    yield "flashinfer", flashinfer
    yield "ops", lambda scale: torch.ops.lean_attention.decode(q, k, v, scale=scale)
    yield "compiled", compiled


def test_scale_0_is_a_number_at_every_door():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in arrays())
    mean, default = v.mean(2, keepdim=True).repeat_interleave(3, 1), decode(q, k, v)
    for name, door in doors_with_scale(torch, q, k, v):
        torch.testing.assert_close(door(0.0), mean, msg=name)
        torch.testing.assert_close(door(None), default, msg=name)


def test_scale_0_is_a_number_in_jax():
    jax = pytest.importorskip("jax")
    from lean_attention.jax import decode as jax_decode

    q, k, v = arrays()
    out = jax.jit(lambda q, k, v: jax_decode(q, k, v, scale=0.0))(*map(jax.numpy.asarray, (q, k, v)))
    np.testing.assert_allclose(np.asarray(out), v.mean(2, keepdims=True).repeat(3, 1), atol=1e-6)


def test_none_is_not_given():
    q, k, v = arrays(q_tokens=3)
    arguments = dict.fromkeys(name for name in lean_attention._core.ARGUMENTS if name not in "qkv")
    np.testing.assert_array_equal(decode(q, k, v, **arguments), decode(q, k, v))


def test_a_window_may_be_a_list():
    q, k, v = arrays(q_tokens=3)
    np.testing.assert_array_equal(decode(q, k, v, window=[4, 0]), decode(q, k, v, window=(4, 0)))


def test_float16():
    q, k, v = arrays(dtype=np.float16)
    out = decode(q, k, v)
    assert out.dtype == np.float16
    attention(q, k, v, dtype="float16").check(out)


def test_bfloat16_of_ml_dtypes():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = (x.astype(bfloat16) for x in arrays())
    out = decode(q, k, v)
    assert out.dtype == bfloat16
    attention(q, k, v, dtype="bfloat16").check(out)


@needs("fp8")
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scales", [None, [0.5], [0.5, 3.0]], ids=["1", "one", "per_head"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_float8_keys_and_values(name, scales, framework):
    import ml_dtypes

    q, k, v = arrays()
    q, (k, v) = q.astype(np.float16), (x.astype(getattr(ml_dtypes, name)) for x in (k, v))
    factor = np.ones(1, np.float32) if scales is None else np.array(scales, np.float32)
    given, arguments = (q, k, v), {} if scales is None else dict(k_scale=factor, v_scale=factor)
    if framework == "torch":
        torch = pytest.importorskip("torch")
        given = [torch.from_numpy(q), *(torch.from_numpy(x.view(np.uint8)).view(getattr(torch, name)) for x in (k, v))]
        arguments = {key: torch.from_numpy(value) for key, value in arguments.items()}
    exact = [x.astype(np.float64) * factor[None, :, None, None] for x in (k, v)]
    attention(q, *exact, dtype="float16").check(decode(*given, **arguments))


@pytest.mark.parametrize("versioned", [False, True])
def test_any_object_with_dlpack(versioned):
    q, k, v = arrays()
    wrapped = [DlpackOnly(x, versioned) for x in (q, k, v)]
    np.testing.assert_array_equal(decode(*wrapped), decode(q, k, v))


def test_numpy_and_torch_arrays_in_one_call():
    torch = pytest.importorskip("torch")
    q, k, v = arrays()
    expected = decode(q, k, v, seqlens=[37, 9])
    np.testing.assert_array_equal(decode(q, torch.from_numpy(k), v, seqlens=torch.tensor([37, 9])), expected)
    np.testing.assert_array_equal(decode(torch.from_numpy(q), k, v, seqlens=np.array([37, 9])).numpy(), expected)


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "sinks", "append_k", "append_v"])
def test_lazy_negatives_are_read_with_their_sign(name):
    """The imaginary part of a conjugated tensor is a view whose memory holds the opposite."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in arrays())
    mask, sinks = torch.randn(1, 1, 1, 37), torch.randn(6)
    given = dict(q=q, k=k, v=v, mask=mask, sinks=sinks, append_k=k[:, :, :1].clone(), append_v=v[:, :, :1].clone(), seqlens=[9, 30])
    expected = decode(**dict(given, k=k.clone(), v=v.clone()))
    if name in ("k", "v"):
        del given["append_k"], given["append_v"]
        expected = decode(**given)
    lazy = torch.complex(torch.randn_like(given[name]), -given[name]).conj().imag
    assert lazy.is_neg() and torch.equal(lazy, given[name])
    assert torch.equal(decode(**dict(given, **{name: lazy})), expected)


@needs("fp8")
def test_scales_may_be_plain_numbers():
    import ml_dtypes

    q, k, v = arrays()
    q, (k, v) = q.astype(np.float16), (x.astype(ml_dtypes.float8_e4m3fn) for x in (k, v))
    expected = decode(q, k, v, k_scale=np.array([0.5], np.float32), v_scale=np.array([3], np.float32))
    np.testing.assert_array_equal(decode(q, k, v, k_scale=0.5, v_scale=np.float32(3)), expected)
    np.testing.assert_array_equal(decode(q, k, v, k_scale=[0.5, 0.5], v_scale=[3, 3]), expected)


@needs("pages")
def test_an_empty_page_table_is_a_table():
    torch = pytest.importorskip("torch")
    q, pool = torch.ones(2, 6, 40), torch.ones(3, 4, 2, 40)
    none = torch.zeros(0, dtype=torch.int32)
    for table in (dict(page_indptr=[0, 0, 0], page_indices=none), dict(block_table=none.reshape(2, 0))):
        out, lse = decode(q, pool, pool, seqlens=[0, 0], layout="bshd", return_lse=True, **table)
        assert (out == 0).all() and (lse == -torch.inf).all()


@needs("pages")
def test_of_max_seqlen_k_a_table_holds_what_it_has_columns_for():
    torch = pytest.importorskip("torch")
    q, pool = torch.ones(2, 6, 40), torch.ones(6, 4, 2, 40)
    table = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    for columns in (table, table[:, :2], table[:, :0]):  # the rows of a view are not the whole table's
        room = 4 * columns.shape[1]
        out = decode(q, pool, pool, block_table=columns, seqlens=[room, 0], max_seqlen_k=512, layout="bshd")
        assert (out[0] == (1 if room else 0)).all() and (out[1] == 0).all()
        with pytest.raises(ValueError, match=rf"seqlens\[0\] = {room + 1}: allowed 0 to {room} "):
            decode(q, pool, pool, block_table=columns, seqlens=[room + 1, 0], max_seqlen_k=512, layout="bshd")


@needs("pages", "window")
def test_page_ids_that_no_query_reaches_may_be_anything():
    q, k, v = arrays(q_tokens=2)
    table = np.array([[-7, 1, 99], [0, 5, -1]], np.int32)
    pool = np.ones((6, 2, 4, 40), np.float32)
    decode(q[:1], pool, pool, block_table=table[:1], seqlens=[8], window=(2, 0))
    decode(q[1:], pool, pool, block_table=table[1:], seqlens=[7])


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    q, k, v = arrays()
    out, lse = decode(*(jax.numpy.asarray(x) for x in (q, k, v)), return_lse=True)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    np.testing.assert_array_equal(np.asarray(out), decode(q, k, v))


def test_jax_arrays_are_never_written_to():
    """Their capsules carry no read-only flag, and others may share the memory."""
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(x) for x in arrays())
    new = [x[:, :, :1] for x in (k, v)]
    zeros = dict(out=jax.numpy.zeros_like(q), lse=jax.numpy.zeros((2, 6, 1)))
    for name, given in [("k", dict(append_k=new[0], append_v=new[1], seqlens=[9, 9])), *((n, {n: z}) for n, z in zeros.items())]:
        before = [np.array(x) for x in (k, v, *zeros.values())]
        with pytest.raises(ValueError, match=f"^{name}: is read-only"):
            decode(q, k, v, **given)
        for was, x in zip(before, (k, v, *zeros.values())):
            np.testing.assert_array_equal(was, np.asarray(x))


def test_scale():
    q, k, v = arrays()
    attention(q, k, v, scale=0.3).check(decode(q, k, v, scale=0.3))


@pytest.mark.parametrize("policy", ["lean", "fixed_split", "data_parallel", "fixed_chunk"])
@pytest.mark.parametrize("fixup", ["last_arriver", "two_kernels"])
def test_options(policy, fixup):
    q, k, v = arrays(kv_tokens=1000)
    attention(q, k, v).check(decode(q, k, v, options=Options(policy=policy, fixup=fixup, workers=7)))


def test_batch_invariant_bits_depend_on_the_sequence_alone():
    q, k, v = arrays(kv_tokens=3000)
    options = Options(determinism="batch_invariant", workers=5)
    whole = decode(q, k, v, options=options)
    alone = decode(q[1:], k[1:], v[1:], options=Options(determinism="batch_invariant", workers=3))
    np.testing.assert_array_equal(whole[1:], alone)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(dict(window=(5, 0)), marks=needs("window")),
        pytest.param(dict(window=(0, -1)), marks=needs("window")),
        pytest.param(dict(softcap=1.5), marks=needs("softcap")),
        pytest.param(dict(alibi_slopes=np.linspace(0.1, 1, 6, dtype=np.float32)), marks=needs("alibi")),
        pytest.param(dict(sinks=np.linspace(-2, 5, 6, dtype=np.float32)), marks=needs("sinks")),
        pytest.param(dict(window=(9, 0), softcap=3.0, sinks=np.ones(6, np.float32)), marks=needs("window", "softcap", "sinks")),
    ],
    ids=lambda a: "+".join(a),
)
def test_score_rules(arguments):
    q, k, v = arrays(q_tokens=3)
    arguments = dict(arguments, seqlens=[37, 11], causal=True)
    out, lse = decode(q, k, v, return_lse=True, **arguments)
    attention(q, k, v, **arguments).check(out, lse)


@needs("mask")
@pytest.mark.parametrize("shape", [(2, 6, 3, 37), (1, 1, 3, 37), (2, 1, 1, 37)])
@pytest.mark.parametrize("boolean", [True, False])
def test_masks_broadcast(shape, boolean):
    q, k, v = arrays(q_tokens=3)
    random = np.random.default_rng(3)
    mask = random.random(shape) < 0.6 if boolean else random.standard_normal(shape).astype(np.float32)
    attention(q, k, v, mask=mask).check(decode(q, k, v, mask=mask))


@needs("pages")
@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("table", ["block_table", "csr"])
def test_pages(page, table):
    q, k, v = arrays(kv_tokens=48)
    seqlens = [48, 17]
    pages = 48 // page
    order = np.random.default_rng(5).permutation(2 * pages + 3)[: 2 * pages].astype(np.int32).reshape(2, pages)
    pool_k, pool_v = (np.full((2 * pages + 3, page, 2, 40), np.nan, np.float32) for _ in range(2))
    for b in range(2):
        for p in range(pages):
            pool_k[order[b, p]], pool_v[order[b, p]] = (x[b, :, p * page : (p + 1) * page].transpose(1, 0, 2) for x in (k, v))
    if table == "block_table":
        arguments = dict(block_table=order)
    else:
        arguments = dict(page_indptr=np.array([0, pages, 2 * pages], np.int32), page_indices=order.reshape(-1))
    out = decode(q.transpose(0, 2, 1, 3), pool_k, pool_v, seqlens=seqlens, layout="bshd", **arguments)
    attention(q, k, v, seqlens=seqlens).check(out.transpose(0, 2, 1, 3))


@needs("append")
def test_append_writes_the_cache_and_attends_to_the_new_token():
    q, k, v = arrays()
    new_k, new_v = arrays(seed=9)[1:]
    new_k, new_v = new_k[:, :, :1].copy(), new_v[:, :, :1].copy()
    lengths = np.array([30, 4], np.int32)
    expected_k, expected_v = k.copy(), v.copy()
    for b in range(2):
        expected_k[b, :, lengths[b]], expected_v[b, :, lengths[b]] = new_k[b, :, 0], new_v[b, :, 0]
    out = decode(q, k, v, seqlens=lengths + 1, append_k=new_k, append_v=new_v)
    np.testing.assert_array_equal(k, expected_k)
    np.testing.assert_array_equal(v, expected_v)
    attention(q, k, v, seqlens=lengths + 1).check(out)


def rotated(x, positions, cos, sin, interleaved):
    """Rotary embedding from its definition (arXiv:2104.09864): x [B, H, n, d], positions [B, n]."""
    half = cos.shape[1]
    c, s = (table[positions][:, None] for table in (cos, sin))
    first, second = (x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else (x[..., :half], x[..., half : 2 * half])
    out = x.copy()
    parts = first * c - second * s, first * s + second * c
    if interleaved:
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = parts
    else:
        out[..., :half], out[..., half : 2 * half] = parts
    return out


@needs("append")
@pytest.mark.parametrize("interleaved", [False, True])
def test_append_with_a_rotary_embedding(interleaved):
    q, k, v = arrays(q_tokens=2)
    new_k, new_v = (x[:, :, :2].copy() for x in arrays(seed=9)[1:])
    angles = np.random.default_rng(4).uniform(0, 6, (37, 16)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    lengths = np.array([32, 6], np.int32)
    positions = lengths[:, None] - 2 + np.arange(2)
    expected_k, expected_v = k.copy(), v.copy()
    turned = rotated(new_k, positions, cos, sin, interleaved)
    for b in range(2):
        expected_k[b, :, positions[b]], expected_v[b, :, positions[b]] = (x[b].transpose(1, 0, 2) for x in (turned, new_v))
    out = decode(
        q, k, v, seqlens=lengths, causal=True, append_k=new_k, append_v=new_v, rotary_cos=cos, rotary_sin=sin,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    np.testing.assert_allclose(k, expected_k, atol=1e-6)
    np.testing.assert_array_equal(v, expected_v)
    expected = attention(rotated(q, positions, cos, sin, interleaved), k, v, seqlens=lengths, causal=True)
    np.testing.assert_allclose(out, expected.out, atol=1e-5)


def test_threads_have_workspaces_of_their_own():
    q, k, v = arrays(kv_tokens=2000)
    expected = decode(q, k, v)
    wrong = []

    def work():
        for _ in range(20):
            if not np.array_equal(decode(q, k, v), expected):
                wrong.append(threading.get_ident())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_process_that_cannot_start_threads_computes_on_its_own():
    """libgomp would say so and end the process. Stacks of 1 GiB, and room for none."""
    script = """
import os, resource, sys
if len(sys.argv) == 1:  # a thread's stack is as large as the limit was when the process began
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 30, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    os.execve(sys.executable, [sys.executable, "-c", os.environ["SCRIPT"], "again"], os.environ)
import numpy as np
from lean_attention import Options, decode
q, k = np.ones((1, 8, 1, 16), np.float32), np.random.default_rng(0).standard_normal((1, 8, 300, 16), np.float32)
here = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (1 << 28)
resource.setrlimit(resource.RLIMIT_AS, (here, here))
out = decode(q, k, k, options=Options(workers=4))
assert np.isfinite(out).all()
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "SCRIPT": script}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr


def test_a_forked_child_of_a_process_with_threads_computes():
    """In an interpreter of its own: this one holds threads of other libraries, which forbid a fork."""
    script = """
import multiprocessing
import numpy as np
from lean_attention import decode

q, k, v = (np.random.default_rng(0).standard_normal((2, heads, tokens, 64), np.float32) for heads, tokens in ((4, 1), (2, 2000), (2, 2000)))
expected = decode(q, k, v)
context = multiprocessing.get_context("fork")
queue = context.Queue()
child = context.Process(target=lambda: queue.put(decode(q, k, v)))
child.start()
np.testing.assert_allclose(queue.get(timeout=60), expected, rtol=1e-5)
child.join()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=90)


def test_the_interpreter_ends_while_daemon_threads_compute():
    script = """
import threading, time
import numpy as np
from lean_attention import decode

q, k, v = (np.ones((2, heads, tokens, 64), np.float32) for heads, tokens in ((4, 1), (2, 3000), (2, 3000)))
calls = [0, 0]
def compute(thread):
    while True:
        decode(q, k, v)
        calls[thread] += 1
for thread in range(2):
    threading.Thread(target=compute, args=(thread,), daemon=True).start()
while min(calls) < 3:
    time.sleep(0.001)
"""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script], check=True, timeout=90)


def test_the_interpreter_ends_while_daemon_threads_are_inside_an_array():
    script = """
import threading, time
import numpy as np
from lean_attention import decode

entered = [0]
class Slow:
    dtype = np.dtype(np.float32)
    def __init__(self, array):
        self.array = array
    def __dlpack_device__(self):
        return (1, 0)
    def __dlpack__(self, **_):
        entered[0] += 1
        time.sleep(0.002)
        return self.array.__dlpack__()

q, k, v = (Slow(np.ones((2, heads, tokens, 64), np.float32)) for heads, tokens in ((4, 1), (2, 30), (2, 30)))
out = np.ones((2, 4, 1, 64), np.float32)
def compute():
    while True:
        decode(q, k, v, out=out)
for _ in range(2):
    threading.Thread(target=compute, daemon=True).start()
while entered[0] < 10:
    time.sleep(0.001)
"""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script], check=True, timeout=90)


def test_calls_keep_no_reference():
    q, k, v = arrays()
    wrapped = [DlpackOnly(x) for x in (q, k, v)]
    counted = [q, k, v, *wrapped, q.dtype]

    def calls():
        for _ in range(50):
            decode(q, k, v, seqlens=np.array([3, 4]))
            decode(*wrapped)
            with pytest.raises(ValueError):
                decode(q, k, v, seqlens=np.zeros(3, np.int32))
        gc.collect()  # other tests' garbage may hold the type, of which a process has one
        return [sys.getrefcount(x) for x in counted]

    assert calls() == calls()


def test_a_child_forked_before_any_call_has_its_own_threads():
    """Unless OpenMP is there before the fork, as in a build whose library has it: whether its threads ran nobody can tell."""
    code = """
import multiprocessing, numpy, lean_attention
from lean_attention import _core
def child(queue):
    a = numpy.ones((1, 1, 8), 'f')
    lean_attention.decode(a, a[None], a[None])
    queue.put(_core.machine()["executor"])
queue = multiprocessing.get_context("fork").SimpleQueue()
multiprocessing.get_context("fork").Process(target=child, args=(queue,)).start()
print(queue.get(), "libgomp" in open("/proc/self/maps").read(), sep=";")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    executor, has_openmp = done.stdout.strip().split(";")
    assert executor in (("one, after a fork",) if has_openmp == "True" else ("OpenMP", "std::thread"))


def test_workspaces_grow_and_are_given_back():
    q, k, v = arrays()
    small = decode(q, k, v)
    big = arrays(batch=64, q_heads=32, kv_heads=8, kv_tokens=64, dim=128)
    decode(*big)
    lean_attention.clear_workspaces()
    np.testing.assert_array_equal(decode(q, k, v), small)
