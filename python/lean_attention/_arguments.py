"""decode()'s arguments: the one list of them in Python. What help() shows, torch's schemas and the checks of names follow from it.

The extension has the same names in its own table (python/src/arguments.hpp), which is compared when the package is
imported.
"""

from __future__ import annotations

import difflib
import inspect
import types
from typing import Any, Callable, Optional, Sequence, TypeVar, Union

from lean_attention import _core
from lean_attention._options import Options

#: A NumPy array, a torch tensor, or any object with ``__dlpack__`` or ``__array_struct__``.
Array = Any
Lengths = Union[Array, Sequence[int]]
Scales = Union[Array, Sequence[float], float]


def declared(
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
    k_scale: Optional[Scales] = None,
    v_scale: Optional[Scales] = None,
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
        seqlens: tokens each sequence has, ``[B]``, or one number for all. Default: all that k holds. Needed with a
            block_table and with append_k.
        leftpad: first token that counts, ``[B]`` or one number. Default: 0.
        cu_seqlens_q, cu_seqlens_k: ``[B + 1]``, where each sequence begins in tokens packed end to end. The last of
            cu_seqlens_q is the number of q's tokens.
        max_seqlen_q, max_seqlen_k: upper bounds of a sequence's tokens, the first with cu_seqlens_q, the other with
            cu_seqlens_k or pages. Default: what the arrays can hold.
        block_table: int32 ``[B, pages of a sequence]``; or page_indptr ``[B + 1]`` with page_indices.
        scale: multiplies q k^T; 0 makes every key count the same. Default (None): 1 / sqrt(d).
        causal: query i of n_q sees keys up to n_kv - n_q + i (bottom-right).
        window: (left, right) keys a query sees beside its own position; -1: all.
        softcap: s becomes softcap tanh(s / softcap); 0: off.
        alibi_slopes: float32 ``[Hq]``, or ``[B, Hq]`` for slopes of each sequence.
        sinks: float32 ``[Hq]``, logits that take part in the denominator only.
        mask: boolean (True: seen) or additive, ``[B, Hq, n_q, n_kv]``, axes of size 1 broadcast.
        tree_mask: uint32 ``[B, n_q, ceil(n_q / 32)]``, bits over the last n_q keys.
        append_k, append_v: one new token for each query token, in q's layout with k's heads: written to k and v and
            attended to. seqlens count them: they are the last n_q tokens of a sequence. No two sequences may write to one page,
            nor on a GPU one read a page that another writes to.
        rotary_cos, rotary_sin: float32 ``[positions, rotary_dim / 2]``, a row for each token the cache can hold,
            applied to q and append_k.
        rotary_interleaved: pairs (0, 1), (2, 3).. instead of halves.
        rotary_absolute: positions count from the cache's token 0, as in flash-attention, instead of from leftpad. Both say
            how rotary_cos and rotary_sin are applied; without these they ask for nothing.
        k_scale, v_scale: float32 ``[1]`` or ``[Hkv]``, or one number, for float8 k and v.
        out: where the result goes, q's shape with dv at the end. Must not overlap an input.
        lse: where the log-sum-exp goes (float32, natural logarithm): ``[B, Hq]`` for one token, ``[B, Hq, n_q]``, or
            ``[Hq, total]``.
        return_lse: return (out, lse).
        options: schedule, fix-up, determinism, workers.
        stream: a cudaStream_t as a number, for arrays on a GPU. Default: the framework's current stream. Beside another
            one lists and numbers are refused, whose arrays would be made on the current one; out and lse are made there.

    Lengths are int32 (on the CPU also int64 or a list). float32, float16 and bfloat16; results are accumulated in
    float32, so that scores beyond +-2.3e38, and values whose weighted sum is beyond 3.4e38, give infinity or NaN. Sequences
    without keys give 0 and -inf. There is no backward pass.

    Lengths and page ids that lie outside what there is are refused where the host has them: on the CPU, and in lists.
    Those on a device nobody looks at before the call: they are clamped there (no memory but the tensors' is touched),
    and sticky_status() tells; check_lengths(), or ``Options(check_lengths=True)``, copies them to the host and looks
    first.

    Returns:
        out, or (out, lse).

    Raises:
        TypeError: an argument is no array, has the wrong element type, or is not known.
        ValueError: shapes, devices or values do not fit. The message begins with the argument's name.
        NotImplementedError: the call makes sense, this backend does not do it; see supports().
        RuntimeError: the device refused; or a torch input needs a gradient.
    """


SIGNATURE = inspect.signature(declared)
#: Every argument with its default.
DEFAULTS = {name: None if p.default is p.empty else p.default for name, p in SIGNATURE.parameters.items()}
#: Those that may be a list or one number.
LENGTHS = tuple(name for name, p in SIGNATURE.parameters.items() if p.annotation == "Optional[Lengths]")
if set(DEFAULTS) != set(_core.ARGUMENTS):
    raise ImportError(f"lean_attention: {set(DEFAULTS) ^ set(_core.ARGUMENTS)}: the extension is of another version")

Function = TypeVar("Function", bound=Callable[..., Any])


def taking_what_is(likeness: Function) -> Callable[[Callable[..., Any]], Function]:
    """A decorator: the function, which takes **arguments, is shown with the signature and the description of `likeness`."""

    def show(function: Any) -> Function:
        function.__doc__ = likeness.__doc__
        function.__signature__ = inspect.signature(likeness)
        function.__annotations__ = likeness.__annotations__
        return function

    return show


def schema(names: Sequence[str]) -> str:
    """These arguments in the language of torch.library's schemas, `window` as two numbers."""
    return ", ".join(f"{type} {name}={default}" for given in names for type, name, default in _torch_forms(given))


def _torch_forms(name: str) -> list[tuple[str, str, Any]]:
    if name == "window":
        return [("SymInt", f"window_{side}", bound) for side, bound in zip(("left", "right"), DEFAULTS[name])]
    annotation, default = SIGNATURE.parameters[name].annotation, DEFAULTS[name]
    return [(_TORCH_TYPES[annotation], name, repr(default))]


_TORCH_TYPES = types.MappingProxyType({
    "Optional[Array]": "Tensor?",
    "Optional[Lengths]": "Tensor?",
    "Optional[Scales]": "Tensor?",
    "Optional[int]": "SymInt?",
    "Optional[float]": "float?",
    "Optional[Options]": "int[]?",
    "float": "float",
    "bool": "bool",
    "str": "str",
})  # fmt: skip

#: What other libraries call decode()'s arguments.
_OTHER_NAMES = types.MappingProxyType({
    "softmax_scale": "scale", "sm_scale": "scale", "scaling": "scale", "is_causal": "causal", "window_size": "window",
    "sliding_window": "window", "logits_soft_cap": "softcap", "soft_cap": "softcap", "s_aux": "sinks", "learnable_sink": "sinks",
    "attn_mask": "mask", "attention_mask": "mask", "cache_seqlens": "seqlens", "seq_lens": "seqlens", "seqused_k": "seqlens",
    "cache_leftpad": "leftpad", "page_table": "block_table", "block_tables": "block_table", "kv_layout": "layout",
    "k_descale": "k_scale", "v_descale": "v_scale", "return_softmax_lse": "return_lse", "indptr": "page_indptr",
    "indices": "page_indices",
})  # fmt: skip


def refuse_unknown(name: str) -> None:
    """Raises TypeError for an argument that decode() does not have, with the one that was probably meant."""
    meant = _OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, DEFAULTS, 1)), None)
    hint = f": did you mean {meant!r}?" if meant else f": there are {', '.join(DEFAULTS)}"
    raise TypeError(f"{name}: decode() has no such argument{hint}")


def lse_shape(q_shape: Sequence[int], packed: bool, layout: str) -> tuple[int, ...]:
    """The shape of lse for a q of this shape."""
    if packed:
        return (q_shape[0], q_shape[1]) if layout == "bhsd" else (q_shape[1], q_shape[0])
    if len(q_shape) == 3:
        return (q_shape[0], q_shape[1])
    return (q_shape[0], q_shape[1], q_shape[2]) if layout == "bhsd" else (q_shape[0], q_shape[2], q_shape[1])
