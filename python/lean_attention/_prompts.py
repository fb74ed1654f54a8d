"""Whose calls of several new tokens are behind the doors of PyTorch and Transformers: this library's where that was measured to
take no longer than PyTorch."""

from __future__ import annotations

import enum
import functools
from typing import Optional

import torch

from lean_attention.torch_ops import is_recorded


class Mask(enum.Enum):
    """What a call has to be told of who sees whom, beside causality."""

    NONE = 0
    RANGES = 1  # two numbers a sequence: causality at the end of a context, or padding on the left
    READ = 2


# On two cores of a Zen 5 (bench/results/experiments/cpu-zen5-prompts-beside-torch.jsonl) prompts of 4 to 1,500 tokens take 0.11 to 0.53
# of the time of PyTorch's attention by AVX-512 and 0.17 to 0.97 by AVX2: bf16, fp16 and fp32, 40 to 256 dims, causal, seen from
# both sides, padded, masked.
_CPU_TYPES = (torch.float32, torch.float16, torch.bfloat16)

# On one H200 chunks of 16 to 512 tokens behind a context, 256 to 8k keys, and prompts that are padded take 0.16 to 0.93 of what PyTorch's
# kernels take that read a mask (bench/results/h200-prompts-masked.jsonl), 4 to 2,048 tokens of 8k 0.08 to 0.20
# (bench/results/h200-rules.jsonl): 64 and 128 dims. In the other three this library's chunks were measured beside kernels that need no mask
# (bench/results/h200-prefill.jsonl). Under masks of numbers cuDNN takes half of its time.
_CUDA_TYPES = (torch.float16, torch.bfloat16)
_CUDA_HEADS = (64, 96, 128, 192, 256)
_CUDA_KEYS = 256

# Whole prompts need no mask, and PyTorch has cuDNN's kernel for them: of 8k tokens and more this library takes 0.89 to 0.97 of its time, of
# 64 dims 1.09, of 2k 1.03 to 1.19 (bench/results/h200-prompts.jsonl; 256 dims were not measured).
_CUDA_WHOLE_HEADS = (96, 128, 192)
_CUDA_WHOLE_TOKENS = 8192


def are_prompts_ours(
    device: Optional[torch.device],
    dtype: Optional[torch.dtype],
    tokens: int,
    keys: int,
    head_dim: Optional[int] = None,
    mask: Mask = Mask.NONE,
) -> bool:
    """Of `tokens` new tokens that see up to `keys`. In a graph (torch.compile, export) they are PyTorch's.

    `head_dim`: None where nobody says it.
    """
    if device is None or is_recorded():
        return False
    if device.type == "cpu":
        return dtype in _CPU_TYPES
    if device.type != "cuda" or mask is Mask.READ or dtype not in _CUDA_TYPES or not _has_wide_tiles(device):
        return False
    if mask is Mask.RANGES:
        return keys >= _CUDA_KEYS and head_dim in (None, *_CUDA_HEADS)
    return tokens >= _CUDA_WHOLE_TOKENS and head_dim in _CUDA_WHOLE_HEADS


@functools.cache
def _has_wide_tiles(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)
