"""JAX: decode() as an operation of XLA's typed FFI, for jax.jit, on the CPU and CUDA.

>>> out = jax.jit(lean_attention.jax.decode)(q, k, v, seqlens=seqlens)

The call is read while JAX traces, so shapes, types and rules are refused there by the argument's name; what the backend
of the device lacks is refused when the operation runs, as XlaRuntimeError. Works under jit, vmap and scan. There is no
gradient. Arrays of JAX never change: append_k and append_v are not here.
"""

from __future__ import annotations

import functools
from typing import Any, Optional, Sequence, Union

import jax
import jax.numpy as jnp
import numpy as np

from lean_attention import _core
from lean_attention._arguments import LENGTHS, lse_shape
from lean_attention._options import Options, flag

_TARGET = "lean_attention_decode"
_INT32 = (*LENGTHS, "block_table", "page_indptr", "page_indices")  # what the operation reads so, and JAX may have in 64 bits


@functools.cache
def _register() -> None:
    for platform, handler in _core.jax_handlers().items():
        jax.ffi.register_ffi_target(_TARGET, handler, platform=platform)


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    seqlens: Union[jax.Array, Sequence[int], None] = None,
    leftpad: Union[jax.Array, Sequence[int], None] = None,
    cu_seqlens_q: Union[jax.Array, Sequence[int], None] = None,
    cu_seqlens_k: Union[jax.Array, Sequence[int], None] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    block_table: Optional[jax.Array] = None,
    page_indptr: Optional[jax.Array] = None,
    page_indices: Optional[jax.Array] = None,
    scale: Optional[float] = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[jax.Array] = None,
    sinks: Optional[jax.Array] = None,
    mask: Optional[jax.Array] = None,
    tree_mask: Optional[jax.Array] = None,
    k_scale: Optional[jax.Array] = None,
    v_scale: Optional[jax.Array] = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    options: Optional[Options] = None,
) -> Any:
    """lean_attention.decode() on JAX's arrays: the same arguments, shapes and errors. Returns out, or (out, lse).

    Arrays may be traced: q, k, v, the lengths (seqlens, leftpad, cu_seqlens_q, cu_seqlens_k), the tables (block_table,
    page_indptr, page_indices), alibi_slopes, sinks, mask, tree_mask, k_scale and v_scale.
    max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, layout, return_lse and options are
    Python values, static under jit.
    """
    given = dict(
        q=q, k=k, v=v, seqlens=seqlens, leftpad=leftpad, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        block_table=block_table, page_indptr=page_indptr, page_indices=page_indices, alibi_slopes=alibi_slopes, sinks=sinks,
        mask=mask, tree_mask=tree_mask, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    operands = {name: _operand(name, value) for name, value in given.items() if value is not None}
    stand_ins = {name: np.empty(x.shape, x.dtype) for name, x in operands.items()}
    if operands["q"].ndim < 2 or operands["v"].ndim < 2:
        raise ValueError(f"q, v: shapes {q.shape}, {v.shape}: three or four axes are needed")
    results = [jax.ShapeDtypeStruct((*operands["q"].shape[:-1], operands["v"].shape[-1]), operands["q"].dtype)]
    if flag("return_lse", return_lse):
        results.append(jax.ShapeDtypeStruct(lse_shape(operands["q"].shape, cu_seqlens_q is not None, layout), jnp.float32))
    stand_ins.update({name: np.empty(x.shape, x.dtype) for name, x in zip(("out", "lse"), results)})
    values = dict(
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, scale=scale, causal=causal, window=window, softcap=softcap,
        layout=layout, options=options,
    )  # fmt: skip
    image = _image(dict(stand_ins, **values))
    _register()
    call = jax.ffi.ffi_call(_TARGET, results, vmap_method="sequential")
    places = np.array([_core.ARGUMENTS.index(name) for name in operands], np.int32)
    out, *lse = call(*operands.values(), image=image, operands=places)
    return (out, lse[0]) if return_lse else out


def _operand(name: str, value: Any) -> jax.Array:
    """Lists of lengths and page ids, and 64-bit ones, as the library has them. JAX cuts numbers to 32 bits in silence."""
    if name in _INT32:
        for i, number in enumerate(_numbers(value)):
            if isinstance(number, int) and not -(2**31) <= number < 2**31:
                raise ValueError(f"{name}[{i}] = {number}: must fit 32 bits")
    array = jnp.asarray(value)
    if name not in _INT32 or array.dtype != jnp.int64:
        return array
    return array.clip(-(2**31), 2**31 - 1).astype(jnp.int32)  # of traced ones, what does not fit stays out of range


def _numbers(value: Any) -> Sequence[Any]:
    """What may not fit 32 bits: a list's numbers, and those of arrays of 64-bit integers that are not traced."""
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in (_numbers(part) or (part,))]
    is_wide = "int64" in str(getattr(value, "dtype", "")) and not isinstance(value, jax.core.Tracer)
    return np.asarray(value).ravel().tolist() if is_wide else ()


def _image(arguments: dict[str, Any]) -> np.ndarray:
    """The call as the extension reads it, without memory; raises what decode() would."""
    q, k, v = (arguments.pop(name) for name in ("q", "k", "v"))
    return np.frombuffer(_core.image(None, q, k, v, arguments), np.uint8)
