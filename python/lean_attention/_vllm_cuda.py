"""vLLM on CUDA: the class behind ``--attention-backend CUSTOM``.

Over the engine's FlashAttention, whose cache it shares: the engine writes new keys and values as ever, and each step goes
one way or the other. Steps of few query tokens a request (decode, guessed tokens) are this library's, captured in full
CUDA graphs: lengths stay on the device, nothing is planned. Steps with longer prefill chunks are FlashAttention's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from lean_attention._core import WIDEST_CUDA_HEAD
from lean_attention._vllm_call import Ranks, side_by_side
from lean_attention._vllm_layers import LeanBuilder, LeanImpl, unknown_rule_of

#: Of a request, in a step of this library's. Chunks of 64 and more take 1.1 to 1.7 times FlashAttention-3's time (docs/results.md).
MOST_QUERY_TOKENS = 16


class LeanCudaImpl(LeanImpl, FlashAttentionImpl):
    engine_backend = FlashAttentionBackend
    reads_packed = staticmethod(side_by_side)
    # Decode context parallelism: several new tokens are never looked for in the cache, so that runs of any length are right.
    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def ranks_of(self, count: int, of_layer: dict[str, Any]) -> Ranks:
        """By the engine's own collectives. Rules are refused that FlashAttention, which has the long chunks, gets wrong there: it
        leaves sinks out, and counts distances within a rank's own tokens."""
        words = f"with decode_context_parallel_size = {count}"
        for name, value in of_layer.items():
            if value is not None:
                raise NotImplementedError(f"{name}: not {words}")
        if envs.VLLM_BATCH_INVARIANT:
            raise NotImplementedError(f"VLLM_BATCH_INVARIANT: not {words}: the order in which ranks are added is the collective's")
        if self.head_size & (self.head_size - 1):
            raise NotImplementedError(f"head_size = {self.head_size}: {words} vLLM's kernel takes powers of two")
        group = get_dcp_group()
        return Ranks(
            gather_heads=lambda query: group.all_gather(query, dim=1),
            combine=lambda out, lse: self.dcp_combine(out, lse, group, return_lse=True),
        )


class LeanCudaBuilder(LeanBuilder, FlashAttentionMetadataBuilder):
    engine_reads_cache = True
    # A graph is of steps whose requests all have as many query tokens: then it is known whose step it is.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.supports_draft_decode_metadata_update = False  # of FlashAttention's metadata alone

    def takes(self, common_attn_metadata: Any) -> bool:
        """All steps where bits must not depend on the batch: two kernels would give two sums."""
        few = common_attn_metadata.max_query_len <= MOST_QUERY_TOKENS
        plain = common_attn_metadata.causal is True and not unknown_rule_of(common_attn_metadata)
        return plain and (few or envs.VLLM_BATCH_INVARIANT)


class LeanCudaBackend(FlashAttentionBackend):
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]  # for float8 FlashAttention wants float8 queries too

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        """Said here too: older FlashAttention classes do not ask the list above, and take float8 on some GPUs."""
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= WIDEST_CUDA_HEAD

    @staticmethod
    def get_impl_cls() -> type:
        return LeanCudaImpl

    @staticmethod
    def get_builder_cls() -> type:
        return LeanCudaBuilder
