#!/usr/bin/env python3
"""Runs every test that needs a GPU, from binaries that are already built: conformance_tests --backend=cuda, gpu_tests, the Python
tests that need one, and a reduced list of the first two under compute-sanitizer.

Each test of gpu_tests and each file of Python tests has a process of its own that is killed when it hangs, so nothing here waits
for ever. The Python tests are those of the package that --python imports, and skipped where that has none with CUDA. Prints a table,
writes a summary as JSON, ends with "N passed, M failed" alone on the last line, and exits non-zero when M > 0; 77 where
there is no GPU. Needs Python and this tree, so that binaries can be carried to a machine that has no build:

Usage: gpu_test.py [--bin DIR] [--json FILE] [--jobs N] [--seconds N] [--only GROUP,...] [--filter PATTERN] [--python PROGRAM]
       groups: conformance, gpu, python, sanitizer; the pattern is GoogleTest's, for the first two
"""
import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "bench"))
from option_lists import list_of  # noqa: E402

NO_DEVICE = 77
GROUPS = ("conformance", "gpu", "python", "sanitizer")
FINISHED = re.compile(r"^\[ +(OK|FAILED|SKIPPED) +\] (\S+) \((\d+) ms\)$", re.MULTILINE)
STARTED = re.compile(r"^\[ RUN +\] (\S+)$", re.MULTILINE)
COUNT = re.compile(r"^\[=+\] Running (\d+) tests?", re.MULTILINE)
CASES = re.compile(r"^(\d+) cases served, (\d+) refused$", re.MULTILINE)

# Tests that take multiprocessors, count free memory or need most of it: one at a time, with nothing beside them.
ALONE = ("Streams.", "Memory.R19", "Schedule.R52")
TEST_SECONDS = 90  # limit of one test of gpu_tests

# tool: its options, then the tests. racecheck and synccheck see shared memory only; nothing on a GPU checks what CTAs share.
# racecheck does not know bulk copies into shared memory and reports each as a race: it runs where threads copy rows. Nor does it
# follow a lane's arrival at an mbarrier for its warp: it needs binaries in which each lane arrives (--racecheck-bin).
SANITIZED_CONFORMANCE = "Conformance.R02_*:Conformance.R21_Negative*:Conformance.R24_*:Conformance.R25_*"
SANITIZER_RUNS = (
    ("memcheck", (), "gpu_tests", "Sanitized.*"),
    ("memcheck", (), "conformance_tests", SANITIZED_CONFORMANCE),
    ("racecheck", (), "gpu_tests",
     "Sanitized.R18_ExactAllocationsOfShortPages:Sanitized.R18_ExactAllocationsOfThePlainKernel:Sanitized.R04_*"),
    ("synccheck", (), "gpu_tests", "Sanitized.R18_*:Sanitized.R04_*"),
    ("initcheck", (), "gpu_tests", "Sanitized.R14_*:Sanitized.R04_*"),
)
PYTHON_TESTS = ("test_cuda.py", "test_cuda_doors.py", "test_cuda_hf.py", "test_jax.py")
PYTHON_SECONDS = 240  # limit of one file
PYTHON_ASKS = "import pytest, lean_attention._core as core; print(core.machine()['cuda_built'])"
PYTEST_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")

SANITIZER_SECONDS = 240  # limit of one run
SANITIZER_EXIT = 86
SANITIZER_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")


@dataclasses.dataclass
class Run:
    """One process and what it said."""
    name: str
    seconds: float = 0.0
    exit_code: int = 0
    timed_out: bool = False
    output: str = ""


@dataclasses.dataclass
class Tally:
    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""
    failures: list = dataclasses.field(default_factory=list)

    def fail(self, what: str, output: str = "") -> None:
        self.failed += 1
        self.failures.append(what)
        print(f"-- FAILED {what}", flush=True)
        lines = [line for line in output.splitlines() if line.strip()]
        print("\n".join(f"   {line[:400]}" for line in lines[-40:]), flush=True)


def say(text: str) -> None:
    print(f"== {text}", flush=True)


class Runner:
    def __init__(self, folder: pathlib.Path, seconds: int):
        self.folder = folder
        self.end = time.monotonic() + seconds
        libraries = [str(folder), str(folder.parent / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        self.environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, libraries))}

    def has(self, binary: str) -> bool:
        return (self.folder / binary).is_file()

    def run(self, name: str, command: list, limit: float, **environment: str) -> Run:
        """Ends within the limit and within the time left: kills the process and its children."""
        begin = time.monotonic()
        limit = max(1.0, min(limit, self.end - begin))
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                 env=self.environment | environment, start_new_session=True)
        result = Run(name)
        try:
            result.output, _ = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            result.timed_out = True
            os.killpg(child.pid, signal.SIGKILL)
            try:
                result.output, _ = child.communicate(timeout=10)
            except subprocess.TimeoutExpired:  # a process stuck in the driver stays behind
                pass
        result.exit_code = child.returncode if child.returncode is not None else -signal.SIGKILL
        result.seconds = time.monotonic() - begin
        return result

    def gtest(self, binary: str, *options: str) -> list:
        return [str(self.folder / binary), *options]


def count(run: Run, tally: Tally) -> None:
    """Adds the tests of one GoogleTest process; what was running when it ended badly, and what never ran, has failed."""
    failed_before = tally.failed
    finished = {name: (result, int(ms)) for result, name, ms in FINISHED.findall(run.output)}
    starts = [match for match in STARTED.finditer(run.output)]
    how = f"exit code {run.exit_code}"
    if run.timed_out:  # a process runs many tests: what is told is how long the last one had
        last = run.seconds - sum(ms for _, ms in finished.values()) / 1000
        how = f"no end in {max(last, 0):.0f} s of the {run.seconds:.0f} s that its process was given"
    for at, start in enumerate(starts):
        name = start[1]
        end = starts[at + 1].start() if at + 1 < len(starts) else len(run.output)
        result, _ = finished.get(name, (None, 0))
        if result == "OK":
            tally.passed += 1
        elif result == "SKIPPED":
            tally.skipped += 1
        elif result == "FAILED":
            tally.fail(name, run.output[start.end():end])
        else:
            tally.fail(f"{name}: {how}", run.output[start.end():end])
    announced = COUNT.search(run.output)
    missing = int(announced[1]) - len(starts) if announced else 0
    if announced is None and run.exit_code != 0:
        tally.fail(f"{run.name}: {how}", run.output)
    elif missing > 0:
        tally.fail(f"{run.name}: {missing} tests never ran", "")
        tally.failed += missing - 1
    elif run.exit_code != 0 and tally.failed == failed_before:
        tally.fail(f"{run.name}: {how}, though every test passed", run.output[-4000:])


def test_conformance(runner: Runner, jobs: int, pattern: str) -> Tally:
    tally = Tally("conformance")
    begin = time.monotonic()
    say(f"conformance_tests --backend=cuda, {jobs} processes")

    def shard(index: int) -> Run:
        command = runner.gtest("conformance_tests", "--backend=cuda", f"--gtest_filter={pattern}")
        return runner.run(f"conformance_tests, shard {index} of {jobs}", command, 300,
                          GTEST_TOTAL_SHARDS=str(jobs), GTEST_SHARD_INDEX=str(index))

    served = refused = 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for run in pool.map(shard, range(jobs)):
            count(run, tally)
            for cases in CASES.findall(run.output):
                served, refused = served + int(cases[0]), refused + int(cases[1])
    tally.note = f"{served} cases served, {refused} refused"
    if served == 0:
        tally.fail("conformance: no case was served")
    tally.seconds = time.monotonic() - begin
    return tally


def list_tests(runner: Runner, binary: str, pattern: str) -> list:
    listed = runner.run(binary, runner.gtest(binary, "--gtest_list_tests", f"--gtest_filter={pattern}"), 60)
    names, suite = [], ""
    for line in listed.output.splitlines():
        if re.fullmatch(r"\w+\.", line):
            suite = line
        elif suite and line.startswith("  "):
            names.append(suite + line.split()[0])
    return names


def test_gpu(runner: Runner, jobs: int, pattern: str) -> Tally:
    tally = Tally("gpu_tests")
    begin = time.monotonic()
    names = list_tests(runner, "gpu_tests", pattern)
    say(f"gpu_tests: {len(names)} tests, a process each")
    if not names:
        tally.fail("gpu_tests: no tests listed")

    def one(name: str) -> Run:
        return runner.run(name, runner.gtest("gpu_tests", f"--gtest_filter={name}"), TEST_SECONDS)

    def take(run: Run) -> None:
        count(run, tally)
        print(f"   {run.seconds:6.1f} s  {run.name}", flush=True)

    alone = [name for name in names if name.startswith(ALONE)]
    with concurrent.futures.ThreadPoolExecutor(min(jobs, 4)) as pool:
        for run in pool.map(one, [name for name in names if name not in alone]):
            take(run)
    for name in alone:
        take(one(name))
    tally.seconds = time.monotonic() - begin
    return tally


def test_python(runner: Runner, python: str) -> list:
    """A file a process: CUDA contexts, and JAX beside torch.compile's processes, are not shared."""
    asked = runner.run("python", [python, "-c", PYTHON_ASKS], 60)
    if asked.exit_code != 0 or "True" not in asked.output.split():
        why = "has no CUDA" if asked.exit_code == 0 else (asked.output.strip().splitlines() or ["no answer"])[-1]
        return [Tally("python", skipped=len(PYTHON_TESTS), note=f"lean_attention of {python}: {why}: nothing was run")]
    say(f"{python} -m pytest: {len(PYTHON_TESTS)} files")

    def one(name: str) -> Tally:
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", str(ROOT / "tests" / "python" / name)]
        run = runner.run(name, command, PYTHON_SECONDS)
        tally = Tally(f"python {name}", seconds=run.seconds)
        last = next((line for line in reversed(run.output.splitlines()) if PYTEST_COUNT.search(line)), "")
        counts = {what: int(number) for number, what in PYTEST_COUNT.findall(last)}
        tally.passed, tally.skipped = counts.get("passed", 0), counts.get("skipped", 0)
        for at, line in enumerate(re.findall(r"^(?:FAILED|ERROR) (.*)$", run.output, re.MULTILINE)):
            tally.fail(line, run.output if at == 0 else "")
        if run.timed_out or run.exit_code not in (0, 5) and tally.failed == 0:  # 5: no tests, all skipped with their file
            how = f"no end after {run.seconds:.0f} s" if run.timed_out else f"exit code {run.exit_code}"
            tally.fail(f"{name}: {how}", run.output)
        return tally

    with concurrent.futures.ThreadPoolExecutor(len(PYTHON_TESTS)) as pool:
        return list(pool.map(one, PYTHON_TESTS))


def find_sanitizer() -> str:
    path = os.pathsep.join([os.environ.get("PATH", ""), *SANITIZER_PLACES])
    return os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer", path=path) or ""


def test_sanitizer(runner: Runner, racecheck_folder: pathlib.Path) -> list:
    tool = find_sanitizer()
    if not tool:
        return [Tally("compute-sanitizer", skipped=len(SANITIZER_RUNS), note="not installed: nothing was run")]
    say(f"{tool}: {len(SANITIZER_RUNS)} runs")

    def one(entry: tuple) -> Tally:
        name, options, binary, pattern = entry
        folder = racecheck_folder if name == "racecheck" else runner.folder
        if folder is None:
            return Tally(f"{name} {binary}", skipped=1, note="needs --racecheck-bin: docs/testing.md")
        command = [tool, "--tool", name, "--error-exitcode", str(SANITIZER_EXIT), *options, str(folder / binary),
                   f"--gtest_filter={pattern}"]
        environment = {"LEAN_TEST_REDUCED": "1", "LEAN_TEST_BACKEND": "cuda"}
        if name == "racecheck":
            environment["LEAN_TEST_WHOLE_TILES"] = "1"  # tests/gpu/memory_test.cpp says why
        run = runner.run(f"{name} {binary}", command, SANITIZER_SECONDS, **environment)
        tally = Tally(run.name, seconds=run.seconds)
        errors = [line for line in run.output.splitlines() if line.startswith("=========")]
        tally.note = errors[-1].strip("= ") if errors else "no report"
        if run.exit_code == SANITIZER_EXIT:
            tally.fail(f"{run.name}: {tally.note}", "\n".join(errors[:40]))
            tally.passed += len(re.findall(r"^\[ +OK", run.output, re.MULTILINE))
        else:
            count(run, tally)
        return tally

    with concurrent.futures.ThreadPoolExecutor(len(SANITIZER_RUNS)) as pool:
        return list(pool.map(one, SANITIZER_RUNS))


def device() -> dict:
    """Name, driver and memory of the first GPU; empty where there is none."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return {}
    fields = ("name", "driver_version", "memory.total", "compute_cap")
    done = subprocess.run([tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, check=False)
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")] if done.returncode == 0 and done.stdout else []
    return dict(zip(fields, values))


def write_summary(path: pathlib.Path, gpu: dict, tallies: list, seconds: float) -> None:
    summary = {"device": gpu, "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
               "seconds": round(seconds, 1), "passed": sum(t.passed for t in tallies), "failed": sum(t.failed for t in tallies),
               "skipped": sum(t.skipped for t in tallies),
               "groups": [{**dataclasses.asdict(t), "seconds": round(t.seconds, 1)} for t in tallies]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build-cuda" / "bin")
    parser.add_argument("--racecheck-bin", type=lambda folder: pathlib.Path(folder).resolve(),
                        help="gpu_tests built with LEAN_CUDA_EVERY_LANE_ARRIVES; without it racecheck is skipped")
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "bench" / "results" / "gpu_tests.json")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=int, default=470, help="for all of it; what has not run by then has failed")
    parser.add_argument("--only", default=",".join(GROUPS), type=list_of(known=GROUPS))
    parser.add_argument("--filter", default="*")
    parser.add_argument("--python", default=sys.executable, help="whose lean_attention is tested")
    options = parser.parse_args()

    gpu = device()
    if not gpu:
        print("gpu_test: no GPU here (nvidia-smi shows none)")
        return NO_DEVICE
    runner = Runner(options.bin.resolve(), options.seconds)
    missing = [name for name in ("conformance_tests", "gpu_tests") if not runner.has(name)]
    if missing:
        print(f"gpu_test: {options.bin} has no {' and no '.join(missing)}: build the preset cuda, or give --bin")
        return 2
    say(", ".join(gpu.values()))

    begin = time.monotonic()
    tallies = []
    if "conformance" in options.only:
        tallies.append(test_conformance(runner, options.jobs, options.filter))
    if "gpu" in options.only:
        tallies.append(test_gpu(runner, options.jobs, options.filter))
    if "python" in options.only:
        tallies += test_python(runner, options.python)
    if "sanitizer" in options.only:
        tallies += test_sanitizer(runner, options.racecheck_bin)

    say("summary")
    for t in tallies:
        print(f"{t.name:28} {t.passed:5} passed {t.failed:4} failed {t.skipped:4} skipped {t.seconds:5.0f} s  {t.note}")
    write_summary(options.json, gpu, tallies, time.monotonic() - begin)
    passed, failed = sum(t.passed for t in tallies), sum(t.failed for t in tallies)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
