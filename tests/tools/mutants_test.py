"""tests/mutants/mutants.json against the tree: what a mutant replaces is there, once, though nobody builds it."""

import json
import pathlib
import unittest

ROOT = pathlib.Path(__file__).parents[2]


class Mutants(unittest.TestCase):
    def test_every_mutant_finds_its_text_once(self):
        mutants = json.loads((ROOT / "tests/mutants/mutants.json").read_text())
        self.assertTrue(mutants)
        for mutant in mutants:
            with self.subTest(mutant["name"]):
                self.assertEqual((ROOT / mutant["file"]).read_text().count(mutant["find"]), 1)


if __name__ == "__main__":
    unittest.main()
