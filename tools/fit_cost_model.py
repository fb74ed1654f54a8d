#!/usr/bin/env python3
"""What a segment, a merge and a second level of merging cost on a GPU, from lines of `lean bench --backend cuda --out FILE`: the
figures behind cost_model() in src/backends/cuda/kernel_config.hpp.

A line says how many tiles and segments the busiest worker had, and how many workers share an output. The reading of that worker's
tiles takes its share of the pure read of the same run; what the call takes beyond that is fitted, by least squares:

    us - read = call + segment x (segments - 1) + merge x [some output is shared] + level x [by more than 32 workers]

Lines count of the rows and schedules asked for, where nearly all multiprocessors work until the end, so that the read is what bounds a
tile's time.

Usage: fit_cost_model.py FILE... [--rows PATTERN] [--impls lean,...]
"""
import argparse
import json
import math
import pathlib
import re
import sys

TILE_UNITS = 16       # CostModel::tile_units
TILE_BYTES = 65536    # of the tiles that align_units counts
ONE_LEVEL = 32        # fixup::kMaxOneLevel
BUSY = 0.9            # of the most workers of any line
COSTS = ("call", "segment", "merge", "level")


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """By elimination with pivots; a column of zeros gives 0."""
    n = len(right)
    rows = [row[:] + [value] for row, value in zip(matrix, right)]
    for column in range(n):
        pivot = max(range(column, n), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if abs(rows[column][column]) < 1e-12:
            rows[column] = [float(i == column) for i in range(n)] + [0.0]
        for i in range(n):
            if i != column:
                factor = rows[i][column] / rows[column][column]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[column])]
    return [rows[i][n] / rows[i][i] for i in range(n)]


def terms(line: dict) -> list[float]:
    return [1.0, line["worker_segments"] - 1.0, float(line["contributors"] > 1), float(line["contributors"] > ONE_LEVEL)]


def beyond_read(line: dict) -> float:
    """What the call takes beyond the reading of its busiest worker, us."""
    most = line["worker_tiles"] * line["workers"] * line["tile_bytes"]
    return line["us"] - line["ceiling_us"] * max(1.0, most / line["kv_bytes"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--rows", default="^flat", help="regular expression that is searched for in the rows' ids")
    parser.add_argument("--impls", default="lean")
    options = parser.parse_args()

    lines = [json.loads(text) for path in options.files for text in path.read_text().splitlines()]
    lines = [line for line in lines if line.get("us") and line.get("worker_tiles") and re.search(options.rows, line["row"])
             and line["impl"] in options.impls.split(",")]
    grid = max((line["workers"] for line in lines), default=0)
    lines = [line for line in lines if line["workers"] >= BUSY * grid]
    if len(lines) < 2 * len(COSTS):
        print(f"fit_cost_model: {len(lines)} lines are too few", file=sys.stderr)
        return 1

    columns = range(len(COSTS))
    matrix = [[sum(terms(line)[i] * terms(line)[j] for line in lines) for j in columns] for i in columns]
    right = [sum(terms(line)[i] * beyond_read(line) for line in lines) for i in columns]
    fitted = solve(matrix, right)
    rest = [beyond_read(line) - sum(a * b for a, b in zip(fitted, terms(line))) for line in lines]

    tile_us = sum(line["ceiling_us"] / line["kv_bytes"] for line in lines) / len(lines) * TILE_BYTES * grid
    print(f"{len(lines)} lines, {grid} workers; a tile of {TILE_BYTES // 1024} KB takes a worker {tile_us:.2f} us")
    for name, cost in zip(COSTS, fitted):
        print(f"{name:8} {cost:6.2f} us = {cost / tile_us:5.2f} tiles = {TILE_UNITS * cost / tile_us:5.1f} units")
    print(f"left over: {math.sqrt(sum(r * r for r in rest) / len(rest)):.2f} us rms, {max(map(abs, rest)):.2f} us at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
