#!/usr/bin/env python3
"""Checks the table of promises in docs/testing.md against the tests.

- Ids stand in order and none is left out; every id in a test's name has a row.
- Every row names a test that exists: `Suite.Name` of C++, a CTest name of `tests/packaging`, a file of `tests/`, `file:test`;
  or says that mutants hold it.
- One of them carries the row's id or is a Python file, so that a promise is found by its id.
- One of them runs without a GPU, or the promise begins with "on a GPU alone".

Usage: check_promises.py [REPOSITORY_ROOT]; prints every fault and exits non-zero if there is one.
"""
import pathlib
import re
import sys

DOCUMENT = "docs/testing.md"
ROW = re.compile(r"^\| (R\d\d) \| (.+?) \| (.+) \|$", re.M)
NAMED = re.compile(r"`([^`]+)`")
CPP_TEST = re.compile(r"\bTEST(?:_F|_P)?\((\w+),\s*(\w+)\)")
CMAKE_TEST = re.compile(r"NAME ([\w.]+)")
ID_IN_NAME = re.compile(r"(?:^|_)[Rr](\d\d)_")
GPU_ALONE = "on a GPU alone"
GPU_FOLDER = "tests/gpu/"
GPU_FILES = re.compile(r"tests/python/test_(?:cuda\w*|multi_gpu)\.py")


def tests_of(root: pathlib.Path) -> dict[str, str]:
    """Every test by its name, and the file that has it."""
    found = {}
    for file in sorted((root / "tests").rglob("*")):
        path = file.relative_to(root).as_posix()
        if file.suffix == ".cpp":
            found |= {f"{suite}.{name}": path for suite, name in CPP_TEST.findall(file.read_text())}
        elif file.name == "CMakeLists.txt":
            found |= {name: path for name in CMAKE_TEST.findall(file.read_text())}
        elif file.suffix == ".py":
            found[path] = path
            found |= {f"{path}:{name}": path for name in re.findall(r"^\s*def (test_\w+)", file.read_text(), re.M)}
    return found


def ids_of(name: str) -> list[str]:
    return [f"R{number}" for number in ID_IN_NAME.findall(name.rpartition(".")[2].rpartition(":")[2])]


def needs_gpu(path: str) -> bool:
    return path.startswith(GPU_FOLDER) or GPU_FILES.fullmatch(path) is not None


def faults_of_row(row: str, promise: str, held_by: str, tests: dict[str, str]):
    named = NAMED.findall(held_by)
    for name in named:
        if name not in tests:
            yield f"{row}: {name}: no such test"
    known = [name for name in named if name in tests]
    if not known:
        yield f"{row}: names no test"
        return
    if "mutants" in held_by:
        return
    if not any(row in ids_of(name) or tests[name].endswith(".py") for name in known):
        yield f"{row}: none of its tests carries the id"
    on_host = any(not needs_gpu(tests[name]) for name in known)
    if on_host == promise.startswith(GPU_ALONE):
        yield f"{row}: a test of it runs without a GPU, though the row says otherwise" if on_host else f"{row}: needs a GPU: say \"{GPU_ALONE}\""


def faults_of(text: str, tests: dict[str, str]):
    rows = ROW.findall(text)
    ids = sorted({row for row, _, _ in rows})
    for number, row in enumerate(ids, 1):
        if row != f"R{number:02}":
            yield f"{row}: follows R{number - 1:02}"
            break
    if [row for row, _, _ in rows] != sorted(row for row, _, _ in rows):
        yield "rows are not in order"
    for row in rows:
        yield from faults_of_row(*row, tests)
    for name in sorted(tests):
        yield from (f"{name}: {of_test} has no row" for of_test in ids_of(name) if of_test not in ids)


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    text = (root / DOCUMENT).read_text()
    tests = tests_of(root)
    faults = list(faults_of(text, tests))
    print(*(f"{DOCUMENT}: {fault}" for fault in faults), sep="\n", end="\n" if faults else "")
    rows = ROW.findall(text)
    print(f"check_promises: {len(rows)} rows, {sum(len(NAMED.findall(held)) for _, _, held in rows)} names, {len(faults)} faults")
    return 1 if faults or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
