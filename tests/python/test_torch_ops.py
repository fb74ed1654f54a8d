"""torch.ops.lean_attention, and decode() on torch tensors."""

import functools
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from conftest import arrays, has, needs  # noqa: E402
from oracle import attention  # noqa: E402

import lean_attention._accepts  # noqa: E402
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


@pytest.mark.parametrize("name", ["out", "lse"])
@pytest.mark.parametrize("what", ["shape", "type"])
def test_a_recorded_call_refuses_an_out_that_does_not_fit(name, what):
    """As eagerly: an operator's result is copied to it, and a copy would be broadcast, or cast."""
    q, k, v = tensors()
    places = dict(out=torch.empty_like(q), lse=torch.empty(2, 6, 1))
    wrong = places[name]
    places[name] = wrong.expand(3, *wrong.shape).clone() if what == "shape" else wrong.to(torch.float64)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=f"^{name}"):
        decode(q, k, v, **places)
    with pytest.raises((ValueError, TypeError), match=f"^{name}"):
        torch.fx.experimental.proxy_tensor.make_fx(lambda x: decode(x, k, v, **places))(q)


class Onlooker(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **keywords or {})


@needs("append")
@pytest.mark.parametrize("wrong", ["out", "lse"])
def test_a_recorded_call_writes_nothing_when_it_refuses_its_out(wrong):
    q, k, v = tensors()
    before, lengths = (k.clone(), v.clone()), torch.tensor([3, 7], dtype=torch.int32)
    places = dict(out=torch.zeros_like(q), lse=torch.zeros(2, 6, 1))
    places[wrong] = places[wrong][:1]
    with Onlooker(), pytest.raises(ValueError, match=f"^{wrong}: shape"):
        decode(q, k, v, append_k=k[:, :, :1] + 1, append_v=v[:, :, :1] + 1, seqlens=lengths, **places)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1]) and not places["out"].any()


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


def write_out(k, v):
    q, out = tensors()[0], torch.zeros(2, 6, 1, 40)
    return out, lambda: decode(q, k, v, out=out)


def write_lse(k, v):
    q, lse = tensors()[0], torch.zeros(2, 6, 1)
    return lse, lambda: decode(q, k, v, lse=lse, return_lse=True)


def write_cache(call, which, k, v):
    new = dict(append_k=torch.ones(2, 2, 1, 40), append_v=torch.ones(2, 2, 1, 40))
    q, lengths = tensors()[0], torch.tensor([3, 7], dtype=torch.int32)
    return (k, v)[which], lambda: call(q, k, v, seqlens=lengths, **new)


@pytest.mark.parametrize(
    "writer",
    [
        write_out,
        write_lse,
        pytest.param(functools.partial(write_cache, decode, 0), marks=needs("append")),
        pytest.param(functools.partial(write_cache, decode, 1), marks=needs("append")),
        pytest.param(functools.partial(write_cache, OPS.decode_append, 0), marks=needs("append")),
    ],
    ids=["out", "lse", "k", "v", "op_k"],
)
def test_r50_a_backward_pass_through_what_was_written_over_is_refused(writer):
    """Its gradient would be made of the new values."""
    written, call = writer(*tensors()[1:])
    factor = torch.ones_like(written).requires_grad_()
    product = factor * written
    with torch.no_grad():
        call()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@needs("append")
@pytest.mark.parametrize("sequences", [0, 2])
def test_a_step_without_tokens_appends_none(sequences):
    """PyTorch keeps empty tensors at null, which is no tensor to the library."""
    rows, k = torch.zeros(4, 0, 8), torch.ones(sequences, 2, 16, 8)
    new, tables = torch.zeros(2, 0, 8), dict(rotary_cos=torch.ones(16, 4), rotary_sin=torch.zeros(16, 4))
    cu = torch.zeros(sequences + 1, dtype=torch.int32)
    arguments = dict(append_k=new, append_v=new, seqlens=[5] * sequences, cu_seqlens_q=cu, **tables)
    assert decode(rows, k, k.clone(), **arguments).shape == (4, 0, 8)
    assert (k == 1).all()


def test_tensors_of_inference_mode_are_written_to():
    q, k, v = tensors()
    with torch.inference_mode():
        out = torch.zeros(2, 6, 1, 40)
    assert torch.equal(decode(q, k, v, out=out), decode(q, k, v))


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


# --- who records a call, and who transforms it -----------------------------------------------------------------------


def doubled(q, k, v, seqlens):
    return decode(q, k, v, seqlens=seqlens, causal=True) * 2


def traced_by_jit(*inputs):
    return torch.jit.trace(doubled, inputs)


def traced_by_fx(mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    return lambda *inputs: make_fx(doubled, tracing_mode=mode)(*inputs)


def exported(*inputs):
    module = type("Module", (torch.nn.Module,), dict(forward=lambda self, *arguments: doubled(*arguments)))()
    return torch.export.export(module, inputs).module()


@pytest.mark.parametrize(
    "trace",
    [traced_by_jit, traced_by_fx("real"), traced_by_fx("fake"), traced_by_fx("symbolic"), exported],
    ids=["jit", "make_fx real", "make_fx fake", "make_fx symbolic", "export"],
)
@pytest.mark.filterwarnings("ignore")
def test_whoever_records_gets_the_call_and_not_its_result(trace):
    lengths = torch.tensor([37, 9], dtype=torch.int32)
    recorded = trace(*tensors(), lengths)
    assert "lean_attention" in str(recorded.graph)
    others = tensors(seed=1)
    lengths = torch.tensor([5, 30], dtype=torch.int32)
    torch.testing.assert_close(recorded(*others, lengths), doubled(*others, lengths))


@pytest.mark.filterwarnings("ignore")
def test_the_old_onnx_exporter_is_refused_by_name(tmp_path):
    module = type("Module", (torch.nn.Module,), dict(forward=lambda self, *arguments: doubled(*arguments)))()
    with pytest.raises(Exception, match="lean_attention::decode"):
        torch.onnx.export(module, (*tensors(), torch.tensor([37, 9], dtype=torch.int32)), str(tmp_path / "x.onnx"), dynamo=False)
    assert not (tmp_path / "x.onnx").exists()


TRANSFORMS = {
    "vmap": lambda call, q, k, v: torch.vmap(call)(q[None], k[None], v[None]),
    "jvp": lambda call, q, k, v: torch.func.jvp(lambda q: call(q, k, v), (q,), (q,)),
    "grad": lambda call, q, k, v: torch.func.grad(lambda q: call(q, k, v).sum())(q),
    "functionalize": lambda call, q, k, v: torch.func.functionalize(lambda q: call(q, k, v))(q),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", [decode, OPS.decode], ids=["decode", "op"])
def test_r50_transforms_are_refused_in_our_words(call, transform):
    q, k, v = tensors()
    if call is not decode and transform == "functionalize":
        assert torch.equal(TRANSFORMS[transform](call, q, k, v), decode(q, k, v))  # an operator that writes to nothing
        return
    with pytest.raises((NotImplementedError, RuntimeError), match="^lean_attention: |requires a gradient, and there is no backward"):
        TRANSFORMS[transform](call, q, k, v)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("call", [decode, OPS.decode, OPS.decode_lse], ids=["decode", "op", "op_lse"])
def test_r50_tangents_are_not_lost(call, which):
    from torch.autograd import forward_ad

    inputs = tensors()
    with forward_ad.dual_level(), torch.no_grad():
        assert call(*inputs) is not None
        inputs[which] = forward_ad.make_dual(inputs[which], torch.ones_like(inputs[which]))
        with pytest.raises(NotImplementedError, match="^lean_attention: a dual tensor"):
            call(*inputs)


@pytest.mark.parametrize("which", ["sinks", "mask", "alibi_slopes", "append_k"])
@pytest.mark.parametrize("call", [decode, OPS.decode_append], ids=["decode", "op"])
def test_r50_tangents_beside_q_k_v_are_not_lost(call, which):
    from torch.autograd import forward_ad

    q, k, v = tensors()
    lengths = torch.tensor([37, 9], dtype=torch.int32)
    others = dict(
        sinks=torch.ones(6), mask=torch.zeros(2, 6, 1, 37), alibi_slopes=torch.ones(6), append_k=torch.ones(2, 2, 1, 40),
        append_v=torch.ones(2, 2, 1, 40),
    )  # fmt: skip
    with forward_ad.dual_level(), torch.no_grad():
        assert call(q, k, v, seqlens=lengths, **others) is not None
        before = k.clone()
        others[which] = forward_ad.make_dual(others[which], torch.ones_like(others[which]))
        with pytest.raises(NotImplementedError, match="^lean_attention: a dual tensor"):
            call(q, k, v, seqlens=lengths, **others)
    assert torch.equal(k, before)


# --- the first call of a process is inside a compiled graph ----------------------------------------------------------

FIRST_CALLS = {
    "decode": """
import lean_attention
call = lambda q, k, v: lean_attention.decode(q, k, v)""",
    "flash_attn_with_kvcache": """
import lean_attention
lengths = torch.tensor([9, 3], dtype=torch.int32)
call = lambda q, k, v: lean_attention.flash_attn_with_kvcache(*(x.transpose(1, 2) for x in (q, k, v)), cache_seqlens=lengths)""",
    "sdpa": """
import lean_attention.sdpa
call = lambda q, k, v: lean_attention.sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True)""",
    "enable_sdpa": """
import lean_attention
if hasattr(torch.nn.attention, "register_flash_attention_impl"): lean_attention.enable_sdpa()
call = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)""",
    "merge_states": """
import lean_attention
call = lambda q, k, v: lean_attention.merge_states(q[:, :, 0], q[:, :, 0, 0], q[:, :, 0], q[:, :, 0, 0])[0]""",
    "flashinfer": """
from lean_attention.compat.flashinfer import BatchDecodeWithPagedKVCacheWrapper
cache, wrapper = torch.randn(10, 2, 4, 2, 16), BatchDecodeWithPagedKVCacheWrapper(None, "NHD")
indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 6, 8], list(range(8)), [4, 3]))
wrapper.plan(indptr, indices, last, 8, 2, 16, 4)
call = lambda q, k, v: wrapper.run(q[:, :, 0], cache)""",
    "hf": """
import lean_attention.hf
module = torch.nn.Module()
call = lambda q, k, v: lean_attention.hf.attention_forward(module, q, k, v, None)[0]""",
}
PROGRAM = """
import torch
torch.set_num_threads(1)
q = torch.randn(2, 8, 1, 16)
k, v = torch.randn(2, 2, 2, 9, 16)
{}
with torch.no_grad():
    first = torch.compile(call, fullgraph=True, backend="eager")(q, k, v)
    torch.testing.assert_close(first, call(q, k, v))
"""


@pytest.mark.parametrize("door", FIRST_CALLS)
def test_the_first_call_of_a_process_may_be_a_compiled_one(door):
    if door == "hf":
        pytest.importorskip("transformers", minversion="4.57")
    if door == "flashinfer" and not has("pages"):
        pytest.skip("not in this build: pages")
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(FIRST_CALLS[door])], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _call(batch=2, kv_batch=None, tokens=9, value_tokens=None, **arguments):
    kv = [torch.randn(kv_batch or batch, 2, n, 16) for n in (tokens, value_tokens or tokens)]
    return [torch.randn(batch, 4, 1, 16), *kv], arguments


def _mask(*shape):
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    "other",
    [
        _call(batch=3, kv_batch=2),
        _call(value_tokens=8),
        _call(mask=_mask(3, 1, 1, 9)),
        _call(mask=_mask(2, 1, 1, 8)),
        _call(mask=_mask(2, 2, 1, 9)),
        _call(scale=2e38),
    ],
)
def test_accepts_does_not_answer_by_a_call_of_other_sizes(monkeypatch, other):
    accepts = lean_attention._accepts.accepts
    monkeypatch.setattr(lean_attention._accepts, "_answers", {})
    tensors, arguments = other
    good = {name: _mask(2, 1, 1, 9) if name == "mask" else 0.5 for name in arguments}
    for _ in range(2):
        assert not accepts(*tensors, **arguments)
        for batch, tokens in ((2, 9), (5, 17)):
            rules = {name: _mask(batch, 1, 1, tokens) if name == "mask" else value for name, value in good.items()}
            assert accepts(*_call(batch, tokens=tokens)[0], **rules)
    assert len(lean_attention._accepts._answers) <= 3


BEFORE_2_10 = """
import torch

if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    del torch.Tensor.__dlpack_c_exchange_api__
import lean_attention, lean_attention._frameworks

asked = []
lean_attention._frameworks.TorchFramework._stream = lambda self, like: asked.append(like.shape)
q, k = torch.randn(2, 4, 16), torch.randn(2, 2, 9, 16)
ops, lengths = torch.ops.lean_attention, torch.tensor([9, 9], dtype=torch.int32)
states = (q, q[..., 0].contiguous()) * 2
for call in (
    lambda: lean_attention.decode(q, k, k),
    lambda: ops.decode(q, k, k),
    lambda: ops.decode_lse(q, k, k),
    lambda: ops.decode_append(q, k, k.clone(), append_k=k[:, :, 0], append_v=k[:, :, 1], seqlens=lengths),
    lambda: lean_attention.merge_states(*states),
    lambda: ops.merge_states(*states),
):
    asked.clear()
    call()
    assert len(asked) == 1, asked
"""


@needs("append")
def test_operators_ask_for_the_current_stream_where_a_tensor_does_not_tell():
    """Tensors before PyTorch 2.10; an operator that does not ask runs on the legacy default stream."""
    done = subprocess.run([sys.executable, "-c", BEFORE_2_10], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
