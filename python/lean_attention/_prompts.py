"""Whose calls of several new tokens are behind the doors of PyTorch and Transformers: this library's where that was measured to
take no longer than PyTorch."""

from __future__ import annotations

import functools
from typing import Optional

import torch

from lean_attention.torch_ops import is_recorded

# On two cores of a Zen 5 (bench/results/experiments/cpu-zen5-prompts-beside-torch.jsonl) prompts of 4 to 1,500 tokens take 0.11 to 0.53
# of the time of PyTorch's attention by AVX-512 and 0.17 to 0.97 by AVX2: bf16, fp16 and fp32, 40 to 256 dims, causal, seen from
# both sides, padded, masked.
_CPU_TYPES = (torch.float32, torch.float16, torch.bfloat16)

# On one H100 (bench/results/h100-prefill.jsonl) chunks of 512 and 2k tokens of 8k take 0.43 to 0.72 of its flash attention's time in
# bf16, groups of 1 to 16 query heads. Shorter ones and whole prompts have not been measured beside it. Under masks of numbers cuDNN
# takes half of this library's time (bench/results/h200-rules.jsonl).
_CUDA_TYPES = (torch.float16, torch.bfloat16)
_CUDA_HEADS = (64, 96, 128, 192, 256)
_CUDA_TOKENS = 512
_CUDA_CONTEXT = 8192


def are_prompts_ours(
    device: Optional[torch.device],
    dtype: Optional[torch.dtype],
    tokens: int,
    keys: int,
    head_dim: Optional[int] = None,
    masked: bool = False,
) -> bool:
    """Of `tokens` new tokens that see up to `keys`. In a graph (torch.compile, export) they are PyTorch's.

    `head_dim`: None where nobody says it. `masked`: a mask has to be read.
    """
    if device is None or is_recorded():
        return False
    if device.type == "cpu":
        return dtype in _CPU_TYPES
    if device.type != "cuda" or masked or dtype not in _CUDA_TYPES or tokens < _CUDA_TOKENS or keys < _CUDA_CONTEXT:
        return False
    return head_dim in (None, *_CUDA_HEADS) and _has_wide_tiles(device)


@functools.cache
def _has_wide_tiles(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)
