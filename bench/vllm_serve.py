#!/usr/bin/env python3
"""Attention inside vLLM's engine on the CPU, this library's beside CPU_ATTN: prompts, and decode steps in turns.

Two engines, each in a process of its own, hold the same requests over the same random model with a known model's heads. Once all
prompts are read, they decode in turns (A B B A ...), a few steps each, so that a machine which is slower for a while is so for
both; what an engine spends inside its attention's implementation, the write to the cache included, is added up, a step at a time.
Before, both read two prompts and decode after them, and log-probabilities are compared (vllm_engine.py's check): the run ends where
they are too far apart. The factor is the median over turns that are neighbours; their quartiles are beside it.
Runs in .venv-vllm (tools/setup.sh engines).

Shapes are BATCHxCONTEXT, or BATCH~CONTEXT for uneven prompts of that mean, as in vllm_engine.py. --model thin has layers in which
everything but attention is small; llama-3.2-1b's are as wide as they are, so that attention's share of a step is that model's.

Usage: vllm_serve.py [--model thin] [--dtype bfloat16] [--shapes 1x1k,8x1k,32~1k] [--turns 8] [--steps 4] [--json FILE]
"""
from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any, Iterator, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "python"))

from checkout import git_commit
from option_lists import list_of
from suite_data import in_turns
from vllm_engine import (
    CHECKED_LENGTHS, CHECKED_TOKENS, HEADS, checked, distance, lengths_of, mean_distance, save_model, shape_of, submit, tokens_of_each,
)  # fmt: skip

ATTENTIONS = ("cpu_attn", "lean")
STEP_TOKENS = 2048  # that one step of the engine takes
NO_ROOM = "not every request decodes in one step: the engine has not room for all of them at once"
WARM_STEPS = 1  # of each turn, which nobody measures
FURTHEST = 0.1  # that log-probabilities of the checked prompts' tokens may be apart in the mean


class Widths(NamedTuple):
    hidden: int
    intermediate: int
    head_dim: int
    layers: int
    weights: float  # their standard deviation


MODELS = {"thin": Widths(256, 256, 128, 2, 0.2), "llama-3.2-1b": Widths(2048, 8192, 64, 4, 0.02)}


class Step(NamedTuple):
    """Seconds of a step of the engine, and of it inside attention."""

    whole: float
    attention: float


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


class Requests:
    """Those of a shape in an engine: first their prompts are read, then they decode, as many steps at a time as are asked for."""

    def __init__(self, llm, shape: str, steps: int, implementation: type) -> None:
        self._engine, self._lengths = llm.llm_engine, lengths_of(shape)
        self._watch = Stopwatch(implementation)
        self._left = steps
        submit(llm, shape, self._lengths, max_tokens=tokens_of_each(self._lengths, steps, STEP_TOKENS))

    def _step(self) -> tuple[int, Step]:
        begin = time.perf_counter()
        decoded = len(self._engine.step())
        return decoded, Step(time.perf_counter() - begin, self._watch.end_step())

    def read(self) -> Step:
        """All steps until every request decodes."""
        whole = attention = 0.0
        decoded = 0
        while decoded < len(self._lengths):
            if not self._engine.has_unfinished_requests():
                raise RuntimeError(NO_ROOM)
            decoded, step = self._step()
            whole, attention = whole + step.whole, attention + step.attention
        return Step(whole, attention)

    def decode(self, steps: int) -> list[Step]:
        self._left -= steps
        if self._left < 0:
            raise ValueError(f"steps = {steps}: more than were said in the beginning")
        found = [self._step() for _ in range(steps)]
        if any(decoded != len(self._lengths) for decoded, _ in found):
            raise RuntimeError(NO_ROOM)
        return [step for _, step in found]

    def end(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._watch.remove()


def attend(connection, attention: str, settings: dict) -> None:
    """In a process of its own: an engine with that attention, which does what it is told until it is told nothing."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["OMP_WAIT_POLICY"] = "passive"  # while the other decodes
    import torch
    import vllm
    from vllm_models import engine

    import lean_attention

    with engine(settings.pop("folder"), ours=attention == "lean", **settings) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        implementation = type(next(iter(layers.values())).impl)
        versions = dict(vllm=vllm.__version__, torch=torch.__version__, lean=lean_attention.__version__)
        connection.send(dict(versions, threads=torch.get_num_threads()))
        requests = None
        while (command := connection.recv()) is not None:
            name, *arguments = command
            if name == "check":
                connection.send(checked(llm))
            elif name == "begin":
                requests = Requests(llm, *arguments, implementation)
                connection.send(requests.read())
            else:
                connection.send(getattr(requests, name)(*arguments))


@contextlib.contextmanager
def engines(settings: dict) -> Iterator[tuple[dict[str, Any], dict]]:
    """By an attention's name a function that has its engine do something; and what the engines say of themselves."""
    spawn = multiprocessing.get_context("spawn")
    pipes = {name: spawn.Pipe() for name in ATTENTIONS}
    processes = [spawn.Process(target=attend, args=(pipes[name][1], name, settings), daemon=True) for name in ATTENTIONS]

    def told(name: str):
        def tell(*command):
            pipes[name][0].send(command)
            return pipes[name][0].recv()

        return tell

    try:
        about = {}
        for process, name in zip(processes, ATTENTIONS):
            process.start()
            pipes[name][1].close()  # so that the end of a process is noticed
            about = pipes[name][0].recv()
        yield {name: told(name) for name in ATTENTIONS}, about
    finally:
        for process, name in zip(processes, ATTENTIONS):
            with contextlib.suppress(OSError):
                pipes[name][0].send(None)
        for process in processes:
            process.join(60)


def agreement(tell: dict[str, Any]) -> str:
    """Of what both decode after the same prompts, in words.

    Raises:
        RuntimeError: log-probabilities of the prompts' own tokens are FURTHEST apart, or more.
    """
    (theirs, theirs_of_prompts), (ours, ours_of_prompts) = (tell[name]("check") for name in ATTENTIONS)
    same, apart = distance(ours, theirs)
    mean = mean_distance(ours_of_prompts, theirs_of_prompts)
    said = (
        f"{same}/{len(CHECKED_LENGTHS) * CHECKED_TOKENS} tokens are the same, log-probabilities up to there within {apart:.2g}, "
        f"those of the prompts' tokens {mean:.2g} apart in the mean"
    )  # fmt: skip
    if not mean < FURTHEST:
        raise RuntimeError(f"{said}, where {FURTHEST} is too far")
    return said


def measure(tell: dict[str, Any], shape: str, turns: int, steps: int) -> tuple[dict[str, Step], dict[str, list[list[Step]]]]:
    """Of each attention: its prompts, and its decode steps, turn by turn."""
    read = {name: tell[name]("begin", shape, turns * (WARM_STEPS + steps)) for name in ATTENTIONS}
    found: dict[str, list[list[Step]]] = {name: [] for name in ATTENTIONS}
    for turn in range(turns):
        for name in ATTENTIONS if turn % 2 == 0 else reversed(ATTENTIONS):
            found[name].append(tell[name]("decode", WARM_STEPS + steps)[WARM_STEPS:])
    for name in ATTENTIONS:
        tell[name]("end")
    return read, found


def line_of(attention: str, shape: str, read: Step, turns: list[list[Step]]) -> dict[str, Any]:
    steps = [step for turn in turns for step in turn]
    whole = [step.whole for step in steps]
    return dict(
        attention=attention, attention_s=statistics.median(step.attention for step in steps), step_s=whole,
        attention_step_s=[[step.attention for step in turn] for turn in turns], prompts_s=read.whole,
        prompts_attention_s=read.attention, tokens_per_s=len(lengths_of(shape)) / statistics.median(whole),
    )  # fmt: skip


def show(theirs: dict, ours: dict) -> None:
    """A row of what is printed."""
    cells = []
    for line in (theirs, ours):
        share = 100 * line["attention_s"] / statistics.median(line["step_s"])
        cells.append(f"{1e6 * line['attention_s'] / line['layers']:9.0f} ({share:3.0f} %)")
    factor = in_turns(theirs["attention_step_s"], ours["attention_step_s"])
    seconds = theirs["prompts_attention_s"], ours["prompts_attention_s"]
    prompts = f"{seconds[0]:.2f} {seconds[1]:.2f} ({seconds[0] / seconds[1]:.2f})"
    rates = f"{theirs['tokens_per_s']:.1f} {ours['tokens_per_s']:.1f}"
    print(f"{ours['shape']:>8} {cells[0]:>16} {cells[1]:>16} {factor:>20} {prompts:>20} {rates:>15}", flush=True)


def processor() -> str:
    """As Linux names it, and which one it is."""
    about: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            about.setdefault(key.strip(), value.strip())
    names = [about.get("model name", "unknown"), *(f"{key} {about[key]}" for key in ("cpu family", "model") if key in about)]
    return ", ".join(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="thin", choices=MODELS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shapes", default="1x1k,1x8k,1x32k,8x1k,8x4k,32~1k,32~2k", type=list_of(shape_of))
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="of a turn that are measured")
    parser.add_argument("--json", metavar="FILE", help="two lines for each shape are added")
    options = parser.parse_args()
    steps, run = options.turns * (WARM_STEPS + options.steps), f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {os.getpid()}"
    lengths = [lengths_of(shape) for shape in options.shapes]
    longest = max(max(each) + tokens_of_each(each, steps, STEP_TOKENS) + 4 for each in [*lengths, CHECKED_LENGTHS])
    of = MODELS[options.model]
    with tempfile.TemporaryDirectory() as folder:
        save_model(
            folder, longest, hidden_size=of.hidden, intermediate_size=of.intermediate, head_dim=of.head_dim, num_hidden_layers=of.layers,
            initializer_range=of.weights,
        )  # fmt: skip
        settings = dict(
            folder=folder, dtype=options.dtype, max_model_len=longest, max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=max(map(len, [*lengths, CHECKED_LENGTHS])), enable_prefix_caching=False,
        )  # fmt: skip
        with engines(settings) as (tell, about):
            threads = about.pop("threads")
            device = f"CPU, {threads} threads: {processor()}"
            print(f"{options.model}, {options.dtype}, {device}; attention, us a layer and decode step, and its share of the step")
            print(agreement(tell))
            print(f"{'shape':>8} {'CPU_ATTN':>16} {'lean':>16} {'CPU_ATTN / lean':>20} {'prompts, s':>20} {'tokens/s':>15}")
            for shape in options.shapes:
                load = os.getloadavg()[0]
                read, found = measure(tell, shape, options.turns, options.steps)
                common = dict(
                    shape=shape, model=options.model, **HEADS | of._asdict(), dtype=options.dtype, **about,
                    device=device, run=run, load=load, commit=git_commit(), date=time.strftime("%Y-%m-%d"),
                )  # fmt: skip
                lines = [common | line_of(name, shape, read[name], found[name]) for name in ATTENTIONS]
                if options.json:
                    with open(options.json, "a") as file:
                        print("\n".join(map(json.dumps, lines)), file=file)
                show(*lines)


if __name__ == "__main__":
    main()
