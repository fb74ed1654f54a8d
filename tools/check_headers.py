#!/usr/bin/env python3
"""Checks that every header of include/ and src/ compiles alone, and twice in one file; lean.h as C99 too.

Headers named *-inl.hpp are included once per instruction set by Highway and have no meaning alone.
Usage: check_headers.py [REPOSITORY_ROOT] [--cxx g++] [--cc gcc] [--jobs N]
"""
import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys

WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wsign-conversion", "-Werror"]


def compile_alone(root: pathlib.Path, header: str, command: list) -> str:
    """Compiler output for a source that holds only this header, twice; empty when clean."""
    source = f'#include "{header}"\n#include "{header}"\n'
    full = command + WARNINGS + ["-fsyntax-only", "-I", str(root / "include"), "-I", str(root / "src"), "-"]
    done = subprocess.run(full, input=source, text=True, capture_output=True, check=False)
    return "" if done.returncode == 0 else done.stderr


def jobs_for(root: pathlib.Path, cxx: str, cc: str):
    """Yields (header, command) for everything to compile."""
    for folder in ("include", "src"):
        for path in sorted((root / folder).rglob("*.h*")):
            header = path.relative_to(root / folder).as_posix()
            if header.endswith("-inl.hpp") or header.startswith("backends/cuda/"):
                continue
            yield header, [cxx, "-std=c++20", "-x", "c++"]
            if header.endswith(".h"):
                yield header, [cc, "-std=c99", "-pedantic", "-x", "c"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", default=".")
    parser.add_argument("--cxx", default="g++")
    parser.add_argument("--cc", default="gcc")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    root = pathlib.Path(options.root).resolve()
    work = list(jobs_for(root, options.cxx, options.cc))
    if not work:
        print(f"check_headers: no headers under {root}")
        return 2
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda job: compile_alone(root, job[0], job[1]), work)
        for (header, command), output in zip(work, results):
            if output:
                failed += 1
                print(f"{header} does not compile alone as {command[1]}:\n{output}")
    print(f"check_headers: {len(work)} compiled, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
