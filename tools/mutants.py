#!/usr/bin/env python3
"""Mutation runner: breaks one thing at a time and demands that a test notices.

Each entry of tests/mutants/mutants.json replaces one exact piece of text. The repository is copied to build-mutants/,
so the working tree is never touched, and one build folder per preset is kept there: a mutant costs what its change
makes the compiler redo. A mutant that does not compile is an error, not a success, and so is one whose text is not
found exactly once. The unbroken code must pass the same test first.

Usage: mutants.py [--only REGEX] [--quick] [--list]
"""
import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build-mutants"
COPIED = ["CMakeLists.txt", "CMakePresets.json", "bench", "cli", "cmake", "examples", "include", "integrations", "src", "tests", "tools", "LICENSE"]
TEST_TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    find: str
    replace: str
    targets: list  # what to build
    test: list  # command, first word relative to the build folder; must fail
    why: str  # what would go wrong in use
    preset: str = "cpu"
    quick: bool = False  # also part of `make test`
    full_size: bool = False  # what the test's small sizes do not show
    gpu: bool = False  # its test runs on one: passed over where there is none

    def test_key(self):
        return (self.preset, tuple(self.targets), tuple(self.test), self.full_size)


class SetUpError(Exception):
    """The mutation could not be tried: says nothing about the tests."""


def load() -> list:
    entries = json.loads((ROOT / "tests/mutants/mutants.json").read_text())
    return [Mutant(**entry) for entry in entries]


def copy_tree() -> pathlib.Path:
    """Brings the copy up to date, leaving times of unchanged files alone so that the build stays incremental."""
    tree = WORK / "tree"
    wanted = set()
    for top in COPIED:
        source = ROOT / top
        files = [source] if source.is_file() else (f for f in source.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
        for file in files:
            relative = file.relative_to(ROOT)
            wanted.add(relative)
            target = tree / relative
            if not target.exists() or target.read_bytes() != file.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
    for file in [f for f in tree.rglob("*") if f.is_file()]:
        if file.relative_to(tree) not in wanted:
            file.unlink()
    return tree


def run(command: list, log: pathlib.Path, **options) -> int:
    with log.open("a") as out:
        out.write(f"$ {' '.join(map(str, command))}\n")
        out.flush()
        return subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False, **options).returncode


class Runner:
    def __init__(self):
        self.tree = copy_tree()
        self.baseline = {}

    def build_folder(self, preset: str) -> pathlib.Path:
        """Configured once per preset. Optimised lightly: mutants are many and tests are short."""
        folder = WORK / preset
        if not (folder / "build.ninja").exists():
            log = WORK / f"{preset}.log"
            command = ["cmake", "--preset", preset, "-B", str(folder), "-DLEAN_WERROR=OFF", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
            if run(command, log, cwd=self.tree) != 0:
                raise SetUpError(f"cannot configure, see {log}")
        return folder

    def build_and_test(self, mutant: Mutant, log: pathlib.Path) -> bool:
        """True if the test passes."""
        folder = self.build_folder(mutant.preset)
        if run(["cmake", "--build", str(folder), "--target", *mutant.targets], log) != 0:
            raise SetUpError(f"does not build, see {log}")
        environment = dict(os.environ, LEAN_TEST_REDUCED="0" if mutant.full_size else "1", GTEST_FAIL_FAST="1",
                           TSAN_OPTIONS="halt_on_error=1")
        command = [str(folder / mutant.test[0]), *mutant.test[1:]]
        try:
            return run(command, log, env=environment, timeout=TEST_TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            return False  # a test that hangs has noticed

    def check_baseline(self, mutant: Mutant) -> None:
        key = mutant.test_key()
        if key not in self.baseline:
            log = WORK / "baseline.log"
            self.baseline[key] = self.build_and_test(mutant, log)
        if not self.baseline[key]:
            raise SetUpError(f"its test fails on the unbroken code, see {WORK / 'baseline.log'}")

    def killed(self, mutant: Mutant) -> bool:
        file = self.tree / mutant.file
        original = file.read_text()
        found = original.count(mutant.find)
        if found != 1:
            raise SetUpError(f"its text occurs {found} times in {mutant.file}, wanted once")
        self.check_baseline(mutant)
        log = WORK / f"{mutant.name}.log"
        log.unlink(missing_ok=True)
        file.write_text(original.replace(mutant.find, mutant.replace))
        try:
            return not self.build_and_test(mutant, log)
        finally:
            file.write_text(original)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names to run, as a regular expression")
    parser.add_argument("--quick", action="store_true", help="those marked quick: part of make test")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    options = parser.parse_args()
    everything = load()
    for stale in [m for m in everything if (ROOT / m.file).read_text().count(m.find) != 1]:  # also those not selected
        print(f"mutant {stale.name}: {stale.file} does not have its text exactly once")
        return 2
    mutants = [m for m in everything if re.search(options.only, m.name) and (m.quick or not options.quick)]
    if not options.list and shutil.which("nvidia-smi") is None:
        for mutant in [m for m in mutants if m.gpu]:
            print(f"mutant {mutant.name}: passed over, needs a GPU")
        mutants = [m for m in mutants if not m.gpu]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}: {mutant.why}")
        return 0

    WORK.mkdir(exist_ok=True)
    runner = Runner()
    passed = failed = 0
    for mutant in sorted(mutants, key=lambda m: (m.preset, m.file)):
        begin = time.monotonic()
        try:
            killed = runner.killed(mutant)
            verdict = "noticed" if killed else f"NOT NOTICED: {mutant.why}; see {WORK / (mutant.name + '.log')}"
        except SetUpError as error:
            killed, verdict = False, f"ERROR: {error}"
        passed, failed = passed + killed, failed + (not killed)
        print(f"mutant {mutant.name}: {verdict} ({time.monotonic() - begin:.0f} s)", flush=True)
    if not mutants:
        print("mutants: none selected")
        return 2
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
