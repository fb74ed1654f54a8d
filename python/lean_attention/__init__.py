"""Exact attention for the decode phase of transformers: LeanTiles, equal shares, one call.

>>> out = lean_attention.decode(q, k, v, seqlens=seqlens)

Takes NumPy arrays, torch tensors and everything with ``__dlpack__``. Submodules, imported when asked for:
``torch_ops`` (torch.ops.lean_attention), ``hf`` (Hugging Face Transformers), ``vllm`` and ``sglang`` (their plug-ins),
``compat.flashinfer``, ``distributed`` (heads or tokens over several processes).
"""

from __future__ import annotations

import os
from typing import Any

from lean_attention import _core
from lean_attention._decode import Support, check_lengths, decode, sticky_status, supports
from lean_attention._merge import merge_states
from lean_attention._options import Options
from lean_attention._schedule import Schedule, schedule

__version__ = _core.VERSION
__all__ = [
    "Options",
    "Schedule",
    "Support",
    "check_lengths",
    "clear_workspaces",
    "decode",
    "enable_sdpa",
    "flash_attn_with_kvcache",
    "flash_mla_with_kvcache",
    "merge_states",
    "schedule",
    "sticky_status",
    "supports",
]


def clear_workspaces() -> None:
    """Gives back the memory that calls of this thread, and calls on GPUs, keep for the next call.

    No call and no captured CUDA graph may be in use.
    """
    _core.clear_workspaces()


def __getattr__(name: str) -> Any:
    """Names that need torch are imported when first asked for."""
    if name == "flash_attn_with_kvcache":
        from lean_attention.compat.flash_attn import flash_attn_with_kvcache

        return flash_attn_with_kvcache
    if name == "flash_mla_with_kvcache":
        from lean_attention.compat.flash_mla import flash_mla_with_kvcache

        return flash_mla_with_kvcache
    if name == "enable_sdpa":
        from lean_attention.sdpa import enable_sdpa

        return enable_sdpa
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_core.after_fork_in_child)
