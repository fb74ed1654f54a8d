"""FlashMLA's functions for dense attention, and those that vLLM's copy of it has for float8: same arguments, same results.

Multi-head latent attention after the absorption of its projections (DeepSeek-V2, arXiv 2405.04434, sec. 2.1): all query
heads read one K/V head, whose values are the first dims of its keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch

from lean_attention.compat._fp8_scales import Scale, fp8_scales
from lean_attention.compat._torch_pieces import decode_named, is_fp8, refuse

_SPARSE = "tokens are not picked one by one here: dense attention is"
_REFUSED = {
    "indices": _SPARSE,
    "topk_length": _SPARSE,
    "extra_k_cache": _SPARSE,
    "extra_indices_in_kvcache": _SPARSE,
    "extra_topk_length": _SPARSE,
    "attn_sink": "sinks that leave the log-sum-exp as it was are of sparse attention alone; decode(sinks=) counts them in both",
}


class FlashMLASchedMeta(NamedTuple):
    """What FlashMLA keeps of a schedule between calls: nothing, for here each call makes its own where it runs."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """(metadata, None), which flash_mla_with_kvcache() takes and does not need; any arguments."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: Optional[torch.Tensor],
    cache_seqlens: Optional[torch.Tensor],
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Optional[torch.Tensor] = None,
    attn_sink: Optional[torch.Tensor] = None,
    extra_k_cache: Optional[torch.Tensor] = None,
    extra_indices_in_kvcache: Optional[torch.Tensor] = None,
    topk_length: Optional[torch.Tensor] = None,
    extra_topk_length: Optional[torch.Tensor] = None,
    *,
    descale_q: Scale = None,
    descale_k: Scale = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q over a paged cache of latent keys; on CUDA 576 and 512 dims in 16 bits and in float8 have kernels of their own.

    Args:
        q: ``[B, n_q, Hq, d]``, d 576 for DeepSeek; queries stand at the end of their sequence. Float8 beside a float8 cache is
            computed as bfloat16, which holds every float8, and so is the result.
        k_cache: ``[pages, page, Hkv, d]`` in q's type or float8, any page size, Hkv 1 for DeepSeek.
        block_table: int32 ``[B, pages of a sequence]``.
        cache_seqlens: int32 ``[B]``, tokens that each sequence has, those of q among them.
        head_dim_v: the first dims of a key that are its value, 1 to d; 512 for DeepSeek.
        tile_scheduler_metadata, num_splits: of get_mla_metadata(), whose or another's; not needed.
        softmax_scale: default d ** -0.5. After absorption models give their own, of the dims before it.
        causal: with several queries: each sees the keys up to its own.
        is_fp8_kvcache: k_cache is float8, whose every dim counts times descale_k. FlashMLA's rows of 656 bytes, of sparse
            attention, are refused.
        descale_q, descale_k: of float8 q and k_cache, float32 of one number or ``[Hkv]``, on their device. Default: 1.
        indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length: sparse attention is
            refused.

    Returns:
        (out ``[B, n_q, Hq, head_dim_v]``, softmax_lse ``[B, Hq, n_q]``), the latter float32, natural logarithm, -inf for rows
        that see no key; merge_states() takes -inf and +inf for empty.

    Raises:
        ValueError: head_dim_v is not within the keys, a table or lengths are missing, and as decode().
        TypeError: is_fp8_kvcache or float8 q with a cache that is not float8.
        NotImplementedError: sparse attention and its rows, by the argument's name.
    """
    asked = dict(
        others, indices=indices, attn_sink=attn_sink, extra_k_cache=extra_k_cache, topk_length=topk_length,
        extra_indices_in_kvcache=extra_indices_in_kvcache, extra_topk_length=extra_topk_length,
    )  # fmt: skip
    refuse("flash_mla_with_kvcache", asked, (), _REFUSED)
    for name, given in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if given is None:
            raise ValueError(f"{name}: None: needed for dense attention")
    if k_cache.dim() != 4:
        raise ValueError(f"k_cache: shape {tuple(k_cache.shape)}: expected [pages, page, Hkv, d]")
    if is_fp8_kvcache:
        _check_fp8_rows(q, k_cache)
    if not isinstance(head_dim_v, int):
        raise TypeError(f"head_dim_v = {head_dim_v!r}: an integer is needed")
    if not 1 <= head_dim_v <= k_cache.shape[-1]:
        raise ValueError(f"head_dim_v = {head_dim_v}: values are the first of {k_cache.shape[-1]} dims of k_cache")
    for name, of, x, scale in (("descale_q", "q", q, descale_q), ("descale_k", "k_cache", k_cache, descale_k)):
        if not is_fp8(x):
            refuse("flash_mla_with_kvcache", {name: scale}, (), {name: f"{of} is {x.dtype}: is for float8 {of}"})
    of_q = descale_q if is_fp8(q) else None  # else a 1
    scales = fp8_scales(q, k_cache, 1, of_q, descale_k, descale_k, names=("descale_q", "descale_k", "descale_k"))
    return decode_named(
        dict(seqlens="cache_seqlens"), q.to(torch.bfloat16) if is_fp8(q) else q, k_cache, k_cache[..., :head_dim_v],
        block_table=block_table, seqlens=cache_seqlens, scale=softmax_scale, causal=causal, layout="bshd", return_lse=True,
        k_scale=scales.k, v_scale=scales.v,
    )  # fmt: skip


def _check_fp8_rows(q: torch.Tensor, k_cache: torch.Tensor) -> None:
    if k_cache.shape[-1] != q.shape[-1]:
        raise NotImplementedError(
            f"is_fp8_kvcache: rows of {k_cache.shape[-1]} elements for queries of {q.shape[-1]} dims: those with scales of 128 dims "
            "and bfloat16 rotary dims, of sparse attention, are not read here: float8 of every dim is"
        )
    if not is_fp8(k_cache):
        raise TypeError(f"is_fp8_kvcache: k_cache is {k_cache.dtype}: float8 is needed")


def get_mla_metadata_dense_fp8(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """The same for flash_mla_with_kvcache_fp8()."""
    return get_mla_metadata(*args, **kwargs)


def flash_mla_with_kvcache_fp8(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    descale_q: Scale = None,
    descale_k: Scale = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_mla_with_kvcache() of a float8 cache, as vLLM calls it (vllm/v1/attention/ops/flashmla.py).

    Args:
        q, k_cache, block_table, cache_seqlens, head_dim_v: as there; k_cache is float8, q may be.
        tile_scheduler_metadata, num_splits: of get_mla_metadata_dense_fp8(), whose or another's; not needed.
        softmax_scale, causal, descale_q, descale_k: as there.

    Returns:
        As flash_mla_with_kvcache(), and raises what it does.
    """
    return flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal, True,
        descale_q=descale_q, descale_k=descale_k,
    )  # fmt: skip
