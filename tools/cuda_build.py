#!/usr/bin/env python3
"""Builds with the CUDA backend and checks what the compiler says of every kernel.

nvcc is the one on the PATH or under /usr/local/cuda, else tools/setup.sh installs it from PyPI. Each compiled kernel
is printed with its registers and spills; the build fails when a CTA's registers do not fit a multiprocessor, when a
kernel spills more than its row of src/backends/cuda/kernel_rows.hpp allows, or when the library is larger than 30 MB.
Ends with "N passed, M failed": a kernel each, and the library. Kernels compiled before and unchanged keep their lines
in build-cuda/kernels.json.

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

# decode_kernel's template arguments, in their order, and what it was compiled for.
KERNEL = re.compile(r"Compiling entry function '_ZN4lean4cuda\d+(?:exchanging_)?decode_kernelILNS0_12ArchitectureE(\d+)ELNS_5DTypeE(\d)ELi(\d+)ELi(\d+)E"
                    r"LNS0_5ScopeE(\d+)E\w*' for '(\w+)'")
ARGUMENTS = ("architecture", "dtype", "head_dim", "rows", "scope")
SPILLS = re.compile(r"(\d+) bytes spill stores")
REGISTERS = re.compile(r"Used (\d+) registers")


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
    for target in [*options.target, "kernel_table"] if options.target else []:
        command += ["--target", target]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "ptxas info" not in line and "spill stores" not in line:
            print(line, end="", flush=True)
    return lines if process.wait() == 0 else None


def table() -> list[dict]:
    """The rows of src/backends/cuda/kernel_rows.hpp, a kernel each."""
    return json.loads(subprocess.run([BUILD / "bin" / "kernel_table", "--json"], check=True, text=True, stdout=subprocess.PIPE).stdout)


def kernels_in(lines: list[str], rows: list[dict]) -> dict[str, dict]:
    """"sm_90 <name of a row>" -> registers and spilled bytes of every kernel that was compiled."""
    names = {tuple(str(row[argument]) for argument in ARGUMENTS): row["name"] for row in rows}
    found: dict[str, dict] = {}
    kernel = None
    for line in lines:
        if match := KERNEL.search(line):
            *arguments, architecture = match.groups()
            kernel = found.setdefault(f"{architecture} {names[tuple(arguments)]}", {"spills": None})
        elif kernel is not None and kernel["spills"] is None and (match := SPILLS.search(line)):
            kernel["spills"] = int(match.group(1))  # the entry function's own line comes first
        elif kernel is not None and (match := REGISTERS.search(line)):
            kernel["registers"] = int(match.group(1))
            kernel = None
    return found


def verdict(kernel: dict, row: dict) -> str:
    if kernel["spills"] > row["spill_bytes"]:
        return f"spills {kernel['spills']} bytes, {row['spill_bytes']} allowed"
    if kernel["registers"] * row["threads"] > MULTIPROCESSOR_REGISTERS:
        return "registers of the CTAs that share a multiprocessor do not fit it"
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
    rows = {row["name"]: row for row in table()}
    kernels = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    kernels |= kernels_in(lines, list(rows.values()))
    kernels = {name: kernel for name, kernel in kernels.items() if name.partition(" ")[2] in rows}  # others were rows once
    RECORD.write_text(json.dumps(kernels, indent=1, sort_keys=True) + "\n")

    failed = 0
    for name, kernel in sorted(kernels.items()):
        fault = verdict(kernel, rows[name.partition(" ")[2]])
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
