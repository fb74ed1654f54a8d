#!/usr/bin/env python3
"""What calls of many rows take by their schedule and a simple model of its time (tools/wide_model.cpp), beside what was measured.

Its five coefficients were fitted to the calls of one build in bench/results/experiments/h100-wide-tile.jsonl, whose segments were
charged half a tile and whose workers might lose three tiles to line up; with them the model says what the charges of now would
make of these calls. It is to choose charges by and to find what takes long, not to quote: only a GPU can say how long a call takes.

Usage: wide_model.py MODEL [--fit | --check | --call Q_HEADS KV_HEADS CAUSAL Q:KV ... | --mixed [TRACE ...]]
  MODEL     the program that is built of tools/wide_model.cpp
  --fit     fits the coefficients anew and prints them; minutes
  --check   exits non-zero when the committed coefficients are further off than ALLOWED_RMS
  --call    what any other call would take, with the charges before and now
  --mixed   prefill chunks and decode rows in two launches and in one, of an H200: the rows of bench/results/h200-prefill-mix.jsonl,
            and batches drawn from traces of requests (AzureLLMInferenceTrace_*.csv of github.com/Azure/AzurePublicDataset)
"""
import argparse
import csv
import json
import math
import pathlib
import random
import re
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MEASURED = ROOT / "bench/results/experiments/h100-wide-tile.jsonl"
BUILD = "rows go from registers to where they end, ring of 128 KB"
WORKERS = 132
THEN = "8,48,0"  # the charges that BUILD had
COEFFICIENTS = {"tile_us": 1.99, "segment_us": 8.5, "shared_us": 16.3, "call_us": 25.5, "gbps": 2760.0, "l2_tiles": 507.0}
DECODE = {"few_tile_us": 0.63, "few_segment_us": 1.63}  # 64 KB at 104 GB/s, as cli/time_coefficients.hpp has it
DECODE_CALL_US = 4.14  # of a call of decode rows alone, beside its reads: the same file
H200_GBPS = 4400.0  # decode alone of the first row of MIXED: 2.13 GB in 480 us
MIXED = ROOT / "bench/results/h200-prefill-mix.jsonl"
DRAWN = 20  # batches of a trace
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
    command = [model, *(str(value) for value in (coefficients | DECODE).values())]
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


def tokens_of(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def mixed_rows() -> dict[str, tuple[str, str]]:
    """The measured batches: chunks, decode rows."""
    rows = dict.fromkeys(json.loads(line)["row"] for line in MIXED.read_text().splitlines())
    batches = {}
    for row in rows:
        parts = re.findall(r"(\d+) x (\d+) of (\d+k?)", row)
        batches[row] = tuple(f"{count}x{new}:{tokens_of(context)}" for count, new, context in parts)
    return batches


def drawn_batches(trace: str, chunk: int, decoding: int) -> list[tuple[str, str]]:
    """A chunk of one request's prompt, wherever in it, beside requests that are somewhere in their answers."""
    with open(trace, newline="") as file:
        requests = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    draw = random.Random(1)
    batches = []
    for _ in range(DRAWN):
        prompt = draw.choice([context for context, _ in requests if context >= chunk] or [chunk])
        end = chunk * draw.randint(1, max(1, prompt // chunk))
        rows = [context + draw.randint(0, generated) for context, generated in draw.choices(requests, k=decoding)]
        batches.append((f"{chunk}:{end}", " ".join(f"1:{max(1, tokens)}" for tokens in rows)))
    return batches


def print_mixed(model: str, traces: list[str]) -> None:
    times = COEFFICIENTS | {"gbps": H200_GBPS}

    def took(charges: str, sequences: list[str], call_us: float) -> list[float]:
        return [p["us"] for p in predict(model, [("32 8 1", each) for each in sequences], charges, times | {"call_us": call_us})]

    def both(batches: list[tuple[str, str]]) -> list[tuple[float, float, float]]:
        chunks = took("now", [chunk for chunk, _ in batches], times["call_us"])
        decode = took("mixed", [rows for _, rows in batches], DECODE_CALL_US)
        one = took("mixed", [f"{chunk} {rows}" for chunk, rows in batches], times["call_us"])
        return list(zip(chunks, decode, one))

    print("| batch, 32/8 heads of 128 | chunks, us | decode rows | two launches | one | one / two |\n|---|---|---|---|---|---|")
    named = mixed_rows()
    for name, (chunks, decode, one) in zip(named, both(list(named.values()))):
        print(f"| {name} | {chunks:,.0f} | {decode:,.0f} | {chunks + decode:,.0f} | {one:,.0f} | {one / (chunks + decode):.2f} |")
    for trace in traces:
        for chunk in (512, 2048):
            for decoding in (16, 64):
                found = both(drawn_batches(trace, chunk, decoding))
                chunks, decode, one = (statistics.mean(each) for each in zip(*found))
                mean = statistics.geometric_mean(o / (c + d) for c, d, o in found)
                name = f"{pathlib.Path(trace).stem}: a chunk of {chunk}, {decoding} decode rows"
                print(f"| {name} | {chunks:,.0f} | {decode:,.0f} | {chunks + decode:,.0f} | {one:,.0f} | {mean:.2f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--call", nargs="+")
    parser.add_argument("--mixed", nargs="*")
    options = parser.parse_args()
    rows = [row for row in map(json.loads, MEASURED.read_text().splitlines()) if row["build"] == BUILD]
    if options.call:
        *heads, sequences = *options.call[:3], " ".join(options.call[3:])
        print_table(options.model, {sequences: (" ".join(heads), sequences)}, {})
        return 0
    if options.mixed is not None:
        print_mixed(options.model, options.mixed)
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
