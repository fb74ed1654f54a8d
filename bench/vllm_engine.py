#!/usr/bin/env python3
"""vLLM's engine with this library's attention and with its own, in turns of whole engines: tokens, and a decode step's time.

Each attention has a process of its own, in which the engine reads the same random model (Llama-3-8B's heads, few thin layers)
and the same prompts, and decodes greedily. Shapes are BATCHxCONTEXT, or BATCH~CONTEXT for uneven prompts of that mean (seeded,
log-normal). On a GPU: CUSTOM, FLASH_ATTN and FLASHINFER, with the engine's CUDA graphs; elsewhere: cpu_attn and lean.
A step's time is the engine's whole, scheduling and sampling included; the fastest and the median of --steps are shown, and how
long reading all prompts took. On a GPU the kernels are then timed in a few steps more, by torch.profiler, and those of attention
are added up. A check comes first: two uneven prompts, 32 tokens, and how far log-probabilities of equal tokens after equal tokens
are apart, and those of the prompts' own tokens.

In as many steps again the host is watched where attentions differ: describing a step to its layers (build), launching its graph
(replay), waiting for the GPU (wait). An attention may be named more than once (CUSTOM,FLASH_ATTN,CUSTOM,FLASH_ATTN): a host
that is slower for a while is told from an attention that is.

--kv-cache-dtype auto,fp8 and --cudagraph-mode default,FULL run every attention with each: processes of their own, the first of
which all others are compared with.

--no-compile leaves out torch.compile, the same for every attention: decode steps are full CUDA graphs, of these shapes'
batch sizes alone, and prefill runs eagerly; with --cudagraph-mode FULL steps of any kind of as many tokens are. A start then takes
seconds, not minutes. --no-host leaves out the steps in which the host is watched. --log keeps all that each process says.

Usage: vllm_engine.py [--shapes 1x32k,8x8k,32~4k,64x1k] [--backends CUSTOM,FLASH_ATTN] [--kv-cache-dtype auto,fp8]
                      [--cudagraph-mode default,FULL] [--steps 48] [--no-compile] [--no-host] [--limit SECONDS] [--log FOLDER]
                      [--json FILE] [--commit NAME]

Rows of several invocations may lie in one file, one after another: `run` tells them apart.
"""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, NamedTuple, Sequence

from checkout import git_commit
from option_lists import list_of

GPU_BACKENDS = ("CUSTOM", "FLASH_ATTN", "FLASHINFER")
CPU_BACKENDS = ("lean", "cpu_attn")
GPU_SHAPES, CPU_SHAPES = "1x32k,8x8k,32~4k,64x1k", "1x512,4~256"
HEADS = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128)  # Llama-3-8B's
VOCABULARY, LAYERS = 512, 4
STEP_TOKENS = 8192  # that one step of the engine takes, prompts of several requests among them
CHECKED_LENGTHS, CHECKED_TOKENS = (100, 700), 32
PROFILED_STEPS = 8
#: Kernels of this library, FlashAttention with its preparation, FlashInfer, XQA (FlashInfer's for decode steps on Hopper, whose one
#: kernel is in no namespace) and Triton. The engine's own, which write new keys and values (reshape_and_cache_flash, the same for
#: all) and round queries to E4M3 for those that want them so, are none of them.
ATTENTION = re.compile(r"\b(lean|flash|flashinfer)::|kernel_unified_attention|reduce_segments|\bkernel_mha\b")
SAID_LINES = 40  # of a process that failed
DEFAULT_GRAPHS = "default"  # those that the engine chooses


class Variant(NamedTuple):
    """What a process of its own runs: an attention, the type of its cache, and which steps are CUDA graphs."""

    backend: str
    cache: str = "auto"
    graphs: str = DEFAULT_GRAPHS

    def __str__(self) -> str:
        return " ".join([self.backend, *(word for word in (self.cache, self.graphs) if word not in ("auto", DEFAULT_GRAPHS))])


def variants_of(options: argparse.Namespace) -> list[Variant]:
    """Attentions in turn for each cache, for each mode of graphs."""
    return [Variant(backend, cache, graphs) for graphs in options.cudagraph_mode for cache in options.kv_cache_dtype
            for backend in options.backends]  # fmt: skip


def shape_of(text: str) -> str:
    """As it is, if lengths_of() can read it."""
    lengths_of(text)
    return text


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


def save_model(folder: str, context: int, **others: Any) -> None:
    """Everything but attention is small, and weights are so large that attention decides which token comes next: but for others of
    LlamaConfig's numbers."""
    import torch
    import transformers

    torch.manual_seed(0)
    thin = dict(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=256, num_hidden_layers=LAYERS, max_position_embeddings=context,
        initializer_range=0.2, **HEADS,
    )  # fmt: skip
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**(thin | others))).save_pretrained(folder)


def tokens_of_each(lengths: Sequence[int], steps: int, step_tokens: int) -> int:
    """So many that the first request still decodes when the last prompt was read and `steps` have passed."""
    return steps + 4 + sum(lengths) // (step_tokens - len(lengths)) + 1


def new_tokens(shape: str, steps: int) -> int:
    return tokens_of_each(lengths_of(shape), steps, STEP_TOKENS)


def context_of(shape: str, steps: int) -> int:
    return max(lengths_of(shape)) + new_tokens(shape, steps) + 4


def submit(llm, name: str, lengths: Sequence[int], **parameters) -> None:
    import vllm

    chosen = vllm.SamplingParams(temperature=0, detokenize=False, ignore_eos=True, **parameters)
    draw = random.Random(7)
    for i, length in enumerate(lengths):
        prompt = [draw.randrange(3, VOCABULARY) for _ in range(length)]
        llm.llm_engine.add_request(f"{name}-{i}", {"prompt_token_ids": prompt}, chosen)


def steps_of_all(
    engine, requests: int, steps: int, measured: Callable[[], Any], see: Callable[[list], None] = lambda _: None
) -> list:
    """Runs an engine until it has no request left: what was measured of the last `steps` steps in which every request decodes.

    Prompts are read one after another, so the first requests decode before the last do, and end before them: steps of a
    part of the requests are left out wherever they are.

    Args:
        measured: called after each step, for what is to be known of it.
        see: gets the outputs of each step.
    """
    found = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        value = measured()
        if len(outputs) == requests:
            found.append(value)
        see(outputs)
    if len(found) <= steps + 1:  # the first of them read the last prompt, the last of them ended a request
        raise RuntimeError(f"{len(found)} steps in which all {requests} requests decode, {steps + 2} are needed: the engine has not room "
                           "for all of them at once")  # fmt: skip
    return found[-steps - 1 : -1]


def decode_steps(llm, shape: str, steps: int) -> tuple[list[list[int]], list[float], float]:
    """Each request's tokens, the seconds of the last steps in which every request gets one, by decoding, and of all steps until
    every prompt was read."""
    lengths, tokens = lengths_of(shape), {}
    submit(llm, shape, lengths, max_tokens=new_tokens(shape, steps))
    begun = ended = time.perf_counter()
    read = 0.0

    def measured() -> float:
        nonlocal ended
        begin, ended = ended, time.perf_counter()
        return ended - begin

    def see(outputs: list) -> None:
        nonlocal read
        if not read and len(outputs) == len(lengths):
            read = ended - begun
        tokens.update({output.request_id: list(output.outputs[0].token_ids) for output in outputs if output.finished})

    try:
        seconds = steps_of_all(llm.llm_engine, len(lengths), steps, measured, see)
    except RuntimeError as error:
        raise RuntimeError(f"{shape}: {error}") from error
    return [tokens[f"{shape}-{i}"] for i in range(len(lengths))], seconds, read


def checked(llm) -> tuple[list[list[tuple[int, float]]], list[float]]:
    """Tokens and their log-probabilities, decoded for two uneven prompts; log-probabilities of the tokens of these prompts."""
    submit(llm, "check", CHECKED_LENGTHS, max_tokens=CHECKED_TOKENS, logprobs=0, prompt_logprobs=0)
    found, given = {}, {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            one = output.outputs[0]
            if output.finished:
                found[output.request_id] = [(t, of[t].logprob) for t, of in zip(one.token_ids, one.logprobs)]
                seen = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])  # nothing comes before the first
                given[output.request_id] = [of[token].logprob for token, of in seen]
    names = [f"check-{i}" for i in range(len(CHECKED_LENGTHS))]
    return [found[name] for name in names], [each for name in names for each in given[name]]


def kernel_seconds(llm, shape: str) -> dict[str, tuple[float, float]]:
    """By a kernel's name: seconds and launches of a decode step, of the GPU's own clock."""
    import torch

    lengths, engine = lengths_of(shape), llm.llm_engine
    submit(llm, f"kernels-{shape}", lengths, max_tokens=new_tokens(shape, 2 * PROFILED_STEPS))
    decoding = 0
    while engine.has_unfinished_requests() and decoding < 2:
        decoding += len(engine.step()) == len(lengths)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_unfinished_requests():
        engine.step()
    cuda = torch.autograd.DeviceType.CUDA
    events = [event for event in profile.key_averages() if event.device_type == cuda]
    return {e.key: (1e-6 * e.self_device_time_total / PROFILED_STEPS, e.count / PROFILED_STEPS) for e in events}


class HostParts:
    """Seconds and calls of a step in functions of classes, by a name; a call within another of the same name is not counted twice."""

    def __init__(self) -> None:
        self.step: dict[str, list[float]] = {}
        self._inside: set[str] = set()
        self._undo: list[Callable[[], None]] = []

    def watch(self, name: str, owner: type, function: str) -> None:
        original, own = getattr(owner, function), function in vars(owner)
        step, inside = self.step, self._inside
        step.setdefault(name, [0.0, 0])

        def timed(*arguments, **keywords):
            if name in inside:
                return original(*arguments, **keywords)
            inside.add(name)
            begin = time.perf_counter()
            try:
                return original(*arguments, **keywords)
            finally:
                inside.remove(name)
                step[name][0] += time.perf_counter() - begin
                step[name][1] += 1

        self._undo.append(lambda: setattr(owner, function, original) if own else delattr(owner, function))
        setattr(owner, function, timed)

    def end_step(self) -> dict[str, tuple[float, int]]:
        ended = {name: (seconds, calls) for name, (seconds, calls) in self.step.items()}
        for spent in self.step.values():
            spent[:] = 0.0, 0
        return ended

    def remove(self) -> None:
        for undo in self._undo:
            undo()


def classes_below(cls: type) -> set[type]:
    return {cls}.union(*(classes_below(each) for each in cls.__subclasses__()))


def host_seconds(llm, shape: str, steps: int) -> dict[str, list[tuple[float, int]]]:
    """Of each part of a decode step on the host: seconds and calls, a step at a time."""
    import torch
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    lengths, parts = lengths_of(shape), HostParts()
    submit(llm, f"host-{shape}", lengths, max_tokens=new_tokens(shape, steps))
    try:
        for builder in classes_below(AttentionMetadataBuilder):
            parts.watch("build", builder, "build")
        if torch.cuda.is_available():
            parts.watch("replay", torch.cuda.CUDAGraph, "replay")
            parts.watch("wait", torch.cuda.Event, "synchronize")
        found = steps_of_all(llm.llm_engine, len(lengths), steps, parts.end_step)
    finally:
        parts.remove()
    return {name: [step[name] for step in found] for name in parts.step}


def compilation(options: argparse.Namespace) -> dict:
    """The engine's settings for its graphs. Without torch.compile decode steps of these shapes, or all steps of as many tokens, are
    full CUDA graphs."""
    mode = {} if options.cudagraph_mode == [DEFAULT_GRAPHS] else dict(cudagraph_mode=options.cudagraph_mode[0])
    if options.no_compile:
        batches = sorted({len(lengths_of(shape)) for shape in options.shapes} | {len(CHECKED_LENGTHS)})
        mode = dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=batches) | mode
    return dict(compilation_config=mode) if mode else {}


def measure(options: argparse.Namespace) -> None:
    """In a process of one attention: writes what it found as JSON, again after each shape."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # steps are called, and timed, here
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    chosen: dict = {}
    if options.backend in CPU_BACKENDS:
        os.environ["LEAN_ATTENTION_VLLM"] = "1" if options.backend == "lean" else "0"
    else:
        chosen["attention_backend"] = options.backend
    import torch
    import vllm

    shapes, gpu = options.shapes, torch.cuda.is_available()
    if gpu:
        chosen.update(compilation(options))
    if options.kv_cache_dtype != ["auto"]:
        chosen["kv_cache_dtype"] = options.kv_cache_dtype[0]
    begin = time.perf_counter()
    llm = vllm.LLM(
        model=options.model, skip_tokenizer_init=True, dtype=options.dtype, max_model_len=longest_context(shapes, options.steps),
        disable_log_stats=True, max_num_batched_tokens=STEP_TOKENS, enable_prefix_caching=False, enforce_eager=not gpu,
        max_num_seqs=max(len(CHECKED_LENGTHS), *(len(lengths_of(shape)) for shape in shapes)), **chosen,
    )  # fmt: skip
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    result = dict(vllm=vllm.__version__, torch=torch.__version__, device=device, compiled=gpu and not options.no_compile, found={},
                  kernels={}, host={}, start_s=time.perf_counter() - begin)  # fmt: skip

    def note(what: str) -> None:
        print(f"vllm_engine: {options.backend}: {what}", flush=True)
        pathlib.Path(options.found).write_text(json.dumps(result))

    note(f"started in {result['start_s']:.1f} s")
    result["check"] = checked(llm)
    note("checked")
    for shape in shapes:
        decode_steps(llm, shape, 2)  # warm
        result["found"][shape] = decode_steps(llm, shape, options.steps)
        note(shape)
    for shape in () if options.no_host else shapes:
        result["host"][shape] = host_seconds(llm, shape, options.steps)
        note(f"{shape}, host")
    for shape in shapes if gpu else ():  # after all that is timed: the profiler may stay in the way
        result["kernels"][shape] = kernel_seconds(llm, shape)
        note(f"{shape}, kernels")


def longest_context(shapes: Sequence[str], steps: int) -> int:
    return max(max(CHECKED_LENGTHS) + CHECKED_TOKENS + 4, *(context_of(shape, max(steps, 2 * PROFILED_STEPS)) for shape in shapes))


def run_one(variant: Variant, turn: int, folder: str, options: argparse.Namespace) -> tuple[dict, str]:
    """What the process of one attention found until its end, and the last that it said if it failed."""
    name = "-".join([*str(variant).split(), *([str(turn)] if turn else [])])
    found, said = pathlib.Path(folder, f"{name}.json"), pathlib.Path(options.log or folder, f"{name}.log")
    command = [sys.executable, __file__, "--backend", variant.backend, "--model", folder, "--found", str(found), "--dtype", options.dtype]
    command += ["--kv-cache-dtype", variant.cache, "--cudagraph-mode", variant.graphs]
    command += ["--shapes", ",".join(options.shapes), "--steps", str(options.steps)]
    command += ["--no-compile"] * options.no_compile + ["--no-host"] * options.no_host
    with said.open("w") as file:
        try:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False, timeout=options.limit).returncode
            ended = f"ended with {status}"
        except subprocess.TimeoutExpired:
            status, ended = 1, f"was ended after {options.limit:g} s"
    lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()] if status else []
    result = json.loads(found.read_text()) if found.exists() else {}
    return result, "\n".join([*lines[-SAID_LINES:], f"{variant}: {ended}"]) if status else ""


def agreement(mine: list[list[int]], theirs: list[list[int]]) -> str:
    """Requests whose tokens are all the same; in 16-bit types two right kernels part where two tokens are nearly as likely."""
    same = sum(a == b for a, b in zip(mine, theirs))
    return f"{same}/{len(mine)}"


def distance(mine: list, theirs: list) -> tuple[int, float]:
    """Tokens until the first that differs, and how far log-probabilities are apart up to there."""
    same, apart = 0, 0.0
    for a, b in zip(mine, theirs):
        equal = next((i for i, (x, y) in enumerate(zip(a, b)) if x[0] != y[0]), len(a))
        same += equal
        apart = max([apart, *(abs(x[1] - y[1]) for x, y in zip(a[:equal], b[:equal]))])
    return same, apart


def mean_distance(mine: list[float], theirs: list[float]) -> float:
    """Of log-probabilities of the same tokens."""
    return statistics.fmean(abs(a - b) for a, b in zip(mine, theirs, strict=True))


def rows_of(variant: Variant, result: dict, first: dict, options: argparse.Namespace) -> list[dict]:
    """A row for each shape that the process came to."""
    rows = []
    for shape, (tokens, seconds, read) in result["found"].items():
        same = agreement(tokens, first["found"][shape][0]) if shape in first["found"] else ""
        said = {key: result[key] for key in ("vllm", "torch", "device", "compiled")}
        kernels = sorted(result["kernels"].get(shape, {}).items(), key=lambda item: -item[1][0])
        timed = dict(attention_s=sum(spent for kernel, (spent, _) in kernels if ATTENTION.search(kernel)) if kernels else None,
                     launches=sum(count for _, (_, count) in kernels),
                     kernels=[dict(name=kernel, s=spent, launches=count) for kernel, (spent, count) in kernels[:12]],
                     host_s=result["host"].get(shape))  # fmt: skip
        chosen = dict(attention=variant.backend, cache=variant.cache, graphs=variant.graphs, dtype=options.dtype)
        built = dict(commit=options.commit) if options.commit else {}
        rows.append(dict(shape=shape, **chosen, step_s=seconds, prompts_s=read, same_tokens=same, **said, **timed, run=options.run,
                         load=os.getloadavg()[0], **built, date=time.strftime("%Y-%m-%d")))  # fmt: skip
    return rows


def show(rows: list[dict], options: argparse.Namespace, first: Variant) -> None:
    print(f"{'shape':>10} {'attention':>20} {'step ms: fastest':>17} {'median':>8} {'kernels of attention':>21} {'prompts ms':>10} "
          f"{'tokens/s':>10} {f'tokens as {first}':>20}  host us: build, replay, wait")  # fmt: skip
    for shape in options.shapes:
        for row in (row for row in rows if row["shape"] == shape):
            median, spent = statistics.median(row["step_s"]), row["attention_s"]
            kernels = "" if spent is None else f"{1e3 * spent:.3f}"
            rate = len(lengths_of(shape)) / median
            host = ", ".join(f"{1e6 * statistics.median(spent for spent, _ in each):.0f}" for each in (row["host_s"] or {}).values())
            name = str(Variant(row["attention"], row["cache"], row["graphs"]))
            print(f"{shape:>10} {name:>20} {1e3 * min(row['step_s']):17.3f} {1e3 * median:8.3f} {kernels:>21} "
                  f"{1e3 * row['prompts_s']:10.1f} {rate:10.1f} {row['same_tokens']:>20}  {host}")  # fmt: skip


def main() -> None:
    import torch

    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=GPU_SHAPES if gpu else CPU_SHAPES, type=list_of(shape_of))
    backends = ",".join(GPU_BACKENDS if gpu else CPU_BACKENDS)
    parser.add_argument("--backends", default=backends, type=list_of(), help="the first is compared with")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto", type=list_of(), help="each attention runs with each: auto, fp8, fp8_e5m2")
    parser.add_argument("--cudagraph-mode", default=DEFAULT_GRAPHS, type=list_of(), help="and with each: default, FULL, ...")
    parser.add_argument("--steps", type=int, default=48, help="decode steps of each shape")
    parser.add_argument("--json", metavar="FILE", help="a line for each row is added")
    parser.add_argument("--commit", default=git_commit(), help="to record in the rows")
    parser.add_argument("--no-compile", action="store_true", help="full CUDA graphs of decode steps, without torch.compile")
    parser.add_argument("--no-host", action="store_true", help="without steps in which the host is watched")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of one attention's process")
    parser.add_argument("--log", metavar="FOLDER", help="where what each process says is kept")
    for internal in ("--backend", "--model", "--found"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend:
        measure(options)
        return
    options.run = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {os.getpid()}"  # rows of one card, which may be compared
    if options.log:
        pathlib.Path(options.log).mkdir(parents=True, exist_ok=True)
    first: tuple[Variant, dict] = (Variant(""), {})
    rows = []
    variants = variants_of(options)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, longest_context(options.shapes, options.steps))
        for i, variant in enumerate(variants):
            result, failed = run_one(variant, variants[:i].count(variant), folder, options)
            if failed:
                print(failed, file=sys.stderr, flush=True)
            if not result:
                continue
            first = first if first[1] else (variant, result)
            if "check" in result and "check" in first[1]:
                (mine, mine_of_prompts), (theirs, theirs_of_prompts) = result["check"], first[1]["check"]
                same, apart = distance(mine, theirs)
                print(f"{variant}: started in {result['start_s']:.0f} s; {same}/{len(CHECKED_LENGTHS) * CHECKED_TOKENS} tokens are those "
                      f"of {first[0]}, log-probabilities up to there within {apart:.2g}, those of the prompts' tokens "
                      f"{mean_distance(mine_of_prompts, theirs_of_prompts):.2g} apart in the mean", flush=True)  # fmt: skip
            new = rows_of(variant, result, first[1], options)
            rows += new
            if options.json and new:
                with open(options.json, "a") as file:
                    print("\n".join(map(json.dumps, new)), file=file)
    if not rows:
        sys.exit("no attention ran")
    show(rows, options, first[0])


if __name__ == "__main__":
    main()
