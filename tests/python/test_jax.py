"""lean_attention.jax.decode under jit: the table of decode(), on the CPU, and on a GPU where JAX has one."""

import os

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU's memory is for other tests too
jax = pytest.importorskip("jax")

from conftest import arrays, needs  # noqa: E402
from oracle import attention  # noqa: E402

import lean_attention  # noqa: E402
from lean_attention import Options  # noqa: E402
from lean_attention.jax import decode  # noqa: E402

ON_GPU = jax.default_backend() == "gpu" and lean_attention._core.machine()["cuda_built"]
DTYPES = ["float16", "bfloat16"] + ([] if ON_GPU else ["float32"])
DTYPE = DTYPES[-1]  # what a test that tries one takes


def inputs(dtype=DTYPE, **sizes):
    return [jax.numpy.asarray(x, dtype) for x in arrays(**sizes)]


def check(expected, out, lse=None):
    expected.check(np.asarray(out.astype("float32")), None if lse is None else np.asarray(lse))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_and_types(dtype, layout):
    q, k, v = inputs(dtype, batch=3, q_tokens=2, kv_tokens=301)
    given = (q, k, v) if layout == "bhsd" else [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    step = jax.jit(lambda q, k, v, n: decode(q, k, v, seqlens=n, causal=True, scale=0.3, layout=layout, return_lse=True))
    for lengths in ([301, 0, 17], [2, 300, 301]):  # the second time nothing is traced
        out, lse = step(*given, jax.numpy.asarray(lengths, "int32"))
        out = out if layout == "bhsd" else out.transpose(0, 2, 1, 3)
        check(attention(q, k, v, seqlens=lengths, causal=True, scale=0.3, dtype=dtype), out, lse)


@pytest.mark.parametrize(
    "rules",
    [
        dict(leftpad=[3, 1]),
        pytest.param(dict(window=(9, 0)), marks=needs("window")),
        pytest.param(dict(softcap=2.0), marks=needs("softcap")),
        pytest.param(dict(alibi_slopes=np.linspace(0.1, 0.6, 6, dtype=np.float32)), marks=needs("alibi")),
        pytest.param(dict(sinks=np.linspace(-1, 3, 6, dtype=np.float32)), marks=needs("sinks")),
        pytest.param(dict(mask=np.arange(37)[None, None, None] % 3 > 0), marks=needs("mask")),
    ],
    ids=lambda rules: "+".join(rules),
)
def test_score_rules(rules):
    q, k, v = inputs(q_tokens=2)
    arrays_of = {name: jax.numpy.asarray(x) for name, x in rules.items() if isinstance(x, np.ndarray)}
    plain = {name: x for name, x in rules.items() if name not in arrays_of}
    out, lse = jax.jit(lambda q, k, v, given: decode(q, k, v, return_lse=True, **given, **plain))(q, k, v, arrays_of)
    check(attention(q, k, v, dtype=DTYPE, **rules), out, lse)


@needs("pages")
def test_pages():
    q, k, v = inputs(kv_tokens=48)
    pools = [x.transpose(0, 2, 1, 3).reshape(8, 12, 2, 40) for x in (k, v)]
    table = np.arange(8, dtype=np.int32).reshape(2, 4)
    query, expected = q.transpose(0, 2, 1, 3), attention(q, k, v, seqlens=[48, 13], dtype=DTYPE)
    out = jax.jit(lambda q, k, v, t: decode(q, k, v, seqlens=[48, 13], block_table=t, layout="bshd"))(query, *pools, table)
    check(expected, out.transpose(0, 2, 1, 3))
    by_list = decode(query, *pools, seqlens=[48, 13], page_indptr=np.int32([0, 4, 8]), page_indices=table.ravel(), layout="bshd")
    assert (by_list == out).all()


def test_packed_tokens():
    q, k, v = inputs(kv_tokens=40)
    packed = [jax.numpy.concatenate([x[0, :, :30], x[1]], 1) for x in (k, v)]
    out, lse = decode(
        q[:, :, 0].transpose(1, 0, 2), *packed, cu_seqlens_q=[0, 1, 2], cu_seqlens_k=[0, 30, 70], max_seqlen_q=1, return_lse=True
    )
    check(attention(q, k, v, seqlens=[30, 40], dtype=DTYPE), out.transpose(1, 0, 2)[:, :, None], lse.T[:, :, None])


def test_inside_a_larger_program():
    q, k, v = inputs()

    @jax.jit
    def program(q, k, v):
        def step(q, _):
            q = decode(q * 2, k, v, options=Options(policy="data_parallel"))
            return q, q

        return jax.lax.scan(step, q, length=3)[1]

    for result in program(q, k, v):
        q = decode(q * 2, k, v)
        np.testing.assert_allclose(*(np.asarray(x.astype("float32")) for x in (result, q)), atol=2e-2 if DTYPE != "float32" else 1e-5)


def test_vmap():
    q, k, v = (jax.numpy.stack([x, x[::-1]]) for x in inputs())
    out = jax.vmap(decode)(q, k, v)
    assert (out[0] == decode(q[0], k[0], v[0])).all() and (out[1] == decode(q[1], k[1], v[1])).all()


@pytest.mark.parametrize(
    "name, error, change",
    [
        ("k", ValueError, lambda q, k, v: dict(k=k[..., :32])),
        ("v", ValueError, lambda q, k, v: dict(v=v[:, :, 1:])),
        ("seqlens", ValueError, lambda q, k, v: dict(seqlens=[1, 2, 3])),
        ("sinks", TypeError, lambda q, k, v: dict(sinks=q[0, :, 0, 0].astype("float16"))),
        ("layout", ValueError, lambda q, k, v: dict(layout="hbsd")),
    ],
)
def test_r50_misuse_names_the_argument_while_tracing(name, error, change):
    q, k, v = inputs()
    with pytest.raises(error, match=f"^{name}"):
        decode(**(dict(q=q, k=k, v=v) | change(q, k, v)))


@pytest.mark.skipif(ON_GPU, reason="lengths on a device are not looked at")
def test_packed_queries_and_page_lists_that_end_elsewhere_are_an_error_of_the_run():
    """The last token's row would be memory that nobody wrote; the last page's id would lie behind the list."""
    q, k, v = inputs(batch=1, q_tokens=3, kv_tokens=48)
    packed = (q[0], k[0], v[0])
    step = jax.jit(lambda starts, pages: decode(*packed, cu_seqlens_q=starts, cu_seqlens_k=pages, max_seqlen_q=3))
    with pytest.raises(Exception, match=r"cu_seqlens_q\[2\] = 2: must be the number of q's tokens, 3"):
        step(np.int32([0, 1, 2]), np.int32([0, 30, 48])).block_until_ready()
    assert step(np.int32([0, 1, 3]), np.int32([0, 30, 48])).shape == q[0].shape
    pools = [x[0].transpose(1, 0, 2).reshape(4, 12, 2, 40) for x in (k, v)]
    queries = q[0].transpose(1, 0, 2)[:2, None]
    lists = dict(seqlens=[12, 30], page_indices=np.int32([0, 1, 2]))
    step = jax.jit(lambda indptr: decode(queries, *pools, page_indptr=indptr, layout="bshd", **lists))
    with pytest.raises(Exception, match=r"page_indptr\[2\] = 4: page_indices has 3"):
        step(np.int32([0, 1, 4])).block_until_ready()


def test_what_the_backend_lacks_is_an_error_of_the_run():
    q, k, v = inputs()
    options = Options(determinism="batch_invariant", policy="data_parallel")
    with pytest.raises(Exception, match="lean_attention: .*determinism"):
        decode(q, k, v, options=options).block_until_ready()


def test_traced_arrays_at_the_other_door():
    """lean_attention.decode() reads memory, which a traced array has not."""
    with pytest.raises(TypeError, match="^q: .*lean_attention.jax.decode"):
        jax.jit(lean_attention.decode)(*inputs())


@pytest.mark.parametrize("kind", [np.array, list, tuple])
@pytest.mark.parametrize("name", ["seqlens", "leftpad"])
def test_lengths_beyond_32_bits_are_refused(name, kind):
    """JAX would keep their lower half."""
    q, k, v = inputs()
    with pytest.raises(ValueError, match=rf"^{name}\[0\] = 4294967301: must fit 32 bits"):
        decode(q, k, v, **{name: kind([2**32 + 5, 5])})
    with jax.enable_x64(True):
        wide = jax.numpy.asarray([2**32 + 5, 5], "int64")
    with pytest.raises(ValueError, match=rf"^{name}\[0\] = 4294967301: must fit 32 bits"):
        decode(q, k, v, **{name: wide})
    assert (decode(q, k, v, **{name: kind([5, 7])}) == decode(q, k, v, **{name: jax.numpy.asarray([5, 7], "int32")})).all()


@needs("pages")
@pytest.mark.skipif(ON_GPU, reason="on a device such numbers are clamped or passed over")
@pytest.mark.parametrize("far", [2**32 + 5, 5 - 2**32])
@pytest.mark.parametrize("name", ["seqlens", "leftpad", "block_table"])
def test_traced_numbers_beyond_32_bits_are_out_of_range(name, far):
    """Their lower half, 5, is not."""
    q, k, v = inputs(batch=1)
    numbers, given = [far], dict(layout="bhsd")
    if name == "block_table":
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        k, v = (x[:, :36].reshape(6, 6, 2, 40) for x in (k, v))  # a page 5 is there
        numbers, given = [[far]], dict(layout="bshd", seqlens=[6])
    with jax.enable_x64(True):
        numbers = jax.numpy.asarray(numbers, "int64")
        with pytest.raises(Exception, match=rf"{name}.* = -?214748364[78]: allowed"):
            jax.jit(lambda numbers: decode(q, k, v, **given, **{name: numbers}))(numbers).block_until_ready()


@needs("pages")
@pytest.mark.parametrize("csr", [False, True], ids=["table", "lists"])
def test_page_ids_of_64_bits_are_read_as_what_they_are(csr):
    """The operation reads 32 bits: 64 of them were read as two numbers each, and ids beyond 32 bits as their lower half."""
    q, k, v = inputs(kv_tokens=48)
    pools = [x.transpose(0, 2, 1, 3).reshape(8, 12, 2, 40) for x in (k, v)]
    lists = dict(page_indptr=[0, 4, 8], page_indices=list(range(8))) if csr else dict(block_table=[[0, 1, 2, 3], [4, 5, 6, 7]])
    given = dict(seqlens=[48, 13], layout="bshd")
    query = q.transpose(0, 2, 1, 3)
    expected = decode(query, *pools, **given, **{name: np.int32(x) for name, x in lists.items()})
    with jax.enable_x64(True):
        wide = {name: jax.numpy.asarray(x, "int64") for name, x in lists.items()}
        assert (decode(query, *pools, **given, **wide) == expected).all()
        assert (jax.jit(lambda wide: decode(query, *pools, **given, **wide))(wide) == expected).all()
    name = "page_indices" if csr else "block_table"
    far = np.int64(lists[name])
    far.ravel()[1] = 2**32
    for wide in (far, list(far)):
        with pytest.raises(ValueError, match=rf"^{name}\[1\] = 4294967296: must fit 32 bits"):
            decode(query, *pools, **given, **{**lists, name: wide})
