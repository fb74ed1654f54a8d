"""flash_attn_with_kvcache(), flash_attn_func() and flash_attn_varlen_func() of flash-attention 2 and 3 and of vLLM's copy: same
arguments, same results, no backward pass."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Union

import torch

from lean_attention.compat._flash_attn_call import (
    PACKED, Call, Rotary, attend, check_axes, joined, of_each_sequence, table_of, with_chunk, with_new_tokens,
)  # fmt: skip
from lean_attention.compat._fp8_scales import Scale, fp8_scales
from lean_attention.compat._torch_pieces import check, float32, is_fp8, lengths_of, one_of, refuse, split_options, window_of

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
    table = table_of(cache_batch_idx, one_of(block_table=block_table, page_table=page_table), k_cache)
    check_axes("q", q, PACKED if cu_seqlens_q is not None else "[B, n_q, Hq, d]")
    if table is not None:
        check_axes("k_cache", k_cache, "[pages, page, Hkv, d]")
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
    call = Call(
        q.to(torch.bfloat16) if is_fp8(q) else q, k_cache, v_cache, cache_seqlens, cache_leftpad, table, cu_seqlens_q,
        max_seqlen_q, causal, window_of("window_size", window_size),
    )  # fmt: skip
    ahead = None
    if k is not None:
        seqlens = lengths_of("rotary_seqlens", rotary_seqlens, batch, q.device)
        tables = None if rotary_cos is None else Rotary(rotary_cos, rotary_sin, rotary_interleaved, seqlens)
        call, ahead = with_new_tokens(call, k, v, cu_seqlens_k_new, tables, scales)
    arguments: dict[str, Any] = dict(
        scale=softmax_scale, softcap=softcap, alibi_slopes=float32(alibi_slopes),
        sinks=float32(one_of(s_aux=s_aux, learnable_sink=learnable_sink)), options=split_options(num_splits),
        return_lse=return_softmax_lse,
    )  # fmt: skip
    if attention_chunk > 0:
        call = with_chunk(call, attention_chunk)
    calls = [(call, dict(arguments, k_scale=scales.k, v_scale=scales.v, out=out))]
    if scales.of_each_sequence:
        calls = of_each_sequence(call, scales, out, arguments)
    if ahead is not None or len(calls) > 1:  # what a later one refuses must not have been written by those before it
        for each, rules in calls:
            attend(each, do=check, **rules)
    if ahead is not None:
        attend(ahead)
    results = [attend(each, **rules) for each, rules in calls]
    return results[0] if not scales.of_each_sequence else joined(results, out)


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
        check_axes("k", k, "[pages, page, Hkv, d]")
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
    call = Call(
        q.to(torch.bfloat16) if is_fp8(q) else q, k, v, lengths_of("seqused_k", seqused_k, batch, q.device), None, table,
        cu_seqlens_q, max_seqlen_q, causal, window_of("window_size", window_size), lengths_name=lengths_name,
    )  # fmt: skip
    if attention_chunk > 0:
        call = with_chunk(call, attention_chunk)
    with_lse = return_softmax_lse or return_attn_probs
    result = attend(
        call, cu_seqlens_k=cu_seqlens_k, scale=softmax_scale, softcap=softcap, alibi_slopes=float32(alibi_slopes),
        sinks=float32(one_of(s_aux=s_aux, learnable_sink=learnable_sink)), k_scale=scales.k, v_scale=scales.v, out=out,
        options=split_options(num_splits), return_lse=with_lse,
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result
