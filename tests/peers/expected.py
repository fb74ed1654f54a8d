"""What the peers' tests take from their own library as the expectation, in torch's operations, from its definition in fp32."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch


def apply_rotary_emb(x: Any, cos: Any, sin: Any, interleaved: bool = False, inplace: bool = False, seqlen_offsets: Any = 0) -> Any:
    """flash_attn.layers.rotary: x [B, n, H, d], tables [positions, rotary_dim / 2]."""
    batch, tokens = x.shape[:2]
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).expand(batch).long()
    positions = (offsets[:, None] + torch.arange(tokens, device=x.device)).clamp(max=cos.shape[0] - 1)
    c, s = (table.float()[positions][:, :, None] for table in (cos, sin))
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    pair = (a * c - b * s, a * s + b * c)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD", return_lse: bool = False, **arguments: Any
) -> Any:
    """flashinfer: q [Hq, d]."""
    result = single_prefill_with_kv_cache(q[None], k, v, causal=False, kv_layout=kv_layout, return_lse=return_lse, **arguments)
    return (result[0][0], result[1][0]) if return_lse else result[0]


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    custom_mask: Optional[torch.Tensor] = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    sm_scale: Optional[float] = None,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    k_scale: Optional[float] = None,
    v_scale: Optional[float] = None,
    rope_scale: Optional[float] = None,
    rope_theta: Optional[float] = None,
    return_lse: bool = False,
    **hints: Any,
) -> Any:
    """flashinfer: q [n_q, Hq, d], k and v [n_kv, Hkv, d] or by kv_layout."""
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    n_q, heads, dim = q.shape
    n_kv = k.shape[0]
    queries, keys, values = q.float(), k.float() * (k_scale or 1.0), v.float() * (v_scale or 1.0)
    if pos_encoding_mode == "ROPE_LLAMA":
        positions = torch.arange(n_kv, device=q.device)
        queries = _llama(queries, positions[-1] - n_q + 1 + torch.arange(n_q, device=q.device), rope_scale, rope_theta)
        keys = _llama(keys, positions, rope_scale, rope_theta)
    keys, values = (x.repeat_interleave(heads // x.shape[1], 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * (dim**-0.5 if sm_scale is None else sm_scale)
    if logits_soft_cap:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    position = torch.arange(n_q, device=q.device)[:, None] + n_kv - n_q
    key = torch.arange(n_kv, device=q.device)
    seen = torch.ones(n_q, n_kv, dtype=torch.bool, device=q.device)
    if custom_mask is not None:
        seen = custom_mask.reshape(n_q, n_kv).bool()
    elif causal:
        seen = key <= position
    if window_left >= 0:
        seen = seen & (key >= position - window_left)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    out = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return (out, lse.T * math.log2(math.e)) if return_lse else out


def _llama(x: torch.Tensor, positions: torch.Tensor, scale: Optional[float], theta: Optional[float]) -> torch.Tensor:
    half = x.shape[-1] // 2
    rate = (theta or 1e4) ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half) / (scale or 1.0)
    angle = (positions.double()[:, None] * rate)[:, None]
    a, b = x[..., :half].double(), x[..., half:].double()
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).float()


def get_seq_lens(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    return ((indptr.diff() - 1).clamp(min=0) * page_size + last_page_len).int()


def get_batch_indices_positions(append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int) -> tuple[torch.Tensor, torch.Tensor]:
    counts = append_indptr.diff().long()
    batch = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    steps = torch.arange(nnz, device=counts.device) - append_indptr[batch]
    return batch.int(), (seq_lens[batch] - counts[batch] + steps).int()


def append_paged_kv_cache(
    k: torch.Tensor, v: torch.Tensor, batch: torch.Tensor, positions: torch.Tensor, cache: Any, indices: torch.Tensor,
    indptr: torch.Tensor, last_page_len: torch.Tensor, kv_layout: str = "NHD",
) -> None:  # fmt: skip
    keys, values = (cache[:, 0], cache[:, 1]) if isinstance(cache, torch.Tensor) else cache
    if kv_layout == "HND":
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    page_size = keys.shape[1]
    pages = indices[indptr[batch.long()] + positions // page_size].long()
    keys[pages, (positions % page_size).long()] = k.to(keys.dtype)
    values[pages, (positions % page_size).long()] = v.to(values.dtype)
