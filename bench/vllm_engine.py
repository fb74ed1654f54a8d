#!/usr/bin/env python3
"""vLLM's engine with this library's attention and with its own, in turns of whole engines: tokens, and a decode step's time.

Each attention has a process of its own, in which the engine reads the same random model (Llama-3-8B's heads, few thin layers)
and the same prompts, and decodes greedily. Shapes are BATCHxCONTEXT, or BATCH~CONTEXT for uneven prompts of that mean (seeded,
log-normal). On a GPU: CUSTOM, FLASH_ATTN and FLASHINFER, with the engine's CUDA graphs; elsewhere: cpu_attn and lean.
A step's time is the engine's whole, scheduling and sampling included; the fastest and the median of --steps are shown.

Usage: vllm_engine.py [--shapes 1x32k,8x8k,32~4k,64x1k] [--backends CUSTOM,FLASH_ATTN] [--steps 48] [--json FILE]
"""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

GPU_BACKENDS = ("CUSTOM", "FLASH_ATTN", "FLASHINFER")
CPU_BACKENDS = ("lean", "cpu_attn")
GPU_SHAPES, CPU_SHAPES = "1x32k,8x8k,32~4k,64x1k", "1x512,4~256"
HEADS = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128)  # Llama-3-8B's
VOCABULARY, LAYERS = 512, 4
STEP_TOKENS = 8192  # that one step of the engine takes, prompts of several requests among them


def lengths_of(shape: str) -> list[int]:
    """Tokens of each request's prompt."""
    mark = "~" if "~" in shape else "x"
    batch, _, context = shape.partition(mark)
    mean = int(context[:-1]) * 1024 if context.endswith("k") else int(context)
    if mark == "x":
        return [mean] * int(batch)
    draw = random.Random(5)
    drawn = [draw.lognormvariate(0, 1) for _ in range(int(batch))]
    return [max(1, min(8 * mean, round(mean * one * len(drawn) / sum(drawn)))) for one in drawn]


def save_model(folder: str, context: int) -> None:
    """Everything but attention is small, and weights are so large that attention decides which token comes next."""
    import torch
    import transformers

    torch.manual_seed(0)
    configuration = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=256, num_hidden_layers=LAYERS, max_position_embeddings=context,
        initializer_range=0.2, **HEADS,
    )  # fmt: skip
    transformers.LlamaForCausalLM(configuration).save_pretrained(folder)


def new_tokens(shape: str, steps: int) -> int:
    """Of each request: so many that the first one still decodes when the last prompt was read and `steps` have passed."""
    lengths = lengths_of(shape)
    return steps + 4 + sum(lengths) // (STEP_TOKENS - len(lengths)) + 1


def context_of(shape: str, steps: int) -> int:
    return max(lengths_of(shape)) + new_tokens(shape, steps) + 4


def decode_steps(llm, shape: str, steps: int) -> tuple[list[list[int]], list[float]]:
    """Each request's tokens, and the seconds of the last steps in which every request gets one, by decoding."""
    import vllm

    parameters = vllm.SamplingParams(temperature=0, max_tokens=new_tokens(shape, steps), detokenize=False, ignore_eos=True)
    draw, engine = random.Random(7), llm.llm_engine
    lengths = lengths_of(shape)
    for i, length in enumerate(lengths):
        prompt = [draw.randrange(3, VOCABULARY) for _ in range(length)]
        engine.add_request(f"{shape}-{i}", {"prompt_token_ids": prompt}, parameters)
    tokens, seconds = {}, []
    while engine.has_unfinished_requests():
        begin = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == len(lengths):
            seconds.append(time.perf_counter() - begin)
        tokens.update({output.request_id: list(output.outputs[0].token_ids) for output in outputs if output.finished})
    if len(seconds) <= steps + 1:  # the first of them read the last prompt, the last of them ended a request
        raise RuntimeError(f"{shape}: {len(seconds)} steps in which all {len(lengths)} requests decode, {steps + 2} are needed: "
                           "the engine has not room for all of them at once")  # fmt: skip
    return [tokens[f"{shape}-{i}"] for i in range(len(lengths))], seconds[-steps - 1 : -1]


def measure(options: argparse.Namespace) -> None:
    """In a process of one attention: writes what it found as JSON."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # steps are called, and timed, here
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    chosen = {}
    if options.backend in CPU_BACKENDS:
        os.environ["LEAN_ATTENTION_VLLM"] = "1" if options.backend == "lean" else "0"
    else:
        chosen["attention_backend"] = options.backend
    import torch
    import vllm

    shapes = options.shapes.split(",")
    longest = max(context_of(shape, options.steps) for shape in shapes)
    llm = vllm.LLM(
        model=options.model, skip_tokenizer_init=True, dtype=options.dtype, max_model_len=longest, disable_log_stats=True,
        max_num_batched_tokens=STEP_TOKENS, max_num_seqs=max(len(lengths_of(shape)) for shape in shapes),
        enable_prefix_caching=False, enforce_eager=not torch.cuda.is_available(), **chosen,
    )  # fmt: skip
    found = {}
    for shape in shapes:
        decode_steps(llm, shape, 2)  # warm
        found[shape] = decode_steps(llm, shape, options.steps)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    pathlib.Path(options.found).write_text(json.dumps(dict(found=found, vllm=vllm.__version__, torch=torch.__version__, device=device)))


def run_one(backend: str, model: str, folder: str, options: argparse.Namespace) -> dict | str:
    """What the process of one attention found, or the last line that it said."""
    found = pathlib.Path(folder, f"{backend}.json")
    command = [sys.executable, __file__, "--backend", backend, "--model", model, "--found", str(found), "--dtype", options.dtype]
    command += ["--shapes", options.shapes, "--steps", str(options.steps)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        return next((line for line in reversed(done.stdout.splitlines()) if line.strip()), f"ended with {done.returncode}")
    return json.loads(found.read_text())


def agreement(mine: list[list[int]], theirs: list[list[int]]) -> str:
    """Requests whose tokens are all the same; in 16-bit types two right kernels part where two tokens are nearly as likely."""
    same = sum(a == b for a, b in zip(mine, theirs))
    return f"{same}/{len(mine)}"


def show(results: dict[str, dict], options: argparse.Namespace) -> list[dict]:
    first, rows = next(iter(results)), []
    print(f"{'shape':>10} {'attention':>12} {'step ms: fastest':>17} {'median':>8} {'tokens/s':>10} {'tokens as ' + first:>20}")
    for shape in options.shapes.split(","):
        for name, result in results.items():
            tokens, seconds = result["found"][shape]
            median = statistics.median(seconds)
            same = agreement(tokens, results[first]["found"][shape][0])
            print(f"{shape:>10} {name:>12} {1e3 * min(seconds):17.3f} {1e3 * median:8.3f} {len(tokens) / median:10.1f} {same:>20}")
            said = {key: result[key] for key in ("vllm", "torch", "device")}
            rows.append(dict(shape=shape, attention=name, step_s=seconds, same_tokens=same, dtype=options.dtype, **said,
                             load=os.getloadavg()[0], date=time.strftime("%Y-%m-%d")))  # fmt: skip
    return rows


def main() -> None:
    import torch

    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=GPU_SHAPES if gpu else CPU_SHAPES)
    parser.add_argument("--backends", default=",".join(GPU_BACKENDS if gpu else CPU_BACKENDS), help="the first is compared with")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=48, help="decode steps of each shape")
    parser.add_argument("--json", metavar="FILE", help="a line for each row is added")
    for internal in ("--backend", "--model", "--found"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend:
        measure(options)
        return
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, max(context_of(shape, options.steps) for shape in options.shapes.split(",")))
        for backend in options.backends.split(","):
            result = run_one(backend, folder, folder, options)
            if isinstance(result, str):
                print(f"{backend}: {result}", file=sys.stderr)
            else:
                results[backend] = result
    if not results:
        sys.exit("no attention ran")
    rows = show(results, options)
    if options.json:
        with open(options.json, "a") as file:
            print("\n".join(map(json.dumps, rows)), file=file)


if __name__ == "__main__":
    main()
