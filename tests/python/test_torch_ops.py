"""torch.ops.lean_attention, and decode() on torch tensors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from conftest import arrays, needs  # noqa: E402
from oracle import attention  # noqa: E402

import lean_attention.torch_ops  # noqa: E402
from lean_attention import Options, decode  # noqa: E402

OPS = torch.ops.lean_attention


def tensors(dtype=torch.float32, **sizes):
    return [torch.from_numpy(x).to(dtype) for x in arrays(**sizes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    q, k, v = tensors(dtype)
    out, lse = decode(q, k, v, seqlens=torch.tensor([37, 9]), return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    attention(q, k, v, seqlens=[37, 9], dtype=str(dtype).removeprefix("torch.")).check(out, lse)


def test_same_bits_as_numpy():
    q, k, v = arrays()
    np.testing.assert_array_equal(decode(*map(torch.from_numpy, (q, k, v))).numpy(), decode(q, k, v))


@pytest.mark.parametrize(
    "arguments",
    [
        dict(),
        dict(seqlens=torch.tensor([37, 9], dtype=torch.int32), causal=True, scale=0.2),
        dict(leftpad=torch.tensor([3, 1], dtype=torch.int32), options=Options(policy="data_parallel").encoded),
        pytest.param(dict(window_left=4, window_right=0, softcap=2.0), marks=needs("window", "softcap")),
        pytest.param(dict(sinks=torch.ones(6)), marks=needs("sinks")),
    ],
)
def test_opcheck(arguments):
    q, k, v = tensors(q_tokens=2)
    torch.library.opcheck(OPS.decode.default, (q, k, v), arguments)
    torch.library.opcheck(OPS.decode_lse.default, (q, k, v), arguments)


@needs("append")
def test_opcheck_append():
    q, k, v = tensors()
    new = dict(append_k=k[:, :, :1].clone(), append_v=v[:, :, :1].clone())
    lengths = torch.tensor([3, 7], dtype=torch.int32)
    torch.library.opcheck(OPS.decode_append.default, (q, k, v), dict(new, seqlens=lengths))


@needs("append")
def test_compile_appends_to_the_cache():
    q, k, v = tensors()
    new = dict(append_k=k[:, :, :1] + 1, append_v=v[:, :, :1] + 1, seqlens=torch.tensor([3, 7], dtype=torch.int32))
    eager_k, eager_v = k.clone(), v.clone()
    expected = decode(q, eager_k, eager_v, **new)
    out = torch.compile(lambda q, k, v: decode(q, k, v, **new), fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(out, expected) and torch.equal(k, eager_k) and torch.equal(v, eager_v)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_is_one_graph(dynamic):
    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def step(q, k, v, seqlens):
        out, lse = decode(q * 2, k, v, seqlens=seqlens, causal=True, return_lse=True)
        return out + 1, lse

    for tokens in (37, 38, 61):
        q, k, v = tensors(q_tokens=2, kv_tokens=tokens)
        seqlens = torch.tensor([tokens, 9], dtype=torch.int32)
        out, lse = step(q, k, v, seqlens)
        eager, eager_lse = decode(q * 2, k, v, seqlens=seqlens, causal=True, return_lse=True)
        assert torch.equal(out, eager + 1) and torch.equal(lse, eager_lse)


def test_compile_writes_to_out():
    q, k, v = tensors()
    out, lse = torch.full_like(q, 7), torch.full((2, 6, 1), 7.0)
    torch.compile(lambda: decode(q, k, v, out=out, lse=lse, seqlens=[37, 2]), fullgraph=True, backend="aot_eager")()
    expected, expected_lse = decode(q, k, v, seqlens=[37, 2], return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_inductor():
    q, k, v = tensors()
    compiled = torch.compile(lambda q, k, v: decode(q + 1, k, v) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), decode(q + 1, k, v) * 2)


def test_inference_mode():
    q, k, v = tensors()
    with torch.inference_mode():
        inside = decode(q, k, v)
        assert torch.equal(OPS.decode(q, k, v), inside)
    assert torch.equal(decode(q, k, v), inside)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("call", [decode, OPS.decode, OPS.decode_lse], ids=["decode", "op", "op_lse"])
def test_r50_inputs_that_need_a_gradient_are_refused(call, which):
    inputs = tensors()
    inputs[which].requires_grad_()
    with pytest.raises(RuntimeError, match=f"^{'qkv'[which]}: requires a gradient"):
        call(*inputs)
    with torch.no_grad():
        call(*inputs)


def test_fake_tensors_give_shapes():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in tensors(value_dim=24))
        out, lse = decode(q, k, v, return_lse=True)
    assert out.shape == (2, 6, 1, 24) and lse.shape == (2, 6, 1)


def test_r50_devices_must_agree():
    q, k, v = tensors()
    with pytest.raises((ValueError, RuntimeError, NotImplementedError, TypeError)):
        decode(q, k.to("meta"), v)


def test_parameters_are_tensors():
    q, k, v = tensors()
    parameter = torch.nn.Parameter(q, requires_grad=False)
    assert torch.equal(decode(parameter, k, v), decode(q, k, v))
