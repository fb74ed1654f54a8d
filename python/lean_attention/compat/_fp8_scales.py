"""Scales of fp8 tensors as flash-attention 3 has them, ``[B, Hkv]``, in decode()'s form, ``[1]`` or ``[Hkv]``."""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

import torch

from lean_attention.compat._torch_pieces import is_fp8

Scale = Union[float, torch.Tensor, None]


class Fp8Scales(NamedTuple):
    """k has q's factor too: scores are q k, so it does not matter which of them is multiplied."""

    k: Optional[torch.Tensor] = None
    v: Optional[torch.Tensor] = None
    of_each_sequence: bool = False  # [B, Hkv]: decode() has no such scales
    cached_k: Optional[torch.Tensor] = None  # without q's factor: what new keys of other types are divided by


def fp8_scales(
    q: torch.Tensor, k: torch.Tensor, batch: int, q_descale: Scale, k_descale: Scale, v_descale: Scale,
    names: tuple[str, str, str] = ("q_descale", "k_descale", "v_descale"),
) -> Fp8Scales:  # fmt: skip
    """`k`: the cache; its axis 2 has the heads. One of 16 or 32 bits has no scales, whatever is given, as there. `names`: the caller's."""
    if not is_fp8(k):
        if is_fp8(q):
            raise TypeError(f"q: {q.dtype}: k and v are {k.dtype}: float8 q goes with float8 k and v")
        return Fp8Scales()
    if not is_fp8(q) and q_descale is not None:
        raise NotImplementedError(f"{names[0]}: q is {q.dtype}: is for float8 q")
    heads = k.shape[2]
    factors = [_rows(name, scale, batch, heads, q.device) for name, scale in zip(names, (q_descale, k_descale, v_descale))]
    of_each = any(factor is not None and factor.shape[0] > 1 for factor in factors)
    if all(factor is None for factor in factors):
        return Fp8Scales()
    of_q, of_k, of_v = (_row(1.0, heads, q.device) if factor is None else factor for factor in factors)
    if of_each:
        return Fp8Scales(of_q * of_k, of_v, True)
    cached_k = of_k[0].contiguous()
    return Fp8Scales(cached_k if factors[0] is None else of_q[0] * cached_k, of_v[0].contiguous(), False, cached_k)


def _row(scale: float, heads: int, device: torch.device) -> torch.Tensor:
    """``[1, Hkv]``, in float32 whatever torch's default type is."""
    return torch.full((1, heads), scale, dtype=torch.float32, device=device)


def _rows(name: str, scale: Scale, batch: int, heads: int, device: torch.device) -> Optional[torch.Tensor]:
    """``[1 or B, Hkv]``; what is expanded from one number or one row is one row."""
    if scale is None:
        return None
    if not isinstance(scale, torch.Tensor):
        return _row(float(scale), heads, device)
    scale = scale.to(device, torch.float32)
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(1, heads)
    if scale.dim() == 1 and scale.shape[0] == heads:
        return scale[None]
    if scale.dim() != 2 or scale.shape[1] != heads or scale.shape[0] not in (1, batch):
        raise ValueError(f"{name}: shape {tuple(scale.shape)}: expected [{batch}, {heads}], [{heads}] or one number")
    if batch == 0:
        return _row(1.0, heads, device)  # of no sequence
    return scale[:1] if scale.stride(0) == 0 else scale
