"""accepts(): whether a call may be ours, for those who have another kernel to turn to."""

from __future__ import annotations

from typing import Any

import torch

from lean_attention._decode import supports

_ROW_ELEMENTS = 8  # 16 bytes of a 16-bit type: what the CUDA backend wants rows to begin at

_answers: dict[tuple, bool] = {}


def accepts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any) -> bool:
    """Whether decode() of these tensors, laid out "bhsd", would be accepted; no for inputs that need a gradient.

    The library is asked once for each kind of call: devices, types, heads, alignment, and which arguments are there.
    While torch.compile traces, tensors cannot be asked; then the call itself refuses what is not supported.
    """
    tensors = (query, key, value)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    if torch.compiler.is_compiling():
        return True
    kind = (
        query.shape[1], key.shape[1], query.shape[2] > 1,
        *((t.device, t.dtype, t.shape[3], t.data_ptr() % 16, *(s % _ROW_ELEMENTS for s in t.stride())) for t in tensors),
        *((name, _kind_of(argument)) for name, argument in arguments.items()),
    )  # fmt: skip
    if kind not in _answers:
        _answers[kind] = bool(supports(query, key, value, **arguments))
    return _answers[kind]


def _kind_of(argument: Any) -> Any:
    """What of an argument decides whether it is supported: that it is there, not its value."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.dim()
    if isinstance(argument, tuple):
        return tuple(part >= 0 for part in argument)
    return bool(argument)
