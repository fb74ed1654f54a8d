"""FlashInfer's merge_state(), merge_states(), merge_state_in_place(): results over disjoint keys, with logarithms in base 2."""

from __future__ import annotations

from typing import Optional

import torch


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One result of ``v [n, states, H, d]`` and ``s [n, states, H]``: (``[n, H, d]``, ``[n, H]`` in float32).

    A state without keys (s = -inf, or +inf as FlashAttention writes it) changes nothing, whatever its v holds.

    Raises:
        ValueError: shapes do not fit, or there is no state.
    """
    if v.dim() != 4 or s.shape != v.shape[:3] or v.shape[1] == 0:
        shapes = f"{tuple(v.shape)}, {tuple(s.shape)}"
        raise ValueError(f"v, s: shapes {shapes}: expected [n, states, H, d], [n, states, H], and one state or more")
    s = s.float()
    s = torch.where(s == torch.inf, -torch.inf, s)
    top = s.amax(1, keepdim=True)
    base = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp2(s - base)
    total = weights.sum(1, keepdim=True)
    shares = torch.where(total == 0, 0.0, weights / total)[..., None]  # by what is 0: a NaN stays one
    merged = torch.where(shares == 0, 0.0, v.float() * shares).sum(1)
    return merged.to(v.dtype), (base + torch.log2(total)).squeeze(1)


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One result of two: of v_a and v_b ``[n, H, d]`` by their logarithms s_a and s_b ``[n, H]`` in base 2.

    Returns:
        (v ``[n, H, d]``, s ``[n, H]`` in float32).

    Raises:
        ValueError: shapes or types differ.
    """
    for names, a, b in (("v_a, v_b", v_a, v_b), ("s_a, s_b", s_a, s_b)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"{names}: shapes {tuple(a.shape)}, {tuple(b.shape)}, {a.dtype}, {b.dtype}: must be the same")
    return merge_states(torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1))


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: Optional[torch.Tensor] = None
) -> None:
    """v ``[n, H, d]`` and s ``[n, H]`` become the result of themselves and of v_other and s_other.

    With ``mask [n]`` only where it is true.

    Raises:
        ValueError: shapes or types differ, or `mask` is not of n rows.
    """
    if mask is not None and mask.shape != v.shape[:1]:
        raise ValueError(f"mask: shape {tuple(mask.shape)}: expected {tuple(v.shape[:1])}")
    merged, merged_s = merge_state(v, s, v_other, s_other)
    if mask is not None:
        merged = torch.where(mask.bool()[:, None, None], merged, v)
        merged_s = torch.where(mask.bool()[:, None], merged_s, s)
    v.copy_(merged)
    s.copy_(merged_s)
