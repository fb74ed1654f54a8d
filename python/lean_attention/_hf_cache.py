"""LeanStaticCache: a static cache of Transformers whose layers are all read in place."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

from lean_attention._hf_masks import may_wait_for


class LeanStaticLayer(StaticLayer):
    """A static layer whose step launches three kernels where StaticLayer's launches five, and that says when it is full."""

    counted = 0  # tokens as the host counts them, which does not see crop() and replays of a captured graph

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One new token goes where the counted tokens end; anything else, and transformers below 5, is StaticLayer's."""
        tokens = key_states.shape[-2]
        if not hasattr(self, "cumulative_length"):
            try:
                return super().update(key_states, value_states, *arguments, **keywords)
            except IndexError as error:
                message = f"LeanStaticCache: {tokens} more tokens do not fit in max_cache_len = {self.max_cache_len}"
                raise ValueError(message) from error
        if not torch.compiler.is_compiling():
            self._need_room(tokens)
        if tokens != 1 or not self.is_initialized:
            return super().update(key_states, value_states, *arguments, **keywords)
        place = self.cumulative_length.view(1)
        self.keys.index_copy_(2, place, key_states)
        self.values.index_copy_(2, place, value_states)
        self.cumulative_length.add_(1)
        return self.keys, self.values

    def _need_room(self, tokens: int) -> None:
        """Refuses tokens that do not fit. A device is asked only when the host's own count says so: that one may be too large."""
        counts_there = self.cumulative_length
        self.counted += tokens
        if counts_there.device.type != "cpu" and (self.counted <= self.max_cache_len or not may_wait_for(counts_there)):
            return
        there_are = int(counts_there)
        self.counted = there_are + tokens
        if self.counted > self.max_cache_len:
            self.counted = there_are
            raise ValueError(
                f"LeanStaticCache: {there_are} tokens are there, {tokens} more do not fit in max_cache_len = {self.max_cache_len}"
            )

    def reset(self) -> None:
        super().reset()
        self.counted = 0


class LeanStaticCache(StaticCache):
    """Like StaticCache, for ``attn_implementation="lean_attention"``: keys and values [B, Hkv, max_cache_len, d], fixed addresses.

    The main difference is in layers with a sliding window. StaticCache keeps a window's tokens and moves all of them by
    one with every new token; here they have the whole length, nothing moves, and the mask function names the window's
    first token. It needs more memory for these layers, and no traffic beyond the window.

    Args:
        config: the model's configuration.
        max_cache_len: tokens a sequence may have. One more raises ValueError, where the host counts: not in a graph.

    Works with generate(cache=...), before transformers 5.24 generate(past_key_values=...), and under CUDA graphs:
    addresses and shapes stay, lengths are on the device.
    """

    def __init__(self, config: Any, max_cache_len: int, **keywords: Any) -> None:
        super().__init__(config=config, max_cache_len=max_cache_len, **keywords)
        self.layers = [
            LeanStaticLayer(max_cache_len=max_cache_len) if type(layer) in (StaticLayer, StaticSlidingWindowLayer) else layer
            for layer in self.layers
        ]
