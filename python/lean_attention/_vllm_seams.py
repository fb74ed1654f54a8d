"""Where versions of vLLM differ for this library, each difference once; docs/vllm.md says which versions were tried, and how.

Knows no version numbers: it asks what the engine's own classes say of themselves, so it runs without the engine too.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from lean_attention import _vllm_call as call

Pages = call.Pages

# Sizes that no two axes of a cache share, the double of one among them.
_SIZES = {"pages": 1234567, "page": 16, "Hkv": 3, "d": 40}
_AXES = {**{size: name for name, size in _SIZES.items()}, 2: "2", 2 * _SIZES["d"]: "2 d"}
_READERS: dict[str, Callable[[torch.Tensor], Pages]] = {
    "2, pages, Hkv, page, d": call.keys_then_values,
    "2, pages, page, Hkv, d": call.token_rows_of_keys_then_values,
    "pages, 2, page, Hkv, d": call.pairs_of_token_rows,
}
_PACKED = "pages, Hkv, page, 2 d"


def reader_of(engine_backend: Any, packed: Callable[[torch.Tensor], Pages]) -> Callable[[torch.Tensor], Pages]:
    """The function that finds K and V in the caches that an engine's backend shapes.

    Backends say the shape themselves where they have ``get_kv_cache_shape``; without it caches are ``[pages, Hkv, page, 2 d]``.

    Args:
        packed: the function for that last shape, in which platforms order keys and values differently.

    Raises:
        NotImplementedError: a shape that is none of those known.
    """
    shape_of = getattr(engine_backend, "get_kv_cache_shape", None)
    if shape_of is None:
        return packed
    shape = shape_of(_SIZES["pages"], _SIZES["page"], _SIZES["Hkv"], _SIZES["d"])
    axes = ", ".join(_AXES.get(size, str(size)) for size in shape)
    if axes == _PACKED:
        return packed
    if axes not in _READERS:
        known = " or ".join(f"[{each}]" for each in (*_READERS, _PACKED))
        raise NotImplementedError(f"{engine_backend.__name__}: caches of shape [{axes}]: lean_attention reads {known}")
    return _READERS[axes]
