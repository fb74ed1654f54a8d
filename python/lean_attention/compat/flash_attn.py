"""flash_attn_with_kvcache() of flash-attention 2 and 3, same arguments, same results (no backward pass there either)."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from lean_attention._decode import decode
from lean_attention._options import Options


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Optional[torch.Tensor] = None,
    v: Optional[torch.Tensor] = None,
    rotary_cos: Optional[torch.Tensor] = None,
    rotary_sin: Optional[torch.Tensor] = None,
    cache_seqlens: Optional[Union[int, torch.Tensor]] = None,
    cache_batch_idx: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
    block_table: Optional[torch.Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[torch.Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Optional[torch.Tensor] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    s_aux: Optional[torch.Tensor] = None,
    learnable_sink: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    scheduler_metadata: Optional[torch.Tensor] = None,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
    **refused: Any,
) -> Any:
    """Attention of q over a cache that is read in place, and written first when k and v are given.

    Args:
        q: ``[B, n_q, Hq, d]``, or with ``cu_seqlens_q`` ``[total, Hq, d]``.
        k_cache, v_cache: ``[B, S, Hkv, d]``, or with a table ``[pages, page, Hkv, d]`` with any page size.
        k, v: ``[B, n_q, Hkv, d]``, written to the cache from cache_seqlens on and attended to; as many tokens as q has.
        rotary_cos, rotary_sin: ``[positions, rotary_dim / 2]``, a row for each token the cache can hold, applied to q and k.
        cache_seqlens: tokens in the cache before k, ``[B]`` int32 or one number. Default: all.
        cache_batch_idx: which row of the cache each sequence has, ``[B]``; no copy is made.
        cache_leftpad: first token that counts, ``[B]`` int32.
        block_table, page_table: two names of one argument, int32 ``[B, pages of a sequence]``.
        softmax_scale, causal, window_size, softcap, alibi_slopes ``[Hq]``: as there; causal is bottom-right.
        num_splits: 0 is the lean schedule; 1 and more ask for that many splits of each head.
        s_aux, learnable_sink: two names of one argument, ``[Hq]``.
        out: where the result goes.
        scheduler_metadata, pack_gqa, sm_margin: hints that change no result; ignored.

    Returns:
        out in q's shape, or (out, softmax_lse ``[B, Hq, n_q]``, natural logarithm).

    Raises:
        NotImplementedError: another number of new tokens than queries; qv, attention_chunk, rotary_seqlens, q_descale,
            k_descale, v_descale, cu_seqlens_k_new; what the backend does not do.
        TypeError, ValueError: as decode().
    """
    for name, value in refused.items():
        if value is not None and not (name == "attention_chunk" and value == 0):
            raise NotImplementedError(f"{name}: flash_attn_with_kvcache() does not have it here")
    table = _one_of(block_table=block_table, page_table=page_table)
    sinks = _one_of(s_aux=s_aux, learnable_sink=learnable_sink)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if cache_batch_idx is not None:
        if table is not None:
            raise ValueError("cache_batch_idx: must not be given with a block_table")
        table = cache_batch_idx.to(torch.int32)[:, None]  # a row of the cache is one page
        cache_seqlens = k_cache.shape[1] if cache_seqlens is None and k is None else cache_seqlens
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    if k is not None:
        cache_seqlens = _with_new_tokens(q, k, cache_seqlens, cu_seqlens_q)
        if rotary_cos is not None and not causal and window_size == (-1, -1) and (cu_seqlens_q is not None or q.shape[1] > 1):
            raise NotImplementedError("rotary_cos: several queries without causal would all have one position: not here")
    return decode(
        q, k_cache, v_cache, seqlens=cache_seqlens, leftpad=cache_leftpad, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        block_table=table, scale=softmax_scale, causal=causal, window=(window_size[0], window_size[1]), softcap=softcap,
        alibi_slopes=_float32(alibi_slopes), sinks=_float32(sinks), append_k=k, append_v=v, rotary_cos=_float32(rotary_cos),
        rotary_sin=_float32(rotary_sin), rotary_interleaved=rotary_interleaved, layout="bshd", out=out,
        return_lse=return_softmax_lse, options=_options(num_splits),
    )  # fmt: skip


def _with_new_tokens(
    q: torch.Tensor, k: torch.Tensor, cache_seqlens: Optional[torch.Tensor], cu_seqlens_q: Optional[torch.Tensor]
) -> torch.Tensor:
    """Lengths with the tokens that are written in this call, as decode() counts."""
    if cache_seqlens is None:
        raise ValueError("cache_seqlens: must be given with k")
    if k.shape[:-2] != q.shape[:-2]:
        raise NotImplementedError(f"k: shape {tuple(k.shape)}: expected a new token for each query of q {tuple(q.shape)}")
    return cache_seqlens + (k.shape[1] if cu_seqlens_q is None else cu_seqlens_q[1:] - cu_seqlens_q[:-1])


def _one_of(**names: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    given = {name: value for name, value in names.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{', '.join(given)}: are one argument: only one may be given")
    return next(iter(given.values()), None)


def _float32(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return None if tensor is None else tensor.detach().float().contiguous()


def _options(num_splits: int) -> Optional[Options]:
    if num_splits == 0:
        return None
    return Options(policy="data_parallel") if num_splits == 1 else Options(policy="fixed_split", splits=num_splits)
