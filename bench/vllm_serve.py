#!/usr/bin/env python3
"""Attention inside vLLM's engine on the CPU, this library's beside CPU_ATTN: prompts, and decode steps in turns.

Two engines, each in a process of its own, hold the same requests over the same random model with a known model's heads. Once all
prompts are read, they decode in turns (A B B A ...), a few steps each, so that a machine which is slower for a while is so for
both; what an engine spends inside its attention's implementation, the write to the cache included, is added up, a step at a time.
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
from suite_data import in_turns as factor_in_turns
from vllm_engine import VOCABULARY, lengths_of, shape_of, submit, tokens_of_each

ATTENTIONS = ("cpu_attn", "lean")
STEP_TOKENS = 2048  # that one step of the engine takes
NO_ROOM = "not every request decodes in one step: the engine has not room for all of them at once"
WARM_STEPS = 1  # of each turn, which nobody measures


class Widths(NamedTuple):
    hidden: int
    intermediate: int
    head_dim: int
    layers: int


#: Both with the heads of Llama 3: 32 of queries, 8 of keys.
MODELS = {"thin": Widths(256, 256, 128, 2), "llama-3.2-1b": Widths(2048, 8192, 64, 4)}


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


def save_model(folder: str, model: str, context: int) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    of = MODELS[model]
    configuration = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=of.hidden, intermediate_size=of.intermediate, num_hidden_layers=of.layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=of.head_dim, max_position_embeddings=context,
        initializer_range=0.02 if model != "thin" else 0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(configuration).to(torch.bfloat16).save_pretrained(folder)


def attend(connection, attention: str, settings: dict) -> None:
    """In a process of its own: an engine with that attention, which does what it is told until it is told nothing."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["OMP_WAIT_POLICY"] = "passive"  # while the other decodes
    import torch
    import vllm
    from vllm_models import engine

    with engine(settings.pop("folder"), ours=attention == "lean", **settings) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        implementation = type(next(iter(layers.values())).impl)
        connection.send(dict(vllm=vllm.__version__, torch=torch.__version__, threads=torch.get_num_threads()))
        requests = None
        while (command := connection.recv()) is not None:
            name, *arguments = command
            if name == "begin":
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
    parser.add_argument("--shapes", default="1x1k,1x4k,1x16k,8x1k,8x4k,32~1k", type=list_of(shape_of))
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="of a turn that are measured")
    parser.add_argument("--json", metavar="FILE", help="two lines for each shape are added")
    options = parser.parse_args()
    steps, run = options.turns * (WARM_STEPS + options.steps), time.strftime("%Y%m%d-%H%M%S")
    lengths = [lengths_of(shape) for shape in options.shapes]
    longest = max(max(each) + tokens_of_each(each, steps, STEP_TOKENS) + 4 for each in lengths)
    layers = MODELS[options.model].layers
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, options.model, longest)
        settings = dict(
            folder=folder, dtype=options.dtype, max_model_len=longest, max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=max(map(len, lengths)), enable_prefix_caching=False,
        )  # fmt: skip
        with engines(settings) as (tell, about):
            threads = about.pop("threads")
            device = f"CPU, {threads} threads: {processor()}"
            print(f"{options.model}, {options.dtype}, {device}; attention, us a layer and decode step, and its share of the step")
            print(f"{'shape':>8} {'CPU_ATTN':>16} {'lean':>16} {'CPU_ATTN / lean':>16} {'of prompts':>12}")
            for shape in options.shapes:
                load = os.getloadavg()[0]
                read, found = measure(tell, shape, options.turns, options.steps)
                cells = []
                for name in ATTENTIONS:
                    flat = [step for turn in found[name] for step in turn]
                    attention = statistics.median(step.attention for step in flat)
                    cells.append(f"{1e6 * attention / layers:9.0f} ({100 * attention / statistics.median(s.whole for s in flat):3.0f} %)")
                    if options.json:
                        line = dict(
                            shape=shape, attention=name, model=options.model, layers=layers, dtype=options.dtype, attention_s=attention,
                            step_s=[step.whole for step in flat], attention_step_s=[[step.attention for step in turn] for turn in found[name]],
                            prompts_s=read[name].whole, prompts_attention_s=read[name].attention, **about, device=device, run=run, load=load,
                            commit=git_commit(), date=time.strftime("%Y-%m-%d"),
                        )  # fmt: skip
                        with open(options.json, "a") as file:
                            print(json.dumps(line), file=file)
                theirs, mine = ([[step.attention for step in turn] for turn in found[name]] for name in ATTENTIONS)
                prompts = read["cpu_attn"].attention / read["lean"].attention
                print(f"{shape:>8} {cells[0]:>16} {cells[1]:>16} {factor_in_turns(theirs, mine):>16.2f} {prompts:>12.2f}", flush=True)


if __name__ == "__main__":
    main()
