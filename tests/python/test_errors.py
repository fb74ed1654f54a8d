"""R50: misuse raises an exception whose message begins with the argument."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import arrays, needs
from oracle import attention

import lean_attention
from lean_attention import Options, decode, supports

INT32 = np.int32


def swapped(array):
    return array.astype(array.dtype.newbyteorder())


@pytest.mark.parametrize(
    "name, error, change",
    [
        ("q", TypeError, dict(q="no array")),
        ("q", TypeError, dict(q=swapped(np.ones((2, 6, 1, 40), np.float32)))),
        ("q", TypeError, dict(q=np.ones((2, 6, 1, 40), np.float64))),
        ("q", TypeError, dict(q=np.zeros((2, 6, 1, 40), []))),  # elements of no bytes
        ("seqlens", TypeError, dict(seqlens=np.zeros(2, "V0"))),
        ("q", ValueError, dict(q=np.ones((6, 40), np.float32))),
        ("q", ValueError, dict(q=np.ones((1, 2, 6, 1, 40), np.float32))),
        ("q: heads", ValueError, dict(q=np.ones((2, 5, 1, 40), np.float32))),
        ("q: its number of tokens", ValueError, dict(q=np.ones((2, 6, 0, 40), np.float32))),
        ("k", ValueError, dict(k=np.ones((2, 2, 37, 32), np.float32))),
        ("k", ValueError, dict(k=np.ones((3, 2, 37, 40), np.float32), v=np.ones((3, 2, 37, 40), np.float32))),
        ("k.dtype", ValueError, dict(k=np.ones((2, 2, 37, 40), np.float16))),
        ("k", TypeError, dict(k=None)),
        ("v", ValueError, dict(v=np.ones((2, 2, 36, 40), np.float32))),
        ("v", ValueError, dict(v=np.ones((2, 2, 37), np.float32))),
        ("v.dtype", ValueError, dict(v=np.ones((2, 2, 37, 40), np.float16))),
        ("out", ValueError, dict(out=np.ones((2, 6, 1, 41), np.float32))),
        ("out", ValueError, dict(out=np.broadcast_to(np.float32(1), (2, 6, 1, 40)))),
        ("out.dtype", ValueError, dict(out=np.ones((2, 6, 1, 40), np.float16))),
        ("lse", TypeError, dict(lse=np.ones((2, 6, 1), np.float64))),
        ("lse", ValueError, dict(lse=np.ones((2, 6), np.float32))),
        ("seqlens", ValueError, dict(seqlens=np.zeros(3, INT32))),
        ("seqlens", ValueError, dict(seqlens=np.zeros((2, 1), INT32))),
        ("seqlens", TypeError, dict(seqlens=np.zeros(2, np.float32))),
        ("leftpad", ValueError, dict(leftpad=np.zeros(1, INT32))),
        ("max_seqlen_q", ValueError, dict(q=np.ones((6, 5, 40), np.float32), cu_seqlens_q=[0, 2, 5], max_seqlen_q=-1)),
        ("cu_seqlens_k", ValueError, dict(k=np.ones((2, 70, 40), np.float32), v=np.ones((2, 70, 40), np.float32), cu_seqlens_k=[0, 70])),
        ("scale", TypeError, dict(scale="large")),
        ("scale", ValueError, dict(scale=float("inf"))),
        ("softcap", ValueError, dict(softcap=-1.0)),
        ("window", TypeError, dict(window=4)),
        ("window[0]", ValueError, dict(window=(-2, 0))),
        ("sinks", TypeError, dict(sinks=np.ones(6))),
        ("sinks", ValueError, dict(sinks=np.ones(5, np.float32))),
        ("sinks", ValueError, dict(sinks=np.ones(12, np.float32)[::2])),
        ("alibi_slopes", ValueError, dict(alibi_slopes=np.ones((3, 6), np.float32))),
        ("mask", ValueError, dict(mask=np.ones((2, 6, 1, 36), bool))),
        ("tree_mask", TypeError, dict(tree_mask=np.ones((2, 1, 1), np.float32))),
        ("block_table", ValueError, dict(block_table=np.zeros((3, 1), INT32))),
        ("block_table", TypeError, dict(block_table=np.zeros((2, 1), np.int64))),
        ("append_k", ValueError, dict(append_k=np.ones((2, 2, 1, 40), np.float32))),
        ("append_v", ValueError, dict(append_k=np.ones((2, 2, 1, 40), np.float32), append_v=np.ones((2, 6, 1, 40), np.float32), seqlens=[1, 2])),
        ("rotary_cos", ValueError, dict(rotary_cos=np.ones((37, 8), np.float32), rotary_sin=np.ones((37, 8), np.float32))),
        ("k_scale", ValueError, dict(k_scale=np.ones(1, np.float32))),
        ("layout", ValueError, dict(layout="sbhd")),
        ("options.splits", ValueError, dict(options=Options(splits=3))),
    ],
)
def test_misuse_names_the_argument(name, error, change):
    q, k, v = arrays()
    arguments = dict(q=q, k=k, v=v) | change
    with pytest.raises(error) as raised:
        decode(**arguments)
    assert str(raised.value).startswith(name), raised.value


@needs("append")
@pytest.mark.parametrize(
    "name, change",
    [
        ("rotary_cos", dict(rotary_cos=np.ones((36, 8), np.float32), rotary_sin=np.ones((36, 8), np.float32))),
        ("rotary_sin", dict(rotary_cos=np.ones((37, 8), np.float32), rotary_sin=np.ones((37, 7), np.float32))),
        ("rotary_cos, rotary_sin", dict(rotary_cos=np.ones((37, 8), np.float32))),
        ("k: is read-only", dict(k=np.broadcast_to(np.float32(1), (2, 2, 37, 40)))),
    ],
)
def test_misuse_of_append_names_the_argument(name, change):
    q, k, v = arrays()
    new_k, new_v = k[:, :, :1].copy(), v[:, :, :1].copy()
    arguments = dict(q=q, k=k, v=v, append_k=new_k, append_v=new_v, seqlens=np.array([3, 4], np.int32)) | change
    with pytest.raises(ValueError) as raised:
        decode(**arguments)
    assert str(raised.value).startswith(name), raised.value


@pytest.mark.parametrize(
    "message, change",
    [
        (r"seqlens\[0\] = 500: allowed 0 to 37", dict(seqlens=[500, 5])),
        (r"seqlens\[1\] = -1: allowed 0 to 37", dict(seqlens=np.array([37, -1]))),
        (r"seqlens\[0\] = 38: allowed 0 to 37", dict(seqlens=38)),
        (r"seqlens\[1\] = 1099511627776: must fit 32 bits", dict(seqlens=np.array([1, 2**40]))),
        (r"seqlens\[0\] = 1180591620717411303424: must fit", dict(seqlens=[2**70, 1])),
        (r"leftpad\[1\] = 38: allowed 0 to 37", dict(leftpad=[0, 38])),
        (r"seqlens\[0\] = 38: allowed 0 to 37", dict(seqlens=[38, 5], append=True)),  # a new token on a full cache
        (r"seqlens: must be given with append_k", dict(append=True)),
    ],
)
def test_lengths_on_the_host_are_never_clamped(message, change):
    q, k, v = arrays()
    out = np.full_like(q, 7)
    if change.pop("append", False):
        change.update(append_k=np.ones((2, 2, 1, 40), np.float32), append_v=np.ones((2, 2, 1, 40), np.float32))
    before = k.copy()
    with pytest.raises(ValueError, match=f"^{message}"):
        decode(q, k, v, out=out, **change)
    assert (out == 7).all() and (k == before).all()


@pytest.mark.parametrize("lengths", [[1.9, 5], (True, 2.5), ["1", 2]])
def test_lengths_are_integers(lengths):
    with pytest.raises(TypeError, match=r"^seqlens\[[01]\] = .*: an integer is needed"):
        decode(*arrays(), seqlens=lengths)


@needs("pages")
@pytest.mark.parametrize(
    "message, change",
    [
        (r"block_table\[1, 2\] = 99: allowed 0 to 5", dict(block_table=np.array([[0, 1, 2], [3, 4, 99]], INT32), seqlens=[12, 9])),
        (r"block_table\[0, 0\] = -1: allowed 0 to 5", dict(block_table=np.array([[-1, 1], [3, 4]], INT32), seqlens=[5, 5])),
        (r"page_indices\[2\] = 6: allowed 0 to 5", dict(page_indptr=[0, 1, 3], page_indices=[0, 1, 6])),
        (r"page_indptr\[2\] = 4: page_indices has 3", dict(page_indptr=[0, 1, 4], page_indices=[0, 1, 2])),
        (r"page_indptr\[2\] = 0: must not be smaller", dict(page_indptr=[0, 1, 0], page_indices=[0, 1, 2])),
        (r"seqlens\[1\] = 9: allowed 0 to 8", dict(page_indptr=[0, 1, 3], page_indices=[0, 1, 2], seqlens=[4, 9])),
        (r"seqlens: must be given with block_table", dict(block_table=np.zeros((2, 3), INT32))),
        (r"page_indices: must be given with page_indptr", dict(page_indptr=[0, 1, 3])),
    ],
)
def test_page_ids_on_the_host_are_never_skipped(message, change):
    pool = np.ones((6, 4, 2, 40), np.float32)
    with pytest.raises(ValueError, match=f"^{message}"):
        decode(np.ones((2, 6, 40), np.float32), pool, pool, layout="bshd", **change)


def test_cumulative_lengths_speak_for_every_query():
    q, k, v = np.ones((6, 5, 40), np.float32), *arrays(batch=2)[1:]
    with pytest.raises(ValueError, match=r"^cu_seqlens_q\[2\] = 4: must be the number of q's tokens, 5: .*'bhsd'"):
        decode(q, k, v, cu_seqlens_q=[0, 2, 4])
    with pytest.raises(ValueError, match=r"^cu_seqlens_q\[2\] = 362: .* q has shape \(362, 8, 32\), and layout 'bhsd'"):
        decode(np.ones((362, 8, 32), np.float32), *(np.ones((2, 2, 400, 32), np.float32),) * 2, cu_seqlens_q=[0, 300, 362])


def test_cumulative_lengths_in_words():
    q, k = np.ones((6, 5, 40), np.float32), np.ones((2, 70, 40), np.float32)
    for cu, message in (([1, 40, 70], r"\[0\] = 1: must be 0"), ([0, 40, 71], r"\[2\] = 71: allowed 0 to 70"), ([0, 71, 70], r"\[1\] = 71")):
        with pytest.raises(ValueError, match=f"^cu_seqlens_k{message}"):
            decode(q, k, k, cu_seqlens_q=[0, 2, 5], cu_seqlens_k=cu)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q\[1\] = 4: the sequence must not be longer than max_seqlen_q or max_seqlen_k"):
        decode(q, k, k, cu_seqlens_q=[0, 4, 5], cu_seqlens_k=[0, 40, 70], max_seqlen_q=3)


@pytest.mark.parametrize(
    "message, change",
    [
        ("softmax_scale: .* did you mean 'scale'", dict(softmax_scale=0.1)),
        ("seqlen: .* did you mean 'seqlens'", dict(seqlen=[1, 2])),
        ("window_size: .* did you mean 'window'", dict(window_size=(1, 1))),
        ("zzz: .* there are q, k, v, seqlens", dict(zzz=1)),
        ("options: {}: lean_attention.Options", dict(options={})),
        ("options.workers = 4294967297", dict(options=Options(workers=2**32 + 1))),
        (r"window\[0\] = 4294967296", dict(window=(2**32, 0))),
        (r"window\[1\]: 1.5: an integer", dict(window=(1, 1.5))),
        ("window: 4: a pair", dict(window=4)),
        ("max_seqlen_q: 'x': an integer", dict(q=np.ones((6, 2, 40), np.float32), cu_seqlens_q=[0, 1, 2], max_seqlen_q="x")),
        ("scale: 'large': a number", dict(scale="large")),
        ("scale = .*: allowed 0, -0, or a size of 1e-37 or more", dict(scale=1e-40)),
        ("softcap = 1e-60: is 0 in float32", dict(softcap=1e-60)),
        ("cu_seqlens_q: .*int.* is no array", dict(q=np.ones((6, 2, 40), np.float32), cu_seqlens_q=4)),
        ("leftpad: .*str.* is no array", dict(leftpad="1")),
        ("cu_seqlens_k = 4: an array or a list of 3", dict(cu_seqlens_k=4, k=np.ones((2, 9, 40), "f"), v=np.ones((2, 9, 40), "f"))),
        ("stream: 'x'", dict(stream="x")),
        ("q: a masked array", dict(q=np.ma.masked_array(np.ones((2, 6, 1, 40), np.float32), False))),
        ("mask: a masked array", dict(mask=np.ma.masked_array(np.ones((1, 1, 1, 37), bool), True))),
        ("q: complex64: expected", dict(q=np.ones((2, 6, 1, 40), np.complex64))),
        ("k: int8: expected", dict(k=np.ones((2, 2, 37, 40), np.int8))),
        ("causal: 'no': True or False is needed", dict(causal="no")),
        (r"causal: \[False\]: True or False is needed", dict(causal=[False])),
        ("causal: 0.125: True or False is needed", dict(causal=0.125)),
        ("causal: nan: True or False is needed", dict(causal=float("nan"))),
        ("causal: 2: True or False is needed", dict(causal=2)),
        ("return_lse: 'no': True or False is needed", dict(return_lse="no")),
        ("scale: True: a number is needed", dict(scale=True)),
        ("softcap: False: a number is needed", dict(softcap=False)),
        (r"window\[1\]: True: an integer is needed", dict(window=(1, True))),
        (r"mask: int64: expected bool \(True: seen\), float32, float16 or bfloat16", dict(mask=np.ones((1, 1, 1, 37), np.int64))),
        (r"seqlens\[0\] = True: an integer is needed", dict(seqlens=[True, 4])),
        ("k.dtype = float16: must equal q.dtype, or be float8; q is float32", dict(k=np.ones((2, 2, 37, 40), np.float16))),
        ("v.dtype = float16: must equal k.dtype; k is float32", dict(v=np.ones((2, 2, 37, 40), np.float16))),
        (r"q: heads = 1: must be a multiple of k's heads, 37: q \(2, 1, 6, 40\) and k .* 'bhsd'",
         dict(q=np.ones((2, 1, 6, 40), np.float32), k=np.ones((2, 37, 2, 40), np.float32), v=np.ones((2, 37, 2, 40), np.float32))),
        ("options.workers = 5000: allowed 0", dict(options=Options(workers=5000))),
    ],
)  # fmt: skip
def test_a_message_says_what_was_seen_and_what_works(message, change):
    q, k, v = arrays()
    with pytest.raises((TypeError, ValueError), match=f"^({message})"):
        decode(**(dict(q=q, k=k, v=v) | change))


def _pool(*shape):
    return np.ones(shape, np.float32)


@needs("pages")
@pytest.mark.parametrize(
    "name, change",
    [
        ("page_indptr", dict(page_indptr=[0, 1, 2], page_indices=[0, 1])),
        ("page_indptr", dict(page_indptr="x")),
        ("page_indices", dict(page_indices=object())),
        ("cu_seqlens_k", dict(cu_seqlens_k=[0, 4, 8])),
        ("cu_seqlens_k", dict(k=_pool(8, 2, 40), v=_pool(8, 2, 40), cu_seqlens_k=[0, 1, 2])),
        ("page_indptr", dict(block_table=None, page_indices=[0, 1])),
        ("max_seqlen_k", dict(block_table=None, max_seqlen_k=3)),
        ("max_seqlen_q", dict(max_seqlen_q=0)),
        ("stream", dict(stream=0)),
    ],
)
def test_what_would_not_be_read_is_refused(name, change):
    q, table = np.ones((2, 6, 40), np.float32), np.array([[0], [1]], INT32)
    call = dict(q=q, k=_pool(2, 2, 37, 40), v=_pool(2, 2, 37, 40), block_table=table, seqlens=[1, 1])
    decode(**call)
    with pytest.raises(ValueError, match=f"^{name}: "):
        decode(**(call | change))


@pytest.mark.parametrize("yes", [True, 1, np.True_, np.array(True)], ids=["bool", "int", "numpy", "array"])
def test_what_equals_true_is_a_flag(yes):
    q, k, v = arrays(q_tokens=3)
    np.testing.assert_array_equal(decode(q, k, v, causal=yes), decode(q, k, v, causal=True))


@pytest.mark.parametrize("name", ["out", "lse"])
def test_outputs_whose_elements_share_memory_are_refused(name):
    q, k, v = arrays(q_tokens=2)
    strides = dict(out=(8, 20 * 4, 40 * 4, 4), lse=(8, 8, 4))[name]  # a head of out begins in the middle of the one before
    shape = dict(out=q.shape, lse=q.shape[:3])[name]
    given = np.lib.stride_tricks.as_strided(np.zeros(4096, np.float32), shape, strides)
    with pytest.raises(ValueError, match=f"^{name}.*: no two axes may meet: outputs must not overlap"):
        decode(q, k, v, return_lse=True, **{name: given})


@needs("pages")
def test_a_table_of_no_sequences_may_have_any_strides():
    pool, table = np.ones((6, 4, 2, 40), np.float32), np.zeros((8, 3), INT32).T[:0]
    assert decode(np.ones((0, 6, 40), np.float32), pool, pool, block_table=table, seqlens=[], layout="bshd").shape == (0, 6, 40)


def test_axes_of_one_in_a_tree_mask_may_have_any_strides():
    q, k, v = arrays(q_tokens=3)
    tree = np.array([[[1], [3], [7]]] * 2, np.uint32)
    odd = np.lib.stride_tricks.as_strided(tree, tree.shape, (12, 4, 400))
    np.testing.assert_array_equal(decode(q, k, v, tree_mask=odd), decode(q, k, v, causal=True))


def test_keys_and_values_of_one_tensor_cannot_be_appended_to():
    q, k, _ = arrays()
    new = np.ones((2, 2, 1, 40), np.float32)
    with pytest.raises(ValueError, match="^v: with append must not be k$"):
        decode(q, k, k, append_k=new, append_v=new, seqlens=[3, 4])


class FailsInside:
    """An array whose library fails when it is asked for."""

    def __init__(self, error):
        self.error, self.shape, self.dtype = error, (2, 6, 1, 40), np.dtype(np.float32)

    def __dlpack__(self, **keywords):
        raise self.error

    def __dlpack_device__(self):
        return (1, 0)


@pytest.mark.parametrize("error", [ValueError("of theirs"), AttributeError("of theirs"), TypeError("of theirs"), BufferError("of theirs")])
def test_what_an_array_raises_comes_through(error):
    _, k, v = arrays()
    with pytest.raises(type(error), match="of theirs"):
        decode(FailsInside(error), k, v)


@pytest.mark.parametrize("returned", [None, 5, "capsule", (1,)])
def test_what_is_no_capsule_is_named(returned):
    q, k, v = arrays()
    broken = FailsInside(None)
    broken.__class__ = type("Broken", (FailsInside,), {"__dlpack__": lambda self, **_: returned})
    with pytest.raises(TypeError, match="^k: its __dlpack__ returned .*: a capsule of DLPack"):
        decode(q, broken, v)


def test_an_array_without_a_shape_needs_out():
    q, k, v = arrays()
    bare = type("Bare", (), {"__dlpack__": lambda self, **_: q.__dlpack__(), "__dlpack_device__": lambda self: (1, 0)})()
    with pytest.raises(TypeError, match="^q: .*__dlpack__ and no shape: give out"):
        decode(bare, k, v)
    np.testing.assert_array_equal(decode(bare, k, v, out=np.empty_like(q)), decode(q, k, v))


@pytest.mark.parametrize("name", ["out", "lse"])
def test_lazy_negatives_cannot_be_written_to(name):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in arrays())
    lazy = torch.zeros(q.shape if name == "out" else q.shape[:3], dtype=torch.complex64).conj().imag
    with pytest.raises(ValueError, match=f"^{name}: is a lazy negative"):
        decode(q, k, v, **{name: lazy})
    new = dict(append_k=k[:, :, :1].clone(), append_v=v[:, :, :1].clone(), seqlens=[3, 4])
    with pytest.raises(ValueError, match="^v: is a lazy negative"):
        decode(q, k, torch.zeros(v.shape, dtype=torch.complex64).conj().imag, **new)


def test_tensors_without_memory_are_refused():
    torch = pytest.importorskip("torch")
    from torch._subclasses import FakeTensorMode

    q, k, v = (torch.from_numpy(x) for x in arrays())
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(k)
    for name, given in (("q", q.to("meta")), ("k", k.to("meta")), ("k", fake), ("v", v.to_sparse())):
        with pytest.raises(TypeError, match=f"^{name}: [^\n]*memory[^\n]*$"):
            decode(**(dict(q=q, k=k, v=v) | {name: given}))


ARRAYS_OF_A_CALL = {
    "q": (2, 6, 1, 40), "k": (2, 2, 37, 40), "v": (2, 2, 37, 40), "sinks": (6,), "alibi_slopes": (6,), "mask": (1, 1, 1, 37),
    "append_k": (2, 2, 1, 40), "append_v": (2, 2, 1, 40), "rotary_cos": (37, 8), "rotary_sin": (37, 8),
}  # fmt: skip


@pytest.mark.parametrize("door", ["decode", "numpy q", "torch.ops"])
@pytest.mark.parametrize("name", ARRAYS_OF_A_CALL)
def test_r50_no_gradient_is_lost(name, door):
    """Sinks are learnt in GPT-OSS: whatever requires a gradient is refused, not q, k and v alone."""
    torch = pytest.importorskip("torch")
    given = {name: torch.ones(shape) for name, shape in ARRAYS_OF_A_CALL.items()}
    given["seqlens"] = torch.tensor([3, 4], dtype=torch.int32)
    given[name].requires_grad_()
    call = torch.ops.lean_attention.decode_append if door == "torch.ops" else decode
    if door == "numpy q":
        given["q"] = given["q"].detach().numpy()
    if door == "numpy q" and name == "q":
        return
    with pytest.raises(RuntimeError, match=f"^{name}: requires a gradient"):
        call(**given)
    if door != "numpy q":
        with torch.no_grad():
            call(**given)


def test_while_compiling_the_same_words():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in arrays())

    def compiled(**arguments):
        torch._dynamo.reset()
        return torch.compile(lambda: decode(q, k, v, **arguments), fullgraph=True, backend="aot_eager")()

    assert torch.equal(compiled(seqlens=9, rotary_interleaved=True), decode(q, k, v, seqlens=9))
    for error, message, arguments in (
        ("TypeError|Unsupported", "integers are needed", dict(seqlens=[1.9, 5])),
        ("TypeError|Unsupported", "did you mean 'scale'", dict(softmax_scale=0.1)),
        ("TypeError|Unsupported", "lean_attention.Options", dict(options={})),
        ("NotImplementedError|Unsupported", "stream: an operator runs on the current one", dict(stream=0)),
        ("ValueError|Unsupported", "append_k and append_v", dict(rotary_cos=torch.ones(37, 8))),
        ("ValueError", r"^seqlens\[0\] = 500: allowed 0 to 37", dict(seqlens=[500, 5])),
    ):
        with pytest.raises(Exception, match=message) as raised:
            compiled(**arguments)
        assert raised.type.__name__ in error


def test_the_first_call_of_a_process_may_be_compiled():
    """Nothing that Dynamo cannot trace stands between an unused package and its first call."""
    pytest.importorskip("torch")
    code = """
import torch, lean_attention
q, k = torch.randn(2, 6, 1, 40), torch.randn(2, 2, 37, 40)
call = lambda q, k: lean_attention.decode(q, k, k, seqlens=[9, 37], options=lean_attention.Options(workers=2))
assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k), call(q, k))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_check_lengths_looks_without_computing():
    q, k, v = arrays()
    lean_attention.check_lengths(q, k, v, seqlens=[37, 5])
    with pytest.raises(ValueError, match=r"^seqlens\[1\] = 38"):
        lean_attention.check_lengths(q, k, v, seqlens=[37, 38])
    decode(q, k, v, seqlens=[37, 5], options=Options(check_lengths=True))


def test_sticky_status_on_the_host_has_nothing_to_say():
    q, k, v = arrays()
    decode(q, k, v)
    assert lean_attention.sticky_status(q) and lean_attention.sticky_status(q, reset=False).code == "ok"


def test_the_list_of_arguments_stands_once():
    """What help() shows, what torch's schema has and what the extension reads are one list."""
    import inspect

    names = list(inspect.signature(decode).parameters)
    assert set(names) == set(lean_attention._core.ARGUMENTS) and names[:3] == ["q", "k", "v"]
    torch = pytest.importorskip("torch")
    from lean_attention import torch_ops  # noqa: F401

    schema = torch.ops.lean_attention.decode_append.default._schema
    in_torch = {a.name for a in schema.arguments} - {"window_left", "window_right"} | {"window", "out", "lse", "return_lse", "stream"}
    assert in_torch == set(names)


def test_a_refused_call_writes_nothing():
    q, k, v = arrays()
    out = np.full((2, 6, 1, 40), 7.0, np.float32)
    with pytest.raises(ValueError, match="seqlens"):
        decode(q, k, v, out=out, seqlens=np.zeros(3, INT32))
    assert (out == 7).all()


def test_out_must_not_be_an_input():
    q, k, v = arrays()
    with pytest.raises(ValueError, match="^out"):
        decode(q, k, v, out=q)


def test_unknown_names_of_options():
    with pytest.raises(ValueError, match="policy = 'fast'"):
        Options(policy="fast")


@pytest.mark.parametrize(
    "message, given",
    [
        ("workers: True: an integer is needed", dict(workers=True)),
        ("dependent_launch: 'no': True or False is needed", dict(dependent_launch="no")),
        ("check_lengths: 0.5: True or False is needed", dict(check_lengths=0.5)),  # as an integer it would be off
    ],
)
def test_flags_and_numbers_of_options(message, given):
    with pytest.raises(TypeError, match=f"^{message}"):
        Options(**given)
    assert Options(check_lengths=np.True_).encoded[-1] == 1


def test_supports_says_why():
    q, k, v = arrays()
    assert supports(q, k, v)
    refused = supports(q, k, v, softcap=-1.0)
    assert not refused and refused.code == "invalid_argument" and refused.reason.startswith("softcap")
    with pytest.raises(TypeError, match="soft_cap"):
        supports(q, k, v, soft_cap=1.0)


def test_supports_agrees_with_decode():
    q, k, v = arrays()
    for arguments in (dict(softcap=2.0), dict(window=(1, 0)), dict(sinks=np.ones(6, np.float32)), dict(causal=True)):
        if supports(q, k, v, **arguments):
            decode(q, k, v, **arguments)
        else:
            with pytest.raises(NotImplementedError):
                decode(q, k, v, **arguments)


def test_unknown_attributes_of_the_package():
    with pytest.raises(AttributeError, match="no attribute 'decoed'"):
        lean_attention.decoed


def test_outputs_lie_apart_from_what_is_read():
    """One buffer for two things: what is computed last would read what was written first."""
    q, k, v = arrays()  # [2, 6, 1, 40]
    floats = np.zeros(4 * q.size, np.float32)
    out = floats[: q.size].reshape(q.shape)
    lse = np.zeros((2, 6, 1), np.float32)
    for name, arguments in (
        ("lse: must not overlap out", dict(out=out, lse=floats[q.size - 5 :][:12].reshape(2, 6, 1))),
        ("out: must not overlap mask", dict(out=out, mask=floats[40:77].reshape(1, 1, 1, 37))),
        ("out: must not overlap sinks", dict(out=out, sinks=floats[q.size - 6 : q.size])),
        ("out: must not overlap seqlens", dict(out=out, seqlens=floats.view(np.int32)[5:7])),
        ("lse: must not overlap seqlens", dict(lse=lse, seqlens=lse.reshape(-1)[2:4].view(np.int32))),
        ("lse: must not overlap mask", dict(lse=lse, mask=np.broadcast_to(lse.reshape(-1)[:1], (1, 1, 1, 37)))),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "):
            decode(q, k, v, **arguments)
    shared = np.zeros(k.size + 40, np.float32)
    with pytest.raises(ValueError, match="^out: must not overlap v: "):
        decode(q, k, shared[40:].reshape(v.shape), out=shared[: q.size].reshape(q.shape))
    with pytest.raises(ValueError, match="^v: must not overlap k: "):
        both = np.zeros(k.size + 40, np.float32)
        new = np.zeros((2, 2, 1, 40), np.float32)
        decode(q, both[40:].reshape(k.shape), both[:-40].reshape(v.shape), seqlens=[5, 6], append_k=new, append_v=new.copy())


def test_outputs_may_lie_between_what_is_read():
    """Rows of one buffer, queries beside results; K and V of one tensor; a cache whose new tokens stand there already."""
    q, k, v = arrays()
    rows = np.zeros((2, *q.shape), np.float32)
    both = np.zeros((q.shape[0], q.shape[1], 2, q.shape[3]), np.float32)
    both[:, :, :1] = q
    decode(both[:, :, :1], k, v, out=both[:, :, 1:], lse=rows[0, :, :, :, 0])
    attention(q, k, v).check(both[:, :, 1:], rows[0, :, :, :, 0])
    pools = np.stack((k, v), 1)
    attention(q, k, v).check(decode(q, pools[:, 0], pools[:, 1], seqlens=[37, 37], append_k=k[:, :, -1:], append_v=v[:, :, -1:]))
    decode(q, k, v, seqlens=[37, 37], append_k=k[:, :, -1:], append_v=v[:, :, -1:])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("packed", [False, True])
def test_new_tokens_stand_in_their_places_or_apart(layout, packed):
    """Three go to 2..4. One that stands where another is written would be read too late."""
    q, k, v = arrays(batch=1, q_tokens=3)
    given, axis = dict(seqlens=[5], layout=layout), 2
    if layout == "bshd":
        q, k, v, axis = *(np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v)), 1
    if packed:
        q, given = q[0], dict(given, cu_seqlens_q=[0, 3], max_seqlen_q=3)
    for first in range(8):
        keys, values = k.copy(), v.copy()
        new = [x.take(range(first, first + 3), axis) for x in (keys, values)]
        views = [x[:, :, first : first + 3] if axis == 2 else x[:, first : first + 3] for x in (keys, values)]
        new, views = ([x[0] for x in new], [x[0] for x in views]) if packed else (new, views)
        if first in (0, 1, 3, 4):
            with pytest.raises(ValueError, match=rf"^append_k: sequence 0: stands {first - 2} tokens beside its place"):
                decode(q, keys, values, **given, append_k=views[0], append_v=views[1])
            with pytest.raises(ValueError, match=rf"^append_v: sequence 0: stands {first - 2} tokens beside its place"):
                decode(q, keys, values, **given, append_k=new[0], append_v=views[1])
            assert (keys == k).all() and (values == v).all()
        else:
            expected = decode(q, k.copy(), v.copy(), **given, append_k=new[0], append_v=new[1])
            assert (decode(q, keys, values, **given, append_k=views[0], append_v=views[1]) == expected).all()
