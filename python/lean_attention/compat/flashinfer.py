"""FlashInfer's BatchDecodeWithPagedKVCacheWrapper. There plan() computes a schedule on the host; here it keeps its arguments."""

from __future__ import annotations

import math
from typing import Any, Optional, Union

import torch

from lean_attention._decode import decode
from lean_attention._options import Options

_LAYOUTS = {"NHD": "bshd", "HND": "bhsd"}
_LOG2_E = math.log2(math.e)


class BatchDecodeWithPagedKVCacheWrapper:
    """One query token of each request over a paged cache, in FlashInfer's words.

    Args:
        float_workspace_buffer: not needed, kept for the signature; may be None.
        kv_layout: "NHD" (``[pages, page, Hkv, d]``) or "HND" (``[pages, Hkv, page, d]``).
        use_cuda_graph: plan() copies into the three buffers given here, so that a captured run() sees the new lengths.
        use_tensor_cores, backend, jit_args: hints that change no result; ignored.
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
        if kv_layout not in _LAYOUTS:
            raise ValueError(f"kv_layout = {kv_layout!r}: allowed 'NHD', 'HND'")
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if use_cuda_graph and any(buffer is None for buffer in buffers):
            names = "paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer"
            raise ValueError(f"{names}: needed with use_cuda_graph")
        self._layout = _LAYOUTS[kv_layout]
        self._use_cuda_graph = use_cuda_graph
        self._indptr: Any
        self._indices: Any
        self._last_page_len: Any
        self._indptr, self._indices, self._last_page_len = buffers
        self._seqlens: Optional[torch.Tensor] = None
        self._planned = False

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

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
        **refused: Any,
    ) -> None:
        """Keeps the page table and the constants of the runs that follow. Waits for nothing.

        Args:
            indptr, indices, last_page_len: int32 ``[B + 1]``, ``[indptr[B]]``, ``[B]``: the pages of each request.
            num_qo_heads, num_kv_heads, head_dim, page_size: checked against the tensors of run().
            window_left, logits_soft_cap, sm_scale: as there.
            fixed_split_size: pages of a split whose bits do not depend on the batch (policy fixed_chunk).
            disable_split_kv: one worker a head (policy data_parallel).
            data types, non_blocking, block_tables, seq_lens: not needed.

        Raises:
            NotImplementedError: pos_encoding_mode other than "NONE", rope_scale, rope_theta, arguments not listed.
        """
        if pos_encoding_mode != "NONE":
            raise NotImplementedError(f"pos_encoding_mode = {pos_encoding_mode!r}: only 'NONE' is here")
        refused = dict(rope_scale=rope_scale, rope_theta=rope_theta, **refused)
        for name, value in refused.items():
            if value is not None:
                raise NotImplementedError(f"{name}: plan() does not have it here")
        if self._use_cuda_graph:
            self._fill_buffers(indptr, indices, last_page_len)
        else:
            self._indptr, self._indices, self._last_page_len = indptr, indices, last_page_len
        self._keep_lengths(page_size)
        self._heads = (num_qo_heads, num_kv_heads, head_dim)
        self._page_size = page_size
        self._window_left = window_left
        self._softcap = logits_soft_cap or 0.0
        self._scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self._options = None
        if disable_split_kv:
            self._options = Options(policy="data_parallel")
        elif fixed_split_size is not None and fixed_split_size > 0:
            self._options = Options(policy="fixed_chunk", chunk_tokens=fixed_split_size * page_size)
        self._planned = True

    begin_forward = plan

    def _fill_buffers(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor) -> None:
        for name, buffer, given in (
            ("indptr", self._indptr, indptr),
            ("last_page_len", self._last_page_len, last_page_len),
            ("indices", self._indices, indices),
        ):
            if given.shape[0] > buffer.shape[0] or (name != "indices" and given.shape != buffer.shape):
                raise ValueError(f"{name}: shape {tuple(given.shape)}: the buffer has {tuple(buffer.shape)}")
            buffer[: given.shape[0]].copy_(given, non_blocking=True)

    def _keep_lengths(self, page_size: int) -> None:
        """Tokens of each request, on its device; a request without pages has none."""
        pages = self._indptr[1:] - self._indptr[:-1]
        lengths = torch.where(pages > 0, (pages - 1) * page_size + self._last_page_len, torch.zeros_like(pages)).to(torch.int32)
        if self._use_cuda_graph and self._seqlens is not None:
            self._seqlens.copy_(lengths)
        else:
            self._seqlens = lengths

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]],
        *,
        q_scale: Optional[float] = None,
        k_scale: Optional[float] = None,
        v_scale: Optional[float] = None,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
        window_left: Optional[int] = None,
        sinks: Optional[torch.Tensor] = None,
    ) -> Any:
        """q ``[B, Hq, d]``; paged_kv_cache ``[pages, 2, ...]`` or a pair (k, v) in the wrapper's layout.

        Returns out ``[B, Hq, d]``, or (out, lse ``[B, Hq]``) with lse in base 2, as FlashInfer has it.

        Raises:
            RuntimeError: before plan().
            ValueError: q or the cache differ from what was planned.
        """
        if not self._planned:
            raise RuntimeError("run(): call plan() first")
        k, v = paged_kv_cache if isinstance(paged_kv_cache, (tuple, list)) else (paged_kv_cache[:, 0], paged_kv_cache[:, 1])
        head_axis, page_axis = (2, 1) if self._layout == "bshd" else (1, 2)
        planned = (*self._heads, self._page_size)
        given = (q.shape[1], k.shape[head_axis], q.shape[2], k.shape[page_axis])
        if given != planned:
            raise ValueError(f"q, paged_kv_cache: (query heads, kv heads, head dim, page) = {given}: plan() was told {planned}")
        scale = self._scale * (1.0 if q_scale is None else q_scale) * (1.0 if k_scale is None else k_scale)
        left = self._window_left if window_left is None else window_left
        result = decode(
            q, k, v, seqlens=self._seqlens, page_indptr=self._indptr, page_indices=self._indices, scale=scale,
            window=(left, -1), softcap=self._softcap, sinks=None if sinks is None else sinks.detach().float(),
            layout=self._layout, out=out, lse=lse, return_lse=return_lse, options=self._options,
        )  # fmt: skip
        result, natural = result if return_lse else (result, None)
        if v_scale is not None:
            result.mul_(v_scale)
        return result if natural is None else (result, natural.mul_(_LOG2_E))

    forward = run

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: Any, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run(q, paged_kv_cache, return_lse=True, **arguments)

    forward_return_lse = run_return_lse

    def end_forward(self) -> None:
        """There is nothing to end."""
