"""tools/check_promises.py: a row whose test is gone, an id without a row, and a promise that only a GPU's tests hold are faults."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))
from check_promises import faults_of  # noqa: E402

TESTS = {
    "Conformance.R01_Empty": "tests/conformance/lengths_test.cpp",
    "Streams.R02_Told": "tests/gpu/stream_test.cpp",
    "Conformance.Other": "tests/conformance/lengths_test.cpp",
    "tests/python/test_errors.py": "tests/python/test_errors.py",
    "tests/python/test_cuda.py:test_r02_told": "tests/python/test_cuda.py",
}
RIGHT = "| R01 | an empty batch | `Conformance.R01_Empty` |\n| R02 | on a GPU alone: told | `Streams.R02_Told` |\n"


class Promises(unittest.TestCase):
    def faults(self, text: str, tests=TESTS) -> list:
        return list(faults_of(text, tests))

    def test_a_right_table_has_none(self):
        self.assertEqual(self.faults(RIGHT), [])

    def test_every_kind_of_fault_is_named(self):
        for broken, fault in (
            (RIGHT.replace("R01_Empty", "R01_Gone"), "R01: Conformance.R01_Gone: no such test"),
            (RIGHT.replace("`Conformance.R01_Empty`", "none"), "R01: names no test"),
            (RIGHT.replace("Conformance.R01_Empty", "Conformance.Other"), "R01: none of its tests carries the id"),
            (RIGHT.replace("on a GPU alone: ", ""), 'R02: needs a GPU: say "on a GPU alone"'),
            (RIGHT.replace("an empty", "on a GPU alone: an empty"), "R01: a test of it runs without a GPU, though the row says otherwise"),
            (RIGHT.splitlines()[0], "Streams.R02_Told: R02 has no row"),
            (RIGHT.replace("R02 |", "R03 |"), "R03: follows R01"),
        ):
            self.assertIn(fault, self.faults(broken), broken)

    def test_a_python_file_needs_no_id(self):
        self.assertEqual(self.faults(RIGHT + "| R03 | misuse | `tests/python/test_errors.py` |\n"), [])


if __name__ == "__main__":
    unittest.main()
