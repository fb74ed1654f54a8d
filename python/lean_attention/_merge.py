"""merge_states(): two results over disjoint keys become one, as in cascade attention and context parallelism."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from lean_attention import _core
from lean_attention._frameworks import framework_of


def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """The result over the union of two disjoint key sets.

    Args:
        o_a, o_b: ``[..., dv]``, results of decode().
        lse_a, lse_b: ``[...]``, their log-sum-exp, natural logarithm.

    Returns:
        (o, lse) of the union, o in o_a's type, lse in float32. States without keys (lse = -inf, or +inf as
        FlashAttention writes it) change nothing, whatever their o holds.

    Formula (softmax re-scaling, LeanAttention, arXiv:2405.10480, section "Softmax Re-scaling as Reduction"), in
    float32: lse = log(exp(lse_a) + exp(lse_b)), o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b.

    Raises:
        ValueError: shapes do not fit.
    """
    for name, o, lse in (("a", o_a, lse_a), ("b", o_b, lse_b)):
        if tuple(o.shape[:-1]) != tuple(lse.shape) or tuple(o.shape) != tuple(o_a.shape):
            expected = f"{tuple(o_a.shape)}, {tuple(o_a.shape[:-1])}"
            raise ValueError(f"o_{name}, lse_{name}: shapes {tuple(o.shape)}, {tuple(lse.shape)}: expected {expected}")
    if framework_of(o_a).ops is not None:
        return _merge_torch(o_a, lse_a, o_b, lse_b)
    return _merge_host(o_a, lse_a, o_b, lse_b)


def _merge_torch(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """In torch's own operations: runs on any device, is traced by torch.compile."""
    torch = sys.modules["torch"]
    a, b = (torch.where(torch.isinf(lse), -torch.inf, lse.float()) for lse in (lse_a, lse_b))
    top = torch.maximum(a, b)
    base = torch.where(top == -torch.inf, 0.0, top)  # (-inf) - (-inf) is not a number
    weight_a, weight_b = torch.exp(a - base), torch.exp(b - base)
    total = weight_a + weight_b
    scale = torch.where(total == 0, 0.0, 1 / total)

    def share(o: Any, lse: Any, weight: Any) -> Any:
        """By selection: an empty state's o may be no number, and 0 times that is none either."""
        return torch.where((lse == -torch.inf).unsqueeze(-1), 0.0, o.float() * (weight * scale).unsqueeze(-1))

    return (share(o_a, a, weight_a) + share(o_b, b, weight_b)).to(o_a.dtype), base + torch.log(total)


def _merge_host(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Any, Any]:
    for name, array in (("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{name}: a masked array, whose mask would be lost: pass .filled(...) or .data")
    framework = framework_of(o_a)
    value_dim = o_a.shape[-1]
    o, lse = (np.array(x, np.float32, order="C") for x in (o_a, lse_a))
    other, other_lse = (np.ascontiguousarray(x, np.float32) for x in (o_b, lse_b))
    _core.merge_states(o.reshape(-1, value_dim), lse.reshape(-1), other.reshape(-1, value_dim), other_lse.reshape(-1))
    o = o.astype(o_a.dtype, copy=False)
    return (o, lse) if framework.finish is None else (framework.finish(o), framework.finish(lse))
