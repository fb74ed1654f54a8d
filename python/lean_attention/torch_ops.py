"""torch.ops.lean_attention: the calls as PyTorch operators, which torch.compile, export and CUDA graphs see as one node.

decode() uses them by itself where something records; eagerly it goes straight to the library.
There is no backward pass: inputs that need a gradient are refused, and so are the transforms of torch.func.
"""

from __future__ import annotations

from typing import Any, Iterable, Optional, Sequence

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from lean_attention import _core
from lean_attention._arguments import DEFAULTS, LENGTHS, lse_shape, refuse_unknown, schema
from lean_attention._frameworks import framework_of
from lean_attention._options import Options, flag

# A process that has torch has its OpenMP runtime too: share its threads.
_core.find_openmp()

_QKV, _STATES = ("q", "k", "v"), ("o_a", "lse_a", "o_b", "lse_b")
_APPEND = ("rotary_cos", "rotary_sin", "rotary_interleaved", "rotary_absolute")
_NOT_HERE = ("q", "k", "v", "append_k", "append_v", *_APPEND, "out", "lse", "return_lse", "stream")
_COMMON = schema([name for name in DEFAULTS if name not in _NOT_HERE])

_library = torch.library.Library("lean_attention", "DEF")
_library.define(f"decode(Tensor q, Tensor k, Tensor v, *, {_COMMON}) -> Tensor")
_library.define(f"decode_lse(Tensor q, Tensor k, Tensor v, *, {_COMMON}) -> (Tensor, Tensor)")
_library.define(
    "decode_append(Tensor q, Tensor(a!) k, Tensor(b!) v, *, Tensor append_k, Tensor append_v, "
    f"{schema(_APPEND)}, {_COMMON}) -> (Tensor, Tensor)"
)
_library.define("merge_states(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b) -> (Tensor, Tensor)")

_plain_types = (torch.Tensor, torch.nn.Parameter)


_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_jit_state = torch._C._get_tracing_state


def is_recorded() -> bool:
    """True while torch.compile, make_fx, torch.jit.trace or another mode of PyTorch's dispatcher looks on."""
    return torch.compiler.is_compiling() or _modes() > 0 or _jit_state() is not None


def must_dispatch(q: torch.Tensor) -> bool:
    """True where a call is recorded, and for tensor subclasses, which have no memory of their own to read."""
    if torch.compiler.is_compiling():
        return True
    if _transforms() is not None:
        _refuse_transforms()
    return _modes() > 0 or _jit_state() is not None or type(q) not in _plain_types


def is_transformed(*tensors: torch.Tensor) -> bool:
    """Whether decode() of these would be refused for a transform of torch.func or a tangent."""
    if torch.compiler.is_compiling():
        return False
    return _transforms() is not None or (forward_ad._current_level >= 0 and _have_tangent(*tensors))


def as_autocast(*tensors: Optional[torch.Tensor]) -> tuple[Optional[torch.Tensor], ...]:
    """What torch.autocast makes of scaled_dot_product_attention's arguments where it is on: one type of 16 bits."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def _refuse_transforms(*arguments: Any, **keywords: Any) -> None:
    raise NotImplementedError(
        "lean_attention: vmap, jvp, grad, functionalize and the other transforms of torch.func do not reach into this library: "
        "call it outside of them (it takes a batch itself)"
    )


def refuse_gradients(q: Any, k: Any, v: Any, others: dict[str, Any], names: Sequence[str] = _QKV) -> None:
    """Refuses what a result would have to be differentiated by, backward or forward."""
    if torch.is_grad_enabled():
        for name, array in (*zip(names, (q, k, v)), *others.items()):
            if getattr(array, "requires_grad", False):
                raise RuntimeError(f"{name}: requires a gradient, and there is no backward pass: call under torch.no_grad()")
    if forward_ad._current_level >= 0 and _have_tangent(q, k, v, *others.values()):
        raise NotImplementedError("lean_attention: a dual tensor of forward-mode differentiation: its tangent would be lost")


def _have_tangent(*tensors: Any) -> bool:
    return any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def dispatch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> Any:
    """decode() by way of the operators, for whoever traces."""
    given = {name: value for name, value in arguments.items() if value is not None}
    for name in given:
        if name not in DEFAULTS:
            refuse_unknown(name)
    out, lse, return_lse = given.pop("out", None), given.pop("lse", None), flag("return_lse", given.pop("return_lse", False))
    if "stream" in given:
        raise NotImplementedError("stream: an operator runs on the current one: call under torch.cuda.stream()")
    for name in ("scale", "softcap"):
        if isinstance(given.get(name), bool):
            raise TypeError(f"{name}: {given[name]}: a number is needed")
    if "window" in given:
        given["window_left"], given["window_right"] = given.pop("window")
    if "options" in given:
        if not isinstance(given["options"], Options):
            raise TypeError(f"options: {given['options']!r}: lean_attention.Options(...) is needed")
        given["options"] = given["options"].encoded
    batch = q.shape[0] if "cu_seqlens_q" not in given else len(given["cu_seqlens_q"]) - 1
    for name in LENGTHS:
        if isinstance(given.get(name), (list, tuple, int)):
            given[name] = _lengths(name, given[name], batch, q.device)
    for name in ("k_scale", "v_scale"):
        if isinstance(given.get(name), (list, tuple, int, float)):
            given[name] = torch.tensor(given[name], dtype=torch.float32, device=q.device).reshape(-1)
    if out is not None:
        check_place("out", out, (*q.shape[:-1], v.shape[-1]), q.dtype)
    if lse is not None:
        check_place("lse", lse, lse_shape(q.shape, "cu_seqlens_q" in given, given.get("layout", "bhsd")), torch.float32)
    ops = torch.ops.lean_attention
    appends = "append_k" in given and "append_v" in given
    if not appends:
        for name in ("rotary_interleaved", "rotary_absolute"):
            given.pop(name, None)  # how, without saying that
        for name in ("append_k", "append_v", "rotary_cos", "rotary_sin"):
            if name in given:
                raise ValueError(f"{name}: append_k and append_v must both be given with it")
    if appends:
        result, result_lse = ops.decode_append(q, k, v, **given)
    elif return_lse or lse is not None:
        result, result_lse = ops.decode_lse(q, k, v, **given)
    else:
        result, result_lse = ops.decode(q, k, v, **given), None
    result = result if out is None else out.copy_(result)
    if lse is not None:
        result_lse = lse.copy_(result_lse)
    return (result, result_lse) if return_lse else result


def check_place(name: str, given: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Whether a result can be copied to where the caller wants it, before it is made: copy_() would broadcast it and change its type."""
    if tuple(given.shape) != tuple(shape):
        raise ValueError(f"{name}: shape {tuple(given.shape)}: expected {tuple(shape)}")
    if given.dtype != dtype:
        raise TypeError(f"{name}: {given.dtype}: expected {dtype}")


def wrote(arrays: Iterable[Any]) -> None:
    """PyTorch counts what is written to a tensor, so that a backward pass that needs the old values is refused. It does not see
    what the library writes."""
    for array in arrays:
        if isinstance(array, torch.Tensor):
            increment_version(array)


def merge_states(*states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """lean_attention.merge_states() of o_a, lse_a, o_b, lse_b, whose shapes fit."""
    if must_dispatch(states[0]):
        return torch.ops.lean_attention.merge_states(*states)
    refuse_gradients(*states[:3], dict(lse_b=states[3]), _STATES)
    return _merge_states(*states)


def _lengths(name: str, value: Any, batch: int, device: torch.device) -> torch.Tensor:
    """Lengths that are a list, or one number for every sequence."""
    values = value if isinstance(value, (list, tuple)) else [value] * batch
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in values):
        raise TypeError(f"{name} = {value}: integers are needed")
    return torch.tensor(values, dtype=torch.int32, device=device)


def _new_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _new_lse(q: torch.Tensor, cu_seqlens_q: Optional[torch.Tensor], layout: str) -> torch.Tensor:
    return q.new_empty(lse_shape(q.shape, cu_seqlens_q is not None, layout), dtype=torch.float32)


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window_left: int = -1, window_right: int = -1, **given: Any) -> None:
    if given.get("options") is not None:
        given["options"] = tuple(given["options"])
    _core.decode(framework_of(q), q, k, v, dict(given, window=(window_left, window_right)))
    if given.get("append_k") is not None:
        wrote((k, v))


def _decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
    out = _new_out(q, v)
    _run(q, k, v, out=out, **arguments)
    return out


def _decode_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = _new_out(q, v)
    lse = _new_lse(q, arguments.get("cu_seqlens_q"), arguments.get("layout", "bhsd"))
    _run(q, k, v, out=out, lse=lse, **arguments)
    return out, lse


def _fake_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return _new_out(q, v)


def _fake_decode_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _new_out(q, v), _new_lse(q, arguments.get("cu_seqlens_q"), arguments.get("layout", "bhsd"))


_MERGED_AS_IS = tuple(getattr(torch, name) for name in _core.QUERY_DTYPES)


def _merge_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    within = o_a.dtype if o_a.dtype == o_b.dtype and o_a.dtype in _MERGED_AS_IS else torch.float32
    o = o_a.to(within, copy=True, memory_format=torch.contiguous_format)
    lse = lse_a.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    other, other_lse = o_b.to(within).contiguous(), lse_b.to(torch.float32).contiguous()
    rows = (-1, o.shape[-1])
    _core.merge_states(framework_of(o), o.view(rows), lse.view(-1), other.view(rows), other_lse.view(-1))
    return o.to(o_a.dtype), lse


def _fake_merge_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return o_a.new_empty(o_a.shape), o_a.new_empty(lse_a.shape, dtype=torch.float32)


def _above(name: str, names: Sequence[str]) -> Any:
    """The operator's autograd kernel: refuses what needs a gradient, else calls the kernel below."""
    operator = getattr(torch.ops.lean_attention, name).default

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor, **arguments: Any) -> Any:
        refuse_gradients(q, k, v, {**dict(zip(names[3:], others)), **arguments}, names)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(q, k, v, *others, **arguments)

    return call


for _name, _kernel, _fake, _tensors in (
    ("decode", _decode, _fake_decode, _QKV),
    ("decode_lse", _decode_lse, _fake_decode_lse, _QKV),
    ("decode_append", _decode_lse, _fake_decode_lse, _QKV),
    ("merge_states", _merge_states, _fake_merge_states, _STATES),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _key)
    _library.impl(_name, _above(_name, _tensors), "Autograd")
    _library.impl(_name, _refuse_transforms, "FuncTorchBatched")
    torch.library.register_fake(f"lean_attention::{_name}", _fake, lib=_library)
