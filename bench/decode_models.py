"""Decode steps of models with random weights: what bench/end_to_end.py and bench/generation.py measure.

A Case is a model shape, an attention implementation, a kind of cache, and how steps are launched. A Decoder holds the model's
cache, filled with random keys and values, so that no prefill runs, and does the steps of greedy decoding.
"""
import contextlib
import dataclasses
import statistics
import time

import torch
import transformers
from transformers import DynamicCache, StaticCache

from lean_attention.hf import LeanStaticCache

RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
CACHE = "cache" if RELEASE >= (5, 24) else "past_key_values"  # what Transformers calls it
WARM_UP = {"launched": 3, "captured": 3, "compiled": 6}  # steps; a compiled graph is recorded at its second or third


@dataclasses.dataclass(frozen=True)
class Case:
    """attention: a Transformers implementation, or "flash" for sdpa with nothing but PyTorch's flash attention.
    cache: dynamic, static or lean. launch: launched (by the interpreter), captured (the forward pass in a CUDA graph as it
    is), compiled (torch.compile, mode="reduce-overhead"). lengths: tokens of each sequence."""

    model: str
    attention: str
    cache: str
    launch: str
    lengths: tuple

    @property
    def implementation(self) -> str:
        """What Transformers calls the attention."""
        return "sdpa" if self.attention == "flash" else self.attention

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def context(self) -> int:
        return max(self.lengths)

    @property
    def impl(self) -> str:
        return f"{self.attention}/{self.cache}" + ("" if self.launch == "launched" else f"+{self.launch}")


def _opt(**common):
    return transformers.OPTConfig(
        hidden_size=4096, ffn_dim=16384, num_attention_heads=32, vocab_size=50272, word_embed_proj_dim=4096, **common
    )


def _phi3(**common):
    return transformers.Phi3Config(
        hidden_size=5120, intermediate_size=17920, num_attention_heads=40, num_key_value_heads=10, vocab_size=32064, **common
    )


def _llama(**common):
    return transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, **common
    )


def _tiny(**common):
    return transformers.LlamaConfig(
        hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, vocab_size=512, **common
    )


MODELS = {"llama-8b": _llama, "phi-3-medium": _phi3, "opt-6.7b": _opt, "tiny": _tiny}


def model_of(name: str, layers: int, positions: int, dtype: torch.dtype, device: str):
    config = MODELS[name](num_hidden_layers=layers, max_position_embeddings=positions, pad_token_id=0, eos_token_id=None)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def read_bytes(model, lengths: tuple) -> int:
    """Weights that a step multiplies with, and the keys and values that exist."""
    config = model.config
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    token = 2 * kv_heads * config.hidden_size // config.num_attention_heads * model.dtype.itemsize * config.num_hidden_layers
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    looked_up = model.get_input_embeddings().weight
    if looked_up.data_ptr() != model.get_output_embeddings().weight.data_ptr():
        weights.pop(looked_up.data_ptr())
    return sum(weights.values()) + token * sum(lengths)


def empty_cache(model, case: Case, steps: int):
    if case.cache == "dynamic":
        return DynamicCache(config=model.config)
    kind = LeanStaticCache if case.cache == "lean" else StaticCache
    return kind(config=model.config, max_cache_len=case.context + steps)


def _filled_cache(model, case: Case, steps: int):
    """Random keys and values; a sequence's tokens end at case.context, what is before them is padding."""
    config = model.config
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    shape = (case.batch, kv_heads, case.context, config.hidden_size // config.num_attention_heads)
    cache = empty_cache(model, case, steps)
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(shape, device=model.device, dtype=model.dtype) for _ in range(2))
        cache.update(k, v, layer)
    return cache


class Decoder:
    """Greedy steps of one model on one cache: that of a prompt that was read, with the token that came of it, or one of random numbers."""

    def __init__(self, model, case: Case, steps: int, cache=None, token=None) -> None:
        self._model, self._case = model, case
        self._cache = _filled_cache(model, case, steps) if cache is None else cache
        lengths = torch.tensor(case.lengths, device=model.device)
        places = torch.arange(case.context + steps, device=model.device)
        self._mask = (places >= (case.context - lengths)[:, None]).long()
        self._seen = case.context
        self._position = lengths[:, None].clone()
        self._token = torch.full((case.batch, 1), 7, device=model.device) if token is None else token.clone()
        self._forward = torch.compile(model.forward, mode="reduce-overhead") if case.launch == "compiled" else model.forward

    def step(self) -> None:
        """One new token of each sequence, in place, so that the step can be captured."""
        self._seen += 1
        # a graph wants one shape; else the mask has the tokens there are, as generate() passes it
        mask = self._mask if self._case.launch != "launched" else self._mask[:, : self._seen]
        if self._case.launch == "compiled":
            torch.compiler.cudagraph_mark_step_begin()
        result = self._forward(
            input_ids=self._token, attention_mask=mask, position_ids=self._position, use_cache=True, **{CACHE: self._cache}
        )
        self._token.copy_(result.logits[:, -1:].argmax(-1))
        self._position.add_(1)

    def captured(self):
        """The next step as a CUDA graph; call it to run."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


def synchronizer(model):
    """Called without arguments: waits for what the model's device does."""
    return torch.cuda.synchronize if model.device.type == "cuda" else lambda: None


def flash_only(case: Case):
    if case.attention != "flash":
        return contextlib.nullcontext()
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)


def _times_ms(step, synchronize, steps: int) -> list:
    """(until the step was launched, until it was done) of each."""
    times = []
    for _ in range(steps):
        synchronize()
        begin = time.perf_counter()
        step()
        launched = time.perf_counter()
        synchronize()
        times.append(((launched - begin) * 1e3, (time.perf_counter() - begin) * 1e3))
    return times


def measure(model, case: Case, steps: int) -> dict:
    """Median, least and most of `steps` steps, each waited for, after some to warm up."""
    synchronize = synchronizer(model)
    model.set_attn_implementation(case.implementation)
    if case.launch == "compiled":
        torch._dynamo.reset()
    warm_up = WARM_UP[case.launch]
    with torch.no_grad(), flash_only(case):
        decoder = Decoder(model, case, warm_up + steps + 1)
        _times_ms(decoder.step, synchronize, warm_up)
        step = decoder.captured() if case.launch == "captured" else decoder.step
        launched, done = zip(*_times_ms(step, synchronize, steps))
    middle = statistics.median(done)
    return {
        "ms": middle, "ms_min": min(done), "ms_max": max(done), "launch_ms": statistics.median(launched),
        "tokens_per_s": 1e3 * case.batch / middle,
    }  # fmt: skip
