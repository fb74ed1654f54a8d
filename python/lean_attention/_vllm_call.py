"""One attention layer of a serving engine over its paged cache, in this library's words.

Knows nothing of vLLM but how its caches lie in memory; _vllm_layers.py turns the engine's objects into these. Runs, and is
tested, without the engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

import torch

from lean_attention._decode import decode
from lean_attention._options import Options

FP8_TYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[pages, Hkv, page, d]`` of a cache ``[pages, Hkv, page, 2 d]`` whose memory of each page and head holds all
    keys, then all values."""
    pages, kv_heads, page, both = _shape(cache, 4)
    flat = cache.view(pages, kv_heads, 2 * page, both // 2)
    return flat[:, :, :page], flat[:, :, page:]


def side_by_side(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a cache ``[pages, Hkv, page, 2 d]`` that holds a token's key and value behind each other."""
    dim = _shape(cache, 4)[3] // 2
    return cache[..., :dim], cache[..., dim:]


def keys_then_values(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a cache ``[2, pages, Hkv, page, d]``."""
    if _shape(cache, 5)[0] != 2:
        raise ValueError(f"kv_cache: shape {tuple(cache.shape)}: the first axis holds keys and values and must be 2")
    return cache[0], cache[1]


def token_rows_of_keys_then_values(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a cache ``[2, pages, page, Hkv, d]``."""
    k, v = keys_then_values(cache)
    return k.transpose(1, 2), v.transpose(1, 2)


def pairs_of_token_rows(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a cache ``[pages, 2, page, Hkv, d]``."""
    if _shape(cache, 5)[1] != 2:
        raise ValueError(f"kv_cache: shape {tuple(cache.shape)}: the second axis holds keys and values and must be 2")
    return cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2)


def _shape(cache: torch.Tensor, axes: int) -> torch.Size:
    if cache.dim() != axes:
        raise ValueError(f"kv_cache: shape {tuple(cache.shape)}: {axes} axes are needed")
    return cache.shape


def first_of(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The first rows, and the tensor itself where there are no more: a view takes the host more than 1 us."""
    return rows if rows.shape[0] == count else rows[:count]


@dataclasses.dataclass
class Batch:
    """What the layers of one step share. The names are vLLM's, whose own code reads some of them.

    query_start_loc: int32 ``[B + 1]``, where each sequence's new tokens begin; seq_lens: int32 ``[B]``, with the new ones;
    block_table: int32 ``[B, pages of a sequence]``; slot_mapping: where the new tokens' keys go.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True


class PagedLayer:
    """The rules of one layer's scores, and its calls.

    Args:
        window: tokens a query sees, itself among them.
        fp8: the element type of a float8 cache, which the engine declares as bytes.
        writes: the call writes the new keys and values to the cache itself; else they are there already.
        batch_invariant: the bits of a sequence depend on that sequence alone.
    """

    def __init__(
        self,
        *,
        scale: float,
        window: Optional[int] = None,
        softcap: Optional[float] = None,
        alibi_slopes: Optional[list[float]] = None,
        sinks: Optional[torch.Tensor] = None,
        fp8: Optional[torch.dtype] = None,
        writes: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self.window, self.fp8, self.writes = window, fp8, writes
        self._sinks = sinks
        self._rules: dict[str, Any] = dict(scale=scale, softcap=softcap or 0.0, layout="bshd")
        if alibi_slopes is not None:
            self._rules["alibi_slopes"] = torch.tensor(alibi_slopes, dtype=torch.float32)
        if batch_invariant:
            self._rules["options"] = Options(determinism="batch_invariant")

    def to(self, device: torch.device) -> None:
        """Puts what the rules hold of tensors on a device; called when weights are there, sinks among them."""
        if "alibi_slopes" in self._rules:
            self._rules["alibi_slopes"] = self._rules["alibi_slopes"].to(device)
        if self._sinks is not None:
            self._rules["sinks"] = self._sinks.detach().to(device, torch.float32).contiguous()

    def attend(
        self,
        query: torch.Tensor,
        key: Optional[torch.Tensor],
        value: Optional[torch.Tensor],
        pages: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        out: torch.Tensor,
        scales: tuple[Any, Any] = (1.0, 1.0),
    ) -> None:
        """Attention of the new tokens, packed end to end, over pages ``[pages, Hkv, page, d]``.

        Args:
            query, out: ``[tokens, Hq, d]``, or more tokens, of which the last belong to no sequence.
            key, value: ``[tokens, Hkv, d]``; read where the layer writes.
            scales: of a float8 cache's keys and values.
        """
        tokens = batch.num_actual_tokens
        arguments = dict(self._rules)
        if self._sinks is not None and "sinks" not in arguments:
            raise RuntimeError("sinks: to() was not called after the weights were loaded")
        k, v = pages
        if self.fp8 is not None:
            k, v = k.view(self.fp8), v.view(self.fp8)
            arguments.update(k_scale=scales[0], v_scale=scales[1])
        if self.writes:
            assert key is not None and value is not None
            arguments.update(append_k=first_of(key, tokens), append_v=first_of(value, tokens))
        if batch.causal:
            arguments.update(causal=True, window=(-1, -1) if self.window is None else (self.window - 1, -1))
        elif self.window is not None:
            raise NotImplementedError(f"sliding_window = {self.window}: a window is of causal steps here, and this one is not")
        decode(
            first_of(query, tokens), k.transpose(1, 2), v.transpose(1, 2), cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len, seqlens=batch.seq_lens, block_table=batch.block_table, out=first_of(out, tokens),
            **arguments,
        )  # fmt: skip

