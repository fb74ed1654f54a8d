"""FlashInfer's wrappers of batches and its functions for one sequence.

There plan() computes a schedule on the host; here it keeps its arguments and waits for nothing.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from lean_attention._decode import decode
from lean_attention.compat._flashinfer_mla import BatchMLAPagedAttentionWrapper
from lean_attention.compat._flashinfer_prefill import (
    BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper, MultiLevelCascadeAttentionWrapper,
)  # fmt: skip
from lean_attention.compat._flashinfer_rules import (
    LOG2_E, PositionEncoding, ScaleLike, Scales, check_layout, nhd, queries_of, refuse_of_alibi,
)  # fmt: skip
from lean_attention.compat._flashinfer_states import merge_state, merge_state_in_place, merge_states
from lean_attention.compat._flashinfer_wrapper import PagedCache, PagedWrapper, Plan, planned
from lean_attention.compat._torch_pieces import refuse

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper", "BatchDecodeWithSharedPrefixPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper", "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper", "MultiLevelCascadeAttentionWrapper", "fast_decode_plan", "merge_state",
    "merge_state_in_place", "merge_states", "single_decode_with_kv_cache", "single_prefill_with_kv_cache",
]  # fmt: skip


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """One query token of each request, or a few, over a paged cache, in FlashInfer's words.

    Args:
        float_workspace_buffer: not needed, kept for the signature; may be None.
        kv_layout: "NHD" (``[pages, page, Hkv, d]``) or "HND" (``[pages, Hkv, page, d]``).
        use_cuda_graph: plan() copies into the three buffers given here, so that a captured run() sees the new lengths.
        use_tensor_cores, backend: hints that change no result; ignored.
        jit_args: refused.
    """

    def __init__(
        self,
        float_workspace_buffer: Optional[torch.Tensor] = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Optional[torch.Tensor] = None,
        paged_kv_indices_buffer: Optional[torch.Tensor] = None,
        paged_kv_last_page_len_buffer: Optional[torch.Tensor] = None,
        backend: str = "auto",
        jit_args: Optional[list] = None,
    ) -> None:
        buffers = dict(
            paged_kv_indptr_buffer=paged_kv_indptr_buffer, paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )  # fmt: skip
        super().__init__(kv_layout, use_cuda_graph, jit_args, buffers)
        self._use_tensor_cores = use_tensor_cores
        self._q_len = 1

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        non_blocking: bool = True,
        block_tables: Optional[torch.Tensor] = None,
        seq_lens: Optional[torch.Tensor] = None,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
        *,
        o_data_type: Any = None,
        q_len_per_req: int = 1,
        **others: Any,
    ) -> None:
        """Keeps the page table and the constants of the runs that follow. Waits for nothing.

        Args:
            indptr, indices, last_page_len: int32 ``[B + 1]``, ``[indptr[B]]``, ``[B]``: the pages of each request.
            num_qo_heads, num_kv_heads, head_dim, page_size: checked against the tensors of run().
            pos_encoding_mode: "NONE"; "ALIBI", without logits_soft_cap; "ROPE_LLAMA", with rope_scale and rope_theta: every
                run copies the request's keys and values, turned, for the cache holds keys as they came. Keys turned when
                they are appended cost nothing.
            window_left, logits_soft_cap, sm_scale: as there.
            q_len_per_req: query tokens of each request, the last of its sequence; several see each other causally.
            o_data_type: must be q's own type; for float8 q, float16 or bfloat16.
            fixed_split_size: pages of a split whose bits do not depend on the batch (policy fixed_chunk).
            disable_split_kv: one worker a head (policy data_parallel).
            q_data_type, kv_data_type, data_type, non_blocking, block_tables, seq_lens: not needed.

        Raises:
            NotImplementedError: what is not here, by its name.
        """
        self._refuse_of_plan(others)
        refuse_of_alibi(pos_encoding_mode, True, logits_soft_cap)
        if q_len_per_req < 1:
            raise ValueError(f"q_len_per_req = {q_len_per_req}: allowed 1 and more")
        if self._use_cuda_graph and self._plan is not None and q_len_per_req != self._q_len:
            raise ValueError(f"q_len_per_req = {q_len_per_req}: the first plan of this graph's wrapper had {self._q_len}")
        self._keep(indptr=indptr, indices=indices, last_page_len=last_page_len)
        self._keep_pages(page_size)
        self._q_len = q_len_per_req
        self._plan = Plan(
            (num_qo_heads, num_kv_heads, head_dim, page_size), None, head_dim**-0.5 if sm_scale is None else sm_scale,
            q_len_per_req > 1, window_left, logits_soft_cap or 0.0,
            PositionEncoding(pos_encoding_mode, num_qo_heads, rope_scale, rope_theta), o_data_type,
            self._options(page_size, fixed_split_size, disable_split_kv),
        )  # fmt: skip

    begin_forward = plan

    def run(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, *args: Any, q_len_per_req: Optional[int] = None,
        return_lse: bool = False, out: Optional[torch.Tensor] = None, **arguments: Any,
    ) -> Any:  # fmt: skip
        """q ``[B q_len_per_req, Hq, d]``; paged_kv_cache ``[pages, 2, ...]`` or a pair (k, v) in the wrapper's layout.

        Args:
            q_scale, k_scale, v_scale: numbers, or for a float8 cache tensors of one number or ``[Hkv]``.
            return_lse: return (out, lse) instead of out.
            out, lse: where results go.
            lse_base, lse_layout: "log2" or "ln"; "NH" or "HN", which is ``[Hq, B q_len_per_req]``.
            window_left, sinks ``[Hq]``: as there.
            enable_pdl, skip_softmax_threshold_scale_factor: change no result here; ignored.

        Returns:
            out in q's shape, or (out, lse ``[B q_len_per_req, Hq]``) with lse in base 2, as FlashInfer has it, unless asked otherwise.

        Raises:
            RuntimeError: before plan().
            ValueError: q or the cache differ from what was planned.
        """
        if self._plan is None:
            raise RuntimeError("run(): call plan() first")
        tokens = self._q_len if q_len_per_req is None else q_len_per_req
        requests = self._kept["last_page_len"].shape[0]
        if q.dim() != 3 or tokens != self._q_len or q.shape[0] != requests * tokens:
            raise ValueError(f"q: shape {tuple(q.shape)}: plan() was told {requests} requests, q_len_per_req = {self._q_len}")
        if tokens == 1:
            return self._attend(q, paged_kv_cache, None, args, return_lse=return_lse, out=out, **arguments)
        apart = (requests, tokens)
        result = self._attend(
            q.unflatten(0, apart), paged_kv_cache, None, args, return_lse=return_lse,
            out=None if out is None else out.unflatten(0, apart), **arguments,
        )  # fmt: skip
        return (result[0].flatten(0, 1), result[1]) if return_lse else result.flatten(0, 1)

    def forward(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, pos_encoding_mode: str = "NONE", q_scale: ScaleLike = None,
        k_scale: ScaleLike = None, v_scale: ScaleLike = None, window_left: int = -1, logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None, rope_scale: Optional[float] = None, rope_theta: Optional[float] = None,
        return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """run() with other rules than plan()'s, which they replace, defaults too. Deprecated there.

        Args:
            q, paged_kv_cache: as of run().
            q_scale, k_scale, v_scale: numbers, or for a float8 cache tensors of one number or ``[Hkv]``.
            pos_encoding_mode, rope_scale, rope_theta, window_left, logits_soft_cap, sm_scale: as of plan().
            return_lse: return (out, lse) instead of out.
        """
        self._plan_of_forward(None, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: PagedCache, *args: Any, **arguments: Any) -> Any:
        """run(q, paged_kv_cache, ...) with return_lse=True: (out, lse)."""
        return self.run(q, paged_kv_cache, *args, return_lse=True, **arguments)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The same with use_cuda_graph; buffers are needed."""

    def __init__(
        self,
        workspace_buffer: Optional[torch.Tensor],
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
        **hints: Any,
    ) -> None:
        buffers = (indptr_buffer, indices_buffer, last_page_len_buffer)
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, *buffers, **hints)


def fast_decode_plan(wrapper: BatchDecodeWithPagedKVCacheWrapper, *args: Any, **kwargs: Any) -> None:
    """plan(), which is as fast as there can be. Of the class: callers put this function in the place of their wrapper's."""
    type(wrapper).plan(wrapper, *args, **kwargs)


def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False, q_scale: ScaleLike = None, k_scale: ScaleLike = None, v_scale: ScaleLike = None,
    window_left: int = -1, logits_soft_cap: Optional[float] = None, sm_scale: Optional[float] = None,
    rope_scale: Optional[float] = None, rope_theta: Optional[float] = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """One query token over one sequence, in FlashInfer's words.

    Args:
        q: ``[Hq, d]``.
        k, v: ``[n_kv, Hkv, d]`` ("NHD"), or ``[Hkv, n_kv, d]`` with kv_layout="HND".
        pos_encoding_mode: "NONE", "ALIBI", or "ROPE_LLAMA" with rope_scale and rope_theta, which copies k, turned.
        use_tensor_cores: ignored: it changes no result.
        q_scale, k_scale, v_scale: numbers, or for float8 keys tensors of one number or ``[Hkv]``.
        window_left, logits_soft_cap, sm_scale: keys to the left that are seen (-1: all), softcap, scale (None: 1 / sqrt(d)).
        return_lse: return (out, lse) instead of out.

    Returns:
        out ``[Hq, d]``, or (out, lse ``[Hq]`` in base 2).
    """
    result = single_prefill_with_kv_cache(
        q[None], k, v, q_scale, k_scale, v_scale, kv_layout=kv_layout, pos_encoding_mode=pos_encoding_mode, sm_scale=sm_scale,
        window_left=window_left, logits_soft_cap=logits_soft_cap, rope_scale=rope_scale, rope_theta=rope_theta,
        return_lse=return_lse,
    )  # fmt: skip
    return (result[0][0], result[1][0]) if return_lse else result[0]


def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: ScaleLike = None, scale_k: ScaleLike = None,
    scale_v: ScaleLike = None, o_dtype: Any = None, custom_mask: Optional[torch.Tensor] = None,
    packed_custom_mask: Optional[torch.Tensor] = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: Optional[float] = None,
    window_left: int = -1, logits_soft_cap: Optional[float] = None, rope_scale: Optional[float] = None,
    rope_theta: Optional[float] = None, backend: str = "auto", return_lse: bool = False, **others: Any,
) -> Any:  # fmt: skip
    """Query tokens, the last of one sequence, over that sequence, in FlashInfer's words.

    Args:
        q: ``[n_q, Hq, d]``.
        k, v: ``[n_kv, Hkv, d]`` ("NHD"), or ``[Hkv, n_kv, d]`` with kv_layout="HND".
        scale_q, scale_k, scale_v: numbers, or for float8 keys tensors of one number or ``[Hkv]``.
        o_dtype: must be q's own type; for float8 q, float16 or bfloat16.
        custom_mask: boolean ``[n_q, n_kv]``, or in a row, instead of causal; numbers to add are refused. packed_custom_mask and
            kv_cache_sf are refused.
        causal: query i sees keys up to n_kv - n_q + i.
        pos_encoding_mode: "NONE", "ALIBI" (causal without custom_mask, or one query; without logits_soft_cap), or "ROPE_LLAMA"
            with rope_scale and rope_theta, which copies k, turned.
        sm_scale, window_left, logits_soft_cap: scale (None: 1 / sqrt(d)), keys to the left that are seen (-1: all), softcap.
        use_fp16_qk_reduction, backend: ignored: they change no result.
        return_lse: return (out, lse) instead of out.

    Returns:
        out ``[n_q, Hq, d]``, or (out, lse ``[n_q, Hq]`` in base 2).
    """
    reasons = dict(packed_custom_mask="give custom_mask", kv_cache_sf="nvfp4 K/V is not computed here")
    refuse("single_prefill_with_kv_cache", dict(others, packed_custom_mask=packed_custom_mask), (), reasons)
    layout = check_layout(kv_layout)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name}: shape {tuple(x.shape)}: q [n_q, Hq, d], for single_decode [Hq, d], and k, v of 3 axes are needed")
    k, v, q = nhd(layout, k), nhd(layout, v), queries_of(q, o_dtype)
    encoding = PositionEncoding(pos_encoding_mode, q.shape[1], rope_scale, rope_theta)
    if custom_mask is not None and custom_mask.is_floating_point():
        raise TypeError(f"custom_mask: {custom_mask.dtype}: boolean is needed (True: seen)")
    causal = causal and custom_mask is None
    refuse_of_alibi(pos_encoding_mode, causal or q.shape[0] == 1, logits_soft_cap)
    if encoding.turns:
        positions = torch.arange(k.shape[0], device=q.device)
        q = encoding.turned(q, torch.arange(q.shape[0], device=q.device) + (k.shape[0] - q.shape[0]))
        k, v = encoding.turned(k.to(q.dtype), positions), v.to(q.dtype)
    scales = Scales(k, scale_q, scale_k, scale_v)
    if custom_mask is not None and custom_mask.shape not in ((q.shape[0], k.shape[0]), (q.shape[0] * k.shape[0],)):
        raise ValueError(f"custom_mask: shape {tuple(custom_mask.shape)}: expected {(q.shape[0], k.shape[0])}, or so many in a row")
    mask = None if custom_mask is None else custom_mask.bool().reshape(1, 1, q.shape[0], k.shape[0])
    result = decode(
        q[None], k[None], v[None], causal=causal, mask=mask, window=(window_left, -1),
        scale=(q.shape[-1] ** -0.5 if sm_scale is None else sm_scale) * scales.of_scores, softcap=logits_soft_cap or 0.0,
        alibi_slopes=encoding.slopes(q.device), layout="bshd", return_lse=return_lse, **scales.arguments,
    )  # fmt: skip
    out, natural = result if return_lse else (result, None)
    out = out[0] if scales.of_result == 1.0 else out[0].mul_(scales.of_result)
    return out if natural is None else (out, natural[0].t() * LOG2_E)


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """One query token of each request over keys that all share, packed, and its own, paged: two calls, merged.

    Deprecated there; MultiLevelCascadeAttentionWrapper says the same of one cache. float_workspace_buffer is not needed.
    """

    def __init__(self, float_workspace_buffer: Optional[torch.Tensor] = None, kv_layout: str = "NHD") -> None:
        self._layout = check_layout(kv_layout)
        self._unique = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Workspaces are this library's own: float_workspace_buffer and int_workspace_buffer are not needed."""

    def end_forward(self) -> None:
        """There is nothing to end."""

    def begin_forward(
        self, unique_kv_indptr: torch.Tensor, unique_kv_indices: torch.Tensor, unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, data_type: Any = "float16",
    ) -> None:  # fmt: skip
        """Keeps the pages of each request's own keys.

        Args:
            unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len: tables as in BatchDecodeWithPagedKVCacheWrapper.plan().
            num_qo_heads, num_kv_heads, head_dim, page_size: checked against the tensors of forward().
            data_type: not needed.
        """
        tables = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        self._unique.plan(*tables, num_qo_heads, num_kv_heads, head_dim, page_size)

    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: PagedCache
    ) -> torch.Tensor:
        """Attention over the shared keys and each request's own.

        Args:
            q: ``[B, Hq, d]``.
            k_shared, v_shared: ``[n_kv, Hkv, d]`` ("NHD") or ``[Hkv, n_kv, d]``, seen by all.
            unique_kv_cache: the paged cache of begin_forward()'s tables.

        Returns:
            The result in q's shape.
        """
        return _merged_with_prefix(self._layout, q, k_shared, v_shared, None, self._unique.run_return_lse(q, unique_kv_cache))


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """The same of packed queries, several of each request. Deprecated there."""

    def __init__(self, float_workspace_buffer: Optional[torch.Tensor] = None, kv_layout: str = "NHD") -> None:
        self._layout = check_layout(kv_layout)
        self._unique = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._planned: tuple = ()

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Workspaces are this library's own: float_workspace_buffer and int_workspace_buffer are not needed."""

    def end_forward(self) -> None:
        """There is nothing to end."""

    def begin_forward(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
    ) -> None:  # fmt: skip
        """Keeps the pages of each request's own keys.

        Args:
            qo_indptr: int32 ``[B + 1]``, where each request's queries begin.
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len: tables as in BatchPrefillWithPagedKVCacheWrapper.plan().
            num_qo_heads, num_kv_heads, head_dim, page_size: checked against the tensors of forward().
        """
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._planned = (*map(planned, tables), num_qo_heads, num_kv_heads, head_dim, page_size)

    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: PagedCache, causal: bool = False,
        use_fp16_qk_reduction: bool = False, sm_scale: Optional[float] = None, rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention over the shared keys and each request's own.

        Args:
            q: ``[qo_indptr[B], Hq, d]``.
            k_shared, v_shared: ``[n_kv, Hkv, d]`` ("NHD") or ``[Hkv, n_kv, d]``, seen by all.
            unique_kv_cache: the paged cache of begin_forward()'s tables.
            causal: of the requests' own keys.
            sm_scale: of scores; default d ** -0.5.
            use_fp16_qk_reduction, rope_scale, rope_theta: change no result, there as here: keys come as they are to be seen.

        Returns:
            The result in q's shape.
        """
        if not self._planned:
            raise RuntimeError("forward(): call begin_forward() first")
        self._unique.plan(*self._planned, causal=causal, sm_scale=sm_scale)
        return _merged_with_prefix(self._layout, q, k_shared, v_shared, sm_scale, self._unique.run_return_lse(q, unique_kv_cache))


def _merged_with_prefix(
    layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: Optional[float], unique: tuple
) -> torch.Tensor:
    """The result over keys that all queries see, merged with that over others."""
    shared = single_prefill_with_kv_cache(q, k, v, kv_layout=layout, sm_scale=sm_scale, return_lse=True)
    return merge_state(*shared, *unique)[0]


_WHAT_WORKS = {
    "BatchAttention": "BatchPrefillWithPagedKVCacheWrapper",
    "BatchAttentionWithAttentionSinkWrapper": "BatchPrefillWithPagedKVCacheWrapper, whose run() takes sinks",
    "PODWithPagedKVCacheWrapper": "BatchPrefillWithPagedKVCacheWrapper, which takes prefill and decode together",
    "BatchPODWithPagedKVCacheWrapper": "BatchPrefillWithPagedKVCacheWrapper, which takes prefill and decode together",
    "single_prefill_with_kv_cache_return_lse": "single_prefill_with_kv_cache(return_lse=True)",
    "append_paged_kv_cache": "lean_attention.decode(append_k=, append_v=)",
    "trtllm_batch_decode_with_kv_cache": "lean_attention.decode(block_table=, seqlens=)",
    "cudnn_batch_decode_with_kv_cache": "lean_attention.decode(block_table=, seqlens=)",
}


def __getattr__(name: str) -> Any:
    """Names of FlashInfer's that are not here say what does the same."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    instead = _WHAT_WORKS.get(name, f"there are {', '.join(__all__)}")
    raise AttributeError(f"{name}: FlashInfer's function is not here: {instead}")
