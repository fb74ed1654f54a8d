"""LeanStaticCache: a static cache of Transformers whose layers are all read in place."""

from __future__ import annotations

from typing import Any

try:
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer
except ImportError as error:
    raise ImportError("LeanStaticCache needs transformers 4.56 or newer") from error


class LeanStaticCache(StaticCache):
    """Like StaticCache, for ``attn_implementation="lean_attention"``: keys and values [B, Hkv, max_cache_len, d], fixed addresses.

    The difference is in layers with a sliding window. StaticCache keeps a window's tokens and moves all of them by one with
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
            StaticLayer(max_cache_len=max_cache_len) if isinstance(layer, StaticSlidingWindowLayer) else layer
            for layer in self.layers
        ]
