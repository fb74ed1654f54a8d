"""R50: misuse raises an exception whose message begins with the argument."""

import numpy as np
import pytest
from conftest import arrays, needs

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
        ("q", ValueError, dict(q=np.ones((6, 40), np.float32))),
        ("q", ValueError, dict(q=np.ones((1, 2, 6, 1, 40), np.float32))),
        ("q: heads", ValueError, dict(q=np.ones((2, 5, 1, 40), np.float32))),
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
        ("append_v", ValueError, dict(append_k=np.ones((2, 2, 1, 40), np.float32), append_v=np.ones((2, 6, 1, 40), np.float32))),
        ("rotary_cos", ValueError, dict(rotary_cos=np.ones((37, 8), np.float32), rotary_sin=np.ones((37, 8), np.float32))),
        ("k_scale", ValueError, dict(k_scale=np.ones(1, np.float32))),
        ("layout", ValueError, dict(layout="sbhd")),
        ("options.splits", ValueError, dict(options=Options(splits=3))),
        ("options.dependent_launch", NotImplementedError, dict(options=Options(dependent_launch=True))),
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
        ("k, v: are read-only", dict(k=np.broadcast_to(np.float32(1), (2, 2, 37, 40)))),
    ],
)
def test_misuse_of_append_names_the_argument(name, change):
    q, k, v = arrays()
    new_k, new_v = k[:, :, :1].copy(), v[:, :, :1].copy()
    arguments = dict(q=q, k=k, v=v, append_k=new_k, append_v=new_v, seqlens=np.array([3, 4], np.int32)) | change
    with pytest.raises(ValueError) as raised:
        decode(**arguments)
    assert str(raised.value).startswith(name), raised.value


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
