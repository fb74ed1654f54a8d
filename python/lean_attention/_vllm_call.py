"""One attention layer of a serving engine over its paged cache, in this library's words.

Knows nothing of vLLM but how its caches lie in memory; _vllm_layers.py turns the engine's objects into these. Runs, and is
tested, without the engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Optional

import torch

from lean_attention._decode import decode
from lean_attention._merge import merge_states
from lean_attention._options import engine_options

Pages = tuple[torch.Tensor, torch.Tensor]
#: K, V and further arguments of decode().
Cached = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
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
    block_table: int32 ``[B, pages of a sequence]``; slot_mapping: where the new tokens' keys go; held: where ranks share the
    tokens, int32 ``[B]``, how many that the layers look for in the cache lie on this one (`held_tokens`).
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    held: Optional[torch.Tensor] = None
    in_place: Optional[bool] = None  # is_in_place()'s answer

    @property
    def has_single_tokens(self) -> bool:
        return self.max_query_len == 1

    def is_in_place(self, page: int) -> bool:
        """Whether slot_mapping has every new token where decode() appends it, behind its request's old ones, and none in page 0,
        which the engine gives to nobody. It is otherwise in the steps of a draft model: tokens that must leave no key (-1), and
        requests that have no page for a guess yet. Looked at once for all layers of a step; in host memory.
        """
        if self.in_place is None:
            self.in_place = self.slot_mapping is None or self._is_in_place(page)
        return self.in_place

    def _is_in_place(self, page: int) -> bool:
        request = torch.repeat_interleave(self.query_start_loc.diff())
        place = (self.seq_lens - self.query_start_loc[1:])[request] + torch.arange(len(request))
        column = torch.div(place, page, rounding_mode="floor")
        if len(request) == 0 or bool(((column < 0) | (column >= self.block_table.shape[1])).any()):
            return len(request) == 0
        ids = self.block_table[request, column]
        slots = self.slot_mapping[: len(request)]
        return bool((ids > 0).all()) and torch.equal((ids * page + place % page).to(slots.dtype), slots)


def held_tokens(shard: Any, batch: Batch) -> torch.Tensor:
    """int32 ``[B]``: how many of the tokens that all of a sequence's new ones see lie on a rank (distributed's Shard). A single
    new token sees itself, which is in the cache by then; of several all see what was there ahead of the step.
    """
    ends = batch.seq_lens
    if not batch.has_single_tokens:
        ends = (ends - batch.query_start_loc.diff()).clamp(min=0)  # lengths that a graph is captured with may be shorter
    return shard.tokens(ends)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """What a layer asks of the ranks that hold the tokens of every sequence between them, and the same K/V heads each.

    gather_heads: from ``[tokens, Hq, d]`` on every rank ``[tokens, ranks x Hq, d]``, in the order of ranks.
    combine: from results over each rank's own keys, ``[tokens, ranks x Hq, d]`` and log-sum-exps (natural, -inf without keys)
        ``[tokens, ranks x Hq]``, those over all keys of this rank's heads, ``[tokens, Hq, d]`` and ``[tokens, Hq]``. May
        overwrite what it is given.
    """

    gather_heads: Callable[[torch.Tensor], torch.Tensor]
    combine: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class PagedLayer:
    """The rules of one layer's scores, and its calls.

    Args:
        window: tokens a query sees, itself among them.
        sinks: of any type; read with each call, since an engine may load weights anew in their memory.
        fp8: the element type of a float8 cache, which the engine declares as bytes.
        writes: the call writes the new keys and values to the cache itself; else they are there already.
        batch_invariant: the bits of a sequence depend on that sequence alone.
        ranks: those that share the tokens of every sequence; None where this one has all.
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
        ranks: Optional[Ranks] = None,
    ) -> None:
        self.window, self.fp8, self.writes, self.ranks = window, fp8, writes, ranks
        #: Whether scores have no rule beside causality.
        self.is_plain = window is None and not softcap and alibi_slopes is None and sinks is None
        self._sinks, self._alibi_slopes = sinks, alibi_slopes
        self._rules: dict[str, Any] = dict(scale=scale, softcap=softcap or 0.0, layout="bshd")
        if alibi_slopes is not None:
            self._rules["alibi_slopes"] = torch.tensor(alibi_slopes, dtype=torch.float32)
        self._rules["options"] = engine_options(batch_invariant)

    def to(self, device: torch.device) -> None:
        """Puts what the rules hold of tensors on a device; called when weights are there, and again when they are loaded anew: into
        the same memory, which graphs read, and whose numbers an engine that slept may have given up."""
        if self._alibi_slopes is not None:
            held = self._rules["alibi_slopes"].to(device)
            self._rules["alibi_slopes"] = held.copy_(torch.tensor(self._alibi_slopes, dtype=torch.float32))

    def attend(
        self,
        query: torch.Tensor,
        key: Optional[torch.Tensor],
        value: Optional[torch.Tensor],
        pages: Pages,
        batch: Batch,
        out: torch.Tensor,
        scales: tuple[Any, Any] = (1.0, 1.0),
    ) -> None:
        """Attention of the new tokens, packed end to end, over pages ``[pages, Hkv, page, d]``.

        Args:
            query, out: ``[tokens, Hq, d]``, or more tokens, of which the last belong to no sequence.
            key, value: ``[tokens, Hkv, d]``; read where the layer writes, and where ranks share tokens.
            scales: of a float8 cache's keys and values.
        """
        tokens = batch.num_actual_tokens
        query, out = first_of(query, tokens), first_of(out, tokens)
        k, v, arguments = self._cached(pages, batch, scales)
        if self.ranks is not None:
            out.copy_(self._over_ranks(self.ranks, query, key, value, batch, (k, v, arguments)))
            return
        if self.writes:
            assert key is not None and value is not None
            if batch.is_in_place(pages[0].shape[2]):
                arguments.update(append_k=first_of(key, tokens), append_v=first_of(value, tokens))
            else:
                self.store(key, value, pages, batch.slot_mapping[:tokens], scales)
        if batch.causal:
            arguments.update(causal=True, window=(-1, -1) if self.window is None else (self.window - 1, -1))
        elif self.window is not None:
            raise NotImplementedError(f"sliding_window = {self.window}: a window is of causal steps here, and this one is not")
        decode(query, k, v, seqlens=batch.seq_lens, out=out, **arguments)

    def store(
        self, key: torch.Tensor, value: torch.Tensor, pages: Pages, slots: torch.Tensor, scales: tuple[Any, Any] = (1.0, 1.0)
    ) -> None:
        """Writes keys and values ``[tokens, Hkv, d]`` to the slots of a cache that an engine names for them, -1: nowhere."""
        there = (slots >= 0).nonzero().flatten()
        page = pages[0].shape[2]
        at = (torch.div(slots[there], page, rounding_mode="floor"), slots[there] % page)
        for pool, given, scale in zip(pages, (key, value), scales):
            rows = given[there]
            if self.fp8 is not None:  # as decode() stores it: to the nearest, at most the largest number
                most = torch.finfo(self.fp8).max
                rows = (rows.float() / scale).clamp(-most, most).to(self.fp8).view(torch.uint8)
                pool = pool.view(torch.uint8)
            pool.transpose(1, 2)[at] = rows.to(pool.dtype)

    def _over_ranks(
        self, ranks: Ranks, query: torch.Tensor, key: Optional[torch.Tensor], value: Optional[torch.Tensor], batch: Batch,
        cached: Cached,
    ) -> torch.Tensor:  # fmt: skip
        """This rank's keys by the query heads of all ranks; then several new tokens among themselves: every rank was given all of
        them, whichever holds them."""
        assert batch.held is not None
        if not batch.causal:
            raise NotImplementedError("causal = False: not with tokens that ranks share")
        k, v, arguments = cached
        heads = ranks.gather_heads(query.contiguous())
        whole, lse = decode(heads, k, v, seqlens=batch.held, return_lse=True, **arguments)
        whole, lse = ranks.combine(whole, lse.transpose(0, 1))
        if not batch.has_single_tokens:
            assert key is not None and value is not None
            own, own_lse = decode(
                query, first_of(key, len(query)), first_of(value, len(query)), cu_seqlens_q=batch.query_start_loc,
                max_seqlen_q=batch.max_query_len, cu_seqlens_k=batch.query_start_loc, max_seqlen_k=batch.max_query_len,
                causal=True, return_lse=True, **self._rules,
            )  # fmt: skip
            whole, _ = merge_states(whole, lse, own, own_lse.transpose(0, 1))
        return whole

    def _cached(self, pages: tuple[torch.Tensor, torch.Tensor], batch: Batch, scales: tuple[Any, Any]) -> Cached:
        """K and V as decode() takes them, and its arguments for a call over them, without lengths."""
        arguments = dict(self._rules)
        k, v = pages
        if self._sinks is not None:  # a graph repeats this too, and has the engine's numbers of then
            arguments["sinks"] = self._sinks.detach().to(k.device, torch.float32).contiguous()
        if self.fp8 is not None:
            k, v = k.view(self.fp8), v.view(self.fp8)
            arguments.update(k_scale=scales[0], v_scale=scales[1])
        arguments.update(cu_seqlens_q=batch.query_start_loc, max_seqlen_q=batch.max_query_len, block_table=batch.block_table)
        return k.transpose(1, 2), v.transpose(1, 2), arguments
