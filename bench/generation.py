#!/usr/bin/env python3
"""Whole generations through Transformers, a prompt read and then its answer token by token: the paper's end-to-end measurement, which has
eight tokens of prompt for each of the answer.

Models have the shape of Phi-3-medium, Llama-3-8B and OPT-6.7B with all their layers (--layers for fewer) and random weights; decoding is
greedy. The prompt goes in as one forward pass. The first few steps warm up, then, where a path says +captured, one is captured in a CUDA
graph that does the rest: `step_ms` is the mean of these, `decode_s` that of all tokens but the first, `total_s` has the prompt too. Capturing, once for a server's life, is `capture_s` and in no sum. Paths are those of bench/end_to_end.py.

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
from decode_models import CACHE, MODELS, WARM_UP, Case, Decoder, empty_cache, flash_only, model_of, synchronizer
from end_to_end import about, case_of, measured, tokens_of
from option_lists import list_of

import lean_attention.hf

LAYERS = {"phi-3-medium": 40, "llama-8b": 32, "opt-6.7b": 32, "tiny": 2}
FEWEST = 1 + max(WARM_UP.values())  # tokens of an answer that no timed step makes
PATHS = "lean_attention/lean+captured,sdpa/static+captured,lean_attention/lean,flash/dynamic"


def lengths_of(text: str) -> tuple:
    """(tokens of prompt, tokens of answer) of "8k:1k"."""
    match = re.fullmatch(r"(\d+)(k?):(\d+)(k?)", text)
    if match is None:
        raise ValueError("expected PROMPT:ANSWER in tokens, as 8k:1k")
    prompt, answer = tokens_of(match[1], match[2]), tokens_of(match[3], match[4])
    if prompt < 1 or answer <= FEWEST:
        raise ValueError(f"a prompt has a token, an answer more than {FEWEST}")
    return prompt, answer


def timed(model, function) -> tuple:
    """(seconds, what it returns), all that the device does included."""
    synchronize = synchronizer(model)
    synchronize()
    begin = time.perf_counter()
    result = function()
    synchronize()
    return time.perf_counter() - begin, result


def read_prompt(model, cache, prompt):
    """The token that follows the prompt, whose keys and values are in the cache then."""
    result = model(input_ids=prompt, use_cache=True, logits_to_keep=1, **{CACHE: cache})
    return result.logits[:, -1:].argmax(-1)


def generate(model, case: Case, answer: int) -> dict:
    model.set_attn_implementation(case.implementation)
    warm_up = WARM_UP[case.launch]
    prompt = torch.randint(1, model.config.vocab_size, (case.batch, case.context), device=model.device)
    with torch.no_grad(), flash_only(case):
        read_prompt(model, empty_cache(model, case, answer), prompt)  # not timed: finds its kernels
        cache = empty_cache(model, case, answer)
        prompt_s, token = timed(model, lambda: read_prompt(model, cache, prompt))
        decoder = Decoder(model, case, answer, cache, token)
        for _ in range(warm_up):
            decoder.step()
        capture_s, step = timed(model, decoder.captured) if case.launch == "captured" else (0.0, decoder.step)
        steps = answer - 1 - warm_up
        loop_s, _ = timed(model, lambda: [step() for _ in range(steps)])
    decode_s = loop_s / steps * (answer - 1)
    return {"prompt_s": prompt_s, "step_ms": loop_s / steps * 1e3, "decode_s": decode_s, "total_s": prompt_s + decode_s,
            "capture_s": capture_s}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", default="phi-3-medium", choices=MODELS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--lengths", type=list_of(lengths_of), default=[(2048, 256), (8192, 1024), (16384, 2048)], help="PROMPT:ANSWER, in tokens")
    parser.add_argument("--paths", type=list_of(), default=PATHS.split(","))
    parser.add_argument("--json", help="append a line a row")
    arguments = parser.parse_args()
    arguments.layers = arguments.layers or LAYERS[arguments.model]
    return arguments


def main() -> None:
    arguments = parse()
    lean_attention.hf.register()
    cases = [(case_of(arguments.model, f"1x{prompt}", path), answer) for prompt, answer in arguments.lengths for path in arguments.paths]
    longest = max(map(sum, arguments.lengths))
    model = model_of(arguments.model, arguments.layers, longest + 64, getattr(torch, arguments.dtype), arguments.device)
    for case, answer in cases:
        row = {"model": case.model, "prompt": case.context, "answer": answer, "impl": case.impl} | measured(lambda: generate(model, case, answer))
        head = f"{case.context:7} + {answer:6} {case.impl:30}"
        print(f"{head} {row['note']}" if row["note"] else f"{head} prompt {row['prompt_s']:7.2f} s, a step {row['step_ms']:7.2f} ms, "
              f"all {row['total_s']:7.2f} s", flush=True)
        if arguments.json:
            with open(arguments.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(row | about(arguments)) + "\n")
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
