"""vLLM on CUDA: the class behind ``--attention-backend CUSTOM``.

Over the engine's FlashAttention, whose cache it shares: the engine writes new keys and values as ever, and each step goes
one way or the other. Steps of few query tokens a request (decode, guessed tokens) are this library's, and so are graphs
of steps of any kind: lengths stay on the device, nothing is planned. Of the steps with longer chunks of prompts `is_no_slower` says
which are FlashAttention's; where that does not read the cache (`LeanCudaImpl.flash_reads_cache`), none is.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_dcp_group
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from lean_attention._core import WIDEST_CUDA_HEAD
from lean_attention._vllm_call import FP8_TYPES, Ranks, side_by_side
from lean_attention._vllm_layers import LeanBuilder, LeanImpl, is_derived, refuse_unknown_rules, unknown_rule_of

#: Of a request, in a step that is this library's whatever else it holds.
MOST_QUERY_TOKENS = 16

# Where longer chunks took no more time here than FlashAttention-3 takes, in the same run on an H100 and on an H200: bf16, 32/8 heads
# of 128 dims, pages of 16 tokens, a request alone in its step (bench/results/h100-prefill.jsonl, h200-prefill.jsonl). Chunks of 512 to
# 16k new tokens of sequences of 8k to 128k: 0.88 to 1.00 of its time. Everything else stays FlashAttention's, since its measured
# neighbours are slower here: chunks of 64 and 256 tokens (0.92 to 1.25) and sequences of 2k (1.09 to 1.21), fewer query heads a kv
# head (512 of 8k: 1.12 with two, 1.19 with one), 2k tokens of d 64 (1.07 to 1.12), d 192 and 256 (1.09 to 1.35), chunks beside decode
# rows (1.05 to 1.23, bench/results/experiments/h100-mixed-02769b1.jsonl).
LONG_CHUNK_TOKENS = 512
LONG_CHUNK_CONTEXT = 8192
LONG_CHUNK_QUERY_ROWS = 32 * LONG_CHUNK_TOKENS  # of all heads: a rank of tensor parallelism has fewer, and needs more tokens
LONG_CHUNK_HEAD_SIZE = 128
LONG_CHUNK_GROUP = 4  # query heads of a kv head, at least


def is_no_slower(query_heads: int, common_attn_metadata: Any) -> bool:
    """Whether a step with a long chunk is one of those measured, for layers that `long_chunk_heads` found to be. By what the host
    knows of a step: no length is read on the device."""
    tokens = common_attn_metadata.max_query_len
    return (
        common_attn_metadata.num_reqs == 1
        and tokens >= LONG_CHUNK_TOKENS
        and tokens * query_heads >= LONG_CHUNK_QUERY_ROWS
        and common_attn_metadata.max_seq_len >= LONG_CHUNK_CONTEXT
    )


def long_chunk_heads(impls: list[Any]) -> int:
    """Query heads of layers whose long chunks may be this library's by `is_no_slower`; 0 where a layer differs from those measured."""
    measured = current_platform.is_device_capability(90) and all(
        impl.vllm_flash_attn_version == 3
        and impl.head_size == LONG_CHUNK_HEAD_SIZE
        and impl.num_heads >= LONG_CHUNK_GROUP * impl.num_kv_heads
        and impl.lean.is_plain
        and impl.lean.fp8 is None
        and impl.lean.ranks is None
        for impl in impls
    )
    return min((impl.num_heads for impl in impls), default=0) if measured else 0


def steps_by_contents(model_config: Any) -> str:
    """What of a model, by its name in the engine's configuration, makes steps FlashAttention's by what they hold; empty: nothing."""
    return next((name for name in ("is_mm_prefix_lm", "rswa_window", "is_diffusion") if getattr(model_config, name, None)), "")


def has_wide_decodes(speculation: Any) -> bool:
    """Whether decode steps with all their guesses, and so their graphs, are FlashAttention's."""
    return (getattr(speculation, "num_speculative_tokens", None) or 0) >= MOST_QUERY_TOKENS


class LeanCudaImpl(LeanImpl, FlashAttentionImpl):
    engine_backend = FlashAttentionBackend
    reads_packed = staticmethod(side_by_side)
    # Decode context parallelism: several new tokens are never looked for in the cache, so that runs of any length are right.
    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def cache_of_engine(self, kv_cache_dtype: str) -> str:
        """Newer FlashAttention classes refuse a float8 cache that they do not read; these layers need not hand anything over."""
        return "auto" if kv_cache_dtype in FP8_TYPES else kv_cache_dtype

    def hand_over(self, attn_type: str, kv_cache_dtype: str) -> None:
        """Older FlashAttention classes take any float8 cache for E4M3, also where they have no kernel for it."""
        if kv_cache_dtype in FP8_TYPES and not FlashAttentionBackend.supports_kv_cache_dtype(kv_cache_dtype):
            raise NotImplementedError(f"kv_cache_dtype = {kv_cache_dtype!r}: a layer of type {attn_type} stays FlashAttention's, which "
                                      "does not read it here")  # fmt: skip

    @property
    def flash_reads_cache(self) -> bool:
        """Whether FlashAttention may have steps of this layer. It reads float8 caches of E4M3 with version 3, by float8 queries;
        where ranks share tokens it would multiply these with new keys that are not."""
        assert self.lean is not None
        if self.lean.fp8 is None:
            return True
        reads = FlashAttentionBackend.supports_kv_cache_dtype(self.kv_cache_dtype)
        return reads and self.lean.fp8 == torch.float8_e4m3fn and self.vllm_flash_attn_version == 3 and self.lean.ranks is None

    def forward_of_engine(self, layer: Any, query: torch.Tensor, key: Any, value: Any, kv_cache: Any, metadata: Any, *others: Any) -> Any:
        """A step that is FlashAttention's over a float8 cache gets the queries that the engine would have made for it."""
        if self.lean is None or self.lean.fp8 is None or metadata is None:
            return super().forward_of_engine(layer, query, key, value, kv_cache, metadata, *others)
        if not self.flash_reads_cache:
            raise NotImplementedError(f"kv_cache_dtype = {self.kv_cache_dtype!r}: this step was described for FlashAttention, which does not "
                                      "read it here")  # fmt: skip
        self.supports_quant_query_input = True  # it multiplies by the queries' scale
        try:
            return super().forward_of_engine(layer, self.float8_queries(layer, query), key, value, kv_cache, metadata, *others)
        finally:
            self.supports_quant_query_input = False

    def float8_queries(self, layer: Any, query: torch.Tensor) -> torch.Tensor:
        """``[tokens, Hq, d]`` as E4M3, by the engine's own kernel: with one scale, or one for the query heads of each kv head."""
        of_group = self.head_size * (self.num_heads // self.num_kv_heads) if layer._q_scale.numel() > 1 else -1
        return ops.scaled_fp8_quant(query.flatten(1), layer._q_scale, group_shape=(-1, of_group))[0].view(query.shape)

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
    #: No step is FlashAttention's, which does not read this cache.
    keeps_all = False
    #: What `is_no_slower` is asked for these layers; 0: nothing.
    long_chunk_heads = 0
    #: Of the largest graph of steps of any kind.
    captured_tokens = 0
    #: Graphs of decode steps are FlashAttention's and are replayed for fewer guesses, too (adaptive verification): what it has to be
    #: told of such a step lies in memory that its own description writes.
    leaves_decodes = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.supports_draft_decode_metadata_update = False  # of FlashAttention's metadata alone
        self.keeps_all = not all(impl.flash_reads_cache for impl in self.impls)
        model = steps_by_contents(vllm_config.model_config) if self.keeps_all else ""
        if self.keeps_all and (model or not self.is_ours):
            raise NotImplementedError(f"kv_cache_dtype = {self.impls[0].kv_cache_dtype!r}: {model or type(self).__name__} hands steps to "
                                      "FlashAttention, which does not read it here")  # fmt: skip
        self.long_chunk_heads = 0 if self.keeps_all else long_chunk_heads(self.impls)
        speculation = vllm_config.speculative_config
        self.leaves_decodes = has_wide_decodes(speculation) and getattr(speculation, "enable_adaptive_verification", False)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Steps of any kind, since the kernels read lengths and query starts on the device and the bound of a request's new tokens
        is the graph's size (`build_for_cudagraph_capture`). Steps whose requests have as many each, where ranks share tokens, whose
        calls differ with the number of new tokens, and where a model's steps are FlashAttention's by what they hold."""
        if is_derived(cls):
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)
        support = AttentionCGSupport.ALWAYS
        if has_wide_decodes(vllm_config.speculative_config):
            support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if steps_by_contents(vllm_config.model_config) or vllm_config.parallel_config.decode_context_parallel_size > 1:
            return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda kind: kind.value)
        return support

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """A graph of steps of any kind is replayed for steps of up to as many tokens, which one request may have alone: whatever
        lengths it is captured with, its kernels are those for that, and read on the device what each request has."""
        of_any_kind = self.vllm_config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL
        if of_any_kind and not self.is_ours and self._cudagraph_support != AttentionCGSupport.ALWAYS:
            raise NotImplementedError("cudagraph_mode = FULL: a layer is FlashAttention's, which has no such graphs here: ask for "
                                      "FULL_AND_PIECEWISE or FULL_DECODE_ONLY")  # fmt: skip
        if of_any_kind and self.is_ours:
            tokens = common_attn_metadata.num_actual_tokens
            self.captured_tokens = max(self.captured_tokens, tokens)
            common_attn_metadata = common_attn_metadata.replace(max_query_len=tokens)
        return super().build_for_cudagraph_capture(common_attn_metadata)

    def takes(self, common_attn_metadata: Any) -> bool:
        """The rule of whose step it is, in one place. All steps where bits must not depend on the batch, since two kernels would
        give two sums; those of a size that graphs were captured for, whose replay reads nothing of a description."""
        if self.keeps_all:
            refuse_unknown_rules(common_attn_metadata)
            return True
        if common_attn_metadata.causal is not True or unknown_rule_of(common_attn_metadata):
            return False
        is_short = common_attn_metadata.max_query_len <= MOST_QUERY_TOKENS and not self.leaves_decodes
        if is_short or common_attn_metadata.num_actual_tokens <= self.captured_tokens:
            return True
        return envs.VLLM_BATCH_INVARIANT or (
            self.long_chunk_heads > 0 and is_no_slower(self.long_chunk_heads, common_attn_metadata)
        )


class LeanCudaBackend(FlashAttentionBackend):
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *FP8_TYPES]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        """Said here too: FlashAttention classes do not ask the list above alone, and take float8 on some GPUs only."""
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_combination(cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *others: Any, **more: Any) -> Any:
        """FlashAttention's answer but for the type of the cache, which it need not read."""
        asked = None if kv_cache_dtype in FP8_TYPES else kv_cache_dtype
        return super().supports_combination(head_size, dtype, asked, *others, **more)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= WIDEST_CUDA_HEAD

    @staticmethod
    def get_impl_cls() -> type:
        return LeanCudaImpl

    @staticmethod
    def get_builder_cls() -> type:
        return LeanCudaBuilder
