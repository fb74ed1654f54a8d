"""accepts() and decode_if_accepted(): for those who have another kernel to turn to where a call is not ours."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch.utils._mode_utils import no_dispatch

from lean_attention._decode import decode, supports

_ROW_ELEMENTS = 8  # 16 bytes of a 16-bit type: what the CUDA backend wants rows to begin at

_answers: dict[tuple, bool] = {}
_MOST_ANSWERS = 4096  # a caller whose numbers never repeat must not fill the memory


def accepts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any) -> bool:
    """Whether decode() of these tensors, laid out "bhsd", would be accepted; no for inputs that need a gradient.

    The library is asked once for each kind of call: devices, types, heads, alignment, which arguments are there, and
    how sizes agree; not for each batch and length.
    """
    tensors = (query, key, value)
    if _need_gradient(*tensors, *arguments.values()):
        return False
    rules = tuple((name, _kind_of(argument)) for name, argument in arguments.items())
    if torch.compiler.is_compiling():
        tokens = 1 if query.shape[2] == 1 else 2  # two numbers, not a function of a symbolic one
        shapes = (query.shape[1], key.shape[1], tokens, query.shape[3], value.shape[3])
        return _accepts_like(query.device, query.dtype, key.dtype, shapes, rules)
    kind = (
        query.shape[1], key.shape[1], query.shape[2] > 1, rules, _agreement(query, key, value, arguments),
        *((t.device, t.dtype, t.shape[3], t.data_ptr() % 16, *(s % _ROW_ELEMENTS for s in t.stride())) for t in tensors),
    )  # fmt: skip
    if kind not in _answers:
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        _answers[kind] = _supported(query, key, value, arguments)
    return _answers[kind]


def decode_if_accepted(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any
) -> Optional[torch.Tensor]:
    """decode() of tensors laid out "bhsd", or None where the library does not do such a call.

    It says so before it does anything.

    Raises:
        ValueError: the call is the library's, and a value in it is wrong, a length for one.
    """
    if torch.compiler.is_compiling():
        return decode(query, key, value, **arguments) if accepts(query, key, value, **arguments) else None
    if _need_gradient(query, key, value, *arguments.values()):
        return None
    try:  # asking first would cost half as much again
        return decode(query, key, value, **arguments)
    except NotImplementedError:
        return None
    except (TypeError, ValueError):
        if _supported(query, key, value, arguments):
            raise
        return None


def _need_gradient(*arguments: Any) -> bool:
    """A mask or a sink alone may be what is learned."""
    return torch.is_grad_enabled() and any(isinstance(one, torch.Tensor) and one.requires_grad for one in arguments)


def _supported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]) -> bool:
    """What cannot even be asked, float64 for one, is the other kernel's to compute or to refuse."""
    try:
        return bool(supports(query, key, value, **arguments))
    except (TypeError, ValueError):
        return False


def _kind_of(argument: Any) -> Any:
    """What of an argument decides whether it is supported: that it is there, not its value."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.dim()
    if isinstance(argument, (tuple, list)):
        return tuple(part >= 0 for part in argument)
    return bool(argument)


def _agreement(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]) -> tuple:
    """Of batch and lengths what decides whether a call is supported: which are equal. And numbers, which have ranges."""
    batch, q_heads, q_tokens, dim = query.shape
    sizes = (1, batch, q_heads, q_tokens, key.shape[2])
    axes = tuple(
        tuple(size == known for size in argument.shape for known in sizes)
        for argument in arguments.values()
        if isinstance(argument, torch.Tensor)
    )
    numbers = tuple(argument for argument in arguments.values() if isinstance(argument, (int, float)))
    return key.shape[0] == batch, key.shape[:3] == value.shape[:3], key.shape[3] == dim, q_tokens == 0, axes, numbers


@torch.compiler.assume_constant_result
def _accepts_like(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, shapes: tuple, rules: tuple) -> bool:
    """The same while torch.compile traces and tensors have no memory: asked of small dense ones of the same kind."""
    q_heads, kv_heads, q_tokens, dim, value_dim = shapes
    with no_dispatch():
        query = torch.empty((1, q_heads, q_tokens, dim), dtype=dtype, device=device)
        key = torch.empty((1, kv_heads, 2, dim), dtype=kv_dtype, device=device)
        value = torch.empty((1, kv_heads, 2, value_dim), dtype=kv_dtype, device=device)
        arguments = {name: _example_of(name, kind, q_heads, device) for name, kind in rules}
        return _supported(query, key, value, arguments)


def _example_of(name: str, kind: Any, q_heads: int, device: torch.device) -> Any:
    """An argument of the kind that _kind_of() saw."""
    if isinstance(kind, bool):
        return {"causal": kind, "mask": None}.get(name, float(kind))
    if isinstance(kind[0], bool):
        return tuple(0 if bounded else -1 for bounded in kind)
    dtype, dims = kind
    shape = (1,) * dims if name == "mask" else (q_heads if name in ("sinks", "alibi_slopes") else 1,)
    return torch.ones(shape, dtype=dtype, device=device)
