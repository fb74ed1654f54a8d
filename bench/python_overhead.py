#!/usr/bin/env python3
"""What a call from Python costs on top of the work: host time of the smallest call, by door.

On the CPU: one head of one token on the caller's thread, so that next to nothing is computed; `core` is the extension alone
with the work in it. On a GPU: time until the call returns, the launch in it. The least of many short repetitions is taken.

Usage: python_overhead.py [--calls N] [--json FILE]
"""
import argparse
import json
import platform
import timeit

import numpy as np

import lean_attention
from lean_attention import _core
from lean_attention._frameworks import framework_of


def least_us(call, calls: int) -> float:
    call()
    return min(timeit.repeat(call, number=calls, repeat=400)) / calls * 1e6


def measure(name: str, q, k, v, options, calls: int) -> dict:
    out = lean_attention.decode(q, k, v, options=options)
    framework, arguments = framework_of(q), {"out": out, "options": options}
    rows = {
        "core": lambda: _core.decode(framework, q, k, v, arguments),
        "decode(out=)": lambda: lean_attention.decode(q, k, v, out=out, options=options),
        "decode": lambda: lean_attention.decode(q, k, v, options=options),
    }
    if name.startswith("torch"):
        import torch

        operator, encoded = torch.ops.lean_attention.decode.default, options.encoded
        rows["torch.ops"] = lambda: operator(q, k, v, options=encoded)
        with torch.inference_mode():
            return {"arrays": name} | {door: round(least_us(call, calls), 2) for door, call in rows.items()}
    return {"arrays": name} | {door: round(least_us(call, calls), 2) for door, call in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--json")
    options = parser.parse_args()

    serial = lean_attention.Options(workers=1)
    host = [np.ones(shape, np.float32) for shape in ((1, 1, 8), (1, 1, 1, 8), (1, 1, 1, 8))]
    rows = [measure("numpy", *host, serial, options.calls)]
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None:
        rows.append(measure("torch cpu", *map(torch.from_numpy, host), serial, options.calls))
        if torch.cuda.is_available() and _core.machine()["cuda_built"]:
            device = [torch.from_numpy(x).to("cuda", torch.bfloat16) for x in host]
            rows.append(measure("torch cuda", *device, lean_attention.Options(), options.calls))
    for row in rows:
        print("  ".join(f"{key} {value}" if key == "arrays" else f"{key} {value:.2f} us" for key, value in row.items()))
    if options.json:
        about = {"machine": _core.machine(), "python": platform.python_version(), "torch": getattr(torch, "__version__", None)}
        with open(options.json, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row | about) + "\n" for row in rows)


if __name__ == "__main__":
    main()
