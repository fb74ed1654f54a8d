"""What the doors to other libraries share: their arguments in this library's words. Nothing here waits for a device."""

from __future__ import annotations

import operator
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

import torch

from lean_attention import _core
from lean_attention._decode import check_lengths, decode, supports
from lean_attention._options import Options
from lean_attention.torch_ops import must_dispatch, refuse_gradients

_FP8 = tuple(getattr(torch, name) for name in _core.SCALED_DTYPES if name.startswith("float8"))


def refuse(function: str, given: Mapping[str, Any], hints: Iterable[str], reasons: Mapping[str, str]) -> None:
    """Keywords a function has no parameter for: hints mean nothing here; None, 0, and a scale or a number of ranks of 1 ask for
    nothing; the rest is refused."""
    for name, value in given.items():
        if name in hints:
            continue
        if name not in reasons:
            raise TypeError(f"{name}: {function}() has no such argument")
        nothing = 1 if "scale" in name or name == "cp_world_size" else 0
        if value is not None and not (isinstance(value, (bool, int, float)) and value == nothing):
            raise NotImplementedError(f"{name}: {reasons[name]}")


def decode_named(
    names: Mapping[str, str], *tensors: torch.Tensor, do: Callable[..., Any] = decode, **arguments: Any
) -> Any:
    """decode(), or check(), whose refusal of an argument begins with the name that the caller knows it by."""
    try:
        return do(*tensors, **arguments)
    except (TypeError, ValueError) as error:
        text = str(error)
        for name, theirs in names.items():
            if text.startswith((f"{name}[", f"{name}:", f"{name} ")):
                raise type(error)(theirs + text[len(name) :]) from None
        raise


def check(*tensors: torch.Tensor, **arguments: Any) -> None:
    """Raises what decode() would, for who has something to write before that call. Nothing is known of a call that is recorded."""
    if must_dispatch(tensors[0]):
        return
    refuse_gradients(*tensors, arguments)
    support = supports(*tensors, **arguments)
    if not support:
        raise (NotImplementedError if support.code == "unsupported" else ValueError)(support.reason)
    if tensors[0].device.type == "cpu":
        check_lengths(*tensors, **arguments)


def window_of(name: str, window: Optional[Sequence[int]]) -> tuple[int, int]:
    """(left, right) of a tuple, a list or two numbers of a tensor; None: all keys. Any negative number means -1."""
    if window is None:
        return (-1, -1)
    sides = list(window) if isinstance(window, Iterable) else []
    if len(sides) != 2:
        raise ValueError(f"{name} = {window!r}: expected (left, right)")
    try:
        left, right = (-1 if side is None else max(-1, _integer(side)) for side in sides)
    except TypeError:
        raise TypeError(f"{name} = {window!r}: two integers are needed") from None
    return (left, right)


def _integer(number: Any) -> int:
    """operator.index() without True and False."""
    if isinstance(number, bool):
        raise TypeError
    return operator.index(number)


def one_of(**names: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """The value of an argument that has several names."""
    given = {name: value for name, value in names.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{', '.join(given)}: are one argument: only one may be given")
    return next(iter(given.values()), None)


def lengths_of(name: str, given: Any, batch: int, device: torch.device) -> Any:
    """A list, or one number for every sequence, as a tensor, which can be counted with; refused in decode()'s words."""
    if not isinstance(given, (int, list, tuple)):
        return given
    for i, number in enumerate([given] if isinstance(given, int) else given):
        try:
            fits = -(2**31) <= _integer(number) < 2**31
        except TypeError:
            raise TypeError(f"{name}[{i}] = {number!r}: an integer is needed") from None
        if not fits:
            raise ValueError(f"{name}[{i}] = {number}: must fit 32 bits")
    if isinstance(given, int):  # without a copy from the host, which a CUDA graph could not hold
        return torch.full((batch,), given, dtype=torch.int32, device=device)
    return torch.tensor(given, dtype=torch.int32, device=device)


def float32(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """In decode()'s type, and still what it was: decode() refuses one that requires a gradient."""
    return None if tensor is None else tensor.float().contiguous()


def is_fp8(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _FP8


def split_options(num_splits: int) -> Optional[Options]:
    if num_splits == 0:
        return None
    return Options(policy="data_parallel") if num_splits == 1 else Options(policy="fixed_split", splits=num_splits)


def sequence_of_tokens(cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Which sequence each of the packed tokens belongs to, ``[total]``."""
    tokens = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True).clamp_(max=cu_seqlens.shape[0] - 2)


def positions_of(first: torch.Tensor, like: torch.Tensor, cu_seqlens: Optional[torch.Tensor], advance: bool) -> torch.Tensor:
    """Positions of the tokens of ``like``, ``[B, n, ...]`` or packed ``[total, ...]``: from first ``[B]`` on, or all at it."""
    if cu_seqlens is None:
        steps = torch.arange(like.shape[1], dtype=first.dtype, device=first.device)
        return first[:, None] + (steps if advance else torch.zeros_like(steps))
    sequence = sequence_of_tokens(cu_seqlens, like.shape[0])
    steps = torch.arange(like.shape[0], device=first.device) - cu_seqlens[sequence] if advance else 0
    return first[sequence] + steps


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotary embedding of ``x [..., heads, d]`` by the rows ``positions [...]`` of tables ``[rows, rotary_dim / 2]``."""
    readable = positions.device.type == "cpu" and positions.numel() > 0 and not torch.compiler.is_compiling()
    if readable and int(positions.max()) >= cos.shape[0]:
        raise ValueError(f"rotary_cos: shape {tuple(cos.shape)}: a token stands at position {int(positions.max())}")
    rows = positions.clamp(0, cos.shape[0] - 1).long()
    return turn_by(x, cos.float()[rows], sin.float()[rows], interleaved)


def turn_by(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The same by ``cos, sin [..., rotary_dim / 2]`` of each token: the bits that decode() gives, fma(a, cos, -(b sin))."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotary_dim = 2 * cos.shape[-1]
    turned = x[..., :rotary_dim].float()
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (_fma(a, cos, -(b * sin)), _fma(a, sin, b * cos))
    both = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((both.to(x.dtype), x[..., rotary_dim:]), -1)


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a b + c rounded once: the product of two fp32 numbers is exact in double."""
    return (a.double() * b.double() + c.double()).float()
