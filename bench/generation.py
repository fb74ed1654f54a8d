#!/usr/bin/env python3
"""Whole generations through Transformers, a prompt read and then its answer token by token: the paper's end-to-end measurement, which has
eight tokens of prompt for each of the answer.

Models have the shape of Phi-3-medium, Llama-3-8B and OPT-6.7B with all their layers (--layers for fewer) and random weights; decoding is
greedy. The prompt goes in as one forward pass. Of the steps the first three are launched one by one, then, where a path says
+captured, one is captured in a CUDA graph that does the rest: `step_ms` is the mean of these, `decode_s` that of all tokens but the first,
`total_s` has the prompt too. Capturing, once for a server's life, is `capture_s` and in no sum. Paths are those of bench/end_to_end.py.

Usage: generation.py [--model phi-3-medium] [--lengths 2k:256,8k:1k,16k:2k] [--paths lean_attention/lean+captured,...] [--layers N]
                     [--device cuda|cpu] [--dtype bfloat16] [--json FILE]
Needs torch and transformers 4.56 or newer.
"""
import argparse
import gc
import json
import re
import time

import torch
import transformers
from checkout import git_commit
from decode_models import CACHE, MODELS, WARM_UP, Case, Decoder, empty_cache, flash_only, model_of
from end_to_end import case_of
from option_lists import list_of

import lean_attention.hf

LAYERS = {"phi-3-medium": 40, "llama-8b": 32, "opt-6.7b": 32, "tiny": 2}
PATHS = "lean_attention/lean+captured,sdpa/static+captured,lean_attention/lean,flash/dynamic"


def tokens_of(text: str) -> int:
    match = re.fullmatch(r"(\d+)(k?)", text)
    if match is None or not int(match[1]):
        raise SystemExit(f"generation: --lengths {text}: expected tokens, as 512 or 8k")
    return int(match[1]) * (1024 if match[2] else 1)


def lengths_of(text: str) -> tuple:
    prompt, _, answer = text.partition(":")
    lengths = tokens_of(prompt), tokens_of(answer or prompt)
    if lengths[1] <= WARM_UP["captured"] + 1:
        raise SystemExit(f"generation: --lengths {text}: answers have more than {WARM_UP['captured'] + 1} tokens")
    return lengths


class Clock:
    def __init__(self, device: str) -> None:
        self._synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    def seconds(self, function) -> tuple:
        self._synchronize()
        begin = time.perf_counter()
        result = function()
        self._synchronize()
        return time.perf_counter() - begin, result


def read_prompt(model, cache, prompt):
    """The token that follows the prompt, whose keys and values are in the cache then."""
    result = model(input_ids=prompt, use_cache=True, logits_to_keep=1, **{CACHE: cache})
    return result.logits[:, -1:].argmax(-1)


def generate(model, case: Case, answer: int, clock: Clock) -> dict:
    prompt = torch.randint(1, model.config.vocab_size, (case.batch, case.context), device=model.device)
    model.set_attn_implementation(case.implementation)
    read_prompt(model, empty_cache(model, case, answer), prompt)  # not timed: finds its kernels
    cache = empty_cache(model, case, answer)
    prompt_s, token = clock.seconds(lambda: read_prompt(model, cache, prompt))
    decoder = Decoder(model, case, answer, cache, token)
    for _ in range(WARM_UP["captured"]):
        decoder.step()
    capture_s, step = clock.seconds(decoder.captured) if case.launch == "captured" else (0.0, decoder.step)
    steps = answer - 1 - WARM_UP["captured"]
    loop_s, _ = clock.seconds(lambda: [step() for _ in range(steps)])
    decode_s = loop_s / steps * (answer - 1)
    return {"prompt_s": prompt_s, "step_ms": loop_s / steps * 1e3, "decode_s": decode_s, "total_s": prompt_s + decode_s, "capture_s": capture_s}


def measured(model, case: Case, answer: int, clock: Clock) -> dict:
    """The row's times, or why there are none."""
    try:
        with torch.no_grad(), flash_only(case):
            return generate(model, case, answer, clock) | {"note": None}
    except Exception as error:  # whatever a stock path may raise
        text = (str(error).strip().splitlines() or [""])[0]
        return {"note": f"{type(error).__name__}: {text[:200]}"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", default="phi-3-medium", choices=MODELS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--lengths", type=list_of(), default=["2k:256", "8k:1k", "16k:2k"], help="PROMPT:ANSWER, in tokens")
    parser.add_argument("--paths", type=list_of(), default=PATHS.split(","))
    parser.add_argument("--json", help="append a line a row")
    arguments = parser.parse_args()
    arguments.layers = arguments.layers or LAYERS[arguments.model]
    return arguments


def main() -> None:
    arguments = parse()
    lean_attention.hf.register()
    rows = [(lengths_of(lengths), path) for lengths in arguments.lengths for path in arguments.paths]
    longest = max(prompt + answer for (prompt, answer), _ in rows)
    model = model_of(arguments.model, arguments.layers, longest + 64, getattr(torch, arguments.dtype), arguments.device)
    on_gpu, clock = arguments.device == "cuda", Clock(arguments.device)
    facts = {
        "device": torch.cuda.get_device_name() if on_gpu else lean_attention._core.machine()["cpu_isa"], "dtype": arguments.dtype,
        "layers": arguments.layers, "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
        "commit": git_commit(),
    }  # fmt: skip
    for (prompt, answer), path in rows:
        case = case_of(arguments.model, f"1x{prompt}", path)
        row = {"model": case.model, "prompt": prompt, "answer": answer, "impl": case.impl} | measured(model, case, answer, clock)
        head = f"{prompt:7} + {answer:6} {case.impl:30}"
        print(f"{head} {row['note']}" if row["note"] else f"{head} prompt {row['prompt_s']:7.2f} s, a step {row['step_ms']:7.2f} ms, "
              f"all {row['total_s']:7.2f} s", flush=True)
        if arguments.json:
            with open(arguments.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(row | facts | {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}) + "\n")
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
