"""A call of flash-attention's functions in decode()'s words: new tokens, chunks, and scales of each sequence change parts of it."""

from __future__ import annotations

import types
from typing import Any, Mapping, NamedTuple, Optional

import torch

from lean_attention.compat._fp8_scales import Fp8Scales
from lean_attention.compat._torch_pieces import decode_named, float32, is_fp8, positions_of, turn
from lean_attention.torch_ops import is_recorded


class Call(NamedTuple):
    """The part of a call that new tokens and chunks change."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seqlens: Optional[torch.Tensor]
    leftpad: Optional[torch.Tensor]
    table: Optional[torch.Tensor]
    cu_seqlens_q: Optional[torch.Tensor]
    max_seqlen_q: Optional[int]
    causal: bool
    window: tuple[int, int]
    mask: Optional[torch.Tensor] = None
    append: Mapping[str, Any] = types.MappingProxyType({})
    lengths_name: str = "cache_seqlens"  # what the caller has for seqlens

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def capacity(self) -> int:
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])

    @property
    def query_tokens(self) -> int:
        """Of the longest sequence, at most."""
        if self.cu_seqlens_q is None:
            return self.q.shape[1]
        return self.q.shape[0] if self.max_seqlen_q is None else self.max_seqlen_q


class Rotary(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool
    seqlens: Optional[torch.Tensor]


def attend(call: Call, **arguments: Any) -> Any:
    names = dict(seqlens=call.lengths_name, leftpad="cache_leftpad")
    return decode_named(
        names, call.q, call.k, call.v, seqlens=call.seqlens, leftpad=call.leftpad, cu_seqlens_q=call.cu_seqlens_q,
        max_seqlen_q=None if call.cu_seqlens_q is None else call.max_seqlen_q, block_table=call.table, causal=call.causal,
        window=call.window, mask=call.mask, layout="bshd", **call.append, **arguments,
    )  # fmt: skip


PACKED = "[total, heads, d]"


def check_axes(name: str, x: torch.Tensor, *allowed: str) -> None:
    """An axis that is missing would be taken for the one behind it."""
    if x.dim() not in [axes.count(",") + 1 for axes in allowed]:
        raise ValueError(f"{name}: shape {tuple(x.shape)}: expected {' or '.join(allowed)}")


def table_of(
    cache_batch_idx: Optional[torch.Tensor], table: Optional[torch.Tensor], k_cache: torch.Tensor
) -> Optional[torch.Tensor]:
    """The table of the sequences' rows. A row that is not there has no page, which decode() refuses, or on a device reports."""
    if cache_batch_idx is None:
        return table
    if not isinstance(cache_batch_idx, torch.Tensor) or cache_batch_idx.dtype not in (torch.int32, torch.int64):
        what = getattr(cache_batch_idx, "dtype", type(cache_batch_idx))
        raise TypeError(f"cache_batch_idx: {what}: a torch tensor of int32 or int64 is needed")
    if table is None and cache_batch_idx.dtype == torch.int32:
        return cache_batch_idx[:, None]  # a row of the cache is one page
    rows = cache_batch_idx.long()
    there = (rows >= 0) & (rows < (k_cache if table is None else table).shape[0])
    if table is None:
        return torch.where(there, rows, -1).to(torch.int32)[:, None]
    return torch.where(there[:, None], table[torch.where(there, rows, 0)], -1)


def _check_new_tokens(
    call: Call, k: torch.Tensor, v: torch.Tensor, cu_seqlens_k_new: Optional[torch.Tensor], rotary: Optional[Rotary]
) -> None:
    """What torch would broadcast, clamp or take for something else."""
    for name, given, length in (
        ("cache_seqlens", call.seqlens, call.batch), ("cu_seqlens_k_new", cu_seqlens_k_new, call.batch + 1),
        ("rotary_seqlens", None if rotary is None else rotary.seqlens, call.batch),
    ):  # fmt: skip
        if given is not None and given.shape != (length,):
            raise ValueError(f"{name}: shape {tuple(given.shape)}: expected {(length,)}")
        readable = isinstance(given, torch.Tensor) and given.device.type == "cpu" and not is_recorded()
        if readable and bool((given < 0).any()):
            raise ValueError(f"{name}[{int(given.argmin())}] = {int(given.min())}: allowed 0 and more")
    if rotary is not None:
        check_axes("rotary_cos", rotary.cos, "[positions, rotary_dim / 2]")
        if 2 * rotary.cos.shape[1] > k.shape[-1]:
            raise ValueError(f"rotary_cos: shape {tuple(rotary.cos.shape)}: head dim is {k.shape[-1]}")
        if rotary.sin is None:
            raise ValueError("rotary_sin: must be given with rotary_cos")
        if rotary.sin.shape != rotary.cos.shape:
            raise ValueError(f"rotary_sin: shape {tuple(rotary.sin.shape)}: expected {tuple(rotary.cos.shape)}")
    packed = [] if call.cu_seqlens_q is None and cu_seqlens_k_new is None else [PACKED]
    dense = [] if cu_seqlens_k_new is not None else ["[B, n_new, Hkv, d]"]
    for name, new, cache in (("k", k, call.k), ("v", v, call.v)):
        check_axes(name, new, *dense, *packed)
        tokens = (call.batch, *k.shape[1:2]) if k.dim() == 4 else (k if cu_seqlens_k_new is not None else call.q).shape[:1]
        if new.shape != (*tokens, *cache.shape[-2:]):
            raise ValueError(f"{name}: shape {tuple(new.shape)}: expected {(*tokens, *cache.shape[-2:])}")


def with_new_tokens(
    call: Call, k: torch.Tensor, v: Optional[torch.Tensor], cu_seqlens_k_new: Optional[torch.Tensor],
    rotary: Optional[Rotary], scales: Fp8Scales,
) -> tuple[Call, Optional[Call]]:  # fmt: skip
    """New tokens for each query go along with the call; others are written by one ahead of it."""
    first = call.seqlens
    if first is None:
        raise ValueError("cache_seqlens: must be given with k")
    if v is None:
        raise ValueError("v: must be given with k")
    _check_new_tokens(call, k, v, cu_seqlens_k_new, rotary)
    stored = _scales_of_new(k, v, scales)
    k, v = (x.to(call.q.dtype) if is_fp8(x) else x for x in (k, v))  # which holds every float8
    if cu_seqlens_k_new is None and k.dim() == 3:
        cu_seqlens_k_new = call.cu_seqlens_q
    together = cu_seqlens_k_new is call.cu_seqlens_q and k.shape[:-2] == call.q.shape[:-2]
    together = together and stored.get("k_scale") is scales.k  # one call has one scale for what it writes and reads
    append: dict[str, Any] = {}
    if rotary is not None:
        advances = call.causal or call.window != (-1, -1)
        as_decode_does = together and (advances or call.query_tokens == 1)
        if as_decode_does and (rotary.seqlens is None or rotary.seqlens is first):
            append = dict(
                rotary_cos=float32(rotary.cos), rotary_sin=float32(rotary.sin), rotary_interleaved=rotary.interleaved,
                rotary_absolute=True,
            )  # fmt: skip
        else:
            start = first if rotary.seqlens is None else rotary.seqlens
            of_q = positions_of(start, call.q, call.cu_seqlens_q, advances)
            of_k = positions_of(start, k, cu_seqlens_k_new, True)
            call = call._replace(q=turn(call.q, rotary.cos, rotary.sin, of_q, rotary.interleaved))
            k = turn(k, rotary.cos, rotary.sin, of_k, rotary.interleaved)
    count = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
    call = call._replace(seqlens=first + count, lengths_name="cache_seqlens with the new tokens: lengths")
    if together:
        return call._replace(append=dict(append, append_k=k, append_v=v)), None
    if k.numel() == 0:
        return call, None
    # Queries that see themselves alone: no tile is read but those that are written.
    own = call._replace(q=k, cu_seqlens_q=cu_seqlens_k_new, max_seqlen_q=None, leftpad=None, causal=False, window=(0, 0))
    return call, own._replace(append=dict(stored, append_k=k, append_v=v))


def _scales_of_new(k: torch.Tensor, v: torch.Tensor, scales: Fp8Scales) -> dict[str, Any]:
    """What new tokens are divided by when they are stored: float8 ones by nothing; others are not in the cache's units."""
    if scales.k is None or (is_fp8(k) and is_fp8(v)):
        return {}
    if is_fp8(k) or is_fp8(v):
        raise TypeError(f"v: {v.dtype}: new keys are {k.dtype}: with descales both are float8, or none is")
    if scales.of_each_sequence:
        raise NotImplementedError(f"k: {k.dtype}: a cache with descales of each sequence takes float8 tokens")
    return dict(k_scale=scales.cached_k, v_scale=scales.v)


def with_chunk(call: Call, chunk: int) -> Call:
    """A query sees its own chunk. Where it is alone, that is where its sequence begins; several need a mask.

    Chunks count from the first token that counts.
    """
    device = call.q.device
    ends = torch.full((call.batch,), call.capacity, device=device) if call.seqlens is None else call.seqlens.long()
    begins = torch.zeros_like(ends) if call.leftpad is None else call.leftpad.long()
    own = call.q.shape[1] if call.cu_seqlens_q is None else call.cu_seqlens_q.diff().long()
    last = ends - begins - 1
    if call.query_tokens <= 1:
        return call._replace(leftpad=(begins + (last - last % chunk).clamp(min=0)).to(torch.int32))
    position = (last + 1 - own)[:, None] + torch.arange(call.query_tokens, device=device)
    first = (position - position % chunk + begins[:, None])[:, None, :, None]
    key = torch.arange(call.capacity, device=device)
    return call._replace(mask=(key >= first) & (key < first + chunk))


def of_each_sequence(
    call: Call, scales: Fp8Scales, out: Optional[torch.Tensor], arguments: dict[str, Any]
) -> list[tuple[Call, dict[str, Any]]]:
    """A call for each sequence, which has scales of its own, and its arguments."""
    if call.cu_seqlens_q is not None:
        raise NotImplementedError("k_descale, v_descale: differ from sequence to sequence: not with packed queries")
    slopes = arguments["alibi_slopes"]
    calls = []
    for b in range(call.q.shape[0]):
        one = slice(b, b + 1)
        row = call._replace(
            q=call.q[one], seqlens=None if call.seqlens is None else call.seqlens[one],
            leftpad=None if call.leftpad is None else call.leftpad[one], mask=None if call.mask is None else call.mask[one],
            k=call.k if call.table is not None else call.k[one], v=call.v if call.table is not None else call.v[one],
            table=None if call.table is None else call.table[one],
        )  # fmt: skip
        k_scale, v_scale = (scale[b % scale.shape[0]].contiguous() for scale in (scales.k, scales.v))
        own_slopes = slopes[one].contiguous() if slopes is not None and slopes.dim() == 2 else slopes
        rules = dict(arguments, k_scale=k_scale, v_scale=v_scale, alibi_slopes=own_slopes, out=None if out is None else out[one])
        calls.append((row, rules))
    return calls


def joined(results: list[Any], out: Optional[torch.Tensor]) -> Any:
    """What calls of one sequence each gave, as one call's; they have written to `out` already."""
    if isinstance(results[0], tuple):
        return joined([o for o, _ in results], out), torch.cat([lse for _, lse in results])
    return torch.cat(results) if out is None else out
