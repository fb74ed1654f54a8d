#!/usr/bin/env python3
"""A picture of what load.py kept: tokens a second and a client's waiting times over the offered load, a line for each server.

    python plot.py ours=with-lean.json "vLLM's own=without.json" --out load.svg

Needs matplotlib and NumPy. A load in which a request failed is drawn all the same, and named on the standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np

PANELS = {"tokens/s": "tokens/s", "first": "ms to the first token", "gap": "ms from token to token"}


def summary(requests: list[dict[str, Any]]) -> dict[str, float]:
    """Of one load: tokens a second from its begin to its last token, and medians and 99th percentiles in ms."""
    answered = [request for request in requests if request["tokens"] and not request["error"]]
    first = [1e3 * (request["tokens"][0] - request["begin"]) for request in answered]
    gaps = [1e3 * (b - a) for request in answered for a, b in zip(request["tokens"], request["tokens"][1:])]
    seconds = max((request["tokens"][-1] for request in answered), default=float("nan"))
    found = {"tokens/s": sum(len(request["tokens"]) for request in answered) / seconds}
    for name, values in (("first", first), ("gap", gaps)):
        found.update({f"{name} p{share}": float(np.percentile(values or [np.nan], share)) for share in (50, 99)})
    return found


def by_load(requests: list[dict[str, Any]]) -> dict[float, dict[str, float]]:
    loads = sorted({request["load"] for request in requests})
    return {load: summary([request for request in requests if request["load"] == load]) for load in loads}


def draw(servers: dict[str, dict[float, dict[str, float]]], out: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(1, len(PANELS)), PANELS.items()):
        for index, (name, loads) in enumerate(servers.items()):
            for share, style in (("", "-"),) if key == "tokens/s" else ((" p50", "-"), (" p99", ":")):
                values = [found[key + share] for found in loads.values()]
                axes.plot(list(loads), values, style, marker="os^D"[index % 4], color=f"C{index}", label=f"{name}{share}")
        axes.set(xlabel="requests/s offered", ylabel=label, ylim=(0, None))
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=FILE", help="files of load.py --json")
    parser.add_argument("--out", default="load.svg", help="svg, png or pdf by its end")
    options = parser.parse_args()
    servers = {}
    for given in options.servers:
        name, mark, file = given.partition("=")
        if not mark:
            parser.error(f"{given!r}: expected NAME=FILE")
        with open(file) as opened:
            requests = json.load(opened)
        for request in requests:
            if request["error"]:
                print(f"{name}: a request at {request['load']:g}/s failed: {request['error']}", file=sys.stderr)
        servers[name] = by_load(requests)
    draw(servers, options.out)


if __name__ == "__main__":
    main()
