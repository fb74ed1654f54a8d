#!/usr/bin/env python3
"""tools/gpu_test.py: what it makes of the words of processes that pass, fail, crash, hang or never start; no GPU needed."""
import contextlib
import importlib.util
import io
import json
import os
import pathlib
import stat
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
SPEC = importlib.util.spec_from_file_location("gpu_test", ROOT / "tools" / "gpu_test.py")
gpu_test = importlib.util.module_from_spec(SPEC)
sys.modules["gpu_test"] = gpu_test
SPEC.loader.exec_module(gpu_test)

PASSES = """[==========] Running 2 tests from 1 test suite.
[ RUN      ] Streams.One
[       OK ] Streams.One (12 ms)
[ RUN      ] Streams.Two
[  SKIPPED ] Streams.Two (0 ms)
[==========] 2 tests from 1 test suite ran. (12 ms total)
"""
FAILS = """[==========] Running 2 tests from 1 test suite.
[ RUN      ] Streams.One
file.cpp:7: Failure
[  FAILED  ] Streams.One (12 ms)
[ RUN      ] Streams.Two
[       OK ] Streams.Two (3 ms)
[==========] 2 tests from 1 test suite ran. (15 ms total)
[  FAILED  ] Streams.One
"""
CRASHES = """[==========] Running 3 tests from 1 test suite.
[ RUN      ] Streams.One
[       OK ] Streams.One (1 ms)
[ RUN      ] Streams.Two
CUDA error
"""


def counted(output: str, **how) -> gpu_test.Tally:
    tally = gpu_test.Tally("tests")
    with contextlib.redirect_stdout(io.StringIO()):
        gpu_test.count(gpu_test.Run("tests", output=output, **how), tally)
    return tally


class Count(unittest.TestCase):
    def numbers(self, tally) -> tuple:
        return tally.passed, tally.failed, tally.skipped

    def test_what_passed_and_what_was_skipped(self):
        self.assertEqual(self.numbers(counted(PASSES)), (1, 0, 1))

    def test_what_failed_is_named_once(self):
        tally = counted(FAILS, exit_code=1)
        self.assertEqual(self.numbers(tally), (1, 1, 0))
        self.assertEqual(tally.failures, ["Streams.One"])

    def test_a_crash_fails_the_running_test_and_those_that_never_ran(self):
        tally = counted(CRASHES, exit_code=-11)
        self.assertEqual(self.numbers(tally), (1, 2, 0))
        self.assertEqual(tally.failures, ["Streams.Two: exit code -11", "tests: 1 tests never ran"])

    def test_a_hang_says_how_long_the_last_test_had(self):
        tally = counted(CRASHES, exit_code=-9, timed_out=True, seconds=90.0)
        self.assertIn("Streams.Two: no end in 90 s of the 90 s", tally.failures[0])

    def test_no_word_at_all_is_a_failure(self):
        self.assertEqual(counted("cannot open libcudart", exit_code=127).failed, 1)

    def test_an_exit_that_no_test_explains_is_a_failure(self):
        tally = counted(PASSES, exit_code=1)
        self.assertEqual(self.numbers(tally), (1, 1, 1))
        self.assertIn("though every test passed", tally.failures[0])


LISTED = """Memory.
  R18_Pages
  R19_AMillion/0  # GetParam() = 3
Streams.
  One
"""


class WithBinaries(unittest.TestCase):
    """Programs in place of the binaries, of nvidia-smi and of Python."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.path = os.environ["PATH"]
        self.addCleanup(os.environ.__setitem__, "PATH", self.path)
        os.environ["PATH"] = f"{self.folder}{os.pathsep}{self.path}"

    def program(self, name: str, body: str) -> pathlib.Path:
        path = self.folder / name
        path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def gtest(self, name: str, output: str, code: int = 0, tail: str = "") -> None:
        self.program(name, f"listing = '--gtest_list_tests' in sys.argv\n"
                           f"print({LISTED!r} if listing else {output!r}, end='')\nprint({tail!r})\nsys.exit(0 if listing else {code})")

    def main(self, *arguments: str) -> tuple:
        said, before = io.StringIO(), sys.argv
        sys.argv = ["gpu_test.py", "--bin", str(self.folder), "--json", str(self.folder / "out.json"), "--jobs", "2", *arguments]
        try:
            with contextlib.redirect_stdout(said):
                code = gpu_test.main()
        finally:
            sys.argv = before
        return code, said.getvalue()

    def test_tests_are_listed_by_their_whole_names(self):
        self.gtest("gpu_tests", PASSES)
        runner = gpu_test.Runner(self.folder, 60)
        self.assertEqual(gpu_test.list_tests(runner, "gpu_tests", "*"), ["Memory.R18_Pages", "Memory.R19_AMillion/0", "Streams.One"])

    def test_a_process_that_hangs_is_killed(self):
        sleeps = self.program("sleeps", "import time\nprint('[ RUN      ] A.B', flush=True)\ntime.sleep(60)")
        run = gpu_test.Runner(self.folder, 60).run("sleeps", [str(sleeps)], 5)
        self.assertTrue(run.timed_out)
        self.assertIn("A.B", run.output)
        self.assertLess(run.seconds, 30)

    def test_no_gpu(self):
        self.program("nvidia-smi", "sys.exit(9)")
        self.assertEqual(self.main()[0], gpu_test.NO_DEVICE)

    def test_a_whole_run(self):
        self.program("nvidia-smi", "print('NVIDIA H200, 580.1, 143771 MiB, 9.0')")
        self.gtest("conformance_tests", PASSES, tail="7 cases served, 2 refused")
        self.gtest("gpu_tests", FAILS, 1)
        python = self.program("a-python", "print('True' if '-c' in sys.argv else '1 failed, 3 passed, 2 skipped in 1.0s\\nFAILED test_cuda.py::a - x')\n"
                                          "sys.exit(0 if '-c' in sys.argv else 1)")
        os.environ["COMPUTE_SANITIZER"] = str(self.program("sanitizer", f"print('========= ERROR SUMMARY: 1 error')\nsys.exit({gpu_test.SANITIZER_EXIT})"))
        self.addCleanup(os.environ.pop, "COMPUTE_SANITIZER")
        code, said = self.main("--python", str(python))
        self.assertEqual(code, 1)
        summary = json.loads((self.folder / "out.json").read_text())
        groups = {group["name"]: group for group in summary["groups"]}
        self.assertEqual(summary["device"]["name"], "NVIDIA H200")
        self.assertEqual((groups["conformance"]["passed"], groups["conformance"]["note"]), (2, "14 cases served, 4 refused"))
        self.assertEqual((groups["gpu_tests"]["passed"], groups["gpu_tests"]["failed"]), (3, 3))  # a process for each of the three
        self.assertEqual([(g["passed"], g["failed"], g["skipped"]) for n, g in groups.items() if n.startswith("python")],
                         [(3, 1, 2)] * len(gpu_test.PYTHON_TESTS))
        sanitized = [g for n, g in groups.items() if "check" in n]
        self.assertEqual((sum(g["failed"] for g in sanitized), sum(g["skipped"] for g in sanitized)), (4, 1))  # racecheck lacks its build
        self.assertEqual(said.splitlines()[-1], f"{summary['passed']} passed, {summary['failed']} failed")
        self.assertEqual(summary["failed"], 3 + len(gpu_test.PYTHON_TESTS) + 4)

    def test_a_python_without_the_package_is_no_failure(self):
        runner = gpu_test.Runner(self.folder, 60)
        python = self.program("b-python", "sys.exit('ModuleNotFoundError: lean_attention')")
        (tally,) = gpu_test.test_python(runner, str(python))
        self.assertEqual((tally.failed, tally.skipped), (0, len(gpu_test.PYTHON_TESTS)))

    def test_binaries_that_are_not_there_are_named(self):
        self.program("nvidia-smi", "print('NVIDIA H200, 580.1, 143771 MiB, 9.0')")
        code, said = self.main()
        self.assertEqual(code, 2)
        self.assertIn("no conformance_tests and no gpu_tests", said)


if __name__ == "__main__":
    unittest.main()
