"""Hugging Face Transformers: ``attn_implementation="lean_attention"`` after ``lean_attention.hf.register()``, and
``"paged|lean_flash"`` for generate_batch().

Two functions are registered. The mask function describes the keys of each sequence by two numbers, first and end, as an
int32 tensor [B, 1, 1, 2] on the device, so that a static cache is read up to the last token there is and padding is
skipped without a mask, a copy of K and V, or a wait for the device. The attention function computes from them.

Which calls are ours:

- one new token of each sequence (decode): decode(), with the model's mask where two numbers do not say it;
- several new tokens (prefill) of a model with softcap or sinks, which PyTorch's attention does not have: decode(), when
  the backend has the feature;
- other prefill: PyTorch's scaled_dot_product_attention, which is made for it;
- what neither does (dropout, gradients, masks with holes under softcap or sinks): the model's own eager function.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Optional

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import and_masks, causal_mask_function, sdpa_mask, sliding_window_overlay

from lean_attention._accepts import decode_if_accepted
from lean_attention._hf_paged import paged_attention_forward, serve_name

NAME = "lean_attention"
PAGED_NAME = "lean_flash"  # with "flash" in it, generate_batch() builds no mask; with a 2 or 3 it would look for that package


def register(name: str = NAME) -> None:
    """Makes `name` an attention implementation of Transformers: ``from_pretrained(..., attn_implementation=name)``; and
    "lean_flash", by itself and as "paged|lean_flash", for continuous batching (transformers 5.23 and newer).

    Needs transformers 4.53 or newer. May be called again.
    """
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    if serve_name(PAGED_NAME):
        AttentionInterface.register(PAGED_NAME, _either_forward)
        AttentionInterface.register(f"paged|{PAGED_NAME}", _either_forward)
        AttentionMaskInterface.register(PAGED_NAME, attention_mask)


# --- masks -----------------------------------------------------------------------------------------------------------


def _closure_of(function: Callable) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


_AND = and_masks(causal_mask_function).__code__
_OVERLAY = sliding_window_overlay(1).__code__


def _window_of(mask_function: Callable, keywords: dict[str, Any]) -> Optional[int]:
    """0 for a plain causal mask, the window of a sliding one, None for every other pattern."""
    if mask_function is causal_mask_function:
        return 0
    if getattr(mask_function, "__code__", None) is not _AND or keywords.get("use_vmap"):
        return None
    if torch.compiler.is_compiling():  # torch.compile cannot look into a closure; the caller says what it made
        config, window = keywords.get("config"), keywords.get("local_size")
        sliding = getattr(config, "sliding_window", None) == window and getattr(config, "attention_chunk_size", None) is None
        return window if sliding and "use_vmap" in keywords else None
    (parts,) = _closure_of(mask_function)
    if len(parts) != 2 or parts[1] is not causal_mask_function or getattr(parts[0], "__code__", None) is not _OVERLAY:
        return None
    (window,) = _closure_of(parts[0])
    return window


def _needs_own_softmax(config: Any) -> bool:
    """Softcap or sinks: PyTorch's attention has neither."""
    return getattr(config, "attn_logit_softcapping", None) is not None or getattr(config, "model_type", "") == "gpt_oss"


def attention_mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Optional[torch.Tensor] = None,
    cache_position: Optional[torch.Tensor] = None,
    **keywords: Any,
) -> Optional[torch.Tensor]:
    """What Transformers calls once a forward pass for each kind of layer. `attention_mask`: [B, tokens], False: padding.

    Returns int32 [B, 1, 1, 2], or None when every key is seen, or what sdpa_mask() returns.
    """
    places: dict[str, Any] = dict(q_length=q_length, q_offset=q_offset)
    if cache_position is not None:  # transformers below 5
        q_length, q_offset = cache_position.shape[0], cache_position[0]
        places = dict(cache_position=cache_position)
    window = _window_of(mask_function, keywords)
    ranges = None
    if window is not None and (q_length == 1 or _needs_own_softmax(keywords.get("config"))):
        if attention_mask is None and window == 0 and q_length == 1 and isinstance(q_offset, int) and q_offset + 1 == kv_length:
            return None
        device = keywords.get("device", getattr(attention_mask, "device", getattr(cache_position, "device", None)))
        ranges = _ranges(batch_size, q_length, kv_length, q_offset, kv_offset, window, attention_mask, device)
    if ranges is not None:
        return ranges
    return sdpa_mask(
        batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
        attention_mask=attention_mask, **places, **keywords,
    )  # fmt: skip


def _ranges(
    batch: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: Any,
    window: int,
    padding: Optional[torch.Tensor],
    device: Any,
) -> Optional[torch.Tensor]:
    """(first, end) of each sequence, counted in the keys of this call; for one query the window is in `first`.

    Every operation here is a launch a step, so what is known on the host is computed there.
    """
    end = q_offset + q_length
    last = end - kv_offset
    if isinstance(last, int):
        ends = torch.full((batch,), min(last, kv_length), dtype=torch.int32, device=device)
    else:
        ends = last.to(torch.int32).clamp(max=kv_length).expand(batch)
    if padding is None:
        starts = torch.zeros(batch, dtype=torch.int32, device=device)
    else:
        seen = padding.to(torch.bool)
        if not isinstance(end, int) or seen.shape[1] != end:
            seen = seen & (torch.arange(seen.shape[1], device=device) < end)
        starts = seen.view(torch.uint8).argmax(-1)
        whole = (seen.sum(-1) == end - starts).all()
        if torch.compiler.is_compiling() or seen.device.type != "cpu":
            torch._assert_async(whole, "attention_mask: has holes or padding on the right: only left padding is read")
        elif not whole:
            return None
    if window > 0 and q_length == 1:
        starts = starts.clamp(min=end - window)
    if not isinstance(kv_offset, int) or kv_offset > 0:
        starts = (starts - kv_offset).clamp(min=0)
    both = torch.stack([starts.to(torch.int32), ends])
    ranges = both.t()[:, None, None, :]
    if not torch.compiler.is_compiling():
        ranges._lean_parts = both.unbind()  # once for all layers
    return ranges


def _parts_of(ranges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First and end, [B] each."""
    parts = None if torch.compiler.is_compiling() else getattr(ranges, "_lean_parts", None)
    return ranges[:, 0, 0].unbind(-1) if parts is None else parts


def _ranges_in(mask: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """`mask` when it is what attention_mask() makes of a pattern it knows."""
    return mask if mask is not None and mask.dtype == torch.int32 else None


def _boolean_mask(ranges: torch.Tensor, q_length: int, kv_length: int, window: Optional[int]) -> torch.Tensor:
    """The same keys as a mask [B, 1, n_q, n_kv], for the functions that want one."""
    keys = torch.arange(kv_length, device=ranges.device)
    position = ranges[..., 1:] - q_length + torch.arange(q_length, device=ranges.device)[None, None, :, None]
    seen = (keys >= ranges[..., :1]) & (keys <= position)
    return seen if not window else seen & (keys > position - window)


# --- attention -------------------------------------------------------------------------------------------------------


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[torch.Tensor] = None,
    **keywords: Any,
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """What Transformers calls for each layer: query [B, Hq, n_q, d], key and value [B, Hkv, n_kv, d] with the new tokens.

    Returns ([B, n_q, Hq, d], None).
    """
    q_length = query.shape[2]
    arguments: dict[str, Any] = dict(scale=scaling, softcap=softcap or 0.0)
    if s_aux is not None:
        arguments["sinks"] = s_aux.detach().float()
    ranges = _ranges_in(attention_mask)
    if ranges is not None:
        arguments["leftpad"], arguments["seqlens"] = _parts_of(ranges)
        if q_length > 1:
            arguments.update(causal=True, window=(-1, -1) if not sliding_window else (sliding_window - 1, -1))
    elif attention_mask is not None:  # a pattern that two numbers do not describe, or one a model made itself
        arguments["mask"] = attention_mask[..., : key.shape[2]]
    ours = (q_length == 1 or ranges is not None) and dropout == 0.0 and "position_bias" not in keywords
    out = decode_if_accepted(query, key, value, **arguments) if ours else None
    if out is not None:
        return out.transpose(1, 2), None
    if ranges is not None:
        attention_mask = _boolean_mask(ranges, q_length, key.shape[2], sliding_window if q_length > 1 else None)
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **keywords)
    keywords.update(softcap=softcap, s_aux=s_aux)
    return _eager_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **keywords)


def _either_forward(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Continuous batching brings its paged cache; without one it is generate()."""
    forward = attention_forward if keywords.get("cache") is None else paged_attention_forward
    return forward(*arguments, **keywords)


def _eager_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Optional[torch.Tensor],
    **keywords: Any,
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """The model's own definition, which knows its softcap and sinks. `mask`: boolean, additive, or None (causal)."""
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, torch.finfo(query.dtype).min)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, mask, **keywords)


def __getattr__(name: str) -> Any:
    """LeanStaticCache needs the layered caches of transformers 4.56, register() does not."""
    if name == "LeanStaticCache":
        from lean_attention._hf_cache import LeanStaticCache

        return LeanStaticCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
