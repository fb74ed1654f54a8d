#!/usr/bin/env python3
"""Fits the coefficients of `lean simulate`'s time model and says how well it predicts what it was not fitted on.

Fitted by damped least squares of the logarithms of predicted / measured, calls far off counting less, on two thirds of the rows that
were measured on an H200. Held out are the other rows of the H200 (a row's checksum says which, for all its schedules) and the whole
H100. Predictions are the command's own, so that what is fitted is what is shipped.

Usage: fit_time_model.py LEAN [--write | --check] [REPOSITORY_ROOT]
  --write  writes cli/time_coefficients.hpp, and the tables and numbers of docs/simulate.md
  --check  exits non-zero when a fit that begins at the committed coefficients leaves them, or a document says other numbers
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

FITTED = ("h200-tier-a.jsonl", "h200-tier-b.jsonl")
SM80 = ("h200-sm80-path.jsonl",)  # of the same card, by the kernels of sm_80
OTHER_GPU = ("experiments/h100-house.jsonl",)
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
HEADER = "cli/time_coefficients.hpp"


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
        done = subprocess.run([self.lean, "simulate", "--json", "--measured", self.path, "--coefficients", given],
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


def fit(model: Model, coefficients: dict) -> dict:
    """Levenberg-Marquardt in the logarithms of the coefficients."""
    here, damping = model.residuals(coefficients), 1e-2
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in range(ROUNDS):
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
    for line in lines if names == SM80 else ():
        line["device"] += ", sm_80 path"  # as cli/gpu_models.hpp has it
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lean")
    parser.add_argument("root", nargs="?", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[1])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = measured(options.root, FITTED)
    with Model(options.lean, [line for line in lines if not is_held_out(line["row"])] + measured(options.root, SM80)) as model:
        found = rounded(fit(model, NEUTRAL))
        print(found, len(model.lines))
        errs = sorted(((abs(r), p["row"], p["schedule"], p["us"], p["predicted_us"]) for r, p in
                  ((math.log(p["predicted_us"] / p["us"]), p) for p in model.predictions(found))), reverse=True)
        for e in errs[:12]:
            print(e)
    for what, held in (("h200", [l for l in lines if is_held_out(l["row"])]), ("sm80", measured(options.root, SM80)), ("h100", measured(options.root, OTHER_GPU))):
        with Model(options.lean, held) as model:
            groups = {}
            for p in model.predictions(found):
                groups.setdefault(p["schedule"], []).append((abs(p["predicted_us"] / p["us"] - 1), p["row"]))
            for name, values in groups.items():
                print(what, name, len(values), statistics.median(v for v, _ in values), max(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
