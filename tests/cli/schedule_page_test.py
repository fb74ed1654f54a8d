#!/usr/bin/env python3
"""The page of `lean schedule --html`: it is whole, it is what docs/schedule-explorer.html holds, and what its JavaScript computes is
what the library computes, share by share, for random batches under every policy.

Usage: schedule_page_test.py LEAN NODE REPOSITORY_ROOT [unittest's arguments]
"""
import html.parser
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import urllib.parse

LEAN, NODE, ROOT = "", "", pathlib.Path()
BATCHES = 120
SCRIPT = """
const schedule = new Function(process.argv[1] + "; return LeanSchedule.schedule;")();
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map(({ batch, policy, workers }) => schedule(batch, policy, workers))));
"""


class Page(html.parser.HTMLParser):
    """Scripts by id, controls and labels, and whatever would be fetched."""

    def __init__(self, text: str):
        super().__init__()
        self.scripts, self.controls, self.labels, self.fetched, self.inside = {}, [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.inside = given.get("id") if tag == "script" else None
        self.fetched += [given[name] for name in ("src", "href", "action") if name in given]
        if tag in ("input", "textarea"):
            self.controls.append(given)
        if tag == "label":
            self.labels.append(given["for"])

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data


def lean(*arguments: str) -> str:
    return subprocess.run([LEAN, "schedule", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def refused(*arguments: str) -> str:
    done = subprocess.run([LEAN, "schedule", *arguments], check=False, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (2, ""), done
    return done.stderr


def random_case(seed: int) -> dict:
    """A batch and a machine; lengths of one kind a batch, so that alike, ragged, tiny and empty ones all come."""
    draw = random.Random(seed)
    longest = draw.choice((1, 40, 700, 5000, 40000))
    count = draw.choice((1, 1, 2, 3, 7, 16, 40))
    lengths = [draw.randint(0, longest) for _ in range(count)]
    if draw.random() < 0.4:
        lengths = [longest] * count
    kv_heads = draw.choice((1, 2, 3, 8))
    return {"lengths": lengths, "kv_heads": kv_heads, "group": draw.choice((1, 4, 12, 40)), "head_dim": draw.choice((64, 80, 128, 256)),
            "workers": draw.choice((1, 2, 7, 24, 108, 132, 500))}


def options_of(case: dict) -> list:
    return ["--lens", ",".join(map(str, case["lengths"])), "--kv-heads", str(case["kv_heads"]), "--q-heads", str(case["kv_heads"] * case["group"]),
            "--head-dim", str(case["head_dim"]), "--workers", str(case["workers"])]


POLICIES = {
    "lean": {"kind": "lean"},
    "fixed-split": {"kind": "fixed_split"},
    "fixed-split:5": {"kind": "fixed_split", "splits": 5},
    "data-parallel": {"kind": "data_parallel"},
    "fixed-chunk": {"kind": "fixed_chunk"},
    "fixed-chunk:300": {"kind": "fixed_chunk", "chunk_tokens": 300},
}
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
# What a person does to the page, and what stands on it then.
POKED = """<script>
const found = [];
function set(id, value) {
  const control = document.getElementById(id);
  control.value = value;
  control.dispatchEvent(new Event("input"));
  found.push({ id, value, said: document.getElementById("said").textContent, error: document.getElementById("error").textContent,
    invalid: control.getAttribute("aria-invalid"), requests: document.getElementById("requests").value,
    picture: document.getElementById("lean-picture").getAttribute("aria-label"), range: document.getElementById("workers-range").value });
}
set("workers", "7"); set("kv_heads-range", "3"); set("workers", "0"); set("workers", "7"); set("lengths", "1000,x"); set("lengths", "2x1k,37");
set("percent", "200");
document.body.innerHTML = "<pre id=found>" + encodeURIComponent(JSON.stringify(found)) + "</pre>";
</script></body>"""
COMPARED = ("policy", "workers", "plan", "summary", "shares")


class Schedules(unittest.TestCase):
    def computed(self, page: Page, cases: list) -> list:
        done = subprocess.run([NODE, "-e", SCRIPT, page.scripts["schedule"]], input=json.dumps(cases), check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout)

    def test_every_share_is_the_librarys(self):
        pages, cases, expected = [], [], []
        for seed in range(BATCHES):
            options = options_of(random_case(seed))
            page = Page(lean(*options, "--html", "-"))
            batch = json.loads(page.scripts["batch"])
            for name in random.Random(seed).sample(sorted(POLICIES), 3):
                whole = json.loads(lean(*options, "--schedule", name, "--json"))
                pages.append((seed, name, options))
                cases.append({"batch": batch, "policy": POLICIES[name], "workers": batch["workers"]})
                expected.append({key: whole[key] for key in COMPARED})
        computed = self.computed(page, cases)
        for what, ours, theirs in zip(pages, computed, expected):
            with self.subTest(what):
                self.assertEqual({key: ours[key] for key in COMPARED}, theirs)
        # Not vacuous: cuts, whole outputs, chunks and idle workers were among them.
        self.assertGreater(sum(each["summary"]["shared_outputs"] > 0 for each in expected), 50)
        self.assertGreater(sum(each["plan"]["whole_outputs"] for each in expected), 5)
        self.assertGreater(sum(each["plan"]["granularity_tiles"] > 1 for each in expected), 20)
        self.assertGreater(sum(each["plan"]["snap_units"] > 0 for each in expected), 20)
        self.assertGreater(sum(each["summary"]["busy_workers"] < each["workers"] for each in expected), 20)

    def test_a_gpus_cost_model_keeps_every_tile_once(self):
        """`lean schedule` has the CPU's model; with the GPU's (src/backends/cuda/kernel_config.hpp) lining up gives workers up."""
        model = {"tile_units": 16, "free_rows": 16, "row_units": 0, "segment_units": 8, "min_worker_tiles": 1, "sliver_tiles": 1,
                 "align_percent": 5, "whole_percent": 20, "align_units": 48, "short_tiles": 6, "spare_tiles": 48,
                 "unshared_tiles": 2}
        drawn = [random_case(seed) for seed in range(60)]
        cases = [{"batch": {key: case[key] for key in ("lengths", "kv_heads", "group")} | {"tile_tokens": 128, "cost_model": model},
                  "policy": POLICIES["lean"], "workers": case["workers"]} for case in drawn]
        page = Page(lean("--html", "-", "--workers", "2"))
        for case, result in zip(cases, self.computed(page, cases)):
            owned = sorted((s["sequence"], s["kv_head"], tile) for share in result["shares"] for s in share["segments"]
                           for tile in range(s["tile_begin"], s["tile_end"]))
            lengths, heads = case["batch"]["lengths"], case["batch"]["kv_heads"]
            self.assertEqual(owned, [(b, h, t) for b, tokens in enumerate(lengths) for h in range(heads) for t in range(max(1, -(-tokens // 128)))])


class Whole(unittest.TestCase):
    def setUp(self):
        self.text = lean("--preset", "conv32", "--workers", "132", "--html", "-")
        self.page = Page(self.text)

    def test_the_documents_page_is_the_commands(self):
        shown = (ROOT / "docs" / "schedule-explorer.html").read_text()
        self.assertTrue(shown == self.text, "lean schedule --preset conv32 --workers 132 --html docs/schedule-explorer.html")

    def test_nothing_is_fetched(self):
        self.assertEqual(self.page.fetched, [])
        for word in ("http:", "https:", "//cdn", "import(", "fetch(", "@import", "url("):
            self.assertNotIn(word, self.text)

    def test_every_control_has_a_name_and_is_native(self):
        self.assertEqual(sorted(self.page.scripts), ["batch", "schedule", "view"])
        for control in self.page.controls:
            self.assertTrue(control["id"] in self.page.labels or control.get("aria-label"), control)
        ids = {control["id"] for control in self.page.controls}
        for name in ("workers", "kv_heads", "requests", "percent"):
            self.assertLessEqual({name, f"{name}-range"}, ids)

    def test_its_scripts_are_javascript(self):
        for name in ("schedule", "view"):
            with tempfile.NamedTemporaryFile("w", suffix=".js") as file:
                file.write(self.page.scripts[name])
                file.flush()
                subprocess.run([NODE, "--check", file.name], check=True)

    def test_what_the_page_cannot_show_is_refused(self):
        for arguments, words in ((("--n-q", "2"), "--n-q = 2: 1 with --html"), (("--window-left", "5"), "--window-left = 5: -1 with --html"),
                                 (("--lens", "1025x1"), "the requests = 1025: up to 1024 with --html"),
                                 (("--lens", "1000x1", "--kv-heads", "64", "--q-heads", "64"), "requests x --kv-heads = 64000: up to 50000"),
                                 (("--q-heads", "3200"), "--q-heads = 3200: up to "), (("--json",), "--html = -: the name of a file with --json"),
                                 (("--svg", "x.svg"), "--html = -: the name of a file with --svg"),
                                 (("--schedule", "data-parallel"), "--schedule and --determinism: as they are by default with --html")):
            self.assertIn("lean schedule: " + words, refused("--html", "-", *arguments))
        self.assertIn("--html = /dev/full: a file that can be written", refused("--html", "/dev/full"))


@unittest.skipUnless(BROWSER, "no chromium here")
class InABrowser(unittest.TestCase):
    def test_controls_change_what_is_said(self):
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder) / "page.html"
            page.write_text(lean("--preset", "conv32", "--workers", "132", "--html", "-").replace("</body>", POKED))
            done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile", "--dump-dom", page.as_uri()],
                                  check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=120)
        found = json.loads(urllib.parse.unquote(re.search(r'id="found">(.*?)<', done.stdout)[1]))
        workers, heads, none, again, wrong, lengths, doubled = found
        self.assertEqual((workers["range"], workers["error"]), ("7", ""))
        self.assertIn("7 of 7 workers busy", workers["said"])
        self.assertIn("32 requests, 96 outputs", heads["said"])
        self.assertEqual((none["error"], none["invalid"]), ('workers = "0": a whole number from 1 to 4096', "true"))
        self.assertEqual((none["said"], again["invalid"], again["error"]), (heads["said"], None, ""))
        self.assertIn('lengths = "x": token counts', wrong["error"])
        self.assertEqual((lengths["requests"], lengths["error"]), ("3", ""))
        told = json.loads(lean("--lens", "2x2k,74", "--kv-heads", "3", "--q-heads", "12", "--workers", "7", "--json"))["summary"]
        self.assertIn(f"3 requests, 9 outputs, {told['tiles']} tiles", doubled["said"])
        self.assertIn(f"longest {told['worker_tiles']['max']} tiles, 7 of 7 workers busy, {told['shared_outputs']} outputs shared", doubled["picture"])


if __name__ == "__main__":
    LEAN, NODE, ROOT = os.path.abspath(sys.argv.pop(1)), sys.argv.pop(1), pathlib.Path(sys.argv.pop(1))
    unittest.main()
