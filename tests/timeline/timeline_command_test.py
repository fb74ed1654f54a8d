#!/usr/bin/env python3
"""`lean timeline`: three schedules of one batch, events whose parts add up; and a build without timelines that says so.

Usage: timeline_command_test.py LEAN_WITH_TIMELINE LEAN [unittest's arguments]
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

WITH = WITHOUT = ""
SMALL = ("--lens", "2000,3,40,0", "--q-heads", "2", "--kv-heads", "1", "--head-dim", "16", "--calls", "3")
TWO = (*SMALL, "--workers", "2")


def lean(program: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([program, "timeline", *arguments], capture_output=True, text=True, check=False)


class TimelineCommand(unittest.TestCase):
    def test_a_build_without_timelines_names_the_option(self):
        done = lean(WITHOUT, *TWO)
        self.assertEqual(done.returncode, 2)
        self.assertEqual(done.stdout, "")
        self.assertRegex(done.stderr, r"^lean timeline: this build records no timeline: .*-DLEAN_TIMELINE=ON")

    def test_lines_of_three_schedules(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "lines.jsonl"
            done = lean(WITH, *TWO, "--json", "--out", str(file), "--commit", "abc")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(file.read_text(), done.stdout)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([line["impl"] for line in lines], ["lean", "lean/fixed_split", "lean/data_parallel"])
        for line in lines:
            self.assertEqual((line["workers"], len(line["tracks"]), line["lost_events"], line["commit"]), (2, 2, 0, "abc"))
            self.assertEqual(sum(line["parts_ns"].values()), 2 * line["ns"])
            busy = sum(line["parts_ns"].values()) - line["parts_ns"]["idle"]
            self.assertAlmostEqual(line["occupancy"], busy / (2 * line["ns"]))
            self.assertLessEqual(line["error_ratio"], 1)
            streamed = [event[2:] for track in line["tracks"] for event in track["events"] if event[0] == "stream_begin"]
            tiles = {sequence: sum(end - begin for at, _, _, begin, end in streamed if at == sequence) for sequence in range(4)}
            whole = [max(1, -(-length // line["tile_tokens"])) for length in (2000, 3, 40, 0)]
            self.assertEqual(list(tiles.values()), whole, line["impl"])

    def test_a_file_that_cannot_be_written_is_refused_before_anything_is_recorded(self):
        with tempfile.TemporaryDirectory() as folder:
            for name, why in ((folder, "Is a directory"), (f"{folder}/none/x", "No such file or directory")):
                done = lean(WITH, *TWO, "--out", name)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertEqual(done.stderr, f"lean timeline: --out = {name}: a file that can be written ({why})\n")

    def test_bytes_that_are_no_text_cost_no_result(self):
        done = lean(WITH, *TWO, "--json", "--commit", "a\udcff")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([json.loads(line)["commit"] for line in done.stdout.splitlines()], ["a\ufffd"] * 3)

    def test_the_table(self):
        done = lean(WITH, *TWO)
        self.assertEqual(done.returncode, 0, done.stderr)
        for words in ("occupancy", "streaming", "merging", "lean/fixed_split", "lean/data_parallel"):
            self.assertIn(words, done.stdout)

    def test_more_workers_than_threads_are_said(self):
        done = lean(WITH, *SMALL, "--json", "--workers", "64")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(json.loads(done.stdout.splitlines()[0])["note"], "oversubscribed: 64 workers take turns on ")


if __name__ == "__main__":
    WITH, WITHOUT = sys.argv[1:3]
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
