"""torch.ops.lean_attention: the calls as PyTorch operators, which torch.compile, export and CUDA graphs see as one node.

decode() uses them by itself where something records; eagerly it goes straight to the library.
There is no backward pass: inputs that need a gradient are refused, and so are the transforms of torch.func.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch.autograd import forward_ad

from lean_attention import _core
from lean_attention._decode import lse_shape

# A process that has torch has its OpenMP runtime too: share its threads.
_core.find_openmp()

_COMMON = (
    "Tensor? seqlens=None, Tensor? leftpad=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    "Tensor? block_table=None, Tensor? page_indptr=None, Tensor? page_indices=None, "
    "float? scale=None, bool causal=False, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, "
    "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? mask=None, Tensor? tree_mask=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, str layout='bhsd', int[]? options=None"
)
_APPEND = (
    "Tensor append_k, Tensor append_v, Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=False"
)

_library = torch.library.Library("lean_attention", "DEF")
_library.define(f"decode(Tensor q, Tensor k, Tensor v, *, {_COMMON}) -> Tensor")
_library.define(f"decode_lse(Tensor q, Tensor k, Tensor v, *, {_COMMON}) -> (Tensor, Tensor)")
_library.define(
    f"decode_append(Tensor q, Tensor(a!) k, Tensor(b!) v, *, {_APPEND}, {_COMMON}) -> (Tensor, Tensor)"
)

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


def refuse_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuses what a result would have to be differentiated by, backward or forward."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise RuntimeError("q, k, v: one requires a gradient, and there is no backward pass: call under torch.no_grad()")
    if forward_ad._current_level >= 0 and _have_tangent(q, k, v):
        _refuse_tangents()


def _have_tangent(*tensors: Any) -> bool:
    return any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _refuse_tangents() -> None:
    raise NotImplementedError("lean_attention: a dual tensor of forward-mode differentiation: its tangent would be lost")


def dispatch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: Optional[torch.Tensor],
    lse: Optional[torch.Tensor],
    return_lse: bool,
    window: tuple[int, int],
    append: dict[str, Any],
    **arguments: Any,
) -> Any:
    """decode() by way of the operators, for whoever traces."""
    ops = torch.ops.lean_attention
    arguments.update(window_left=window[0], window_right=window[1])
    if append["append_k"] is not None:
        result, result_lse = ops.decode_append(q, k, v, **append, **arguments)
    elif return_lse or lse is not None:
        result, result_lse = ops.decode_lse(q, k, v, **arguments)
    else:
        result, result_lse = ops.decode(q, k, v, **arguments), None
    result = result if out is None else out.copy_(result)
    if lse is not None:
        result_lse = lse.copy_(result_lse)
    return (result, result_lse) if return_lse else result


def _new_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _new_lse(q: torch.Tensor, cu_seqlens_q: Optional[torch.Tensor], layout: str) -> torch.Tensor:
    return q.new_empty(lse_shape(q.shape, cu_seqlens_q is not None, layout), dtype=torch.float32)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    *,
    seqlens: Any = None,
    leftpad: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    block_table: Any = None,
    page_indptr: Any = None,
    page_indices: Any = None,
    scale: Any = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    mask: Any = None,
    tree_mask: Any = None,
    append_k: Any = None,
    append_v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = "bhsd",
    options: Any = None,
) -> None:
    _core.decode(
        q, k, v, out, lse, seqlens, leftpad, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        block_table, page_indptr, page_indices, scale, causal, (window_left, window_right), softcap, alibi_slopes, sinks,
        mask, tree_mask, append_k, append_v, rotary_cos, rotary_sin, rotary_interleaved, k_scale, v_scale, layout,
        None if options is None else tuple(options), None,
    )  # fmt: skip


def _decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
    out = _new_out(q, v)
    _run(q, k, v, out, None, **arguments)
    return out


def _decode_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = _new_out(q, v)
    lse = _new_lse(q, arguments.get("cu_seqlens_q"), arguments.get("layout", "bhsd"))
    _run(q, k, v, out, lse, **arguments)
    return out, lse


def _fake_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return _new_out(q, v)


def _fake_decode_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _new_out(q, v), _new_lse(q, arguments.get("cu_seqlens_q"), arguments.get("layout", "bhsd"))


def _above(name: str) -> Any:
    """The operator's autograd kernel: refuses what needs a gradient, else calls the kernel below."""
    operator = getattr(torch.ops.lean_attention, name).default

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        refuse_gradients(q, k, v)
        if forward_ad._current_level >= 0 and _have_tangent(*arguments, *keywords.values()):
            _refuse_tangents()
        with torch._C._AutoDispatchBelowAutograd():
            return operator(q, k, v, *arguments, **keywords)

    return call


for _name, _kernel, _fake in (
    ("decode", _decode, _fake_decode),
    ("decode_lse", _decode_lse, _fake_decode_lse),
    ("decode_append", _decode_lse, _fake_decode_lse),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _key)
    _library.impl(_name, _above(_name), "Autograd")
    _library.impl(_name, _refuse_transforms, "FuncTorchBatched")
    torch.library.register_fake(f"lean_attention::{_name}", _fake, lib=_library)
