"""vLLM on the CPU: the class that is registered in the place of CPU_ATTN.

CPU_ATTN packs keys in a form of its own for each instruction set. Here they lie plainly in the same memory: a decoder
layer's cache is written by the attention call and read by nobody else.
"""

from __future__ import annotations

from typing import Any

from vllm import envs
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from lean_attention._core import MAX_HEAD_DIM
from lean_attention._vllm_call import Batch, halves
from lean_attention._vllm_layers import LeanBuilder, LeanImpl


def has_step_of(layer: Any) -> bool:
    """Whether the engine is in a step that this library computes for the layer."""
    steps = get_forward_context().attn_metadata if is_forward_context_available() else None
    return isinstance(steps, dict) and isinstance(steps.get(layer.layer_name), Batch)


class LeanCpuImpl(LeanImpl, CPUAttentionBackendImpl):
    writes = True
    engine_backend = CPUAttentionBackend
    reads_packed = staticmethod(halves)

    def refuse_configuration(self, config: Any, kv_cache_dtype: str) -> None:
        super().refuse_configuration(config, kv_cache_dtype)
        if self.head_size > MAX_HEAD_DIM:
            raise NotImplementedError(f"head_size = {self.head_size}: lean_attention takes 1 to {MAX_HEAD_DIM}")
        if config.kv_transfer_config is not None:
            raise NotImplementedError("kv_transfer_config: another engine would expect CPU_ATTN's packed keys")

    def hand_over(self, attn_type: str, kv_cache_dtype: str) -> None:
        if envs.VLLM_BATCH_INVARIANT:
            raise NotImplementedError(f"VLLM_BATCH_INVARIANT: a layer of type {attn_type} stays CPU_ATTN's, which is not")

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        """A layer of this library writes its cache in forward(); what a model stores outside of a step of the layer, here."""
        if self.lean is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        elif not has_step_of(layer):
            self.lean.store(key, value, self.pages_of(kv_cache), slot_mapping, self.factors_of(layer))

    def scales_of(self, layer: Any) -> tuple[Any, Any]:
        return layer._k_scale_float, layer._v_scale_float


class LeanCpuBuilder(LeanBuilder, CPUAttentionMetadataBuilder):
    pass


class LeanCpuBackend(CPUAttentionBackend):
    """Named as what it stands for: vLLM looks the name up in its enumeration."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any; beyond MAX_HEAD_DIM a layer is refused when it is built

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type:
        return LeanCpuImpl

    @staticmethod
    def get_builder_cls() -> type:
        return LeanCpuBuilder
