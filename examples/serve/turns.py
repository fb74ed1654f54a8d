#!/usr/bin/env python3
"""Two servers under the same load in turns, A B B A A B ...: the ratio of their medians, on a machine that is never quiet.

    python turns.py lean=http://127.0.0.1:8000/v1 own=http://127.0.0.1:8001/v1 --turns 6 --load 1 --requests 12

Both serve the same model; one waits while the other is asked the same prompts at the same moments (load.py). A pair of turns
next to each other gives one ratio, so that what slows the machine for a while slows both; printed are each turn with the
machine's load average, and of all pairs the median ratio, with the smallest and the largest. --json FILE keeps every turn.

Where others compute on the same cores, waiting times say more of them than of the servers. With --processes, the servers' own
process ids in their order, what these and their children computed for is compared too: CPU seconds of a turn. Start servers
with one thread then (OMP_NUM_THREADS=1): threads that wait for each other count as computing. Needs psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
from typing import Any

import openai
from load import Request, offer, stream

MEASURED = {"first": "ms to the first token", "gap": "ms from token to token", "rate": "tokens/s", "cpu": "CPU seconds"}


def cpu_seconds(process: int | None) -> float:
    """Of a process and its children, so far."""
    if process is None:
        return math.nan
    import psutil

    root = psutil.Process(process)
    times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def medians(requests: list[Request], seconds: float) -> dict[str, float]:
    """Of one turn."""
    first = [1e3 * (request.tokens[0] - request.begin) for request in requests]
    gaps = [gap for request in requests for gap in request.gaps_ms()]
    rate = sum(len(request.tokens) for request in requests) / seconds
    return {"first": statistics.median(first), "gap": statistics.median(gaps or [0]) or math.nan, "rate": rate}


def ratios(turns: list[dict[str, Any]], names: tuple[str, str], what: str) -> list[float]:
    """first / second of each pair of turns."""
    pairs = [{turn["server"]: turn[what] for turn in turns[i : i + 2]} for i in range(0, len(turns), 2)]
    return [pair[names[0]] / pair[names[1]] for pair in pairs]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs=2, metavar="NAME=URL")
    parser.add_argument("--turns", type=int, default=6, help="of each server")
    parser.add_argument("--load", type=float, default=1.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=12, help="of a turn")
    parser.add_argument("--prompt-words", type=int, default=200, help="at most; half of it at least")
    parser.add_argument("--new-tokens", type=int, default=64, help="2 or more")
    parser.add_argument("--words", default="the of and to in is that it was for on are with as his they at be this from")
    parser.add_argument("--processes", nargs=2, type=int, metavar="PID")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    servers = dict(given.split("=", 1) for given in options.servers)
    clients = {name: openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0) for name, url in servers.items()}
    names = tuple(clients)
    processes = dict(zip(names, options.processes or (None, None)))
    models = {name: (await client.models.list()).data[0].id for name, client in clients.items()}
    for name, client in clients.items():
        await stream(client, models[name], "warm up", 4, Request(0, 2), 0.0)
    turns: list[dict[str, Any]] = []
    for number in range(options.turns):
        options.seed = number  # other prompts in each turn, the same for both
        for name in names if number % 2 == 0 else reversed(names):
            before = cpu_seconds(processes[name])
            requests, seconds = await offer(clients[name], models[name], options.load, options)
            spent = cpu_seconds(processes[name]) - before
            failed = [request.error or "no token" for request in requests if request.error or not request.tokens]
            if failed:
                sys.exit(f"{name}: {failed[0]}")
            turns.append(dict(server=name, machine_load=os.getloadavg()[0], cpu=spent, **medians(requests, seconds)))
    print(f"{'server':>12} {'first, ms':>10} {'token, ms':>10} {'tokens/s':>9} {'CPU, s':>9} {'machine load':>13}")
    for turn in turns:
        print(f"{turn['server']:>12} {turn['first']:10.1f} {turn['gap']:10.2f} {turn['rate']:9.1f} {turn['cpu']:9.2f} "
              f"{turn['machine_load']:13.1f}")  # fmt: skip
    for what, words in MEASURED.items():
        found = [ratio for ratio in ratios(turns, names, what) if not math.isnan(ratio)]
        if not found:
            continue
        print(f"{names[0]} / {names[1]}, {words}: {statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(turns, file)


if __name__ == "__main__":
    asyncio.run(main())
