"""The part that FlashInfer's wrappers share: what plan() keeps, and the call that run() makes of it."""

from __future__ import annotations

import math
from typing import Any, Mapping, NamedTuple, Optional, Union

import torch

from lean_attention._decode import decode
from lean_attention._options import Options
from lean_attention.compat._flashinfer_rules import (
    LSE_BASES, LSE_LAYOUTS, PLAN_HINTS, PLAN_REFUSED, RUN_HINTS, RUN_REFUSED, PositionEncoding, ScaleLike, Scales, check_layout, nhd, queries_of,
    refuse_of_alibi,
)  # fmt: skip
from lean_attention.compat._torch_pieces import float32, positions_of, refuse
from lean_attention.torch_ops import check_place

PagedCache = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


class Plan(NamedTuple):
    """The constants of the runs that follow a plan()."""

    sizes: tuple[int, ...]  # heads of q and of k, head dim, and of a paged cache the page
    value_dim: Optional[int]  # None: any
    scale: float
    causal: bool
    window_left: int
    softcap: float
    encoding: PositionEncoding
    o_data_type: Any
    options: Optional[Options]


class Wrapper:
    """Tables and lengths stay on their device; with use_cuda_graph in the buffers given here: a replay sees the next plan."""

    _cache = "paged_kv_cache"  # what run() calls keys and values

    def __init__(
        self, kv_layout: str, use_cuda_graph: bool, jit_args: Any, buffers: Mapping[str, Optional[torch.Tensor]]
    ) -> None:
        if jit_args is not None:
            raise NotImplementedError("jit_args: kernels of one's own are not compiled here")
        if use_cuda_graph and any(buffer is None for buffer in buffers.values()):
            raise ValueError(f"{', '.join(buffers)}: needed with use_cuda_graph")
        self._layout = check_layout(kv_layout)
        self._use_cuda_graph = use_cuda_graph
        self._kept: dict[str, Any] = dict(buffers)
        self._seqlens: Optional[torch.Tensor] = None
        self._plan: Optional[Plan] = None
        self._device: Optional[torch.device] = None  # where a run has found the tables, or brought them

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Workspaces are this library's own: there is nothing to set."""

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Bytes that the caller must own: none."""
        return (0, 0)

    def end_forward(self) -> None:
        """There is nothing to end."""

    def _keep(self, **given: torch.Tensor) -> None:
        """Tables of a plan; in the buffers of a graph they must fit, page ids alone may be fewer. There is no plan then until
        plan() comes to its end: the constants of an old one do not go with the new tables."""
        for name, value in given.items():
            if not isinstance(value, torch.Tensor) or value.is_floating_point():
                what = value.dtype if isinstance(value, torch.Tensor) else type(value)
                raise TypeError(f"{name}: {what}: a torch tensor of int32 is needed")
        self._device = None
        if not self._use_cuda_graph:
            self._plan = None
            self._kept = {name: planned(value) for name, value in given.items()}
            return
        for (name, value), buffer in zip(given.items(), self._kept.values()):
            if value.shape[0] > buffer.shape[0] or (name != "indices" and value.shape != buffer.shape):
                raise ValueError(f"{name}: shape {tuple(value.shape)}: the buffer has {tuple(buffer.shape)}")
        self._plan = None
        self._kept = dict(zip(given, self._kept.values()))
        for name, value in given.items():
            self._kept[name][: value.shape[0]].copy_(value, non_blocking=True)

    def _bring_tables(self, device: torch.device) -> None:
        """Tables may be planned with in host memory, as there: plan() copies them, and the first run has them on its device."""
        if self._device == device or self._use_cuda_graph:
            return
        self._kept = {name: table.to(device) for name, table in self._kept.items()}
        if self._seqlens is not None:
            self._seqlens = self._seqlens.to(device)
        self._device = device

    def _keep_lengths(self, lengths: torch.Tensor) -> None:
        """Keys of each request, on its device."""
        if self._use_cuda_graph and self._seqlens is not None:
            self._seqlens.copy_(lengths)
        else:
            self._seqlens = lengths

    @staticmethod
    def _options(page_size: int, fixed_split_size: Optional[int], disable_split_kv: bool) -> Optional[Options]:
        if disable_split_kv:
            return Options(policy="data_parallel")
        if fixed_split_size is not None and fixed_split_size > 0:
            return Options(policy="fixed_chunk", chunk_tokens=fixed_split_size * page_size)
        return None

    @staticmethod
    def _refuse_of_plan(others: Mapping[str, Any]) -> None:
        refuse("plan", others, PLAN_HINTS, PLAN_REFUSED)

    def _plan_of_forward(
        self, causal: Optional[bool], pos_encoding_mode: str, window_left: int, logits_soft_cap: Optional[float],
        sm_scale: Optional[float], rope_scale: Optional[float], rope_theta: Optional[float],
    ) -> None:  # fmt: skip
        """What a forward() says, or leaves out, takes the place of what plan() was told, as there. `causal` None: as planned."""
        if self._plan is None:
            raise RuntimeError("forward(): call plan() first")
        refuse_of_alibi(pos_encoding_mode, causal is not False, logits_soft_cap)
        heads, _, dim, *_ = self._plan.sizes
        self._plan = self._plan._replace(
            scale=dim**-0.5 if sm_scale is None else sm_scale, causal=self._plan.causal if causal is None else causal,
            window_left=window_left, softcap=logits_soft_cap or 0.0,
            encoding=PositionEncoding(pos_encoding_mode, heads, rope_scale, rope_theta),
        )  # fmt: skip

    def forward(self, *args: Any, **arguments: Any) -> Any:
        """Deprecated there, and with defaults of its own: run() has those of plan()."""
        raise NotImplementedError

    def forward_return_lse(self, *args: Any, **arguments: Any) -> Any:
        """forward(...) with return_lse=True: (out, lse)."""
        return self.forward(*args, return_lse=True, **arguments)

    def _attend(
        self, q: torch.Tensor, cache: PagedCache, cu_seqlens_q: Optional[torch.Tensor], args: tuple, *, q_scale: ScaleLike = None,
        k_scale: ScaleLike = None, v_scale: ScaleLike = None, out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None, return_lse: bool = False, lse_base: str = "log2", lse_layout: str = "NH",
        window_left: Optional[int] = None, sinks: Optional[torch.Tensor] = None, **others: Any,
    ) -> Any:  # fmt: skip
        """q ``[B, Hq, d]``, or ``[B, n_q, Hq, d]``, or packed."""
        if self._plan is None:
            raise RuntimeError("run(): call plan() first")
        if args:
            raise NotImplementedError("run(): further arguments are those of kernels of one's own: not here")
        refuse("run", others, RUN_HINTS, RUN_REFUSED)
        for name, value, allowed in (("lse_base", lse_base, LSE_BASES), ("lse_layout", lse_layout, LSE_LAYOUTS)):
            if value not in allowed:
                raise ValueError(f"{name} = {value!r}: allowed {', '.join(map(repr, allowed))}")
        self._bring_tables(q.device)
        cu_seqlens_q = None if cu_seqlens_q is None else cu_seqlens_q.to(q.device)
        plan = self._plan
        if isinstance(cache, (tuple, list)) and len(cache) != 2:
            raise ValueError(f"{self._cache}: {len(cache)} tensors: expected (k, v)")
        k, v = (nhd(self._layout, x) for x in (cache if isinstance(cache, (tuple, list)) else (cache[:, 0], cache[:, 1])))
        given = (q.shape[-2], k.shape[-2], q.shape[-1], *k.shape[1:-2])
        if given != plan.sizes:
            names = ", ".join(("query heads", "kv heads", "head dim", "page")[: len(plan.sizes)])
            raise ValueError(f"q, {self._cache}: ({names}) = {given}: plan() was told {plan.sizes}")
        if plan.value_dim not in (None, v.shape[-1]):
            raise ValueError(f"{self._cache}: head dim of v = {v.shape[-1]}: plan() was told head_dim_vo = {plan.value_dim}")
        q = queries_of(q, plan.o_data_type)
        k, v, lengths = self._keys(k, v, plan.encoding, q.dtype)
        if plan.encoding.turns:
            q = self._turned(q, plan.encoding, cu_seqlens_q)
        scales = Scales(k, q_scale, k_scale, v_scale)
        if lse is not None:
            rows = (math.prod(q.shape[:-2]), q.shape[-2])
            check_place("lse", lse, rows[::-1] if lse_layout == "HN" else rows, torch.float32)
        result = decode(
            q, k, v, cu_seqlens_q=cu_seqlens_q, scale=plan.scale * scales.of_scores, causal=plan.causal,
            window=(plan.window_left if window_left is None else window_left, -1), softcap=plan.softcap,
            alibi_slopes=plan.encoding.slopes(q.device), sinks=float32(sinks), layout="bshd", out=out, options=plan.options,
            return_lse=return_lse or lse is not None, **lengths, **scales.arguments,
        )  # fmt: skip
        result, natural = result if isinstance(result, tuple) else (result, None)
        if scales.of_result != 1.0:
            result.mul_(scales.of_result)
        if natural is None:
            return result
        asked = _of_tokens(natural, q, cu_seqlens_q) * LSE_BASES[lse_base]
        if lse_layout == "HN":
            asked = asked.t().contiguous()
        if lse is not None:
            asked = lse.copy_(asked)
        return (result, asked) if return_lse else result

    def _keys(
        self, k: torch.Tensor, v: torch.Tensor, encoding: PositionEncoding, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Keys and values as decode() takes them, keys turned where `encoding` does, and the arguments that say whose they are."""
        raise NotImplementedError

    def _turned(self, q: torch.Tensor, encoding: PositionEncoding, cu_seqlens_q: Optional[torch.Tensor]) -> torch.Tensor:
        assert self._seqlens is not None
        if cu_seqlens_q is not None:
            return encoding.turned(q, positions_of(self._seqlens - cu_seqlens_q.diff(), q, cu_seqlens_q, True))
        if q.dim() == 3:
            return encoding.turned(q, self._seqlens - 1)
        return encoding.turned(q, positions_of(self._seqlens - q.shape[1], q, None, True))


class PagedWrapper(Wrapper):
    """Over a cache in pages, ``[pages, page, Hkv, d]``."""

    def _keep_pages(self, page_size: int) -> None:
        """A request without pages has no keys."""
        pages, last = self._kept["indptr"].diff(), self._kept["last_page_len"]
        if last.shape != pages.shape:
            raise ValueError(f"last_page_len: shape {tuple(last.shape)}: expected {tuple(pages.shape)}, one for each request of indptr")
        possible = (last >= 0) & (last <= page_size)
        if possible.device.type == "cpu" and not bool(possible.all()):
            b = int(possible.int().argmin())
            raise ValueError(f"last_page_len[{b}] = {int(last[b])}: allowed 0 to {page_size} (the page)")
        lengths = torch.where(pages > 0, (pages - 1) * page_size + last, 0)
        self._keep_lengths(torch.where(possible, lengths, -1).to(torch.int32))  # on a device decode() reports -1

    def _keys(
        self, k: torch.Tensor, v: torch.Tensor, encoding: PositionEncoding, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        indptr, indices = self._kept["indptr"], self._kept["indices"]
        if encoding.turns:
            k, v, indices = encoding.turned_pages(k, v, indptr, indices, dtype)
        return k, v, dict(seqlens=self._seqlens, page_indptr=indptr, page_indices=indices)


class RaggedWrapper(Wrapper):
    """Over keys packed end to end, ``[tokens, Hkv, d]``."""

    _cache = "k"

    def _keys(
        self, k: torch.Tensor, v: torch.Tensor, encoding: PositionEncoding, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        indptr = self._kept["kv_indptr"]
        if encoding.turns:
            k = encoding.turned(k.to(dtype), positions_of(torch.zeros_like(indptr[1:]), k, indptr, True))
            v = v.to(dtype)
        return k, v, dict(cu_seqlens_k=indptr)


def planned(table: Any) -> Any:
    """A table as plan() was given it: one in host memory may be filled anew before the first run. Others are not copied there."""
    return table.clone() if isinstance(table, torch.Tensor) and table.device.type == "cpu" else table


def _of_tokens(natural: torch.Tensor, q: torch.Tensor, cu_seqlens_q: Optional[torch.Tensor]) -> torch.Tensor:
    """decode()'s lse with a row for each query token, ``[tokens, Hq]``, as FlashInfer has it."""
    if cu_seqlens_q is not None:
        return natural.t()
    return natural.transpose(1, 2).flatten(0, 1) if q.dim() == 4 else natural
