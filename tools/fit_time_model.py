#!/usr/bin/env python3
"""Fits the coefficients of `lean simulate`'s time model and says how well it predicts what it was not fitted on.

Fitted by damped least squares of the logarithms of predicted / measured, calls far off counting less, on two thirds of the rows that
were measured on an H200. Held out are the other rows of the H200 (a row's checksum says which, for all its schedules) and all H100s,
one alone and two with the heads dealt out. Predictions are the command's own, so that what is fitted is what is shipped.

Usage: fit_time_model.py (--fit | --tables | --check) LEAN [REPOSITORY_ROOT]
  --fit     fits from neutral coefficients and writes cli/time_coefficients.hpp; minutes
  --tables  writes the tables of docs/simulate.md, by the committed coefficients
  --check   exits non-zero when a fit gets better from the committed coefficients on, when a median error is above what is allowed,
            when a simulated share is not the one that ran, or when a table of docs/simulate.md is not what the model says
"""
import argparse
import concurrent.futures
import json
import math
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import zlib

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from fit_cost_model import solve  # noqa: E402

FITTED = ("h200-tier-a.jsonl", "h200-tier-b.jsonl", "experiments/h200-short-a573c56.jsonl")
SM80 = ("h200-sm80-path.jsonl",)  # of the same card, by the kernels of sm_80
OTHER_GPU = ("experiments/h100-house.jsonl",)
SEVERAL_GPUS = ("h100-multi-gpu.jsonl",)
NEEDED = ("row", "impl", "lens", "q_heads", "kv_heads", "head_dim", "dtype", "n_q", "us", "note", "device", "commit")
NEUTRAL = {
    "step.worker_gbps": 80.0, "any_call.tile_us": 0.3, "any_call.worker_gbps": 80.0, "sm80.tile_us": 0.3, "sm80.worker_gbps": 80.0,
    "flat.call_us": 5.0, "flat.segment_us": 1.0, "flat.merge_us": 1.0, "flat.contributor_us": 0.1,
    "general.call_us": 5.0, "general.segment_us": 1.0, "general.merge_us": 1.0, "general.contributor_us": 0.1, "memory_share": 0.9,
}
NAMES = tuple(NEUTRAL)
FAR = 0.1          # an error from which on a call counts less
STEP = 0.02        # of a logarithm, for slopes
DIGITS = 3
ROUNDS = 40
SETTLED = 1e-3     # a fit that lowers the loss by no more than this has nowhere to go
MOST_MEDIAN = 0.08
FEW = 30           # calls of a set that are one line of the table, whatever their schedules
HEADER = "cli/time_coefficients.hpp"
DOCUMENT = "docs/simulate.md"
# Rows whose shares a rule of the plan has changed since they were measured: what was measured of lean is of other shares.
EARLIER = ("qwen3-30b 1x4k 32/4 d128 bf16 bhsd n_q1", "llama-70b/8 34x1k 8/1 d128 bf16 bhsd n_q1",
           "phi3-medium 8x1k 40/10 d128 bf16 bhsd n_q1", "paper 1x40x2k 40/40 d128 fp16 bhsd n_q1",
           "opt-30b 1x1k 56/56 d128 bf16 bhsd n_q1", "paper 1x40x1k 40/40 d128 fp16 bhsd n_q1",
           "gpt-oss 34x1k 64/8 d64 bf16 bhsd n_q1", "llama-70b/8 34x4k 8/1 d128 bf16 bhsd n_q1", "opt-30b 8x1k 56/56 d128 bf16 bhsd n_q1",
           "opt-1.3b 34x1k 32/32 d64 bf16 bhsd n_q1", "paper 1x40x4k 40/40 d128 fp16 bhsd n_q1", "paper 6x48x1k 48/48 d64 fp16 bhsd n_q1",
           "phi3-medium 32x1k 40/10 d128 bf16 bhsd n_q1", "phi3-medium 34x1k 40/10 d128 bf16 bhsd n_q1")


def is_held_out(row: str) -> bool:
    return zlib.crc32(row.encode()) % 3 == 0


class Model:
    """The command, asked for predictions of the same lines again and again."""

    def __init__(self, lean: str, lines: list):
        self.lean, self.lines = lean, lines
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False) as file:
            file.writelines(json.dumps({name: line[name] for name in NEEDED if name in line}) + "\n" for line in lines)
        self.path = pathlib.Path(file.name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.path.unlink()

    def predictions(self, coefficients: dict) -> list:
        given = ",".join(f"{name}={value!r}" for name, value in coefficients.items())
        done = subprocess.run([self.lean, "simulate", "--json", "--measured", self.path, *(["--coefficients", given] if given else [])],
                              check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout)

    def residuals(self, coefficients: dict) -> list:
        return [math.log(each["predicted_us"] / each["us"]) for each in self.predictions(coefficients)]


def weight(residual: float) -> float:
    return min(1.0, FAR / max(abs(residual), 1e-12))


def loss(residuals: list) -> float:
    """Huber's."""
    return sum(r * r / 2 if abs(r) < FAR else FAR * (abs(r) - FAR / 2) for r in residuals) / len(residuals)


def moved(coefficients: dict, by: dict) -> dict:
    return {name: value * math.exp(by.get(name, 0.0)) for name, value in coefficients.items()}


def fit(model: Model, coefficients: dict, rounds: int = ROUNDS) -> dict:
    """Levenberg-Marquardt in the logarithms of the coefficients."""
    here, damping = model.residuals(coefficients), 1e-2
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in range(rounds):
            there = pool.map(lambda name: model.residuals(moved(coefficients, {name: STEP})), NAMES)
            slopes = [[(b - a) / STEP for a, b in zip(here, each)] for each in there]
            weights = [weight(r) for r in here]
            matrix = [[sum(w * a * b for w, a, b in zip(weights, p, q)) for q in slopes] for p in slopes]
            right = [-sum(w * a * r for w, a, r in zip(weights, p, here)) for p in slopes]
            before = loss(here)
            for _ in range(6):
                damped = [[value + (damping * (1e-3 * len(here) + value) if i == j else 0.0) for j, value in enumerate(row)]
                          for i, row in enumerate(matrix)]
                step = [max(-1.0, min(1.0, value)) for value in solve(damped, right)]
                tried = moved(coefficients, dict(zip(NAMES, step)))
                tried["memory_share"] = min(tried["memory_share"], 1.0)
                residuals = model.residuals(tried)
                if loss(residuals) < before:
                    coefficients, here, damping = tried, residuals, damping / 5
                    break
                damping *= 10
            if before - loss(here) < 1e-5 * before:
                return coefficients
    return coefficients


def rounded(coefficients: dict) -> dict:
    return {name: float(f"{value:.{DIGITS}g}") if value >= 1e-3 else 0.0 for name, value in coefficients.items()}


def measured(root: pathlib.Path, names: tuple) -> list:
    lines = [json.loads(text) for name in names for text in (root / "bench" / "results" / name).read_text().splitlines()]
    lines = [line for line in lines if line["impl"].startswith("lean") and (line["impl"] != "lean" or line["row"] not in EARLIER)]
    for line in lines if names == SM80 else ():
        line["device"] += ", sm_80 path"  # as cli/gpu_models.hpp has it
    return lines


def of_each_gpu(lines: list) -> list:
    """Calls of bench/multi_gpu.py as a GPU has them: all heads, or its part of them."""
    return [{**line, "impl": "lean", "n_q": 1, "q_heads": line["q_heads"] // line["ranks"], "kv_heads": line["kv_heads"] // line["ranks"]}
            for line in lines if line["us"] and line["impl"] in ("lean/one", "lean/tensor")]


# Of the paper's sweeps: where its text says a speed-up over FlashDecoding. GPU, GPUs, heads, batch, context, dims, what it says.
PAPER = (
    ("A100, 4 x 32 heads", "a100", 1, 32, 4, "1k", 64, "close to 2"),
    ("", "a100", 1, 32, 4, "16k", 64, ""),
    ("", "a100", 1, 32, 4, "256k", 64, "2.18"),
    ("A100, 2 x 56 heads", "a100", 1, 56, 2, "256k", 64, "2.18, its most"),
    ("A100, heads at 4 x 256k", "a100", 1, 12, 4, "256k", 64, "comparable"),
    ("", "a100", 1, 24, 4, "256k", 64, ""),
    ("", "a100", 1, 48, 4, "256k", 64, "more than 2"),
    ("", "a100", 1, 64, 4, "256k", 64, "more than 2"),
    ("H100, 6 x 48 heads", "h100", 1, 48, 6, "4k", 64, "more than 2"),
    ("", "h100", 1, 48, 6, "64k", 64, "2.52 or 2.53, its most"),
    ("8 x A100, 4 x 256 heads", "a100", 8, 256, 4, "1k", 64, "more than 2"),
    ("", "a100", 8, 256, 4, "64k", 64, "more than 2"),
    ("", "a100", 8, 256, 4, "1024k", 64, "more than 2"),
    ("8 x A100, heads at 4 x 256k", "a100", 8, 64, 4, "256k", 64, "comparable"),
    ("", "a100", 8, 160, 4, "256k", 64, "comparable"),
    ("", "a100", 8, 512, 4, "256k", 64, "grows"),
    ("A100, 1 x 32 heads of 128", "a100", 1, 32, 1, "8k", 128, "1.34 (heads not said)"),
    ("", "a100", 1, 32, 1, "128k", 128, "3.5 (heads not said)"),
)
IMPLS = {"lean": "lean", "lean/fixed_split": "fixed split", "lean/data_parallel": "one worker per output"}
WORDS = {
    "step.worker_gbps": "GB/s that one worker reads, decode step's kernels of sm_90",
    "any_call.tile_us": "us of a tile beside its bytes, sm_90's kernels for any call",
    "any_call.worker_gbps": "GB/s that one worker reads between, the same kernels",
    "sm80.tile_us": "us of a tile beside its bytes, kernels of sm_80",
    "sm80.worker_gbps": "GB/s that one worker reads between, the same kernels",
    "flat.call_us": "us of a call around its streaming, `lean`",
    "flat.segment_us": "us between two segments of a worker, `lean`",
    "flat.merge_us": "us of a merge, `lean`",
    "flat.contributor_us": "us of each partial of a merge, `lean`",
    "general.call_us": "us of a call around its streaming, the other schedules",
    "general.segment_us": "us between two segments of a worker, the other schedules",
    "general.merge_us": "us of a merge, the other schedules",
    "general.contributor_us": "us of each partial of a merge, the other schedules",
    "memory_share": "of the published bandwidth that all workers together read",
}


def header_text(c: dict) -> str:
    def group(name: str, *fields: str) -> str:
        return f"    .{name} = {{" + ", ".join(f".{field} = {c.get(f'{name}.{field}', 0.0)!r}" for field in fields) + "},\n"

    walk = ("call_us", "segment_us", "merge_us", "contributor_us")
    return ("// The coefficients of the time model. Written by tools/fit_time_model.py from bench/results; check.time_model holds them to it.\n"
            "#pragma once\n\n#include \"cli/time_model.hpp\"\n\nnamespace lean::cli {\n\ninline constexpr TimeModel kTimeModel{\n"
            + "".join(group(name, "tile_us", "worker_gbps") for name in ("step", "any_call", "sm80"))
            + "".join(group(name, *walk) for name in ("flat", "general"))
            + f"    .memory_share = {c['memory_share']!r},\n}};\n\n}}  // namespace lean::cli\n")


def committed(root: pathlib.Path) -> dict:
    """What the header says."""
    found = {}
    for group, fields in re.findall(r"\.(\w+) = \{(.*)\}", (root / HEADER).read_text()):
        found |= {f"{group}.{name}": float(value) for name, value in re.findall(r"\.(\w+) = ([\d.e+-]+)", fields)}
    found["memory_share"] = float(re.search(r"memory_share = ([\d.e+-]+)", (root / HEADER).read_text())[1])
    return {name: found[name] for name in NAMES}


def fitted_lines(root: pathlib.Path) -> list:
    return [line for line in measured(root, FITTED) if not is_held_out(line["row"])] + measured(root, SM80)


def sets(root: pathlib.Path) -> dict:
    return {
        "H200, fitted": [line for line in measured(root, FITTED) if not is_held_out(line["row"])],
        "H200, rows held out": [line for line in measured(root, FITTED) if is_held_out(line["row"])],
        "H100, held out": measured(root, OTHER_GPU),
        "one H100 and two, heads dealt out, held out": of_each_gpu(measured(root, SEVERAL_GPUS)),
        "H200 by the kernels of sm_80, fitted": measured(root, SM80),
    }


def validation(lean: str, root: pathlib.Path, coefficients: dict) -> list:
    """Of each set and schedule: errors with their predictions, the worst first."""
    found = []
    for name, lines in sets(root).items():
        with Model(lean, lines) as model:
            predictions = model.predictions(coefficients)
        few = len(predictions) < FEW
        for impls, schedule in [(tuple(IMPLS), "all")] if few else [((impl,), schedule) for impl, schedule in IMPLS.items()]:
            errors = sorted(((abs(each["predicted_us"] / each["us"] - 1), each) for each in predictions if each["schedule"] in impls),
                            key=lambda pair: -pair[0])
            if errors:
                found.append((name, schedule, errors))
    return found


def markdown(head: list, rows: list) -> str:
    return "".join("| " + " | ".join(cells) + " |\n" for cells in [head, ["---"] * len(head), *rows])


def us_text(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.3g}"


def by_name(row: str) -> str:
    return re.sub(r"(\d)x(\d)", r"\1 x \2", row)


def validation_table(found: list) -> str:
    return markdown(["calls", "schedule", "number", "median error", "9 of 10 within", "worst", "worst row: measured, predicted"], [
        [name, schedule, str(len(errors)), f"{statistics.median(e for e, _ in errors):.1%}", f"{errors[len(errors) // 10][0]:.0%}",
         f"{errors[0][0]:.0%}", f"{by_name(errors[0][1]['row'])}: {us_text(errors[0][1]['us'])}, {us_text(errors[0][1]['predicted_us'])} us"]
        for name, schedule, errors in found])


def simulated(lean: str, gpu: str, gpus: int, heads: int, batch: int, context: str, dims: int) -> dict:
    done = subprocess.run([lean, "simulate", "--json", "--gpu", gpu, "--tensor-parallel", str(gpus), "--lens", f"{batch}x{context}",
                           "--q-heads", str(heads), "--kv-heads", str(heads), "--head-dim", str(dims), "--dtype", "fp16"],
                          check=True, stdout=subprocess.PIPE, text=True)
    return {each["schedule"]: each for each in json.loads(done.stdout)["gpus"][0]["schedules"]}


def paper_table(lean: str) -> str:
    rows, sweep = [], ""
    for name, gpu, gpus, heads, batch, context, dims, said in PAPER:
        sweep = name or sweep
        by = simulated(lean, gpu, gpus, heads, batch, context, dims)
        ours, split = by["lean"], by["lean/fixed_split"]
        rows.append([sweep, str(heads), f"{batch} x {context}", us_text(ours["us"]), us_text(split["us"]), f"{split['us'] / ours['us']:.2f}",
                     f"{ours['occupancy']:.0%}", f"{split['occupancy']:.0%}", said or "-"])
    return markdown(["the paper's sweep", "heads", "batch x context", "lean, us", "fixed split, us", "fixed split / lean", "occupancy, lean",
                     "fixed split", "the paper says"], rows)


def tables(lean: str, root: pathlib.Path, found: list) -> dict:
    here = committed(root)
    return {"coefficients": markdown(["coefficient", "value", "what it is"], [[f"`{name}`", f"{here[name]:g}", WORDS[name]] for name in NAMES]),
            "validation": validation_table(found), "paper": paper_table(lean)}


def with_tables(text: str, made: dict) -> str:
    for name, table in made.items():
        pattern = rf"(<!-- simulated: {name} -->\n).*?(<!-- simulated: end -->)"
        if len(re.findall(pattern, text, re.DOTALL)) != 1:
            raise SystemExit(f"fit_time_model: {DOCUMENT} has not one place for the table {name}")
        text = re.sub(pattern, lambda place: place[1] + table + place[2], text, flags=re.DOTALL)
    return text


def median_faults(found: list):
    for name, schedule, errors in found:
        if statistics.median(e for e, _ in errors) > MOST_MEDIAN:
            yield f"{name}, {schedule}: the median error is above {MOST_MEDIAN:.0%}"


def share_faults(lean: str, root: pathlib.Path):
    """What is simulated is what ran: the longest share and the most contributors of every measured call."""
    lines = [line for each in sets(root).values() for line in each if "worker_tiles" in line]
    with Model(lean, lines) as model:
        ran = {(line["row"], line["impl"], line["us"]): line for line in lines}
        for each in model.predictions({}):
            line = ran[each["row"], each["schedule"], each["us"]]
            if (each["worker_tiles"], each["contributors"]) != (line["worker_tiles"], line["contributors"]):
                yield f"{each['row']}, {each['schedule']}: the simulated shares are not those that were measured"


def fit_faults(lean: str, root: pathlib.Path):
    here = committed(root)
    with Model(lean, fitted_lines(root)) as model:
        now, best = loss(model.residuals(here)), loss(model.residuals(fit(model, here, rounds=3)))
    if best < now * (1 - SETTLED):
        yield f"{HEADER}: a fit goes on from there, {1 - best / now:.2%} better; --write writes what it finds"


def check(lean: str, root: pathlib.Path) -> int:
    found = validation(lean, root, committed(root))
    faults = [*fit_faults(lean, root), *median_faults(found), *share_faults(lean, root)]
    text = (root / DOCUMENT).read_text()
    now = with_tables(text, tables(lean, root, found))
    faults += [f"{DOCUMENT}:{number}: the model says {new}" for number, (old, new) in enumerate(zip(text.splitlines(), now.splitlines()), 1) if old != new]
    if not faults and text != now:
        faults.append(f"{DOCUMENT}: a table has other rows")
    for fault in faults:
        print(fault)
    print(f"fit_time_model: {sum(len(errors) for *_, errors in found)} measured calls, {len(faults)} faults")
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lean")
    parser.add_argument("root", nargs="?", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[1])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--fit", action="store_true")
    mode.add_argument("--tables", action="store_true")
    mode.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        return check(options.lean, options.root)
    if options.fit:
        with Model(options.lean, fitted_lines(options.root)) as model:
            found = rounded(fit(model, NEUTRAL))
        (options.root / HEADER).write_text(header_text(found))
        print(f"{HEADER} is written: build the command anew, then --tables")
        return 0
    document = options.root / DOCUMENT
    found = validation(options.lean, options.root, committed(options.root))
    document.write_text(with_tables(document.read_text(), tables(options.lean, options.root, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
