"""The attention backend that lean_attention.sglang adds to SGLang: decode, prefill and both in one batch over its token pools.

A pool holds keys ``[slots, Hkv, d]``; a request's row of the pool of requests has the slot of each of its tokens. So slots, or
pages of them, are the library's pages, and rows its block table: keys and values are read where they lie. A step's table and
lengths are made once, for all layers; inside a CUDA graph by operations that the graph repeats, with lengths that stay on the
device and no plan.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from lean_attention._decode import decode
from lean_attention._options import engine_options
from lean_attention.sglang import NAME


class Step(NamedTuple):
    """What all layers of a step have in common."""

    table: torch.Tensor  # [B, pages of the longest] int32
    window_table: Optional[torch.Tensor]  # the same of a pool that layers with a window have to themselves
    lengths: torch.Tensor  # [B] int32, with the new tokens
    first_queries: Optional[torch.Tensor] = None  # [B + 1] int32, where there may be several new tokens
    most_queries: Optional[int] = None


class LeanAttentionBackend(AttentionBackend):
    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        arguments = model_runner.server_args
        for pool in (getattr(model_runner.token_to_kv_pool, name, None) for name in ("full_kv_pool", "swa_kv_pool")):
            _refuse_pool(model_runner.token_to_kv_pool if pool is None else pool)
        if arguments.speculative_algorithm is not None:
            raise NotImplementedError(f"lean: speculative_algorithm = {arguments.speculative_algorithm}: not here: take triton")
        if getattr(arguments, "dcp_size", 1) > 1:
            raise NotImplementedError(f"lean: dcp_size = {arguments.dcp_size}: not here: take triton")
        if getattr(arguments, "enable_prefill_cp", False):
            raise NotImplementedError("lean: enable_prefill_cp: prompts whose tokens ranks share are not here: take fa3")
        if model_runner.model_config.is_encoder_decoder:
            raise NotImplementedError("lean: an encoder's keys are not here: take --attention-backend triton")
        _refuse_images(model_runner)
        self._rows = model_runner.req_to_token_pool.req_to_token
        self._pool = model_runner.token_to_kv_pool
        self._page = self._pool.page_size
        has_windows = isinstance(self._pool, SWAKVPool) and self._pool.swa_layer_nums > 0
        mapping = self._pool.layers_mapping if has_windows else {}
        self._window_layers = {layer for layer, (_, windowed) in mapping.items() if windowed}
        self._chunk = getattr(model_runner, "attention_chunk_size", None)
        self._options = engine_options(arguments.enable_deterministic_inference)
        self._step: Optional[Step] = None
        self._graph_step: Optional[Step] = None
        self._window_slots: Optional[torch.Tensor] = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Of a step that is launched: its table is as wide as its longest request."""
        self._check_mode(forward_batch)
        lengths = forward_batch.seq_lens
        on_host = lengths if lengths.device.type == "cpu" else forward_batch.seq_lens_cpu
        longest = self._rows.shape[1] if on_host is None or on_host.numel() == 0 else int(on_host.max())
        slots = self._rows[forward_batch.req_pool_indices, : longest : self._page]
        first, most = None, None
        if not forward_batch.forward_mode.is_decode_or_idle():
            first = torch.nn.functional.pad(forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            counts = forward_batch.extend_seq_lens_cpu
            most = None if counts is None else max(map(int, counts), default=0)
        self._step = Step(self._pages(slots), self._pages_of_windows(slots), lengths.to(torch.int32), first, most)
        self._note_window_slots(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """The table that graphs fill is as wide as the longest request there may be: lengths say how far it is read."""
        pages = -(-self._rows.shape[1] // self._page)
        like = dict(dtype=torch.int32, device=self._rows.device)
        table, lengths = torch.zeros(max_bs, pages, **like), torch.ones(max_bs, **like)
        self._graph_step = Step(table, torch.zeros_like(table) if self._window_layers else None, lengths)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Of a step inside a graph: which buffers it has. Filled they are inside."""
        self._check_mode(forward_batch)
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError("lean: prefill in a CUDA graph is not here: --disable-piecewise-cuda-graph, or decode alone")
        if self._graph_step is None:
            raise RuntimeError("lean: init_cuda_graph_state() comes first")
        batch = forward_batch.batch_size
        self._step = Step(*(None if buffer is None else buffer[:batch] for buffer in self._graph_step[:3]))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        step, batch = self._step, forward_batch.batch_size
        assert step is not None
        slots = self._rows[forward_batch.req_pool_indices[:batch], :: self._page]
        step.table.copy_(self._pages(slots))
        if step.window_table is not None:
            step.window_table.copy_(self._pages_of_windows(slots))
        step.lengths.copy_(forward_batch.seq_lens[:batch])
        self._note_window_slots(forward_batch)

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **others: Any
    ) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, others)

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **others: Any
    ) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, others)

    def _forward(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool, others: dict[str, Any]
    ) -> torch.Tensor:
        """q ``[tokens, Hq d]``; returns ``[tokens, Hq dv]``."""
        sinks = others.pop("sinks", None)
        _refuse(layer, others)
        self._refuse_window(layer)
        if save_kv_cache and k is not None:
            slots = KVWriteLoc(forward_batch.out_cache_loc, self._window_slots)
            scaled = self._pool.dtype != k.dtype and layer.k_scale is not None  # then the pool divides both in place
            self._pool.set_kv_buffer(layer, slots, *((k.clone(), v.clone(), layer.k_scale, layer.v_scale) if scaled else (k, v)))
        step = self._step
        assert step is not None
        keys, values = (self._in_pages(x) for x in self._pool.get_kv_buffer(layer.layer_id))
        of_fp8 = dict(k_scale=layer.k_scale_float, v_scale=layer.v_scale_float) if keys.dtype.itemsize == 1 else {}
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        decode(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim), keys, values, out=out, layout="bshd",
            block_table=step.window_table if layer.layer_id in self._window_layers else step.table, seqlens=step.lengths,
            cu_seqlens_q=step.first_queries, max_seqlen_q=step.most_queries, causal=step.first_queries is not None,
            window=(layer.sliding_window_size, -1), scale=layer.scaling, softcap=layer.logit_cap,
            sinks=None if sinks is None else sinks.float(), options=self._options, **of_fp8,
        )  # fmt: skip
        return out.flatten(1)

    def _refuse_window(self, layer: Any) -> None:
        """A layer that sees less than all its keys, where the backend is not told which by sliding_window_size."""
        if getattr(layer, "use_irope", False) and self._chunk is not None:
            raise NotImplementedError(
                f"lean: layer {layer.layer_id}: use_irope: attention in chunks of {self._chunk} tokens is not here: take fa3"
            )
        if layer.layer_id in self._window_layers and layer.sliding_window_size < 0:
            raise NotImplementedError(
                f"lean: layer {layer.layer_id}: sliding_window_size = {layer.sliding_window_size}: its pool keeps a window's "
                "tokens alone: 0 and more are computed"
            )

    def _check_mode(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.name in ("EXTEND", "MIXED")):
            raise NotImplementedError(f"lean: forward_mode = {mode.name}: not here: take --attention-backend triton")

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of the first token of each page, as numbers of pages."""
        return slots if self._page == 1 else slots // self._page

    def _pages_of_windows(self, slots: torch.Tensor) -> Optional[torch.Tensor]:
        """Tokens that left the window have no slot any more, and are not looked at: _refuse_window() sees to that."""
        if not self._window_layers:
            return None
        return self._pages(self._pool.translate_loc_from_full_to_swa(slots)).clamp(min=0).to(torch.int32)

    def _note_window_slots(self, forward_batch: Any) -> None:
        new = forward_batch.out_cache_loc
        self._window_slots = self._pool.translate_loc_from_full_to_swa(new) if self._window_layers and new is not None else None

    def _in_pages(self, buffer: torch.Tensor) -> torch.Tensor:
        """``[slots, H, d]`` as ``[pages, page, H, d]``: a view."""
        return buffer[: buffer.shape[0] // self._page * self._page].unflatten(0, (-1, self._page))


def _refuse_pool(pool: Any) -> None:
    if isinstance(pool, MLATokenToKVPool):
        raise NotImplementedError("lean: latent attention (MLA) is not here: take --attention-backend triton")
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        raise NotImplementedError(
            f"lean: kv_cache_layout = {layout!r}: allowed 'nhd', what SGLang has without its settings for others"
        )
    if getattr(pool, "is_quantized_kv_cache", False):
        raise NotImplementedError("lean: kv_cache_dtype: 4-bit caches are not here: allowed auto, fp8_e4m3, fp8_e5m2")
    if getattr(pool, "k_scale_buffer", None):
        raise NotImplementedError("lean: kv_cache_dtype: scales of blocks (mxfp8) are not read: allowed auto, fp8_e4m3, fp8_e5m2")


def _refuse_images(model_runner: Any) -> None:
    """Of models whose image tokens see each other both ways: they hand a mask to SGLang's Triton backend, and leave images causal
    where another has prefill. Gemma-3 does not find Triton's beside another for decode either."""
    if not (model_runner.model_config.is_multimodal and hasattr(model_runner.model, "prepare_attn_masks")):
        return
    model = type(model_runner.model).__name__
    option = "--attention-backend" if model == "Gemma3ForConditionalGeneration" else "--prefill-attention-backend"
    if option == "--attention-backend" or getattr(model_runner, "prefill_attention_backend_str", NAME) == NAME:
        raise NotImplementedError(f"lean: {model}: image tokens that see each other both ways are not here: take {option} triton")


def _refuse(layer: Any, others: dict[str, Any]) -> None:
    """What a layer asks for and is not computed, by its name in SGLang."""
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        kind = "cross attention" if layer.is_cross_attention else layer.attn_type.value
        raise NotImplementedError(f"lean: layer {layer.layer_id}: attn_type = {kind}: not here: take --attention-backend triton")
    if layer.pos_encoding_mode != "NONE":
        raise NotImplementedError(f"lean: layer {layer.layer_id}: pos_encoding_mode = {layer.pos_encoding_mode!r}: allowed 'NONE'")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise NotImplementedError(
            f"lean: layer {layer.layer_id}: logit_capping_method = {layer.logit_capping_method!r}: allowed 'tanh'"
        )
    if layer.xai_temperature_len > 0:
        raise NotImplementedError(f"lean: layer {layer.layer_id}: xai_temperature_len = {layer.xai_temperature_len}: not here")
    for name, value in others.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"lean: layer {layer.layer_id}: {name}: not here: take --attention-backend triton")
