#!/usr/bin/env python3
"""bench/timeline_data.py: bars and busy shares are what the events say, and their mean is the occupancy of the line."""
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))
import figure_data
import timeline_data

RUN = [0, 0, 0, 0, 4]
TRACKS = [
    {"worker": 0, "processor": 0, "events": [["start", 0], ["stream_begin", 10, *RUN], ["stream_end", 60, *RUN], ["stored", 65, *RUN],
                                              ["merge_begin", 80, *RUN], ["merge_end", 100, *RUN], ["end", 100]]},
    {"worker": 1, "processor": 1, "events": [["start", 5], ["stream_begin", 10, *RUN], ["stream_end", 70, *RUN], ["stored", 80, *RUN], ["end", 80]]},
    {"worker": 2, "processor": 0, "events": []},
]


class TimelineData(unittest.TestCase):
    def test_bars(self):
        self.assertEqual(timeline_data.bars(TRACKS[0]), [["streaming", 10, 60], ["storing", 60, 65], ["merging", 80, 100]])
        self.assertEqual(timeline_data.bars(TRACKS[2]), [])

    def test_busy_steps(self):
        steps = timeline_data.busy_steps(TRACKS, 100)
        self.assertEqual(steps, [[0, 0], [10, 2 / 3], [65, 1 / 3], [100, 0]])
        self.assertAlmostEqual(timeline_data.mean_busy(steps), (55 * 2 + 35) / 300)

    def test_the_committed_recording_adds_up(self):
        lines = figure_data.lines(figure_data.TIMELINE)
        self.assertEqual([line["impl"] for line in lines], ["lean", "lean/fixed_split", "lean/data_parallel"])
        for line in lines:
            self.assertAlmostEqual(timeline_data.mean_busy(timeline_data.busy_steps(line["tracks"], line["ns"])), line["occupancy"], places=9)
            self.assertEqual(sum(line["parts_ns"].values()), line["workers"] * line["ns"])


if __name__ == "__main__":
    unittest.main()
