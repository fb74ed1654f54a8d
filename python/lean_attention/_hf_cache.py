"""LeanStaticCache: a static cache of Transformers whose layers are all read in place."""

from __future__ import annotations

from typing import Any

import torch

try:
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer
except ImportError as error:
    raise ImportError("LeanStaticCache needs transformers 4.56 or newer") from error


class LeanStaticLayer(StaticLayer):
    """A static layer whose step launches three kernels where StaticLayer's launches five."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One new token goes where the counted tokens end; anything else, and transformers below 5, is StaticLayer's."""
        if key_states.shape[-2] != 1 or not self.is_initialized or not hasattr(self, "cumulative_length"):
            return super().update(key_states, value_states, *arguments, **keywords)
        place = self.cumulative_length.view(1)
        self.keys.index_copy_(2, place, key_states)
        self.values.index_copy_(2, place, value_states)
        self.cumulative_length.add_(1)
        return self.keys, self.values


class LeanStaticCache(StaticCache):
    """Like StaticCache, for ``attn_implementation="lean_attention"``: keys and values [B, Hkv, max_cache_len, d], fixed addresses.

    The main difference is in layers with a sliding window. StaticCache keeps a window's tokens and moves all of them by one with
    every new token; here they have the whole length, nothing moves, and the mask function names the window's first token.
    It needs more memory for these layers, and no traffic beyond the window.

    Args:
        config: the model's configuration.
        max_cache_len: tokens a sequence may have.

    Works with generate(past_key_values=...) and under CUDA graphs: addresses and shapes stay, lengths are on the device.
    """

    def __init__(self, config: Any, max_cache_len: int, **keywords: Any) -> None:
        super().__init__(config=config, max_cache_len=max_cache_len, **keywords)
        self.layers = [
            LeanStaticLayer(max_cache_len=max_cache_len) if type(layer) in (StaticLayer, StaticSlidingWindowLayer) else layer
            for layer in self.layers
        ]
