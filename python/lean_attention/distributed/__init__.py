"""Attention over several processes, one GPU or CPU each, on torch.distributed: under torchrun, or whatever starts them.

ContextParallel deals out the tokens of every sequence, TensorParallel the heads; together they make a device mesh. Processes,
rendezvous and transport are torch.distributed's; this package adds which rank computes what, and the merge.
"""

from __future__ import annotations

from lean_attention.distributed._context import ContextParallel
from lean_attention.distributed._exchange import merge_in_order
from lean_attention.distributed._local_call import StepLengths
from lean_attention.distributed._placement import Placement
from lean_attention.distributed._tensor import TensorParallel

__all__ = ["ContextParallel", "Placement", "StepLengths", "TensorParallel", "merge_in_order"]
