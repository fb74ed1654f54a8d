"""What this library's backends for vLLM share, as classes that stand before the engine's own of a platform.

A layer is decided for when it is built: decoder layers are this library's, which has its own batch description for them;
what it does not do stays the engine's class underneath, with the engine's cache and metadata (cross attention, encoders),
or is refused by name. _vllm_cpu.py and _vllm_cuda.py add the platform.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from vllm import envs
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from lean_attention._vllm_call import FP8_TYPES, Batch, PagedLayer, Ranks, first_of, held_tokens
from lean_attention._vllm_seams import Pages, reader_of
from lean_attention.distributed._local_call import Shard
from lean_attention.distributed._placement import Placement

DECODER = "decoder"
_FLOAT_CACHES = ("auto", "float16", "bfloat16", "float32")
#: Of a step's description: what changes who sees whom and is not computed here.
_UNKNOWN_RULES = {
    "mm_req_doc_ranges": "tokens of images that see each other both ways",
    "rswa_prefix_lens": "windows that leave a prefix visible",
}


def is_derived(cls: type) -> bool:
    """Whether vLLM made a class of its own from this library's, to change what it gets."""
    return cls.__module__.partition(".")[0] != __name__.partition(".")[0]


class LeanBuilder:
    """Stands before the engine's builder: makes a Batch for the layers of a group where they are this library's."""

    #: Whether the engine's class may take over what this library does not do: it knows what the cache holds.
    engine_reads_cache = False
    #: This rank's part of the tokens; None where it has all.
    shard: Optional[Shard] = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
        impls = [getattr(layer, "impl", None) for layer in layers.values()]
        #: The layers of the group that are computed here: all of them, or none.
        self.impls = [impl for impl in impls if isinstance(impl, LeanImpl) and impl.lean is not None]
        if self.impls and len(self.impls) != len(impls):
            raise NotImplementedError(f"{', '.join(layer_names)}: share a cache, and some are computed here, some not")
        self.is_ours = bool(self.impls)
        first: Any = self.impls[0] if self.impls else None
        if self.is_ours and first.lean.ranks is not None:
            interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
            self.shard = Shard(Placement(first.dcp_world_size, interleave), first.dcp_rank)
            self._held = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)
            self.supports_update_block_table = False  # a copy of another group's Batch would leave this group's memory as it was
        if self.is_ours and is_derived(type(self)):
            if not self.engine_reads_cache:
                raise NotImplementedError(f"{type(self).__name__}: changes the steps of its layers: not known to lean_attention")
            self.is_ours = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """On the host's way to each step, also to one that replays a graph and reads nothing of it: the engine's description
        or ours, not both, and no operation on a tensor where the engine hands over as many rows as it has requests and this
        rank has all of their tokens."""
        if self.is_ours and self.takes(common_attn_metadata):
            batch = batch_of(common_attn_metadata)
            if self.shard is not None:  # in the same memory in each step: graphs read it
                held = held_tokens(self.shard, batch)
                batch.held = first_of(self._held, len(held)).copy_(held)
            return batch
        return super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]

    def takes(self, common_attn_metadata: Any) -> bool:
        """Whether a step of this library's layers is computed here; refused by name where nobody could."""
        refuse_unknown_rules(common_attn_metadata)
        return True


def unknown_rule_of(common: Any) -> str:
    """What a step asks for that is not computed here, in words; empty if all is."""
    for name, words in _UNKNOWN_RULES.items():
        if getattr(common, name, None) is not None:
            return f"{name}: {words}"
    return "" if isinstance(common.causal, bool) else "causal: one for each request"


def refuse_unknown_rules(common: Any) -> None:
    unknown = unknown_rule_of(common)
    if unknown:
        raise NotImplementedError(f"{unknown}: not computed by lean_attention")


def batch_of(common: Any) -> Batch:
    """vLLM's description of a step as a Batch, over the engine's own tensors."""
    requests = common.num_reqs
    return Batch(
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        query_start_loc=first_of(common.query_start_loc, requests + 1),
        max_seq_len=common.max_seq_len,
        seq_lens=first_of(common.seq_lens, requests),
        block_table=first_of(common.block_table_tensor, requests),
        slot_mapping=common.slot_mapping,
        causal=common.causal,
    )


class LeanImpl:
    """Stands before the engine's implementation. `lean` is None for a layer that stays the engine's."""

    can_return_lse_for_decode = False
    supports_dcp = False
    supports_pcp = False
    supports_quant_query_input = False
    lean: Optional[PagedLayer] = None
    #: The engine's backend of the platform, which shapes the cache, and what reads a packed one.
    engine_backend: Any = None
    reads_packed: Callable[[torch.Tensor], Pages]
    #: Whether the attention call writes new keys and values, in an order of its own, and not the engine ahead of it.
    writes = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: Optional[int] = None,
        alibi_slopes: Optional[list[float]] = None,
        sliding_window: Optional[int] = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: Optional[float] = None,
        attn_type: str = DECODER,
        kv_sharing_target_layer_name: Optional[str] = None,
        sinks: Optional[torch.Tensor] = None,
        **others: Any,
    ) -> None:
        if others:
            raise NotImplementedError(f"{', '.join(others)}: not known to lean_attention's attention layer")
        is_decoder = str(getattr(attn_type, "value", attn_type)) == DECODER
        stays = not is_decoder or (is_derived(type(self)) and not self.writes)
        super().__init__(  # type: ignore[call-arg]
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
            kv_cache_dtype if stays else self.cache_of_engine(kv_cache_dtype), logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, sinks=sinks,
        )  # fmt: skip
        self.kv_cache_dtype = kv_cache_dtype
        if stays:
            self.hand_over(attn_type, kv_cache_dtype)
            return
        if is_derived(type(self)):
            raise NotImplementedError(f"{type(self).__name__}: changes what its layer gets: not known to lean_attention")
        config = get_current_vllm_config()
        self.refuse_configuration(config, kv_cache_dtype)
        ranks = None
        if config.parallel_config.decode_context_parallel_size > 1:
            of_layer = dict(alibi_slopes=alibi_slopes, sliding_window=sliding_window, sinks=sinks,
                            kv_sharing_target_layer_name=kv_sharing_target_layer_name)  # fmt: skip
            ranks = self.ranks_of(config.parallel_config.decode_context_parallel_size, of_layer)
        self._pages_of = reader_of(self.engine_backend, self.reads_packed)
        self.lean = PagedLayer(
            scale=scale, window=sliding_window, softcap=logits_soft_cap, alibi_slopes=alibi_slopes, sinks=sinks,
            fp8=FP8_TYPES.get(kv_cache_dtype), writes=self.writes and kv_sharing_target_layer_name is None,
            batch_invariant=envs.VLLM_BATCH_INVARIANT, ranks=ranks,
        )  # fmt: skip
        self.supports_quant_query_input = False  # queries come as the model made them, whatever the engine's class takes
        self._bound: tuple[Any, Any] = (None, None)
        self._device = config.device_config.device

    def cache_of_engine(self, kv_cache_dtype: str) -> str:
        """The type of cache that the engine's class is told of, underneath a layer of this library's."""
        return kv_cache_dtype

    def hand_over(self, attn_type: str, kv_cache_dtype: str) -> None:
        """Called for a layer that stays the engine's; raises NotImplementedError where it cannot."""

    def refuse_configuration(self, config: Any, kv_cache_dtype: str) -> None:
        """Raises NotImplementedError for an engine that asks for what is not computed here."""
        if kv_cache_dtype not in _FLOAT_CACHES and kv_cache_dtype not in FP8_TYPES:
            taken = ", ".join((*_FLOAT_CACHES, *FP8_TYPES))
            raise NotImplementedError(f"kv_cache_dtype = {kv_cache_dtype!r}: lean_attention takes {taken}")

    def ranks_of(self, count: int, of_layer: dict[str, Any]) -> Ranks:
        """The ranks that share this layer's tokens (decode context parallelism); `of_layer`: what it has of rules, by name.

        Raises NotImplementedError for rules that are not computed there, and where ranks are not served."""
        raise NotImplementedError(f"decode_context_parallel_size = {count}: lean_attention serves caches that one rank holds")

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)  # type: ignore[misc]
        if self.lean is not None:
            self.lean.to(self._device)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: Optional[torch.Tensor] = None,
        output_block_scale: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        if not isinstance(attn_metadata, Batch):  # the engine's own layer or step, or no step at all
            return self.forward_of_engine(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: results are not quantised by lean_attention")
        assert self.lean is not None
        self.lean.attend(query, key, value, self.pages_of(kv_cache), attn_metadata, output, self.factors_of(layer))
        return output

    def pages_of(self, kv_cache: torch.Tensor) -> Pages:
        """Its keys and values, worked out once for each cache."""
        if self._bound[0] is not kv_cache:
            self._bound = (kv_cache, self._pages_of(kv_cache))
        return self._bound[1]

    def factors_of(self, layer: Any) -> tuple[Any, Any]:
        """What stored keys and values count times."""
        assert self.lean is not None
        return (1.0, 1.0) if self.lean.fp8 is None else self.scales_of(layer)

    def forward_of_engine(self, layer: Any, query: torch.Tensor, *others: Any) -> torch.Tensor:
        """What the engine's own class makes of the same."""
        return super().forward(layer, query, *others)  # type: ignore[misc]

    def scales_of(self, layer: Any) -> tuple[Any, Any]:
        """Of a float8 cache's keys and values."""
        return layer._k_scale, layer._v_scale
