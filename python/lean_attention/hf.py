"""Hugging Face Transformers: ``attn_implementation="lean_attention"`` after ``lean_attention.hf.register()``, and
``"lean_flash"`` for generate_batch().

Two functions are registered. The mask function (_hf_masks.py) describes the keys of each sequence by two numbers, first
and end, on the device, so that a static cache is read up to the last token there is and padding is skipped without a
mask or a copy of K and V. The attention function computes from them.

Which calls are ours:

- one new token of each sequence (decode): decode(), with the model's mask where two numbers do not say it;
- several new tokens (prefill): decode() where that was measured to be no slower than PyTorch (_prompts.py): on CPUs, and
  long chunks on GPUs of compute capability 9.0;
- several of a model with softcap or sinks, which PyTorch's attention does not have: decode(), when the backend has the
  feature;
- sequences packed end to end (generate_batch()): decode();
- other prefill, and prompts in a graph (torch.compile, export): PyTorch's scaled_dot_product_attention;
- what neither does (dropout, gradients, on GPUs masks with holes under softcap or sinks): the model's own eager function.

Keys that a sparse model picks for each query (DeepSeek-V3.2) are a mask, as they are for "sdpa". Models that Transformers
would refuse for "sdpa" are refused, those that choose their attention by its name, and those that pick blocks of keys.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, Optional

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lean_attention import torch_ops
from lean_attention._accepts import decode_if_accepted
from lean_attention._hf_masks import attention_mask, dense_of, ranges_of, with_picked, without_plain
from lean_attention._hf_models import refuse_models_without_interface
from lean_attention._hf_paged import is_packed, packed_attention, read_cache, refuse_of_packed, serve_name
from lean_attention._prompts import Mask, are_prompts_ours

NAME = "lean_attention"
PAGED_NAME = "lean_flash"  # with "flash" in it, generate_batch() builds no mask; with a 2 or 3 it would look for that package

#: Tensors that models and callers hand through to every attention function: read here, said by the mask already, or of what comes
#: after the layers. What another one would change is not known.
_KNOWN_TENSORS = frozenset((
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "block_table", "read_index", "write_index",
    "position_ids", "cache_position", "seq_idx", "token_type_ids", "mm_token_type_ids", "num_items_in_batch", "shift_labels",
    "logits_indices", "logits_processor_args",
    *({"position_bias"} & set(inspect.signature(sdpa_attention_forward).parameters)),  # there from transformers 5 on
))  # fmt: skip


def register(name: str = NAME) -> None:
    """Makes `name` an attention implementation of Transformers: ``from_pretrained(..., attn_implementation=name)``; and
    "lean_flash", by itself and as "paged|lean_flash", for continuous batching (transformers 5.23 and newer).

    Needs transformers 4.57.1 or newer. May be called again.
    """
    names = [name]
    if serve_name(PAGED_NAME):
        names += [PAGED_NAME, f"paged|{PAGED_NAME}"]
    for each in names:
        AttentionInterface.register(each, attention_forward)
        AttentionMaskInterface.register(each, attention_mask)
    refuse_models_without_interface(names)


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
    indices: Optional[torch.Tensor] = None,
    **keywords: Any,
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """What Transformers calls for each layer, in its words. What the library does not compute goes to sdpa or to eager attention.

    Args:
        module: the attention layer.
        query: ``[B, Hq, n_q, d]``.
        key, value: ``[B, Hkv, n_kv, d]`` with the new tokens.
        attention_mask: None, boolean (True: seen) or additive, ``[B, 1, n_q, n_kv]``, or what this package's mask function made.
        dropout: calls with another than 0 go to sdpa.
        scaling, sliding_window, softcap: scale (None: 1 / sqrt(d)), keys that a window holds, softcap.
        s_aux: ``[Hq]``, attention sinks.
        indices: ``[B, n_q, picked]``, the keys that a sparse model picks for each query; the mask hides some of these too.
        keywords: what else Transformers passes, of which the cumulative lengths of packed batches are read.

    Returns:
        (out ``[B, n_q, Hq, d]``, None).

    Raises:
        TypeError: a mask of integers, which eager attention would add to the scores.
        ValueError: lengths that the keys do not have; several queries with `indices` and no mask.
        NotImplementedError: another tensor among the keywords, by its name.
    """
    for name, given in keywords.items():
        if isinstance(given, torch.Tensor) and name not in _KNOWN_TENSORS:
            raise NotImplementedError(f'{name}: a tensor that is not read here: use attn_implementation="sdpa" or "eager"')
    if attention_mask is not None and attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
        raise TypeError(f"attention_mask: {attention_mask.dtype}: with four axes boolean (True: seen) or additive is needed")
    query, key, value, attention_mask = torch_ops.as_autocast(query, key, value, without_plain(attention_mask))
    if is_packed(keywords):
        by_lengths = attention_mask is None or keywords.get("is_causal")  # else the mask says who sees whom
        if by_lengths:
            refuse_of_packed(indices=indices, dropout=dropout or None, position_bias=keywords.get("position_bias"))
        key, value = read_cache(module, key, value, keywords)
        if by_lengths:
            return packed_attention(module, query, key, value, keywords, scaling, sliding_window, softcap, s_aux)
    if indices is not None:
        attention_mask = with_picked(attention_mask, indices, key.shape[2])
    rules: dict[str, Any] = dict(scale=scaling, softcap=softcap or 0.0)
    if s_aux is not None:
        rules["sinks"] = s_aux.float()
    ours = dropout == 0.0 and keywords.get("position_bias") is None and not torch_ops.is_transformed(query, key, value)
    causal = _is_causal(module, keywords.get("is_causal"))
    out = _decoded(query, key, value, attention_mask, causal, rules) if ours else None
    if out is not None:
        return out.transpose(1, 2), None
    mask = dense_of(attention_mask)
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **keywords)
    keywords.update(softcap=softcap, s_aux=s_aux, dropout=dropout, scaling=scaling)
    return _eager_forward(module, query, key, value, mask, **keywords)


def _is_causal(module: torch.nn.Module, said: Optional[bool]) -> bool:
    """Of several queries without a mask."""
    return getattr(module, "is_causal", True) if said is None else said


def _decoded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Optional[torch.Tensor], causal: bool, rules: dict[str, Any]
) -> Optional[torch.Tensor]:
    """The library's result, or None: it is for one query, for causal ones whose keys are two numbers, and for other prompts
    where they are ours."""
    tokens, keys = query.shape[2], key.shape[2]
    ranges = ranges_of(mask)
    if tokens > 1 and ranges is None:
        of_mask = Mask.NONE if mask is None else Mask.READ
        if not are_prompts_ours(query.device, query.dtype, tokens, keys, query.shape[3], of_mask):
            return None
        if mask is None and causal:
            if keys < tokens:
                return None
            # As is_causal of sdpa counts from the first key: what a static cache holds behind the prompt is not seen.
            key, value = key[:, :, :tokens], value[:, :, :tokens]
            rules["causal"] = True
    if ranges is not None:
        rules.update(leftpad=ranges.starts, seqlens=ranges.ends)
        if tokens > 1:
            rules.update(causal=True, window=(ranges.window - 1, -1) if ranges.window else (-1, -1))
    if mask is not None and (ranges is None or not ranges.whole):
        rules["mask"] = mask[..., :keys]
    return decode_if_accepted(query, key, value, **rules)


def _eager_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Optional[torch.Tensor],
    is_causal: Optional[bool] = None,
    **keywords: Any,
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """The model's own definition, which knows its softcap and sinks. `mask`: boolean, additive, or None (as `is_causal` says)."""
    if mask is None and _is_causal(module, is_causal) and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, torch.finfo(query.dtype).min)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, mask, **keywords)


def __getattr__(name: str) -> Any:
    """LeanStaticCache is imported when asked for."""
    if name == "LeanStaticCache":
        from lean_attention._hf_cache import LeanStaticCache

        return LeanStaticCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
