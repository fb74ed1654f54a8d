#!/usr/bin/env python3
"""Decode steps of whole models by Transformers: this library's attention beside the stock ones.

Models have the shape of Llama-3-8B, Phi-3-medium and OPT-6.7B with random weights and --layers layers, fewer than the real
ones: times are of those layers, the embedding and the head. "tiny" is there to try the script. The cache is filled with
random keys and values. A step is a forward pass and an argmax, as greedy decoding does it, and is waited for.

Rows come in the order of their importance, each is written when it is done, and a row that fails becomes a line with a note,
so a run may be cut short, by --minutes or from outside. `bound` is the weights and the keys and values that exist, read at
--gbps.

Shapes: BATCHxCONTEXT, "8x32k"; with :ragged, lengths go evenly from an eighth of the context to all of it.
Paths: ATTENTION/CACHE[+LAUNCH]: lean_attention, sdpa, flash (sdpa pinned to flash attention), eager, flex_attention; dynamic,
static, lean; +captured (the forward pass in a CUDA graph), +compiled (torch.compile, mode="reduce-overhead").

Usage: end_to_end.py [--device cuda|cpu] [--models llama-8b,...] [--shapes 1x32k,8x8k:ragged] [--paths sdpa/static,...]
                     [--layers 8] [--steps 16] [--minutes 2] [--gbps 4500] [--json FILE] [--plot FILE]
Needs torch and transformers 4.56 or newer.
"""
import argparse
import gc
import json
import re
import sys
import time

import torch
import transformers
from checkout import git_commit
from decode_models import MODELS, Case, measure, model_of, read_bytes
from option_lists import list_of

import lean_attention.hf

SHAPES = {
    "cuda": "1x32k,1x128k,8x8k,8x32k,8x32k:ragged,1x1k,1x8k,32x1k,32x8k:ragged",
    "cpu": "1x8k,1x1k,4x8k:ragged",
}
PATHS = {
    "cuda": "lean_attention/lean,sdpa/static,sdpa/dynamic,lean_attention/dynamic,lean_attention/static,flash/dynamic,"
    "eager/static,eager/dynamic,lean_attention/lean+captured,sdpa/static+captured,"
    "lean_attention/lean+compiled,sdpa/static+compiled,flex_attention/static",
    "cpu": "lean_attention/lean,sdpa/static,sdpa/dynamic,lean_attention/dynamic,eager/static,eager/dynamic",
}
SLOW = ("compiled", "flex_attention")  # seconds of compilation a row: after all other rows of a model


def tokens_of(number: str, thousands: str) -> int:
    """"8", "k": 8,192."""
    return int(number) * (1024 if thousands else 1)


def lengths_of(shape: str) -> tuple:
    match = re.fullmatch(r"(\d+)x(\d+)(k?)(:ragged)?", shape)
    if match is None:
        raise SystemExit(f"end_to_end: --shapes {shape}: expected BATCHxCONTEXT, as 8x32k or 8x32k:ragged")
    batch, context = int(match[1]), tokens_of(match[2], match[3])
    if not match[4] or batch == 1:
        return (context,) * batch
    first = context // 8
    return tuple(first + (context - first) * b // (batch - 1) for b in range(batch))


def case_of(model: str, shape: str, path: str) -> Case:
    match = re.fullmatch(r"(\w+)/(dynamic|static|lean)(?:\+(captured|compiled))?", path)
    if match is None or (match[2] == "dynamic" and match[3]):
        raise SystemExit(f"end_to_end: --paths {path}: expected ATTENTION/CACHE or, unless dynamic, ATTENTION/CACHE+LAUNCH")
    return Case(model, match[1], match[2], match[3] or "launched", lengths_of(shape))


def cases_of(arguments) -> list:
    """(shape, case) by importance: models as given, what compiles after the rest, shapes and paths as given."""
    cases = [(shape, case_of(model, shape, path)) for model in arguments.models for shape in arguments.shapes for path in arguments.paths]
    models = list(arguments.models)
    return sorted(cases, key=lambda item: (models.index(item[1].model), item[1].launch in SLOW or item[1].attention in SLOW))


def about(arguments) -> dict:
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else lean_attention._core.machine()["cpu_isa"]
    return {
        "device": device, "dtype": arguments.dtype, "layers": arguments.layers, "threads": torch.get_num_threads(),
        "torch": torch.__version__, "transformers": transformers.__version__, "commit": git_commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip


def measured(times) -> dict:
    """The row's times, which a function finds, or why there are none."""
    try:
        return times() | {"note": None}
    except Exception as error:  # whatever a stock path or a first contact with a machine may raise
        text = (str(error).strip().splitlines() or [""])[0]
        return {"note": f"{type(error).__name__}: {text[:200]}"}


class Report:
    """Prints rows beside a progress bar and writes each to the file as it comes."""

    def __init__(self, total: int, path: str) -> None:
        self._total, self._path, self._begin = total, path, time.monotonic()
        self.rows = []

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self._begin) / 60

    def progress(self) -> None:
        done = len(self.rows)
        bar = f"[{done * 30 // self._total * '#':30}] {done}/{self._total} {self.minutes * 60:.0f} s"
        print(f"\r{bar} ", end="", file=sys.stderr, flush=True)

    def add(self, row: dict) -> None:
        self.rows.append(row)
        print("\r", end="", file=sys.stderr)
        head = f"{row['model']:13} {row['shape']:13} {row['impl']:29}"
        if row["note"] is None:
            bound = f" bound {row['bound_ms']:7.2f}" if "bound_ms" in row else ""
            times = f"{row['ms']:9.2f} ms ({row['ms_min']:.2f} to {row['ms_max']:.2f}, launch {row['launch_ms']:.2f})"
            print(f"{head} {times}{bound} {row['tokens_per_s']:9.1f} tokens/s", flush=True)
        else:
            print(f"{head} {row['note']}", flush=True)
        if self._path:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def plot(rows: list, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(1, len(models), figsize=(6 * len(models), 4.5), squeeze=False)
    for axis, model in zip(axes[0], models):
        series = {}
        shapes = list(dict.fromkeys(row["shape"] for row in rows if row["model"] == model))
        for row in (row for row in rows if row["model"] == model):
            series.setdefault(row["impl"], []).append((shapes.index(row["shape"]), row["ms"]))
        for name, points in series.items():
            axis.plot(*zip(*points), marker="o", linestyle="-" if "lean" in name else ":", label=name)
        axis.set(title=model, xticks=range(len(shapes)), ylabel="ms a step", yscale="log")
        axis.set_xticklabels(shapes, rotation=30)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", type=list_of(known=MODELS), default=[name for name in MODELS if name != "tiny"])
    parser.add_argument("--shapes", type=list_of())
    parser.add_argument("--paths", type=list_of())
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no row after so long")
    parser.add_argument("--gbps", type=float, default=0, help="a read speed to compare with, in GB/s")
    parser.add_argument("--json", help="append a line a row")
    parser.add_argument("--plot", help="draw to this file")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    arguments.shapes = arguments.shapes or SHAPES[arguments.device].split(",")
    arguments.paths = arguments.paths or PATHS[arguments.device].split(",")
    arguments.layers = arguments.layers or (8 if on_gpu else 2)
    arguments.steps = arguments.steps or (16 if on_gpu else 4)
    return arguments


def main() -> None:
    arguments = parse()
    lean_attention.hf.register()
    cases, facts = cases_of(arguments), about(arguments)
    positions = max(case.context for _, case in cases) + 64
    report, model, name = Report(len(cases), arguments.json), None, None
    for shape, case in cases:
        if report.minutes > arguments.minutes:
            print(f"\r{len(cases) - len(report.rows)} rows left out after {report.minutes:.1f} minutes", flush=True)
            break
        if case.model != name:
            model = None  # its memory is needed
            model, name = model_of(case.model, arguments.layers, positions, getattr(torch, arguments.dtype), arguments.device), case.model
        report.progress()
        row = {"model": case.model, "shape": shape, "impl": case.impl, "lens": case.lengths} | measured(lambda: measure(model, case, arguments.steps))
        row["read_bytes"] = read_bytes(model, case.lengths)
        if arguments.gbps:
            row["bound_ms"] = row["read_bytes"] / arguments.gbps / 1e6
        report.add(row | facts)
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    finished = [row for row in report.rows if row["note"] is None]
    if arguments.plot and finished:
        plot(finished, arguments.plot)


if __name__ == "__main__":
    main()
