"""merge_states(): two results over disjoint keys become one, as in cascade attention and context parallelism."""

from __future__ import annotations

from typing import Any

import numpy as np

from lean_attention import _core
from lean_attention._frameworks import framework_of


def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """The result over the union of two disjoint key sets, on the device that has them.

    Args:
        o_a, o_b: ``[..., dv]``, results of decode().
        lse_a, lse_b: ``[...]``, their log-sum-exp, natural logarithm.

    Returns:
        (o, lse) of the union, o in o_a's type, lse in float32. States without keys (lse = -inf, or +inf as
        FlashAttention writes it) change nothing, whatever their o holds.

    Formula (softmax re-scaling, LeanAttention, arXiv:2405.10480, section "Softmax Re-scaling as Reduction"), in
    float32: lse = log(exp(lse_a) + exp(lse_b)), o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b.

    Raises:
        ValueError: shapes do not fit, or arrays lie on different devices.
        TypeError: integers or complex numbers, which would be cut.
        RuntimeError: a torch tensor requires a gradient: there is no backward pass.
        NotImplementedError: tensors on a GPU, and this build has no CUDA.
    """
    if not o_a.shape or o_a.shape[-1] == 0:
        raise ValueError(f"o_a: shape {tuple(o_a.shape)}: its head dim must not be 0")
    for name, o, lse in (("a", o_a, lse_a), ("b", o_b, lse_b)):
        if tuple(o.shape[:-1]) != tuple(lse.shape) or tuple(o.shape) != tuple(o_a.shape):
            expected = f"{tuple(o_a.shape)}, {tuple(o_a.shape[:-1])}"
            raise ValueError(f"o_{name}, lse_{name}: shapes {tuple(o.shape)}, {tuple(lse.shape)}: expected {expected}")
        for array_name, array in ((f"o_{name}", o), (f"lse_{name}", lse)):
            if not _is_floating(array.dtype):
                raise TypeError(f"{array_name}: {array.dtype}: real floating-point numbers are needed")
    framework = framework_of(o_a)
    if framework.ops is not None:
        return framework.ops.merge_states(o_a, lse_a, o_b, lse_b)
    for name, array in (("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{name}: a masked array, whose mask would be lost: pass .filled(...) or .data")
    value_dim = o_a.shape[-1]
    o, lse, other, other_lse = (framework.float32(o_a, x).copy(order="C") for x in (o_a, lse_a, o_b, lse_b))
    _core.merge_states(framework, o.reshape(-1, value_dim), lse.reshape(-1), other.reshape(-1, value_dim), other_lse.reshape(-1))
    o = o.astype(o_a.dtype, copy=False)
    return (o, lse) if framework.finish is None else (framework.finish(o), framework.finish(lse))


def _is_floating(dtype: Any) -> bool:
    """Whether numbers of a torch or NumPy type are; types that NumPy is told of by others, bfloat16 for one, have no kind there."""
    floating = getattr(dtype, "is_floating_point", None)
    return floating if floating is not None else np.dtype(dtype).kind not in "biuc"
