"""decode() and supports(): one call of the library on arrays of any framework."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, Union

from lean_attention import _core
from lean_attention._frameworks import TORCH, framework_of
from lean_attention._options import Options

#: A NumPy array, a torch tensor, or any object with ``__dlpack__`` or ``__array_struct__``.
Array = Any
Lengths = Union[Array, Sequence[int]]


def decode(
    q: Array,
    k: Array,
    v: Array,
    *,
    seqlens: Optional[Lengths] = None,
    leftpad: Optional[Lengths] = None,
    cu_seqlens_q: Optional[Lengths] = None,
    cu_seqlens_k: Optional[Lengths] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    block_table: Optional[Array] = None,
    page_indptr: Optional[Array] = None,
    page_indices: Optional[Array] = None,
    scale: Optional[float] = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    sinks: Optional[Array] = None,
    mask: Optional[Array] = None,
    tree_mask: Optional[Array] = None,
    append_k: Optional[Array] = None,
    append_v: Optional[Array] = None,
    rotary_cos: Optional[Array] = None,
    rotary_sin: Optional[Array] = None,
    rotary_interleaved: bool = False,
    rotary_absolute: bool = False,
    k_scale: Optional[Array] = None,
    v_scale: Optional[Array] = None,
    layout: str = "bhsd",
    out: Optional[Array] = None,
    lse: Optional[Array] = None,
    return_lse: bool = False,
    options: Optional[Options] = None,
    stream: Optional[int] = None,
) -> Any:
    """Exact attention of a few new tokens over many cached ones: softmax(scale q k^T + mask) v.

    Letters: B sequences, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), n_q and n_kv tokens of a sequence,
    d head dim of q and k, dv of v. Arrays are read where they are, with any strides; nothing is copied.

    Args:
        q: ``[B, Hq, d]`` (one token), ``[B, Hq, n_q, d]``, or with ``cu_seqlens_q`` ``[Hq, total, d]``.
        k, v: ``[B, Hkv, n_kv, d]``; with ``cu_seqlens_k`` ``[Hkv, total, d]``; with pages ``[pages, Hkv, page, d]``,
            or ``[slots, Hkv, d]`` for pages of one token. dv may differ from d.
        layout: "bhsd" as above; "bshd": tokens before heads wherever both axes exist (``[B, n_q, Hq, d]``,
            ``[total, Hq, d]``, ``[pages, page, Hkv, d]``).
        seqlens: tokens each sequence has, ``[B]``; values outside [0, n_kv] are clamped. Default: all.
        leftpad: first token that counts, ``[B]``. Default: 0.
        cu_seqlens_q, cu_seqlens_k: ``[B + 1]``, where each sequence begins in tokens packed end to end.
        max_seqlen_q, max_seqlen_k: upper bounds of a sequence's tokens. Default: what the arrays can hold.
        block_table: int32 ``[B, pages of a sequence]``; or page_indptr ``[B + 1]`` with page_indices.
        scale: multiplies q k^T. Default: 1 / sqrt(d).
        causal: query i of n_q sees keys up to n_kv - n_q + i (bottom-right).
        window: (left, right) keys a query sees beside its own position; -1: all.
        softcap: s becomes softcap tanh(s / softcap); 0: off.
        alibi_slopes: float32 ``[Hq]``, or ``[B, Hq]`` for slopes of each sequence.
        sinks: float32 ``[Hq]``, logits that take part in the denominator only.
        mask: boolean (True: seen) or additive, ``[B, Hq, n_q, n_kv]``, axes of size 1 broadcast.
        tree_mask: uint32 ``[B, n_q, ceil(n_q / 32)]``, bits over the last n_q keys.
        append_k, append_v: one new token for each query token, in q's layout with k's heads: written to k and v and attended
            to. seqlens count them: they are the last n_q tokens of a sequence.
        rotary_cos, rotary_sin: float32 ``[positions, rotary_dim / 2]``, a row for each token the cache can hold, applied to
            q and append_k.
        rotary_interleaved: pairs (0, 1), (2, 3).. instead of halves.
        rotary_absolute: positions count from the cache's token 0, as in flash-attention, instead of from leftpad.
        k_scale, v_scale: float32 ``[1]`` or ``[Hkv]``, for float8 k and v.
        out: where the result goes, q's shape with dv at the end. Must not overlap an input.
        lse: where the log-sum-exp goes (float32, natural logarithm): ``[B, Hq]`` for one token, ``[B, Hq, n_q]``, or
            ``[Hq, total]``.
        return_lse: return (out, lse).
        options: schedule, fix-up, determinism, workers.
        stream: a cudaStream_t as a number. Default: the framework's current stream.

    Lengths are int32 (on the CPU also int64 or a list). float32, float16 and bfloat16; results are accumulated in
    float32. Sequences without keys give 0 and -inf. There is no backward pass.

    Returns:
        out, or (out, lse).

    Raises:
        TypeError: an argument is no array or has the wrong element type.
        ValueError: shapes, devices or values do not fit. The message begins with the argument's name.
        NotImplementedError: the call makes sense, this backend does not do it; see supports().
        RuntimeError: the device refused; or a torch input needs a gradient.
    """
    framework = framework_of(q)
    if isinstance(seqlens, (list, tuple)):
        seqlens = framework.int32(q, seqlens)
    if isinstance(leftpad, (list, tuple)):
        leftpad = framework.int32(q, leftpad)
    if isinstance(cu_seqlens_q, (list, tuple)):
        cu_seqlens_q = framework.int32(q, cu_seqlens_q)
    if isinstance(cu_seqlens_k, (list, tuple)):
        cu_seqlens_k = framework.int32(q, cu_seqlens_k)
    if framework is TORCH:
        ops = TORCH.ops
        if ops.must_dispatch(q):
            return ops.dispatch(
                q, k, v, out, lse, return_lse, window,
                dict(append_k=append_k, append_v=append_v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                     rotary_interleaved=rotary_interleaved, rotary_absolute=rotary_absolute),
                seqlens=seqlens, leftpad=leftpad, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, block_table=block_table, page_indptr=page_indptr,
                page_indices=page_indices, scale=scale, causal=causal, softcap=softcap, alibi_slopes=alibi_slopes,
                sinks=sinks, mask=mask, tree_mask=tree_mask, k_scale=k_scale, v_scale=v_scale, layout=layout,
                options=None if options is None else options.encoded,
            )  # fmt: skip
        ops.refuse_gradients(q, k, v)
    made_out = out is None
    if made_out:
        out = framework.output(q, v)
    if lse is None and return_lse:
        lse = framework.empty_float32(q, lse_shape(q.shape, cu_seqlens_q is not None, layout))
    _core.decode(
        q, k, v, out, lse, seqlens, leftpad, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        block_table, page_indptr, page_indices, scale, causal, window, softcap, alibi_slopes, sinks, mask, tree_mask,
        append_k, append_v, rotary_cos, rotary_sin, rotary_interleaved, rotary_absolute, k_scale, v_scale, layout,
        None if options is None else options.encoded, framework.stream(q) if stream is None else stream,
    )  # fmt: skip
    if made_out:
        out = framework.finish(out)
    return (out, lse) if return_lse else out


def lse_shape(q_shape: Sequence[int], packed: bool, layout: str) -> tuple[int, ...]:
    """The shape of lse for a q of this shape."""
    if packed:
        return (q_shape[0], q_shape[1]) if layout == "bhsd" else (q_shape[1], q_shape[0])
    if len(q_shape) == 3:
        return (q_shape[0], q_shape[1])
    return (q_shape[0], q_shape[1], q_shape[2]) if layout == "bhsd" else (q_shape[0], q_shape[2], q_shape[1])


class Support(NamedTuple):
    """True when decode() would accept the call; else `code` and `reason` say why not."""

    ok: bool
    code: str = "ok"
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def supports(q: Array, k: Array, v: Array, **arguments: Any) -> Support:
    """Whether decode() with these arguments would be accepted. Reads no array's contents.

    Takes what decode() takes. Raises TypeError for arguments decode() does not have or that are no arrays, and ValueError
    when shapes do not fit each other; what the backend does not do is the answer.
    """
    unknown = set(arguments) - set(_core.ARGUMENTS) - {"return_lse"}
    if unknown:
        raise TypeError(f"supports() got an unexpected argument {sorted(unknown)[0]!r}")
    framework = framework_of(q)
    values = dict(_DEFAULTS, **arguments, q=q, k=k, v=v)
    if values["out"] is None:
        values["out"] = framework.output(q, v)
    if isinstance(values["options"], Options):
        values["options"] = values["options"].encoded
    for name in ("seqlens", "leftpad", "cu_seqlens_q", "cu_seqlens_k"):
        if isinstance(values[name], (list, tuple)):
            values[name] = framework.int32(q, values[name])
    refused = _core.supports(*(values[name] for name in _core.ARGUMENTS))
    return Support(True) if refused is None else Support(False, *refused)


_DEFAULTS = dict.fromkeys(_core.ARGUMENTS) | (decode.__kwdefaults__ or {})
