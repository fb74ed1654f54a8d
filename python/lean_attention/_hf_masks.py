"""The registered mask function: which keys each sequence sees, as two numbers where a causal pattern and left padding allow it.

The mask that Transformers hands through its model is a boolean one, [B, 1, n_q, n_kv], as
scaled_dot_product_attention() takes it, for whoever reads it. With it go the two numbers, for who knows them: see
ranges_of().
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional, Union

import torch
from torch.utils._pytree import tree_map
from transformers.masking_utils import and_masks, causal_mask_function, eager_mask, sdpa_mask, sliding_window_overlay

from lean_attention._prompts import Mask, are_prompts_ours
from lean_attention.torch_ops import is_recorded


class Ranges(NamedTuple):
    """The keys that each sequence sees, counted in the keys of the call. The last query's position is `ends` - 1."""

    starts: torch.Tensor  # int32 [B]: the first key; for one query the window is in it
    ends: torch.Tensor  # int32 [B]
    window: int  # keys that one of several queries sees, its own among them; 0: all before it
    whole: bool  # False: keys between are hidden as well, and the mask has to be read


class KeyRanges(torch.Tensor):
    """A boolean mask, [B, 1, n_q, n_kv], that is made when somebody reads it. This library reads its two numbers alone.

    `plain`: is_causal says the same; the mask is for a model that takes the last of its rows.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    starts: torch.Tensor
    ends: torch.Tensor

    @staticmethod
    def __new__(
        cls, starts: torch.Tensor, ends: torch.Tensor, window: int, q_length: int, kv_length: int, plain: bool = False
    ) -> KeyRanges:
        shape = (starts.shape[0], 1, q_length, kv_length)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=starts.device)
        self.starts, self.ends, self.window, self.plain, self.made = starts, ends, window, plain, None
        return self

    def dense(self) -> torch.Tensor:
        """The mask, made once for all layers."""
        if self.made is None:
            self.made = _dense(self.starts, self.ends, self.window, self.shape[2], self.shape[3])
        return self.made

    def _of_last(self, queries: int) -> KeyRanges:
        """The same numbers say what the last queries see; one of them has its window in the first key."""
        alone = queries == 1 and self.window > 0
        starts = torch.maximum(self.starts, self.ends - self.window) if alone else self.starts
        return KeyRanges(starts, self.ends, self.window, queries, self.shape[3], self.plain and queries == self.shape[2])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: tuple = (), keywords: Optional[dict] = None) -> Any:
        kept = _kept_queries(function, arguments)
        if kept and kept[-1] == arguments[0].shape[2] - 1 and kept.step == 1:
            return arguments[0]._of_last(len(kept))
        arguments, keywords = tree_map(dense_of, (arguments, keywords or {}))
        return function(*arguments, **keywords)

    def __repr__(self) -> str:
        return f"KeyRanges(starts={self.starts}, ends={self.ends}, window={self.window}, shape={tuple(self.shape)})"

    # What torch.compile asks of a tensor that is an input of its graph.
    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        return ["starts", "ends"], (self.window, self.shape[2], self.shape[3], self.plain)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: tuple, size: Any, stride: Any) -> KeyRanges:
        return KeyRanges(inner["starts"], inner["ends"], *context)

    def _stable_hash_for_caching(self) -> str:
        return f"KeyRanges window={self.window} shape={tuple(self.shape)} plain={self.plain}"


def _kept_queries(function: Any, arguments: tuple) -> range:
    """Of mask[:, :, begin:], which Gemma-4 takes of its masks; none of any other operation."""
    if function is torch.ops.aten.alias.default:
        return range(arguments[0].shape[2])
    if function is torch.ops.aten.slice.Tensor and arguments[1] == 2:
        return range(arguments[0].shape[2])[slice(*arguments[2:])]
    return range(0)


def ranges_of(mask: Optional[torch.Tensor]) -> Optional[Ranges]:
    """The two numbers of a mask that attention_mask() made, and of no other."""
    if isinstance(mask, KeyRanges):
        return Ranges(mask.starts, mask.ends, mask.window, True)
    return getattr(mask, "_lean_ranges", None)


def without_plain(mask: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """None in the place of a mask that is_causal says, too."""
    return None if isinstance(mask, KeyRanges) and mask.plain else mask


def dense_of(mask: Any) -> Any:
    """The boolean mask of a KeyRanges; everything else as it is."""
    return mask.dense() if isinstance(mask, KeyRanges) else mask


def with_picked(mask: Optional[torch.Tensor], indices: torch.Tensor, keys: int) -> torch.Tensor:
    """What a mask shows of the keys that are picked for each query, `indices` [B, n_q, picked].

    Sparse models do so themselves for the names that they know, "sdpa" and "eager", and hand all others what they picked.
    """
    if mask is None and indices.shape[1] > 1:
        raise ValueError("attention_mask: None: needed with indices, which may name keys after a query")
    picked = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    picked = picked.scatter(2, indices.long(), True)[:, None]
    if mask is None:
        return picked
    mask = dense_of(mask)[..., :keys]
    return mask & picked if mask.dtype == torch.bool else mask.masked_fill(~picked, torch.finfo(mask.dtype).min)


def _dense(starts: torch.Tensor, ends: torch.Tensor, window: int, q_length: int, kv_length: int) -> torch.Tensor:
    keys = torch.arange(kv_length, device=starts.device)
    position = (ends - q_length)[:, None, None, None] + torch.arange(q_length, device=starts.device)[:, None]
    seen = (keys >= starts[:, None, None, None]) & (keys <= position)
    return seen & (keys > position - window) if window and q_length > 1 else seen


# --- patterns --------------------------------------------------------------------------------------------------------


def _closure_of(function: Callable) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


_AND = and_masks(causal_mask_function).__code__
_OVERLAY = sliding_window_overlay(1).__code__


def _window_of(mask_function: Callable, keywords: dict[str, Any], may_be_packed: bool) -> Optional[int]:
    """0 for a plain causal mask, the window of a sliding one, None for every other pattern."""
    if mask_function is causal_mask_function:
        return 0
    if getattr(mask_function, "__code__", None) is not _AND or keywords.get("use_vmap"):
        return None
    if torch.compiler.is_compiling():
        return _window_while_compiling(keywords, may_be_packed)
    (parts,) = _closure_of(mask_function)
    if len(parts) != 2 or parts[1] is not causal_mask_function or getattr(parts[0], "__code__", None) is not _OVERLAY:
        return None
    (window,) = _closure_of(parts[0])
    return window


def _window_while_compiling(keywords: dict[str, Any], may_be_packed: bool) -> Optional[int]:
    """torch.compile cannot look into a closure, so what else has the code of and_masks() is excluded by what came with it.

    A window on both sides names allow_is_bidirectional_skip, functions of the caller's use vmap (below transformers 5
    they do not say so, and nothing is known), chunks have a size of their own, and packed rows need a pass without
    cache or padding.
    """
    config, window = keywords.get("config"), keywords.get("local_size")
    sliding = window is not None and getattr(config, "sliding_window", None) == window
    others = "allow_is_bidirectional_skip" in keywords or getattr(config, "attention_chunk_size", None) is not None
    return window if sliding and not others and not may_be_packed and "use_vmap" in keywords else None


def _needs_own_softmax(config: Any) -> bool:
    """Softcap or sinks: PyTorch's attention has neither."""
    return getattr(config, "attn_logit_softcapping", None) is not None or getattr(config, "model_type", "") == "gpt_oss"


def _extends_an_additive_mask(config: Any) -> bool:
    """DeepSeek-V4 puts numbers to add beside its mask, in the mask's type: booleans would turn them round."""
    return getattr(config, "model_type", "") == "deepseek_v4"


def _head_dim_of(config: Any) -> Optional[int]:
    """None where the configuration does not say it."""
    said = getattr(config, "head_dim", None)
    size, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    return said or (size // heads if isinstance(size, int) and isinstance(heads, int) and heads > 0 else None)


def _slices_queries(config: Any) -> bool:
    """Layers that share keys get the last queries alone (Gemma-4), and is_causal would count those from the first key."""
    return bool(getattr(config, "num_kv_shared_layers", 0))


# --- the mask function -----------------------------------------------------------------------------------------------


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

    Returns what sdpa_mask() would: a boolean mask, with the two numbers where it has them, or None when every key is
    seen and the model does not want to look at its mask (`allow_is_causal_skip`).
    """
    config = keywords.get("config")
    places: dict[str, Any] = dict(q_length=q_length, q_offset=q_offset)
    if cache_position is not None:  # transformers below 5
        q_length, q_offset = cache_position.shape[0], cache_position[0]
        places = dict(cache_position=cache_position)

    def as_sdpa(make: Callable = sdpa_mask, **more: Any) -> Optional[torch.Tensor]:
        return make(
            batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, **places, **(keywords | more),
        )  # fmt: skip

    if _extends_an_additive_mask(config):
        return as_sdpa(eager_mask)
    may_be_packed = attention_mask is None and q_length > 1 and q_length == kv_length
    window = _window_of(mask_function, keywords, may_be_packed)
    may_skip = keywords.get("allow_is_causal_skip", True)
    device = keywords.get("device", getattr(attention_mask, "device", getattr(cache_position, "device", None)))
    if window is None or not (q_length == 1 or _needs_own_softmax(config)):
        mask = as_sdpa()
        if mask is not None and window is not None and are_prompts_ours(
            device, keywords.get("dtype"), q_length, kv_length, _head_dim_of(config), Mask.RANGES
        ):
            ranges = _ranges_of_padded(batch_size, q_length, kv_length, q_offset, kv_offset, window, attention_mask, device)
            return mask if ranges is None else _with_ranges(mask, ranges)
        if mask is not None or q_length == 1 or not (may_skip and _slices_queries(config)):
            return mask
        if is_recorded():
            return as_sdpa(allow_is_causal_skip=False)
        ranges = _starts_and_ends(batch_size, q_length, kv_length, q_offset, kv_offset, 0, None, device)
        return KeyRanges(*ranges, 0, q_length, kv_length, plain=True)
    plain = attention_mask is None and window == 0 and q_length == 1 and may_skip
    if plain and not isinstance(q_offset, torch.Tensor) and q_offset + 1 == kv_length:
        return None
    seen = None if attention_mask is None else _seen(attention_mask, q_offset + q_length)
    starts, ends = _starts_and_ends(batch_size, q_length, kv_length, q_offset, kv_offset, window, seen, device)
    if seen is not None:
        if not may_wait_for(seen):  # holes cannot be excluded, so the mask is read as well
            return _with_ranges(as_sdpa(allow_is_causal_skip=False), Ranges(starts, ends, window, False))
        if not _is_padded_left(seen, q_offset + q_length):
            return as_sdpa()
    if is_recorded():  # dead code in the graph, unless the model looks at its mask
        return _with_ranges(_dense(starts, ends, window, q_length, kv_length), Ranges(starts, ends, window, True))
    return KeyRanges(starts, ends, window, q_length, kv_length)


def _with_ranges(mask: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    mask._lean_ranges = ranges
    return mask


def _ranges_of_padded(
    batch: int, q_length: int, kv_length: int, q_offset: Any, kv_offset: int, window: int, padding: Optional[torch.Tensor], device: Any
) -> Optional[Ranges]:
    """The two numbers of a causal mask that hides padding on the left and nothing else."""
    seen = None if padding is None else _seen(padding, q_offset + q_length)
    if seen is not None and not (may_wait_for(seen) and _is_padded_left(seen, q_offset + q_length)):
        return None
    return Ranges(*_starts_and_ends(batch, q_length, kv_length, q_offset, kv_offset, window, seen, device), window, True)


def may_wait_for(tensor: torch.Tensor) -> bool:
    """Whether Python may ask for a value: not in a graph, where later runs bring others."""
    if is_recorded():
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _seen(padding: torch.Tensor, end: Any) -> torch.Tensor:
    """Which tokens up to `end` are no padding."""
    seen = padding.to(torch.bool)
    if isinstance(end, torch.Tensor) or seen.shape[1] != end:
        seen = seen & (torch.arange(seen.shape[1], device=seen.device) < end)
    return seen


def _is_padded_left(seen: torch.Tensor, end: Union[int, torch.Tensor]) -> bool:
    """Whether nothing is hidden between each sequence's first token and `end`: one bit from the device, once a forward pass."""
    return bool((seen.sum(-1) == end - seen.view(torch.uint8).argmax(-1)).all())


def _starts_and_ends(
    batch: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: Any,
    window: int,
    seen: Optional[torch.Tensor],
    device: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [B] each. Every operation here is a launch a step, so what is known on the host is computed there."""
    end = q_offset + q_length
    last = end - kv_offset
    if isinstance(last, torch.Tensor):
        ends = last.to(torch.int32).clamp(max=kv_length).expand(batch)
    else:
        ends = torch.full((batch,), min(last, kv_length), dtype=torch.int32, device=device)
    if seen is None:
        starts = torch.zeros(batch, dtype=torch.int32, device=device)
    else:
        starts = seen.view(torch.uint8).argmax(-1)
    if window > 0 and q_length == 1:
        starts = starts.clamp(min=end - window)
    if isinstance(kv_offset, torch.Tensor) or kv_offset > 0:
        starts = (starts - kv_offset).clamp(min=0)
    return torch.stack([starts.to(torch.int32), ends]).unbind()
