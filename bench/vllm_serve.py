#!/usr/bin/env python3
"""Attention inside vLLM's engine on the CPU, this library's beside CPU_ATTN: a decode step's layers, with the write to the cache.

A random model of a few thin layers with a known model's heads runs in this process (.venv-vllm; tools/setup.sh engines);
what the engine spends inside the attention's implementation is added up, a step at a time. One row for each shape:
medians over the steps, and how often each was measured. Both have the same engine, cache, prompts and threads.

Usage: vllm_serve.py [--dtype bfloat16] [--shapes 1x1k,1x8k,8x1k] [--steps 24] [--json FILE]
"""
import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "python"))

import torch
import transformers
import vllm
from option_lists import list_of
from vllm_engine import steps_of_all, tokens_of_each
from vllm_models import engine, prompts

import lean_attention

HEADS = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128)  # Llama-3-8B's
LAYERS = 4
STEP_TOKENS = 2048  # that one step of the engine takes


def model_in(folder: str, context: int) -> str:
    """Everything but attention is small, so that prompts of many tokens are quickly read."""
    torch.manual_seed(0)
    configuration = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=LAYERS, max_position_embeddings=context,
        initializer_range=0.2, **HEADS,
    )  # fmt: skip
    transformers.LlamaForCausalLM(configuration).save_pretrained(folder)
    return folder


class Stopwatch:
    """Adds up the time inside an implementation's calls; end_step() takes it."""

    def __init__(self, implementation: type) -> None:
        self.spent = 0.0
        self._undo = []
        for name in ("forward", "do_kv_cache_update"):
            self._undo.append((implementation, name, implementation.__dict__.get(name)))
            setattr(implementation, name, self._timed(getattr(implementation, name)))

    def _timed(self, function):
        def timed(*arguments, **keywords):
            begin = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self.spent += time.perf_counter() - begin

        return timed

    def end_step(self) -> float:
        spent, self.spent = self.spent, 0.0
        return spent

    def remove(self) -> None:
        for implementation, name, before in self._undo:
            delattr(implementation, name) if before is None else setattr(implementation, name, before)


def decode_steps(llm, batch: int, context: int, steps: int, implementation: type) -> list[float]:
    """Seconds of attention in each of the last steps in which all requests decode, up to `context` tokens each."""
    new = tokens_of_each((context,) * batch, steps, STEP_TOKENS)
    parameters = vllm.SamplingParams(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True)
    for i, prompt in enumerate(prompts((context - new,) * batch)):
        llm.llm_engine.add_request(f"{context}-{batch}-{i}", {"prompt_token_ids": prompt}, parameters)
    watch = Stopwatch(implementation)
    try:
        return steps_of_all(llm.llm_engine, batch, steps, watch.end_step)
    finally:
        watch.remove()


def shape_of(text: str) -> tuple[int, int]:
    batch, _, context = text.partition("x")
    return int(batch), int(context[:-1]) * 1024 if context.endswith("k") else int(context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shapes", default="1x1k,1x4k,8x1k,1x16k", type=list_of(shape_of))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", metavar="FILE", help="a line for each row is added")
    options = parser.parse_args()
    longest = max(context for _, context in options.shapes)
    found: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        model_in(folder, longest)
        settings = dict(dtype=options.dtype, max_model_len=longest, max_num_batched_tokens=STEP_TOKENS, enable_prefix_caching=False)
        for name, ours in (("cpu_attn", False), ("lean", True)):
            with engine(folder, ours=ours, **settings) as llm:
                layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
                implementation = type(next(iter(layers.values())).impl)
                for batch, context in options.shapes:
                    found[name, batch, context] = decode_steps(llm, batch, context, options.steps, implementation)
    print(f"{options.dtype}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, us a layer: median (fastest)")
    print(f"{'batch x context':>16} {'CPU_ATTN':>18} {'lean':>18} {'CPU_ATTN / lean':>16}")
    for batch, context in options.shapes:
        theirs, mine = ([1e6 * step / LAYERS for step in found[name, batch, context]] for name in ("cpu_attn", "lean"))
        cells = [f"{statistics.median(times):9.0f} ({min(times):6.0f})" for times in (theirs, mine)]
        factor = statistics.median(theirs) / statistics.median(mine)
        print(f"{f'{batch} x {context}':>16} {cells[0]:>18} {cells[1]:>18} {factor:>16.2f}")
        if options.json:
            row = dict(
                batch=batch, context=context, dtype=options.dtype, heads=HEADS, layers=LAYERS, cpu_attn_us=theirs, lean_us=mine,
                vllm=vllm.__version__, lean=lean_attention.__version__, torch=torch.__version__, machine=platform.processor(),
                threads=torch.get_num_threads(), load=os.getloadavg()[0], date=time.strftime("%Y-%m-%d"),
            )  # fmt: skip
            with open(options.json, "a") as file:
                print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
