"""Continuous batching of Transformers (generate_batch), and every other call whose sequences are packed end to end."""

from __future__ import annotations

from typing import Any, Optional

import torch
from transformers import modeling_flash_attention_utils as _flash_loader

from lean_attention._decode import decode

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index", "block_table")
_NEEDED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def serve_name(name: str) -> bool:
    """Lets Transformers find `name` where it looks for a package of flash functions; False if it is older than 5.23.

    generate_batch() takes only names with "flash" in them, and loads such a name's functions when it is set, from a
    package it knows or the hub; a registered function is called in their place later. There is no public way to say
    that nothing is to be loaded, so this stands in front of its private loader, for this name alone.
    """
    load = getattr(_flash_loader, "_lazy_imports", None)
    if load is None or not hasattr(_flash_loader, "_flash_with_kvcache_fn"):
        return False
    if hasattr(load, "lean_attention"):
        return True

    def lazy_imports(implementation: Optional[str], *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        if implementation is None or implementation.split("|")[-1] != name:
            return load(implementation, *arguments, **keywords)
        return _never_called, _never_called, None, _flash_loader._pad_input, _flash_loader._unpad_input

    lazy_imports.lean_attention = True  # type: ignore[attr-defined]
    _flash_loader._lazy_imports = lazy_imports
    return True


def _never_called(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("attn_implementation: this model does not call its attention through AttentionInterface")


def is_packed(keywords: dict[str, Any]) -> bool:
    """Whether the tokens of a call belong to several sequences."""
    return any(keywords.get(name) is not None for name in _PACKED)


def refuse_of_packed(**asked: Any) -> None:
    """What other attention is asked for in the place of ours; before the cache has the new tokens."""
    for name, given in asked.items():
        if given is not None:
            raise NotImplementedError(f"{name}: is not here for packed sequences, and there is nobody to hand them to")


def read_cache(
    module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, keywords: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence's keys and values with the new tokens, packed; the lengths in `keywords` become this layer's own.

    From transformers 5.24 on the layer has done this; before, the attention function gets the cache and does it.
    """
    cache = keywords.pop("cache", None)
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=keywords)
    if keywords.get("block_table") is not None:
        raise NotImplementedError("block_table: sequences in pages are not read by this attention: set max_blocks_per_request=0")
    return key, value


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keywords: dict[str, Any],
    scaling: Optional[float],
    window: Optional[int],
    softcap: Optional[float],
    s_aux: Optional[torch.Tensor],
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, tokens of all sequences, d], key and value [1, Hkv, tokens of all, d]; prefill and decode are one call.

    Returns ([1, tokens, Hq, d], None).

    Raises:
        ValueError: a packed call that does not say where its sequences begin.
        NotImplementedError: what the backend lacks, float32 on CUDA for one: there is nobody to hand it to.
    """
    for name in _NEEDED:
        _need(name, keywords.get(name))
    if query.shape[0] != 1 or key.shape[0] != 1:
        raise ValueError(f"query, key: {query.shape[0]} and {key.shape[0]} rows of packed sequences: one is needed")
    causal = keywords.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if window and not causal:
        raise NotImplementedError(f"sliding_window={window} with is_causal=False: a window on both sides of packed sequences")
    lengths = dict(cu_seqlens_q=keywords["cu_seq_lens_q"].to(torch.int32), cu_seqlens_k=keywords["cu_seq_lens_k"].to(torch.int32))
    tokens = query.shape[2]
    if query.device.type == "cpu" and not torch.compiler.is_compiling():  # a batch may be filled up with tokens of no sequence
        query = query[:, :, : int(lengths["cu_seqlens_q"][-1])]
    out = decode(
        query[0], key[0], value[0], **lengths,
        max_seqlen_q=int(keywords["max_length_q"]), max_seqlen_k=int(keywords["max_length_k"]),
        scale=getattr(module, "scaling", None) if scaling is None else scaling, causal=bool(causal),
        window=(window - 1, -1) if window else (-1, -1), softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )  # fmt: skip
    out = torch.nn.functional.pad(out, (0, 0, 0, tokens - out.shape[1])) if tokens > out.shape[1] else out
    return out.transpose(0, 1)[None], None


def _need(name: str, value: Any) -> None:
    if value is None:
        raise ValueError(f"{name}: is missing in a call of packed sequences: where they begin is not known")
    if isinstance(value, (dict, list)):
        raise ValueError(f"{name}: {type(value).__name__} of all kinds of layers: the cache did not choose this layer's")
