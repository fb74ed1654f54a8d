#!/usr/bin/env python3
"""What a segment, a merge and a second level of merging cost on a GPU, from lines of `lean bench --backend cuda --out FILE`: to
hold cost_model() in src/backends/cuda/kernel_config.hpp against.

A line says how many segments the busiest worker had, how many workers share an output, and how many work at all. What the call takes
beyond the pure read of the same run is fitted, by least squares:

    us - read = call + segment x (segments - 1) + merge x [some output is shared] + level x [by more than 32 workers]
                + idle x read x (grid - workers) / workers

`idle` is the part of a missing worker's reading that the others cannot take over: 1 where each reads as fast as it can, 0 where the
memory is the limit whoever asks. Lines count of the rows and schedules asked for, where nearly all multiprocessors work.

Usage: fit_cost_model.py FILE... [--rows PATTERN] [--impls lean ...]
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
COSTS = ("call", "segment", "merge", "level", "idle")


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


def terms(line: dict, grid: int) -> list[float]:
    idle = line["ceiling_us"] * (grid - line["workers"]) / line["workers"]
    return [1.0, line["worker_segments"] - 1.0, float(line["contributors"] > 1), float(line["contributors"] > ONE_LEVEL), idle]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--rows", default="^flat", help="regular expression that is searched for in the rows' ids")
    parser.add_argument("--impls", default=["lean"], nargs="+")
    options = parser.parse_args()

    lines = [json.loads(text) for path in options.files for text in path.read_text().splitlines()]
    lines = [line for line in lines if line.get("us") and line.get("worker_tiles") and re.search(options.rows, line["row"])
             and line["impl"] in options.impls]
    # Of one tile: steps of many outputs have two workers on a multiprocessor, and tiles of half the tokens.
    tile = max((line.get("tile_bytes", 0) for line in lines), default=0)
    lines = [line for line in lines if line.get("tile_bytes", 0) == tile]
    grid = max((line["workers"] for line in lines), default=0)
    lines = [line for line in lines if line["workers"] >= BUSY * grid]
    if len(lines) < 2 * len(COSTS):
        print(f"fit_cost_model: {len(lines)} lines are too few", file=sys.stderr)
        return 1

    rows = [terms(line, grid) for line in lines]
    beyond_read = [line["us"] - line["ceiling_us"] for line in lines]
    columns = range(len(COSTS))
    fitted = solve([[sum(row[i] * row[j] for row in rows) for j in columns] for i in columns],
                   [sum(row[i] * us for row, us in zip(rows, beyond_read)) for i in columns])
    rest = [us - sum(a * b for a, b in zip(fitted, row)) for row, us in zip(rows, beyond_read)]

    tile_us = sum(line["ceiling_us"] / line["kv_bytes"] for line in lines) / len(lines) * TILE_BYTES * grid
    print(f"{len(lines)} lines, {grid} workers; a tile of {TILE_BYTES // 1024} KB takes a worker {tile_us:.2f} us")
    for name, cost in zip(COSTS[:-1], fitted):
        print(f"{name:8} {cost:6.2f} us = {cost / tile_us:5.2f} tiles = {TILE_UNITS * cost / tile_us:5.1f} units")
    print(f"{COSTS[-1]:8} {fitted[-1]:6.2f} of a missing worker's reading")
    print(f"left over: {math.sqrt(sum(r * r for r in rest) / len(rest)):.2f} us rms, {max(map(abs, rest)):.2f} us at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
