#!/usr/bin/env python3
"""What calls of many rows take by their schedule and a simple model of its time (tools/wide_model.cpp), beside what was measured.

Its five coefficients were fitted to the calls of one build in bench/results/experiments/h100-wide-tile.jsonl, whose segments were
charged half a tile and whose workers might lose three tiles to line up; with them the model says what the charges of now would
make of these calls. It is to choose charges by and to find what takes long, not to quote: only a GPU can say how long a call takes.

Usage: wide_model.py MODEL [--fit | --check | --call Q_HEADS KV_HEADS CAUSAL Q:KV ...]
  MODEL     the program that is built of tools/wide_model.cpp
  --fit     fits the coefficients anew and prints them; minutes
  --check   exits non-zero when the committed coefficients are further off than ALLOWED_RMS
  --call    what any other call would take, with the charges before and now
"""
import argparse
import json
import math
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MEASURED = ROOT / "bench/results/experiments/h100-wide-tile.jsonl"
BUILD = "rows go from registers to where they end, ring of 128 KB"
WORKERS = 132
THEN = "8,48,0"  # the charges that BUILD had
COEFFICIENTS = {"tile_us": 1.99, "segment_us": 8.5, "shared_us": 16.3, "call_us": 25.5, "gbps": 2760.0, "l2_tiles": 507.0}
ALLOWED_RMS = 0.12
SAME_KV = re.compile(r"(\d+) outputs of (\d+) rows, (\d+) tiles each, all of the same K and V")
CALL = re.compile(r"(\d+) x (\d+) of (\d+), (\d+)/(\d+) heads(, causal)?")


def call_of(row: str) -> tuple[str, str]:
    """A measured row as the program wants it: heads and causality, sequences."""
    if match := SAME_KV.fullmatch(row):  # one sequence of so many row blocks: all read the same
        outputs, rows, tiles = map(int, match.groups())
        return "1 1 0", f"{outputs * rows}:{tiles * 128}"
    *numbers, causal = CALL.fullmatch(row).groups()
    batch, q_tokens, kv_tokens, q_heads, kv_heads = map(int, numbers)
    return f"{q_heads} {kv_heads} {int(causal is not None)}", f"{batch}x{q_tokens}:{kv_tokens}"


def predict(model: str, calls: list[tuple[str, str]], charges: str, coefficients: dict[str, float]) -> list[dict]:
    lines = "".join(f"{heads} {WORKERS} {charges} {sequences}\n" for heads, sequences in calls)
    command = [model, *(str(value) for value in coefficients.values())]
    done = subprocess.run(command, input=lines, text=True, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def residual(model: str, rows: list[dict], coefficients: dict[str, float]) -> float:
    """Root mean square of the logarithms of predicted / measured."""
    predicted = predict(model, [call_of(row["row"]) for row in rows], THEN, coefficients)
    return math.sqrt(sum(math.log(p["us"] / row["us"]["lean"]) ** 2 for p, row in zip(predicted, rows)) / len(rows))


def fit(model: str, rows: list[dict]) -> dict[str, float]:
    """Each coefficient in turn by smaller and smaller steps, as long as that helps: the model is not smooth."""
    best = dict(COEFFICIENTS)
    least = residual(model, rows, best)
    step = 0.3
    while step > 0.01:
        moved = False
        for name in best:
            for factor in (1.0 + step, 1.0 / (1.0 + step)):
                tried = best | {name: best[name] * factor}
                if (found := residual(model, rows, tried)) < least:
                    best, least, moved = tried, found, True
        step = step if moved else step / 2
    return best


def print_table(model: str, calls: dict[str, tuple[str, str]], measured: dict[str, float]) -> None:
    then = predict(model, list(calls.values()), THEN, COEFFICIENTS)
    now = predict(model, list(calls.values()), "now", COEFFICIENTS)
    print("| call | measured, us | model, charges of then | model, charges of now | GB from memory, then | now |")
    print("|---|---|---|---|---|---|")
    for name, a, b in zip(calls, then, now):
        took = f"{measured[name]:,.0f}" if name in measured else "-"
        print(f"| {name} | {took} | {a['us']:,.0f} | {b['us']:,.0f} | {a['memory_gb']:.2f} | {b['memory_gb']:.2f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--call", nargs="+")
    options = parser.parse_args()
    rows = [row for row in map(json.loads, MEASURED.read_text().splitlines()) if row["build"] == BUILD]
    if options.call:
        *heads, sequences = *options.call[:3], " ".join(options.call[3:])
        print_table(options.model, {sequences: (" ".join(heads), sequences)}, {})
        return 0
    if options.fit:
        print({name: float(f"{value:.3g}") for name, value in fit(options.model, rows).items()})
        return 0
    found = residual(options.model, rows, COEFFICIENTS)
    print_table(options.model, {row["row"]: call_of(row["row"]) for row in rows}, {row["row"]: row["us"]["lean"] for row in rows})
    print(f"\n{len(rows)} calls, {found * 100:.1f} % rms")
    return 1 if options.check and found > ALLOWED_RMS else 0


if __name__ == "__main__":
    sys.exit(main())
