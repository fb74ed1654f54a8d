"""flash_attn_with_kvcache(), flash_attn_func() and flash_attn_varlen_func() of flash-attention 2 and 3 and of vLLM's copy: same
arguments, same results, no backward pass."""

from __future__ import annotations

import types
from typing import Any, Mapping, NamedTuple, Optional, Sequence, Union

import torch

from lean_attention.compat._fp8_scales import Fp8Scales, Scale, fp8_scales
from lean_attention.compat._torch_pieces import (
    check, decode_named, float32, is_fp8, lengths_of, one_of, positions_of, refuse, split_options, turn, window_of,
)  # fmt: skip
from lean_attention.torch_ops import is_recorded

Window = Optional[Sequence[int]]

#: Say how, not what: nothing here depends on them.
_HINTS = (
    "scheduler_metadata", "pack_gqa", "sm_margin", "fa_version", "gqa_parallel", "max_seqlen_k_hint", "deterministic",
    "max_seqlen_k_new", "num_sm", "min_seqlen_k", "seqlen_k_per_split", "disable_scheduler_metadata",
)  # fmt: skip
_OWN_RULES = "scores are changed by decode()'s own rules only: mask=, window=, softcap=, alibi_slopes="
_REFUSED = {
    "qv": "scores of a second query over v are not computed here",
    "q_v": "scores of a second query over v are not computed here",
    "dropout_p": "there is no dropout here",
    "seqused_q": "all queries between two of cu_seqlens_q are computed: leave out those that are not used",
    "cp_world_size": "one process's keys are attended to: merge the parts with merge_states()",
    "cp_rank": "one process's keys are attended to: merge the parts with merge_states()",
    "cp_tot_seqused_k": "one process's keys are attended to: merge the parts with merge_states()",
    "output_scale": "results have q's type: float8 ones are not made here",
    **dict.fromkeys(("mask_mod", "score_mod", "score_mod_bwd", "aux_tensors", "aux_tensor_leading_dims", "aux_scalars"), _OWN_RULES),
    **dict.fromkeys(("block_sparse_tensors", "block_sparse_tensors_bwd", "gather_kv_indices"), "tokens are not picked here"),
    "dynamic_causal": "causal is of all sequences of a call",
}


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Optional[torch.Tensor] = None,
    v: Optional[torch.Tensor] = None,
    rotary_cos: Optional[torch.Tensor] = None,
    rotary_sin: Optional[torch.Tensor] = None,
    cache_seqlens: Union[int, Sequence[int], torch.Tensor, None] = None,
    cache_batch_idx: Optional[torch.Tensor] = None,
    cache_leftpad: Union[int, Sequence[int], torch.Tensor, None] = None,
    block_table: Optional[torch.Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[torch.Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Optional[torch.Tensor] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k_new: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Union[int, Sequence[int], torch.Tensor, None] = None,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    attention_chunk: int = 0,
    s_aux: Optional[torch.Tensor] = None,
    learnable_sink: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    **others: Any,
) -> Any:
    """Attention of q over a cache that is read in place, and written first when k and v are given.

    Args:
        q: ``[B, n_q, Hq, d]``, or with ``cu_seqlens_q`` ``[B + 1]`` ``[total, Hq, d]``; max_seqlen_q is an upper bound of a
            sequence's queries then. float8 q is computed as bfloat16, which
            holds it.
        k_cache, v_cache: ``[B, S, Hkv, d]``, or with a table ``[pages, page, Hkv, d]`` with any page size.
        k, v: ``[B, n_new, Hkv, d]``, or packed as ``cu_seqlens_k_new`` (else ``cu_seqlens_q``) says: written to the
            cache from cache_seqlens on and attended to. As many tokens as q has cost one call; another number costs a
            second, short one.
        rotary_cos, rotary_sin: ``[positions, rotary_dim / 2]``, applied to q and k. New token i stands at cache_seqlens
            + i, whatever the left padding; query i too with causal or a window, else at cache_seqlens.
        rotary_interleaved: pairs (0, 1), (2, 3).. (the default) instead of halves.
        rotary_seqlens: ``[B]``, a list or one number: where positions start instead of at cache_seqlens.
        cache_seqlens: tokens in the cache before k, ``[B]`` int32, a list or one number. Default: all.
        cache_batch_idx: which row of the cache, or of the table, each sequence has, ``[B]``; the cache is not copied.
        cache_leftpad: first token that counts, ``[B]`` int32, a list or one number.
        block_table, page_table: two names of one argument, int32 ``[B, pages of a sequence]``.
        softmax_scale, causal, window_size, softcap, alibi_slopes ``[Hq]`` or ``[B, Hq]``: as there; causal is
            bottom-right.
        q_descale, k_descale, v_descale: ``[B, Hkv]`` or fewer, for a float8 cache; other caches have none, as there.
            Rows that differ from sequence to sequence cost a call each. New float8 tokens are stored as they are, others
            divided by k_descale and v_descale.
        attention_chunk: keys are seen from the last multiple of so many tokens on; several queries need a mask of all
            keys.
        return_softmax_lse: return (out, lse) instead of out.
        num_splits: 0 is the lean schedule; 1 and more ask for that many splits of each head.
        s_aux, learnable_sink: two names of one argument, ``[Hq]``.
        out: where the result goes.
        others: fa_version, pack_gqa, sm_margin, scheduler_metadata, gqa_parallel, max_seqlen_k_hint and the like change
            no result and are ignored.

    Returns:
        out in q's shape, or (out, softmax_lse ``[B, Hq, n_q]`` or ``[Hq, total]``, natural logarithm).

    Raises:
        NotImplementedError: qv; what the backend does not do.
        TypeError, ValueError: as decode().
    """
    refuse("flash_attn_with_kvcache", others, _HINTS, _REFUSED)
    table = _table(cache_batch_idx, one_of(block_table=block_table, page_table=page_table), k_cache)
    _check_axes("q", q, _PACKED if cu_seqlens_q is not None else "[B, n_q, Hq, d]")
    if table is not None:
        _check_axes("k_cache", k_cache, "[pages, page, Hkv, d]")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if cache_seqlens is None and table is not None and k is None:
        cache_seqlens = table.shape[1] * k_cache.shape[1]  # all of a row
    cache_seqlens = lengths_of("cache_seqlens", cache_seqlens, batch, q.device)
    cache_leftpad = lengths_of("cache_leftpad", cache_leftpad, batch, q.device)
    if k is None:
        of_new = dict(v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
        for name in [name for name, given in of_new.items() if given is not None]:
            raise ValueError(f"{name}: is for new tokens: k must be given with it")
    scales = fp8_scales(q, k_cache, batch, q_descale, k_descale, v_descale)
    call = _Call(
        q.to(torch.bfloat16) if is_fp8(q) else q, k_cache, v_cache, cache_seqlens, cache_leftpad, table, cu_seqlens_q,
        max_seqlen_q, causal, window_of("window_size", window_size),
    )  # fmt: skip
    ahead = None
    if k is not None:
        seqlens = lengths_of("rotary_seqlens", rotary_seqlens, batch, q.device)
        tables = None if rotary_cos is None else _Rotary(rotary_cos, rotary_sin, rotary_interleaved, seqlens)
        call, ahead = _with_new_tokens(call, k, v, cu_seqlens_k_new, tables, scales)
    arguments: dict[str, Any] = dict(
        scale=softmax_scale, softcap=softcap, alibi_slopes=float32(alibi_slopes),
        sinks=float32(one_of(s_aux=s_aux, learnable_sink=learnable_sink)), options=split_options(num_splits),
        return_lse=return_softmax_lse,
    )  # fmt: skip
    if attention_chunk > 0:
        call = _with_chunk(call, attention_chunk)
    calls = [(call, dict(arguments, k_scale=scales.k, v_scale=scales.v, out=out))]
    if scales.of_each_sequence:
        calls = _of_each_sequence(call, scales, out, arguments)
    if ahead is not None or len(calls) > 1:  # what a later one refuses must not have been written by those before it
        for each, rules in calls:
            _attend(each, do=check, **rules)
    if ahead is not None:
        _attend(ahead)
    results = [_attend(each, **rules) for each, rules in calls]
    return results[0] if not scales.of_each_sequence else _joined(results, out)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[torch.Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **others: Any,
) -> Any:
    """Attention of q over all of k and v, without a cache.

    Args:
        q: ``[B, n_q, Hq, d]``.
        k, v: ``[B, n_kv, Hkv, d]``.
        dropout_p: must be 0.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as flash_attn_with_kvcache().
        deterministic: ignored: results always are.
        return_attn_probs: return three values, of which the third is None.
        others: any other argument of flash_attn_with_kvcache().

    Returns:
        out; with return_softmax_lse=True (out, softmax_lse); with return_attn_probs (out, softmax_lse, None):
        probabilities exist in tests of dropout only.
    """
    refuse("flash_attn_func", dict(dropout_p=dropout_p), _HINTS, _REFUSED)
    with_lse = others.pop("return_softmax_lse", False) or return_attn_probs
    result = flash_attn_with_kvcache(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
        return_softmax_lse=with_lse, **others,
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[torch.Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[torch.Tensor] = None,
    *,
    seqused_k: Optional[torch.Tensor] = None,
    return_softmax_lse: bool = False,
    page_table: Optional[torch.Tensor] = None,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    num_splits: int = 0,
    s_aux: Optional[torch.Tensor] = None,
    learnable_sink: Optional[torch.Tensor] = None,
    attention_chunk: int = 0,
    out: Optional[torch.Tensor] = None,
    **others: Any,
) -> Any:
    """Attention of packed q ``[total, Hq, d]`` over k, v: packed ``[total_k, Hkv, d]``, or pages ``[pages, page, Hkv, d]``.

    Args:
        cu_seqlens_q: ``[B + 1]``, where each sequence's queries begin; max_seqlen_q is an upper bound of their number.
        cu_seqlens_k: ``[B + 1]``, where each sequence's keys begin; with pages they say how many each has.
        seqused_k: ``[B]``, keys that each sequence has; what vLLM gives with pages.
        max_seqlen_k: not needed.
        block_table, page_table: two names of one argument, int32 ``[B, pages of a sequence]``.
        dropout_p, deterministic, return_attn_probs: as flash_attn_func().
        softmax_scale, causal, window_size, softcap, alibi_slopes, num_splits, return_softmax_lse: as flash_attn_with_kvcache().
        s_aux, learnable_sink: two names of one argument, ``[Hq]``: logits that take part in the denominator only.
        q_descale, k_descale, v_descale: of float8 tensors, the same for all sequences: ``[1]`` or ``[Hkv]``.
        attention_chunk: keys are seen from the last multiple of so many tokens on; with pages only.
        out: where the result goes, q's shape.
        others: hints, which are ignored, and what is refused by name.

    Returns:
        out ``[total, Hq, d]``, or (out, softmax_lse ``[Hq, total]``), as flash_attn_func().

    Raises:
        NotImplementedError: what is not here, by its name.
        ValueError: neither cu_seqlens_k nor a table is given, or shapes do not fit.
    """
    refuse("flash_attn_varlen_func", dict(others, dropout_p=dropout_p), _HINTS, _REFUSED)
    table = one_of(block_table=block_table, page_table=page_table)
    lengths_name = "seqused_k"
    if table is not None:
        _check_axes("k", k, "[pages, page, Hkv, d]")
        if seqused_k is None and cu_seqlens_k is not None:
            lengths_name = "cu_seqlens_k: lengths"
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        cu_seqlens_k = None
    elif cu_seqlens_k is None:
        raise ValueError("cu_seqlens_k: must be given without a block_table")
    if cu_seqlens_k is not None and attention_chunk > 0:
        raise NotImplementedError("attention_chunk: packed keys have no mask of their own: not here")
    batch = cu_seqlens_q.shape[0] - 1
    scales = fp8_scales(q, k[None] if table is None else k, batch, q_descale, k_descale, v_descale)
    if scales.of_each_sequence:
        raise NotImplementedError("k_descale, v_descale: differ from sequence to sequence: not with packed queries")
    call = _Call(
        q.to(torch.bfloat16) if is_fp8(q) else q, k, v, lengths_of("seqused_k", seqused_k, batch, q.device), None, table,
        cu_seqlens_q, max_seqlen_q, causal, window_of("window_size", window_size), lengths_name=lengths_name,
    )  # fmt: skip
    if attention_chunk > 0:
        call = _with_chunk(call, attention_chunk)
    with_lse = return_softmax_lse or return_attn_probs
    result = _attend(
        call, cu_seqlens_k=cu_seqlens_k, scale=softmax_scale, softcap=softcap, alibi_slopes=float32(alibi_slopes),
        sinks=float32(one_of(s_aux=s_aux, learnable_sink=learnable_sink)), k_scale=scales.k, v_scale=scales.v, out=out,
        options=split_options(num_splits), return_lse=with_lse,
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result


class _Call(NamedTuple):
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


class _Rotary(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool
    seqlens: Optional[torch.Tensor]


def _attend(call: _Call, **arguments: Any) -> Any:
    names = dict(seqlens=call.lengths_name, leftpad="cache_leftpad")
    return decode_named(
        names, call.q, call.k, call.v, seqlens=call.seqlens, leftpad=call.leftpad, cu_seqlens_q=call.cu_seqlens_q,
        max_seqlen_q=None if call.cu_seqlens_q is None else call.max_seqlen_q, block_table=call.table, causal=call.causal,
        window=call.window, mask=call.mask, layout="bshd", **call.append, **arguments,
    )  # fmt: skip


_PACKED = "[total, heads, d]"


def _check_axes(name: str, x: torch.Tensor, *allowed: str) -> None:
    """An axis that is missing would be taken for the one behind it."""
    if x.dim() not in [axes.count(",") + 1 for axes in allowed]:
        raise ValueError(f"{name}: shape {tuple(x.shape)}: expected {' or '.join(allowed)}")


def _table(
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
    call: _Call, k: torch.Tensor, v: torch.Tensor, cu_seqlens_k_new: Optional[torch.Tensor], rotary: Optional[_Rotary]
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
        _check_axes("rotary_cos", rotary.cos, "[positions, rotary_dim / 2]")
        if 2 * rotary.cos.shape[1] > k.shape[-1]:
            raise ValueError(f"rotary_cos: shape {tuple(rotary.cos.shape)}: head dim is {k.shape[-1]}")
        if rotary.sin is None:
            raise ValueError("rotary_sin: must be given with rotary_cos")
        if rotary.sin.shape != rotary.cos.shape:
            raise ValueError(f"rotary_sin: shape {tuple(rotary.sin.shape)}: expected {tuple(rotary.cos.shape)}")
    packed = [] if call.cu_seqlens_q is None and cu_seqlens_k_new is None else [_PACKED]
    dense = [] if cu_seqlens_k_new is not None else ["[B, n_new, Hkv, d]"]
    for name, new, cache in (("k", k, call.k), ("v", v, call.v)):
        _check_axes(name, new, *dense, *packed)
        tokens = (call.batch, *k.shape[1:2]) if k.dim() == 4 else (k if cu_seqlens_k_new is not None else call.q).shape[:1]
        if new.shape != (*tokens, *cache.shape[-2:]):
            raise ValueError(f"{name}: shape {tuple(new.shape)}: expected {(*tokens, *cache.shape[-2:])}")


def _with_new_tokens(
    call: _Call, k: torch.Tensor, v: Optional[torch.Tensor], cu_seqlens_k_new: Optional[torch.Tensor],
    rotary: Optional[_Rotary], scales: Fp8Scales,
) -> tuple[_Call, Optional[_Call]]:  # fmt: skip
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


def _with_chunk(call: _Call, chunk: int) -> _Call:
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


def _of_each_sequence(
    call: _Call, scales: Fp8Scales, out: Optional[torch.Tensor], arguments: dict[str, Any]
) -> list[tuple[_Call, dict[str, Any]]]:
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


def _joined(results: list[Any], out: Optional[torch.Tensor]) -> Any:
    """What calls of one sequence each gave, as one call's; they have written to `out` already."""
    if isinstance(results[0], tuple):
        return _joined([o for o, _ in results], out), torch.cat([lse for _, lse in results])
    return torch.cat(results) if out is None else out
