#!/usr/bin/env python3
"""bench/option_lists.py, and what tools/run_tests.py makes of it: an empty item, or one that nobody knows, is refused by name."""
import argparse
import contextlib
import importlib.util
import io
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))
from option_lists import list_of


def tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Lists(unittest.TestCase):
    def test_items_are_read_in_order(self):
        self.assertEqual(list_of(int)("4,1,4"), [4, 1, 4])
        self.assertEqual(list_of()("a"), ["a"])

    def test_empty_items_are_refused(self):
        for read in (list_of(), list_of(int), list_of(known=("a", "b")), tool("run_tests").presets_in):
            for text in ("a,,b", ",a", "a,", ","):
                with self.subTest(read=read, text=text), self.assertRaises(argparse.ArgumentTypeError):
                    read(text)

    def test_unknown_items_are_named(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--gpus", type=list_of(int))
        parser.add_argument("--ways", type=list_of(known=("one", "two")))
        for arguments, says in ((("--gpus", "1,x"), "--gpus: 'x': "), (("--gpus", "1,,2"), "--gpus: '1,,2' has an empty item"),
                                (("--ways", "one,three"), "--ways: 'three': there are one, two")):
            said = io.StringIO()
            with self.subTest(arguments), contextlib.redirect_stderr(said), self.assertRaises(SystemExit):
                parser.parse_args(arguments)
            self.assertIn(says, said.getvalue())

    def test_no_preset_at_all_is_meant(self):
        self.assertEqual(tool("run_tests").presets_in(""), [])


if __name__ == "__main__":
    unittest.main()
