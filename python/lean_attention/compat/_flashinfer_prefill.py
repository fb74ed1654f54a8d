"""FlashInfer's wrappers of packed queries: over a paged cache, over packed keys, over levels of a paged cache."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch

from lean_attention.compat._flashinfer_wrapper import PagedCache, PagedWrapper, Plan, RaggedWrapper
from lean_attention.compat._flashinfer_rules import PositionEncoding, ScaleLike, refuse_of_alibi
from lean_attention.compat._flashinfer_states import merge_states


def _refuse_masks(custom_mask_buf: Any, mask_indptr_buf: Any, variant_owns_mask: bool) -> None:
    if custom_mask_buf is not None or mask_indptr_buf is not None:
        raise NotImplementedError("custom_mask_buf, mask_indptr_buf: a mask of each request needs decode(mask=)")
    if variant_owns_mask:
        raise NotImplementedError("variant_owns_mask: kernels of one's own are not compiled here")


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Packed queries of each request, the last of its sequence, over a paged cache: prefill, chunks of it, and decode together.

    Arguments as BatchDecodeWithPagedKVCacheWrapper. custom_mask_buf, mask_indptr_buf, jit_args,
    variant_owns_mask: refused.
    """

    def __init__(
        self,
        float_workspace_buffer: Optional[torch.Tensor] = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Optional[torch.Tensor] = None,
        paged_kv_indptr_buf: Optional[torch.Tensor] = None,
        paged_kv_indices_buf: Optional[torch.Tensor] = None,
        paged_kv_last_page_len_buf: Optional[torch.Tensor] = None,
        custom_mask_buf: Optional[torch.Tensor] = None,
        mask_indptr_buf: Optional[torch.Tensor] = None,
        backend: str = "auto",
        jit_args: Optional[list] = None,
        jit_kwargs: Optional[dict] = None,
        variant_owns_mask: bool = False,
    ) -> None:
        _refuse_masks(custom_mask_buf, mask_indptr_buf, variant_owns_mask)
        buffers = dict(
            paged_kv_indptr_buf=paged_kv_indptr_buf, paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf, qo_indptr_buf=qo_indptr_buf,
        )  # fmt: skip
        super().__init__(kv_layout, use_cuda_graph, jit_args, buffers)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: Optional[int] = None,
        custom_mask: Optional[torch.Tensor] = None,
        packed_custom_mask: Optional[torch.Tensor] = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: Optional[float] = None,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        *,
        o_data_type: Any = None,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
        **others: Any,
    ) -> None:
        """Keeps the page table and the constants of the runs that follow. Waits for nothing.

        Args:
            qo_indptr: int32 ``[B + 1]``: where each request's queries begin.
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len: int32 ``[B + 1]``, ``[indptr[B]]``, ``[B]``: the pages of
                each request.
            num_qo_heads, num_kv_heads, head_dim_qk, page_size: checked against the tensors of run().
            head_dim_vo: of v and the result, checked if given; default: any.
            use_fp16_qk_reduction: not needed.
            custom_mask, packed_custom_mask: refused.
            causal: query i of n sees keys up to n_kv - n + i.
            pos_encoding_mode, rope_scale, rope_theta: as BatchDecodeWithPagedKVCacheWrapper.plan(); "ALIBI" with causal and
                without logits_soft_cap only.
            window_left, logits_soft_cap, sm_scale: keys to the left that are seen (-1: all), softcap, scale (None: 1 / sqrt(d)).
            o_data_type: must be q's own type; for float8 q, float16 or bfloat16.
            fixed_split_size: pages of a split whose bits do not depend on the batch (policy fixed_chunk).
            disable_split_kv: one worker a head (policy data_parallel).

        Raises:
            NotImplementedError: custom masks and what else is not here, by its name.
        """
        self._refuse_of_plan(dict(others, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask))
        refuse_of_alibi(pos_encoding_mode, causal, logits_soft_cap)
        tables = dict(indptr=paged_kv_indptr, indices=paged_kv_indices, last_page_len=paged_kv_last_page_len)
        self._keep(**tables, qo_indptr=qo_indptr)
        self._keep_pages(page_size)
        self._plan = Plan(
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size), head_dim_vo, head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            causal, window_left, logits_soft_cap or 0.0, PositionEncoding(pos_encoding_mode, num_qo_heads, rope_scale, rope_theta),
            o_data_type, self._options(page_size, fixed_split_size, disable_split_kv),
        )  # fmt: skip

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: PagedCache, *args: Any, **arguments: Any) -> Any:
        """Attention of q ``[qo_indptr[B], Hq, d]`` over paged_kv_cache, ``[pages, 2, ...]`` or a pair (k, v) in the wrapper's
        layout.

        The rest, and what is returned, as BatchDecodeWithPagedKVCacheWrapper.run().
        """
        if self._plan is None:
            raise RuntimeError("run(): call plan() first")
        return self._attend(q, paged_kv_cache, self._kept["qo_indptr"], args, **arguments)

    def forward(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, k_scale: ScaleLike = None, v_scale: ScaleLike = None, window_left: int = -1,
        logits_soft_cap: Optional[float] = None, sm_scale: Optional[float] = None, rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """run() with other rules than plan()'s, which they replace, defaults too. Deprecated there.

        Args:
            q, paged_kv_cache: as of run().
            k_scale, v_scale: numbers, or for a float8 cache tensors of one number or ``[Hkv]``.
            causal: query i of n_q sees keys up to n_kv - n_q + i.
            pos_encoding_mode, rope_scale, rope_theta, window_left, logits_soft_cap, sm_scale: as of plan().
            use_fp16_qk_reduction: changes no result here; ignored.
            return_lse: return (out, lse) instead of out.
        """
        self._plan_of_forward(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: PagedCache, *args: Any, **arguments: Any) -> Any:
        """run(q, paged_kv_cache, ...) with return_lse=True: (out, lse)."""
        return self.run(q, paged_kv_cache, *args, return_lse=True, **arguments)


class BatchPrefillWithRaggedKVCacheWrapper(RaggedWrapper):
    """Packed queries of each request, the last of its sequence, over keys packed end to end: no cache.

    Arguments as BatchPrefillWithPagedKVCacheWrapper.
    """

    def __init__(
        self,
        float_workspace_buffer: Optional[torch.Tensor] = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Optional[torch.Tensor] = None,
        kv_indptr_buf: Optional[torch.Tensor] = None,
        custom_mask_buf: Optional[torch.Tensor] = None,
        mask_indptr_buf: Optional[torch.Tensor] = None,
        backend: str = "auto",
        jit_args: Optional[list] = None,
        jit_kwargs: Optional[dict] = None,
        variant_owns_mask: bool = False,
    ) -> None:
        _refuse_masks(custom_mask_buf, mask_indptr_buf, variant_owns_mask)
        super().__init__(kv_layout, use_cuda_graph, jit_args, dict(qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf))

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: Optional[int] = None,
        custom_mask: Optional[torch.Tensor] = None,
        packed_custom_mask: Optional[torch.Tensor] = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        *,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
        **others: Any,
    ) -> None:
        """Keeps where queries and keys begin, and the constants of the runs that follow. Waits for nothing.

        Args:
            qo_indptr: int32 ``[B + 1]``: where each request's queries begin.
            kv_indptr: int32 ``[B + 1]``: where each request's keys begin.
            num_qo_heads, num_kv_heads, head_dim_qk: checked against the tensors of run().
            head_dim_vo: of v and the result, checked if given; default: any.
            use_fp16_qk_reduction, q_data_type, kv_data_type: not needed.
            custom_mask, packed_custom_mask: refused.
            causal: query i of n sees keys up to n_kv - n + i.
            pos_encoding_mode, rope_scale, rope_theta: as BatchDecodeWithPagedKVCacheWrapper.plan(); "ALIBI" with causal and
                without logits_soft_cap only.
            window_left, logits_soft_cap, sm_scale: keys to the left that are seen (-1: all), softcap, scale (None: 1 / sqrt(d)).
            o_data_type: must be q's own type; for float8 q, float16 or bfloat16.
            fixed_split_size: tokens of a split whose bits do not depend on the batch (policy fixed_chunk).
            disable_split_kv: one worker a head (policy data_parallel).

        Raises:
            NotImplementedError: custom masks and what else is not here, by its name.
        """
        self._refuse_of_plan(dict(others, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask))
        refuse_of_alibi(pos_encoding_mode, causal, logits_soft_cap)
        self._keep(qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        self._keep_lengths(self._kept["kv_indptr"].diff())
        self._plan = Plan(
            (num_qo_heads, num_kv_heads, head_dim_qk), head_dim_vo, head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            causal, window_left, logits_soft_cap or 0.0, PositionEncoding(pos_encoding_mode, num_qo_heads, rope_scale, rope_theta),
            o_data_type, self._options(1, fixed_split_size, disable_split_kv),
        )  # fmt: skip

    begin_forward = plan

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **arguments: Any) -> Any:
        """q ``[qo_indptr[B], Hq, d]``; k, v ``[kv_indptr[B], Hkv, d]`` ("NHD") or ``[Hkv, kv_indptr[B], d]``.

        The rest, and what is returned, as BatchDecodeWithPagedKVCacheWrapper.run().
        """
        if self._plan is None:
            raise RuntimeError("run(): call plan() first")
        return self._attend(q, (k, v), self._kept["qo_indptr"], args, **arguments)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None, rope_scale: Optional[float] = None, rope_theta: Optional[float] = None,
        return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """run() with other rules than plan()'s, which they replace, defaults too. Deprecated there.

        Args:
            q, k, v: as of run().
            causal: query i of n_q sees keys up to n_kv - n_q + i.
            pos_encoding_mode, rope_scale, rope_theta, window_left, logits_soft_cap, sm_scale: as of plan().
            use_fp16_qk_reduction: changes no result here; ignored.
            return_lse: return (out, lse) instead of out.
        """
        self._plan_of_forward(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, k, v, return_lse=return_lse)

    def run_return_lse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **arguments: Any) -> Any:
        """run(q, k, v, ...) with return_lse=True: (out, lse)."""
        return self.run(q, k, v, *args, return_lse=True, **arguments)


class MultiLevelCascadeAttentionWrapper:
    """Queries over several levels of one paged cache: a call of each level, merged. Requests share the keys of the first ones.

    Each level's result is rounded to q's type before they are merged. `*_buf_arr`: a buffer of each level, with
    use_cuda_graph.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Optional[torch.Tensor] = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Optional[Sequence[torch.Tensor]] = None,
        paged_kv_indptr_buf_arr: Optional[Sequence[torch.Tensor]] = None,
        paged_kv_indices_buf_arr: Optional[Sequence[torch.Tensor]] = None,
        paged_kv_last_page_len_buf_arr: Optional[Sequence[torch.Tensor]] = None,
    ) -> None:
        buffers = dict(
            qo_indptr_buf_arr=qo_indptr_buf_arr, paged_kv_indptr_buf_arr=paged_kv_indptr_buf_arr,
            paged_kv_indices_buf_arr=paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr=paged_kv_last_page_len_buf_arr,
        )  # fmt: skip
        arrays = {name: [None] * num_levels if array is None else array for name, array in buffers.items()}
        self._use_cuda_graph = use_cuda_graph
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *of_level)
            for of_level in _of_levels(num_levels, **arrays)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffers: Any) -> None:
        """Workspaces are this library's own: float_workspace_buffer and int_workspace_buffers are ignored."""

    def plan(
        self,
        qo_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indices_arr: Sequence[torch.Tensor],
        paged_kv_last_page_len: Sequence[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        **arguments: Any,
    ) -> None:
        """Keeps the tables of each level and the constants of the runs that follow.

        Args:
            qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len: of each level what
                BatchPrefillWithPagedKVCacheWrapper.plan() takes of one.
            num_qo_heads, num_kv_heads, head_dim, page_size: the same for all levels; checked against the tensors of run().
            causal: of the last level; the others are shared by all their queries.
            arguments: any other argument of BatchPrefillWithPagedKVCacheWrapper.plan().
        """
        tables = _of_levels(
            len(self._levels), qo_indptr_arr=qo_indptr_arr, paged_kv_indptr_arr=paged_kv_indptr_arr,
            paged_kv_indices_arr=paged_kv_indices_arr, paged_kv_last_page_len=paged_kv_last_page_len,
        )  # fmt: skip
        for level in self._levels:  # one that is refused leaves none of an old plan
            level._plan = None
        for level, of_level in zip(self._levels, tables):
            is_last = level is self._levels[-1]
            level.plan(*of_level, num_qo_heads, num_kv_heads, head_dim, page_size, causal=causal and is_last, **arguments)

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: PagedCache) -> torch.Tensor:
        """Attention of q ``[tokens, Hq, d]`` over paged_kv_cache (as of the paged wrapper); the result in q's shape."""
        states = [level.run_return_lse(q, paged_kv_cache) for level in self._levels]
        return merge_states(*(torch.stack(parts, 1) for parts in zip(*states)))[0]

    forward = run


def _of_levels(levels: int, **arrays: Sequence[Optional[torch.Tensor]]) -> list[tuple]:
    """What each level has of arrays with one entry a level."""
    for name, array in arrays.items():
        if len(array) != levels:
            raise ValueError(f"{name}: {len(array)} entries: num_levels = {levels}")
    return list(zip(*arrays.values()))
