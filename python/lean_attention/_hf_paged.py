"""Continuous batching of Transformers (generate_batch): sequences packed end to end, keys and values in a paged cache."""

from __future__ import annotations

from typing import Any, Optional

import torch
from transformers import modeling_flash_attention_utils as _flash_loader

from lean_attention._decode import decode


def serve_name(name: str) -> bool:
    """Lets Transformers find `name` where it looks for a package of flash functions; False if it is older than 5.23.

    generate_batch() takes only names with "flash" in them, and loads such a name's functions when it is set, from a package it
    knows or the hub; a registered function is called in their place later. There is no public way to say that nothing is to be
    loaded, so this stands in front of its private loader, for this name alone.
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


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    scaling: Optional[float] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[torch.Tensor] = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, tokens of all sequences, d], key and value [1, Hkv, the same, d], written to keywords["cache"].

    The cache writes the new tokens and hands back each sequence's keys packed; prefill and decode are one call. Returns
    ([1, tokens, Hq, d], None).

    Raises:
        NotImplementedError: what the backend lacks, float32 on CUDA for one: there is nobody to hand it to.
    """
    own = dict(keywords)  # update() replaces the lengths of all layer types by this layer's
    key, value = own["cache"].update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=own)
    window = own.get("sliding_window")
    out = decode(
        query[0], key[0], value[0],
        cu_seqlens_q=own["cu_seq_lens_q"].to(torch.int32), cu_seqlens_k=own["cu_seq_lens_k"],
        max_seqlen_q=own["max_length_q"], max_seqlen_k=own["max_length_k"],
        scale=getattr(module, "scaling", None) if scaling is None else scaling, causal=True,
        window=(window - 1, -1) if window else (-1, -1), softcap=softcap or 0.0, sinks=None if s_aux is None else s_aux.detach().float(),
    )  # fmt: skip
    return out.transpose(0, 1)[None], None
