"""Attention from its definition in float64, and how far a result may lie from it. Shares no code with the library."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Sequence

import numpy as np

# The constants of src/backends/reference/error_bound.cpp.
U32 = 2.0**-24
EXP_ERROR = 2.0**-22
ELEMENT_SIGMAS = 6.0
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST_TILE = 16  # tokens: the most merges there can be
MOST_CONTRIBUTORS = 64


@dataclasses.dataclass
class Answer:
    out: np.ndarray
    lse: np.ndarray
    allowed: np.ndarray
    allowed_lse: np.ndarray

    def check(self, out: Any, lse: Any = None) -> None:
        """Every element within its bound; 0 and -inf where no key is seen."""
        measured = as_float64(out)
        assert measured.shape == self.out.shape
        np.testing.assert_array_less(np.abs(measured - self.out), self.allowed + 1e-300)
        if lse is not None:
            measured_lse = as_float64(lse)
            finite = np.isfinite(self.lse)
            assert (np.isfinite(measured_lse) == finite).all()
            np.testing.assert_array_less(np.abs(measured_lse[finite] - self.lse[finite]), self.allowed_lse[finite])


def as_float64(array: Any) -> np.ndarray:
    if hasattr(array, "detach"):
        array = array.detach().double().cpu().numpy()
    return np.asarray(array).astype(np.float64)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    seqlens: Optional[Sequence[int]] = None,
    leftpad: Optional[Sequence[int]] = None,
    scale: Optional[float] = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    mask: Any = None,
    dtype: str = "float32",
) -> Answer:
    """q [B, Hq, n_q, d], k and v [B, Hkv, n_kv, d]; the meaning of each rule is that of src/backends/reference/visibility.hpp."""
    q, k, v = (as_float64(x) for x in (q, k, v))
    batch, q_heads, q_tokens, dim = q.shape
    group = q_heads // k.shape[1]
    scale = dim**-0.5 if scale is None else scale
    shape = (batch, q_heads, q_tokens)
    answer = Answer(np.zeros((*shape, v.shape[-1])), np.full(shape, -np.inf), np.zeros((*shape, v.shape[-1])), np.zeros(shape))
    for b, head, i in np.ndindex(shape):
        end = k.shape[2] if seqlens is None else int(seqlens[b])
        begin = 0 if leftpad is None else int(leftpad[b])
        keys = np.arange(begin, max(begin, end))
        position = end - q_tokens + i
        seen = np.ones(len(keys), bool)
        if causal:
            seen &= keys <= position
        if window[0] >= 0:
            seen &= keys >= position - window[0]
        if window[1] >= 0:
            seen &= keys <= position + window[1]
        row_mask = None
        if mask is not None:
            row_mask = np.broadcast_to(mask, (batch, q_heads, q_tokens, k.shape[2]))[b, head, i, keys]
            seen &= row_mask if row_mask.dtype == bool else row_mask != -np.inf
        keys = keys[seen]
        sink = -np.inf if sinks is None else float(sinks[head])
        if len(keys) == 0:
            continue
        rows = k[b, head // group, keys]
        scores = scale * (rows @ q[b, head, i])
        if softcap > 0:
            scores = softcap * np.tanh(scores / softcap)
        if alibi_slopes is not None:
            scores = scores - float(alibi_slopes[head]) * np.abs(position - keys)
        if row_mask is not None and row_mask.dtype != bool:
            scores = scores + row_mask[seen]
        top = max(scores.max(), sink)
        weights = np.exp(scores - top)
        total = weights.sum() + np.exp(sink - top)
        p = weights / total
        values = v[b, head // group, keys]
        answer.out[b, head, i] = p @ values
        answer.lse[b, head, i] = top + np.log(total)
        _bound(answer, (b, head, i), dtype, p, values, abs(scale) * (np.abs(rows) @ np.abs(q[b, head, i])).max(), dim)
    return answer


def _bound(answer: Answer, at: tuple, dtype: str, p: np.ndarray, values: np.ndarray, magnitude: float, dim: int) -> None:
    """The element bound of docs/numerics.md, p rounded to the type of v as where the CPU has such a dot product."""
    tiles = -(-len(p) // SMALLEST_TILE)
    depth = tiles + min(tiles, MOST_CONTRIBUTORS)
    score_error = dim * U32 / (1 - dim * U32) * magnitude + EXP_ERROR
    magnitudes = p @ np.abs(values)
    p_roundoff = 0.0 if dtype == "float32" else ROUNDOFF[dtype]
    answer.allowed[at] = (
        2 * (2 * score_error + depth * U32) * magnitudes
        + ELEMENT_SIGMAS * p_roundoff * np.sqrt((p**2) @ (values**2))
        + ROUNDOFF[dtype] * np.abs(answer.out[at])
    )
    answer.allowed_lse[at] = 2 * (score_error + depth * U32) + 2 * U32 * np.abs(answer.lse[at])
