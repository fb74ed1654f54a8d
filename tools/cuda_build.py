#!/usr/bin/env python3
"""Builds with the CUDA backend and checks what the compiler says of every kernel.

nvcc is the one on the PATH or under /usr/local/cuda, else tools/setup.sh installs it from PyPI. Each compiled kernel
is printed with its registers and spills; the build fails when a CTA's registers do not fit a multiprocessor, when a
kernel spills more than LIMITS allow it, or when the library is larger than 30 MB. Ends with "N passed, M failed":
a kernel each, and the library. Kernels compiled before and unchanged keep their lines in build-cuda/kernels.json.

Usage: cuda_build.py [--architectures 80-real;90] [--target NAME ...] [--jobs N]
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build-cuda"
RECORD = BUILD / "kernels.json"
LIBRARY_BYTES = 30 << 20
MULTIPROCESSOR_REGISTERS = 65536

# Spilled bytes a kernel may store, by (head_dim, rows), a little above what is compiled: none is the aim. Those of any call lie mostly
# outside the loop over tiles, where what merges chunks and stages queries is called (docs/cuda-backend.md).
STEP_LIMITS = ({(128, 128): 64},
               {(128, 32): 24, (128, 64): 24, (128, 128): 208, (256, 16): 96, (256, 32): 96, (256, 64): 384})
LIMITS = {  # by scope: of 16-bit types, of fp8
    "step": STEP_LIMITS,
    "strided": STEP_LIMITS,
    "tensor": STEP_LIMITS,
    "chunk": ({}, {(128, 16): 24, (256, 16): 96}),
    "any": ({(64, 128): 24, (128, 16): 40, (128, 32): 288, (128, 64): 288, (128, 128): 672,
             (256, 16): 72, (256, 32): 264, (256, 64): 1024},
            {(64, 128): 32, (128, 16): 152, (128, 32): 152, (128, 64): 152, (128, 128): 672,
             (256, 16): 256, (256, 32): 288, (256, 64): 976}),
}

KERNEL = re.compile(r"Compiling entry function '_ZN4lean4cuda13decode_kernelILNS_5DTypeE(\d)ELi(\d+)ELi(\d+)ELNS0_5ScopeE(\d)E\w*' for '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores")
REGISTERS = re.compile(r"Used (\d+) registers")
TYPES = {"1": "f16", "2": "bf16", "3": "fp8"}
SCOPES = ["step", "strided", "tensor", "chunk", "any"]  # kernel_config.hpp's Scope
PRODUCERS = {"step": 1, "strided": 4, "tensor": 4, "chunk": 1, "any": 3}  # warps beside the consumers


def nvcc() -> str:
    """Path of nvcc, installed if need be."""
    return subprocess.run(["tools/setup.sh", "nvcc"], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout.strip().splitlines()[-1]


def build(options: argparse.Namespace) -> list[str] | None:
    """The build's output, or None if it failed."""
    environment = os.environ | {"CUDACXX": nvcc()}
    configure = ["cmake", "--preset", "cuda", "-DLEAN_CUDA_REPORT=ON", f"-DLEAN_CUDA_ARCHITECTURES={options.architectures}"]
    if subprocess.run(configure, cwd=ROOT, env=environment, check=False).returncode != 0:
        return None
    command = ["cmake", "--build", "--preset", "cuda", "--parallel", str(options.jobs)]
    for target in options.target:
        command += ["--target", target]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "ptxas info" not in line and "spill stores" not in line:
            print(line, end="", flush=True)
    return lines if process.wait() == 0 else None


def kernels_in(lines: list[str]) -> dict[str, dict]:
    """Name -> registers, spilled bytes, head_dim and rows of every kernel that was compiled."""
    found: dict[str, dict] = {}
    kernel = None
    for line in lines:
        if match := KERNEL.search(line):
            dtype, head_dim, rows, scope, architecture = match.groups()
            kernel = found.setdefault(f"{architecture} {TYPES[dtype]} d{head_dim} rows {rows} {SCOPES[int(scope)]}",
                                      {"dtype": TYPES[dtype], "head_dim": int(head_dim), "rows": int(rows),
                                       "scope": SCOPES[int(scope)], "spills": None})
        elif kernel is not None and kernel["spills"] is None and (match := SPILLS.search(line)):
            kernel["spills"] = int(match.group(1))  # the entry function's own line comes first
        elif kernel is not None and (match := REGISTERS.search(line)):
            kernel["registers"] = int(match.group(1))
            kernel = None
    return found


def threads(kernel: dict) -> int:
    """Of a CTA: kernel_config.hpp's cta_threads()."""
    return 32 * ((4 if kernel["head_dim"] > 128 else 8) + PRODUCERS[kernel["scope"]])


def verdict(kernel: dict) -> str:
    limits = LIMITS[kernel["scope"]][kernel["dtype"] == "fp8"]
    allowed = limits.get((kernel["head_dim"], kernel["rows"]), 0)
    if kernel["spills"] > allowed:
        return f"spills {kernel['spills']} bytes, {allowed} allowed"
    if kernel["registers"] * threads(kernel) > MULTIPROCESSOR_REGISTERS:
        return "registers of a CTA do not fit a multiprocessor"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", default="80-real;90")
    parser.add_argument("--target", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()

    lines = build(options)
    if lines is None:
        print("0 passed, 1 failed")
        return 1
    kernels = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    kernels = {name: kernel for name, kernel in kernels.items() if "scope" in kernel}  # a record from before there were scopes
    kernels |= kernels_in(lines)
    RECORD.write_text(json.dumps(kernels, indent=1, sort_keys=True) + "\n")

    failed = 0
    for name, kernel in sorted(kernels.items()):
        fault = verdict(kernel)
        failed += bool(fault)
        print(f"{name:31} {kernel['registers']:4} registers {kernel['spills']:5} bytes spilled  {fault}")
    size = max((path.stat().st_size for path in (BUILD / "lib").glob("liblean_attention.so*")), default=0)
    print(f"library {size / 2**20:.1f} MB")
    if not 0 < size <= LIBRARY_BYTES or not kernels:
        failed += 1
    print(f"{len(kernels) + 1 - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
