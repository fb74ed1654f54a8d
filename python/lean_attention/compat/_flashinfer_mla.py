"""FlashInfer's wrapper of multi-head latent attention over a paged cache."""

from __future__ import annotations

from typing import Any, Optional

import torch

from lean_attention._options import flag
from lean_attention.compat._flashinfer_rules import LOG2_E, RUN_HINTS, listed_pages
from lean_attention.compat._flashinfer_wrapper import Wrapper
from lean_attention.compat._torch_pieces import decode_named, is_fp8, refuse
from lean_attention.torch_ops import check_place

_OF_FLOAT8 = "both parts of float8 rows have one scale here: scales of their own, of tokens, or of other caches are not read"
_RUN_REFUSED = {
    "profiler_buffer": "what happens inside a kernel is not recorded here",
    "ckv_scale_arr": _OF_FLOAT8,
    "kv_len": "lengths and tables are plan()'s, as for every backend but cutlass",
    "page_table": "lengths and tables are plan()'s, as for every backend but cutlass",
}


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Packed queries over latent keys: their scores are of [ckv, kpe], their values are ckv; one K/V head for all query heads.

    On CUDA 512 and 64 dims have kernels of their own, in 16 bits and in float8; others take the plain one, which is exact and not
    fast. Where ckv and kpe are the two parts of one tensor's rows nothing is copied; else every run copies the pages that the
    requests have.

    Args:
        float_workspace_buffer: not needed, kept for the signature; may be None.
        use_cuda_graph: plan() copies into the four buffers given here, so that a captured run() sees the new lengths.
        backend: a hint that changes no result; "cutlass", whose run() takes tables, is refused.
    """

    def __init__(
        self,
        float_workspace_buffer: Optional[torch.Tensor] = None,
        use_cuda_graph: bool = False,
        qo_indptr: Optional[torch.Tensor] = None,
        kv_indptr: Optional[torch.Tensor] = None,
        kv_indices: Optional[torch.Tensor] = None,
        kv_len_arr: Optional[torch.Tensor] = None,
        backend: str = "auto",
    ) -> None:
        if backend == "cutlass":
            raise NotImplementedError("backend = 'cutlass': tables given to run() are not taken: 'auto', 'fa2', 'fa3' are")
        buffers = dict(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
        super().__init__("NHD", use_cuda_graph, None, buffers)
        self._sizes: Optional[tuple[int, ...]] = None  # of plan()

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        use_profiler: bool = False,
    ) -> None:
        """Keeps the tables and the constants of the runs that follow. Waits for nothing.

        Args:
            qo_indptr, kv_indptr: int32 ``[B + 1]``, where each request's queries and pages begin.
            kv_indices: int32, page ids; kv_len_arr: int32 ``[B]``, tokens that each request has.
            num_heads, head_dim_ckv, head_dim_kpe, page_size: checked against the tensors of run().
            causal: each query sees the keys up to its own; a request's queries are the last of its sequence.
            sm_scale: as there.
            q_data_type, kv_data_type: not needed.
            use_profiler: refused.
        """
        if use_profiler:
            raise NotImplementedError(f"use_profiler: {_RUN_REFUSED['profiler_buffer']}")
        self._keep(qo_indptr=qo_indptr, kv_indptr=kv_indptr, indices=kv_indices, kv_len_arr=kv_len_arr)
        self._sizes = (num_heads, head_dim_ckv, head_dim_kpe, page_size)
        self._causal, self._scale = causal, sm_scale

    begin_forward = plan

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        profiler_buffer: Optional[torch.Tensor] = None,
        kv_len: Optional[torch.Tensor] = None,
        page_table: Optional[torch.Tensor] = None,
        return_lse_base_on_e: bool = False,
        *,
        ckv_scale: Any = None,
        kpe_scale: Any = None,
        ckv_scale_arr: Any = None,
        **others: Any,
    ) -> Any:
        """Attention of q over the pages that plan() was told.

        Args:
            q_nope, q_pe: ``[qo_indptr[B], heads, ckv dims]`` and ``[qo_indptr[B], heads, kpe dims]``.
            ckv_cache, kpe_cache: ``[pages, page, ckv dims]`` and ``[pages, page, kpe dims]``.
            out, lse: results go there if given.
            return_lse: return (out, lse) instead of out.
            return_lse_base_on_e: the log-sum-exp in base e, not 2.
            ckv_scale, kpe_scale: numbers, the same, which float8 caches count times; 1 where they are left out.
            profiler_buffer, kv_len, page_table, ckv_scale_arr: refused.

        Returns:
            out in q_nope's shape, or (out, lse ``[qo_indptr[B], heads]``), -inf for rows that see no key.

        Raises:
            ValueError: sizes are not those of plan().
            TypeError: the two parts of q, or of the cache, have different types.
            NotImplementedError: ckv_scale and kpe_scale differ, or the caches are not float8; and what is refused by name.
        """
        asked = dict(
            others, profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table, ckv_scale_arr=ckv_scale_arr,
        )  # fmt: skip
        refuse("run", asked, RUN_HINTS, _RUN_REFUSED)
        if self._sizes is None:
            raise RuntimeError("run(): call plan() first")
        heads, *dims, page = self._sizes
        of_q, of_keys = (heads, *dims), (*dims, page)
        given = (*q_nope.shape[1:], q_pe.shape[-1])
        if given != of_q or q_pe.shape[:-1] != q_nope.shape[:-1]:
            shapes = f"{tuple(q_nope.shape)}, {tuple(q_pe.shape)}"
            raise ValueError(f"q_nope, q_pe: shapes {shapes}: plan() was told (heads, ckv dims, kpe dims) = {of_q}")
        given = (ckv_cache.shape[-1], kpe_cache.shape[-1], *ckv_cache.shape[1:-1])
        if given != of_keys:
            shapes = f"{tuple(ckv_cache.shape)}, {tuple(kpe_cache.shape)}"
            raise ValueError(f"ckv_cache, kpe_cache: shapes {shapes}: plan() was told (ckv dims, kpe dims, page) = {of_keys}")
        for name, part, whole, whole_name in (("q_pe", q_pe, q_nope, "q_nope"), ("kpe_cache", kpe_cache, ckv_cache, "ckv_cache")):
            if part.dtype != whole.dtype:  # torch would find a third type for both
                raise TypeError(f"{name}: {part.dtype}: {whole_name}'s {whole.dtype} is needed")
        if lse is not None:
            check_place("lse", lse, q_nope.shape[:-1], torch.float32)
        scale = _scale_of(ckv_cache, ckv_scale, kpe_scale)
        self._bring_tables(q_nope.device)
        tables = self._kept
        k, indices = _keys_of(ckv_cache, kpe_cache, tables["indices"])
        k = k.unsqueeze(2)
        names = dict(seqlens="kv_len_arr", page_indptr="kv_indptr", page_indices="kv_indices", cu_seqlens_q="qo_indptr")
        result, natural = decode_named(
            names, torch.cat((q_nope, q_pe), -1), k, k[..., : ckv_cache.shape[-1]], cu_seqlens_q=tables["qo_indptr"],
            seqlens=tables["kv_len_arr"], page_indptr=tables["kv_indptr"], page_indices=indices, scale=self._scale,
            causal=self._causal, layout="bshd", out=out, return_lse=True, k_scale=scale, v_scale=scale,
        )  # fmt: skip
        of_tokens = natural.t() if return_lse_base_on_e else natural.t() * LOG2_E
        if lse is not None:
            of_tokens = lse.copy_(of_tokens)
        return (result, of_tokens) if flag("return_lse", return_lse) else result

    forward = run


def _scale_of(ckv: torch.Tensor, ckv_scale: Any, kpe_scale: Any) -> Optional[float]:
    """What both parts of float8 rows count times; None: 1."""
    given = {"ckv_scale": ckv_scale, "kpe_scale": kpe_scale}
    for name, scale in given.items():
        if scale is None or (isinstance(scale, (int, float)) and scale == 1):
            continue
        if not isinstance(scale, (int, float)) or not is_fp8(ckv) or any(other != scale for other in given.values()):
            raise NotImplementedError(f"{name}: {_OF_FLOAT8}")
    return None if ckv_scale is None or ckv_scale == 1 else float(ckv_scale)


def _keys_of(ckv: torch.Tensor, kpe: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[pages, page, ckv dims + kpe dims]`` and the page ids in it: a view of the rows that hold both, or a copy of the pages."""
    if ckv.shape[:2] != kpe.shape[:2]:
        raise ValueError(f"kpe_cache: shape {tuple(kpe.shape)}: ckv_cache has {tuple(ckv.shape)}: pages and tokens must be as many")
    dims = ckv.shape[-1] + kpe.shape[-1]
    behind = kpe.data_ptr() == ckv.data_ptr() + ckv.shape[-1] * ckv.element_size()
    rows_hold_both = ckv.stride(-1) == 1 and ckv.stride(1) >= dims and ckv.dtype == kpe.dtype and ckv.stride() == kpe.stride()
    if behind and rows_hold_both and ckv.untyped_storage().data_ptr() == kpe.untyped_storage().data_ptr():
        return ckv.as_strided((*ckv.shape[:2], dims), ckv.stride()), indices
    if indices.shape[0] == 0:  # no request has a key, and a pool has a page at least
        return torch.cat((ckv[:1], kpe[:1]), -1), indices
    ids, own = listed_pages(indices, ckv.shape[0])
    return torch.cat((ckv[ids], kpe[ids]), -1), own
