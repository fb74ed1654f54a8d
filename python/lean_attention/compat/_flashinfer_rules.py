"""What FlashInfer's functions ask of a call beside pages and queries: scales and position encodings, in decode()'s words."""

from __future__ import annotations

import math
from typing import Any, Optional, Union

import torch

from lean_attention.compat._torch_pieces import is_fp8, sequence_of_tokens, turn_by

LOG2_E = math.log2(math.e)
LAYOUTS = ("NHD", "HND")
LSE_BASES = {"log2": LOG2_E, "ln": 1.0}
LSE_LAYOUTS = ("NH", "HN")
ScaleLike = Union[float, torch.Tensor, None]

#: Say how, not what: nothing here depends on them. skip_softmax_* trades accuracy for speed: here results stay exact.
RUN_HINTS = ("enable_pdl", "skip_softmax_threshold_scale_factor", "use_fp16_softmax")
RUN_REFUSED = {
    "kv_cache_sf": "nvfp4 K/V is not computed here",
    "uses_spcompress": "compressed K/V is not computed here",
    "o_scale": "float8 results are not made here: v_scale multiplies others",
}
PLAN_HINTS = (
    "q_data_type", "kv_data_type", "data_type", "non_blocking", "block_tables", "seq_lens", "seq_lens_q",
    "use_fp16_qk_reduction", "max_token_per_sequence", "max_sequence_kv", "global_override_indptr_cpu", "uniform_q_len",
)  # fmt: skip
_NO_ITEMS = "several items in one sequence have no mask here"
PLAN_REFUSED = {
    "custom_mask": "a mask of each request needs decode(mask=)",
    "packed_custom_mask": "a mask of each request needs decode(mask=)",
    "prefix_len_ptr": _NO_ITEMS,
    "token_pos_in_items_ptr": _NO_ITEMS,
    "token_pos_in_items_len": _NO_ITEMS,
    "max_item_len_ptr": _NO_ITEMS,
    "window_right": "keys after a query's own are seen by non-causal calls alone",
    "v_indptr": "values lie as keys do",
    "o_indptr": "results lie as queries do",
}


def nhd(layout: str, tensor: torch.Tensor) -> torch.Tensor:
    """Pages, or one sequence's keys, with tokens before heads: a view."""
    return tensor if layout == "NHD" else tensor.transpose(-3, -2)


def check_layout(kv_layout: str) -> str:
    if kv_layout not in LAYOUTS:
        raise ValueError(f"kv_layout = {kv_layout!r}: allowed 'NHD', 'HND'")
    return kv_layout


def queries_of(q: torch.Tensor, o_data_type: Any) -> torch.Tensor:
    """q in the type that results have: its own, or what holds every float8."""
    wanted = getattr(torch, o_data_type) if isinstance(o_data_type, str) else o_data_type
    if is_fp8(q):
        if wanted not in (torch.float16, torch.bfloat16):
            raise NotImplementedError(f"o_data_type = {o_data_type}: float8 q needs float16 or bfloat16")
        return q.to(wanted)
    if wanted is not None and wanted != q.dtype:
        raise NotImplementedError(f"o_data_type = {o_data_type}: results have q's type, {q.dtype}")
    return q


def refuse_of_alibi(pos_encoding_mode: str, causal: bool, logits_soft_cap: Optional[float]) -> None:
    if pos_encoding_mode != "ALIBI":
        return
    if not causal:
        raise NotImplementedError("pos_encoding_mode = 'ALIBI': without causal keys after a query would gain: not here")
    if logits_soft_cap is not None and logits_soft_cap > 0:
        raise NotImplementedError("logits_soft_cap: caps scores and slopes together with pos_encoding_mode = 'ALIBI': not here")


def listed_pages(indices: torch.Tensor, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that copy the listed pages of a pool into one of their own, and their ids there; those outside the pool stay so, under
    their own numbers where these are outside the new one, too."""
    ids = indices.long()
    inside = (ids >= 0) & (ids < pages)
    outside = torch.where((ids >= 0) & (ids < len(ids)), -1, ids)
    own = torch.where(inside, torch.arange(len(ids), device=ids.device), outside).to(torch.int32)
    return torch.where(inside, ids, 0), own


class Scales:
    """q_scale, k_scale, v_scale: numbers, or for float8 keys tensors ``[1]`` or ``[Hkv]`` too."""

    def __init__(self, k: torch.Tensor, q_scale: ScaleLike, k_scale: ScaleLike, v_scale: ScaleLike) -> None:
        given = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        self.of_scores, self.of_result = 1.0, 1.0
        self.arguments: dict[str, Any] = {}
        if is_fp8(k) and any(isinstance(scale, torch.Tensor) for scale in given.values()):
            heads = k.shape[-2]
            of_q, of_k, of_v = (_per_head(name, scale, heads, k.device) for name, scale in given.items())
            self.arguments = dict(k_scale=of_q * of_k, v_scale=of_v)
            return
        of_q, of_k, of_v = (_number(name, scale) for name, scale in given.items())
        self.of_scores, self.of_result = of_q * of_k, of_v
        if is_fp8(k) and of_v != 1.0:  # rounded once, in the kernel
            self.arguments = dict(k_scale=_per_head("k_scale", None, 1, k.device), v_scale=_per_head("v_scale", of_v, 1, k.device))
            self.of_result = 1.0


def _number(name: str, scale: ScaleLike) -> float:
    if isinstance(scale, torch.Tensor) and scale.numel() != 1:
        raise NotImplementedError(f"{name}: shape {tuple(scale.shape)}: a scale of each head is for float8 k and v")
    return 1.0 if scale is None else float(scale)


def _per_head(name: str, scale: ScaleLike, heads: int, device: torch.device) -> torch.Tensor:
    if not isinstance(scale, torch.Tensor):
        return torch.full((heads,), 1.0 if scale is None else float(scale), dtype=torch.float32, device=device)
    if scale.numel() not in (1, heads):
        raise ValueError(f"{name}: shape {tuple(scale.shape)}: expected one number or [{heads}]")
    return scale.to(device, torch.float32).reshape(-1).expand(heads).contiguous()


class PositionEncoding:
    """pos_encoding_mode. "ROPE_LLAMA" turns queries and cached keys as they are read, so every run copies the keys."""

    def __init__(self, mode: str, heads: int, rope_scale: Optional[float], rope_theta: Optional[float]) -> None:
        if mode not in ("NONE", "ROPE_LLAMA", "ALIBI"):
            raise ValueError(f"pos_encoding_mode = {mode!r}: allowed 'NONE', 'ROPE_LLAMA', 'ALIBI'")
        self.turns = mode == "ROPE_LLAMA"
        self._heads = heads if mode == "ALIBI" else 0
        self._rate = 1.0 / (1.0 if rope_scale is None else rope_scale)
        self._theta = 1e4 if rope_theta is None else rope_theta

    def slopes(self, device: torch.device) -> Optional[torch.Tensor]:
        """ALiBi's own (arXiv 2108.12409): a power of two of heads, and every other one of twice as many."""
        if self._heads == 0:
            return None
        whole = 2 ** int(math.log2(self._heads))
        slopes = [2.0 ** (-8.0 * (h + 1) / whole) for h in range(whole)]
        slopes += [2.0 ** (-4.0 * (2 * h + 1) / whole) for h in range(self._heads - whole)]
        return torch.tensor(slopes, dtype=torch.float32, device=device)

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``x [..., heads, d]`` at ``positions [...]``, by halves, theta^(-2 i / d) a position."""
        half = x.shape[-1] // 2
        exponents = torch.arange(half, dtype=torch.float64, device=x.device) / half
        angles = positions.double().unsqueeze(-1) * (self._rate * torch.pow(self._theta, -exponents))
        return turn_by(x, angles.cos().float(), angles.sin().float(), False)

    def turned_pages(
        self, k: torch.Tensor, v: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A pool of the listed pages alone, ``[listed, page, Hkv, d]``, keys turned, and the ids in it; others stay out of it."""
        listed, page = indices.shape[0], k.shape[1]
        if listed == 0:  # no request has a key, and a pool has a page at least
            return k[:1].to(dtype), v[:1].to(dtype), indices
        request = sequence_of_tokens(indptr, listed)
        first = (torch.arange(listed, device=k.device) - indptr[request]) * page
        ids, own = listed_pages(indices, k.shape[0])
        positions = first[:, None] + torch.arange(page, device=k.device)
        return self.turned(k[ids].to(dtype), positions), v[ids].to(dtype), own
