"""Tiny random models on disk, as vLLM loads them, and engines over them: vLLM's own attention or this library's.

Weights are ten times as large as models begin with, so that attention decides which token comes next.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pathlib
from typing import Any, Iterator

VOCABULARY = 512
WINDOW = 40  # tokens; shorter than most prompts of the tests, and no multiple of a page
CONTEXT = 1024
_SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.2, tie_word_embeddings=False,
)  # fmt: skip


def _configuration(kind: str) -> Any:
    import transformers as hf

    if kind == "llama":
        return hf.LlamaConfig(**_SIZES)
    if kind == "qwen3":
        return hf.Qwen3Config(**_SIZES, head_dim=64)
    if kind == "mistral":
        return hf.MistralConfig(**_SIZES, sliding_window=WINDOW, head_dim=32)
    if kind == "gemma2":  # softcap, a window in every other layer
        return hf.Gemma2Config(
            **{**_SIZES, "tie_word_embeddings": True}, head_dim=32, sliding_window=WINDOW, attn_logit_softcapping=20.0,
            query_pre_attn_scalar=32, final_logit_softcapping=30.0,
        )  # fmt: skip
    if kind == "gpt_oss":  # sinks, a window in every other layer
        return hf.GptOssConfig(**_SIZES, head_dim=32, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2)
    if kind == "opt":
        return hf.OPTConfig(
            vocab_size=VOCABULARY, hidden_size=128, ffn_dim=192, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=CONTEXT, init_std=0.2, word_embed_proj_dim=128,
        )  # fmt: skip
    if kind == "bloom":  # ALiBi
        return hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=128, n_layer=2, n_head=4, initializer_range=0.2)
    if kind == "bert":
        return hf.BertConfig(**{**_SIZES, "tie_word_embeddings": True})
    raise ValueError(kind)


def folder_of(kind: str, below: pathlib.Path) -> str:
    """Saves the model once; its tokenizer's words are t0, t1..."""
    import tokenizers
    import torch
    import transformers

    folder = below / kind
    if not folder.exists():
        torch.manual_seed(len(kind))
        family = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
        family.from_config(_configuration(kind)).save_pretrained(folder)
        words = tokenizers.models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0")
        tokenizer = tokenizers.Tokenizer(words)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
    return str(folder)


@functools.lru_cache
def prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    import numpy

    random = numpy.random.default_rng(seed)
    return [random.integers(3, VOCABULARY, n).tolist() for n in lengths]


@functools.lru_cache
def register_kernels_once() -> None:
    """vLLM does this with each engine, in processes that have one: it looks through all modules there are, and stumbles over
    some that are imported between two engines. Older versions, 0.28 among them, do not."""
    from vllm.platforms import current_platform

    if not hasattr(type(current_platform), "register_triton_kernel_overrides"):
        return
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def choose(ours: bool) -> None:
    """Which attention the engines that are built from now on in this process have."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import lean_attention.vllm

    AttentionBackendEnum.CPU_ATTN.clear_override()
    selector._cached_get_attn_backend.cache_clear()
    os.environ["LEAN_ATTENTION_VLLM"] = "1" if ours else "0"
    lean_attention.vllm.register()


@contextlib.contextmanager
def engine(folder: str, ours: bool, **settings: Any) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    register_kernels_once()
    choose(ours)
    given: dict[str, Any] = dict(
        skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=CONTEXT, max_num_batched_tokens=64,
        max_num_seqs=64, disable_log_stats=True,
    )  # fmt: skip
    llm = LLM(model=folder, **{**given, **settings})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def generate(llm: Any, given: list[list[int]], tokens: int = 12, **sampling: Any) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of each prompt, and what each token's log-probability was."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, detokenize=False, ignore_eos=True, **sampling)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in given], parameters, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), _chosen(o.outputs[0].token_ids, o.outputs[0].logprobs)) for o in outputs]


def log_probabilities(llm: Any, given: list[list[int]]) -> list[list[float]]:
    """Of each prompt's tokens after the first, all seen in one go or in chunks."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in given], parameters, use_tqdm=False)
    return [_chosen(o.prompt_token_ids[1:], o.prompt_logprobs[1:]) for o in outputs]


def _chosen(tokens: Any, probabilities: Any) -> list[float]:
    return [at[token].logprob for token, at in zip(tokens, probabilities)]
