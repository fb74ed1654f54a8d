#!/usr/bin/env python3
"""What a person gets to see of the command `lean`: errors of one style, and a failed write that is no success.

Usage: command_test.py LEAN [unittest's arguments]
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
import check_results  # noqa: E402

LEAN = ""
SMALL = ("--lens", "3,0,40", "--q-heads", "4", "--kv-heads", "2", "--head-dim", "8")
BENCH = ("bench", "--kv-mib", "1", "--rounds", "1", "--threads", "1", "--rows", "^uniform b1 h1 g4 d128 fp32")
LENGTHS = "token counts from 0 to 2147483647 with commas between them"


def lean(*arguments: str, **options) -> subprocess.CompletedProcess:
    options = {"stdout": subprocess.PIPE, "cwd": tempfile.gettempdir()} | options
    return subprocess.run([LEAN, *arguments], stderr=subprocess.PIPE, text=True, check=False, **options)


class OneStyle(unittest.TestCase):
    """`lean run: --option = value: what is allowed`, exit code 2."""

    def refused(self, allowed: str, command: str, option: str, value: str) -> None:
        done = lean(command, option, value)
        shown = value or '""'
        with self.subTest(command=command, option=option, value=value):
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertEqual(done.stdout, "")
            self.assertTrue(done.stderr.startswith(f"lean {command}: {option} = {shown}: "), done.stderr)
            self.assertIn(allowed, done.stderr)
            self.assertLess(len(done.stderr), 200)

    def test_numbers(self):
        for value in ("0", "-1", "9999999999999999999999", "12x", "0x10", "1.5", ""):
            self.refused("a whole number from 1 to ", "run", "--head-dim", value)
        for value in ("-1", "nan", "inf", "1e31", "x"):
            self.refused("a number from 0 to 1e+30", "run", "--softcap", value)
        self.refused("0 or a number from 1e-30 to 1e+30", "run", "--softcap", "1e-35")
        for value in ("-1", "0", "nan"):
            self.refused("a number from 0.001 to 1e+09", "bench", "--max-seconds", value)
        self.refused("a whole number from 0 to 18446744073709551615", "run", "--seed", "-1")
        self.refused("a whole number from 0 to 4096", "schedule", "--workers", "4097")
        self.refused("a whole number from 1 to 100000", "demo", "--repeat", "0")

    def test_words(self):
        self.refused("one of fp32, fp16, bf16", "run", "--dtype", "int8")
        self.refused("one of auto, on, off", "run", "--causal", "maybe")
        self.refused("one of cpu, cuda", "run", "--backend", "tpu")
        self.refused("one of a, b, all", "bench", "--tier", "c")
        self.refused("some of paper, models, ragged,", "bench", "--suite", "tier")
        self.refused("lean, fixed-split", "schedule", "--schedule", "")

    def test_lengths(self):
        for value in ("", "x", "-1", "0x10", "x10", "2147483648"):
            self.refused(LENGTHS, "schedule", "--lens", value)
        for value, item in (("1000,0x10", "0x10"), ("1000,", '""')):
            done = lean("schedule", "--lens", value)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn(f"lean schedule: --lens = {item}: {LENGTHS}", done.stderr)

    def test_an_empty_item_of_a_list_is_refused(self):
        for command, option, item in (("bench", "--threads", "1"), ("bench", "--suite", "ragged"), ("run", "--lens", "5"), ("simulate", "--gpu", "h100"),
                                      ("simulate", "--coefficients", "memory_share=0.9")):
            for value in (f"{item},,{item}", f",{item}", f"{item},"):
                done = lean(command, option, value)
                with self.subTest(command=command, option=option, value=value):
                    self.assertEqual((done.returncode, done.stdout), (2, ""))
                    self.assertTrue(done.stderr.startswith(f'lean {command}: {option} = "": '), done.stderr)
        self.assertIn("--threads = 0x1: a whole number from 1 to ", lean("bench", "--threads", "1,0x1").stderr)

    def test_a_command_that_is_none_is_named(self):
        done = lean("benchmark", "--list")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertEqual(done.stderr, "lean: benchmark: no such command; `lean --help` lists what there is\n")

    def test_values_narrower_than_keys(self):
        for more in (("--value-dim", "5"), ("--latent", "--value-dim", "6"), ("--latent", "--value-dim", "6", "--page-tokens", "16")):
            done = lean("run", *SMALL, "--repeat", "1", "--json", *more)
            self.assertEqual(done.returncode, 0, done.stderr)
            line = lines_of(done.stdout)[0]
            self.assertEqual((line["value_dim"], line.get("values_in_keys", False)), (int(more[more.index("--value-dim") + 1]), "--latent" in more))
        for more in (("--latent",), ("--latent", "--value-dim", "8")):
            done = lean("run", *SMALL, *more)
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertIn("--value-dim = 8: below --head-dim, which is 8, with --latent", done.stderr)
        self.assertIn("values of 512 in the keys", lean("run", "--lens", "64", "--q-heads", "16", "--kv-heads", "1", "--head-dim", "576", "--latent", "--repeat", "1").stdout)

    def test_what_is_of_a_trace_goes_with_one(self):
        for option, value in (("--batch", "3"), ("--pick", "spread")):
            done = lean("schedule", "--lens", "5", option, value)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn("goes with --trace", done.stderr)

    def test_an_empty_value_never_means_as_without_the_option(self):
        for command, option in (("run", "--lens"), ("run", "--preset"), ("run", "--trace"), ("demo", "--trace"), ("demo", "--svg"),
                                ("schedule", "--svg"), ("schedule", "--html"), ("simulate", "--measured"),
                                ("simulate", "--coefficients"), ("bench", "--out"), ("bench", "--rows"), ("bench", "--suite"), ("bench", "--threads"), ("bench", "--peers"), ("bench", "--trace")):
            self.refused("", command, option, "")

    def test_sizes_beyond_64_bits_and_beyond_memory(self):
        for command in ("run", "schedule", "simulate"):
            self.refused("up to 16777216 outputs", command, "--q-heads", "2147483640")
        for command in ("run", "schedule", "simulate"):
            done = lean(command, "--lens", "1048576x2147483647", "--q-heads", "16", "--kv-heads", "16")
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertIn("the requests have more than 2^58 elements of K, or of q", done.stderr)
        done = lean("schedule", "--lens", "2x2147483647", "--page-tokens", "1")
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertIn("--page-tokens = 1: up to 2147483647 pages in all", done.stderr)
        for sizes in (("--lens", "5", "--q-heads", "2147483647", "--kv-heads", "1"), ("--lens", "5", "--n-q", "524288", "--q-heads", "1024")):
            done = lean("run", *sizes)  # q and o count, too
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertRegex(done.stderr, "the tensors need .* or fewer heads")

    def test_options_that_are_none(self):
        for arguments in (("run", "--nonsense"), ("run", "word"), ("run", "--lens"), ("nonsense",), ()):
            done = lean(*arguments)
            with self.subTest(arguments=arguments):
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                who = "lean run" if arguments[:1] == ("run",) else "lean"
                self.assertRegex(done.stderr, rf"^{who}: .*; `{who} --help` lists what there is\n$")


class Writes(unittest.TestCase):
    """A result that nobody got is no success."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def trace(self, text: str) -> str:
        path = self.folder / "trace.csv"
        path.write_text(text)
        return str(path)

    def test_stdout_that_is_full(self):
        for arguments in (("run", *SMALL, "--json"), ("run", *SMALL), ("schedule", *SMALL), ("schedule", *SMALL, "--svg", "-"),
                          ("schedule", *SMALL, "--html", "-"), ("simulate", *SMALL), ("bench", "--list"), ("--help",), ("run", "--help"), ("--version",)):
            with self.subTest(arguments=arguments), open("/dev/full", "w") as full:
                done = lean(*arguments, stdout=full)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertRegex(done.stderr, r"(?m)^lean.*stdout")

    def test_out_that_is_full(self):
        done = lean(*BENCH, "--out", "/dev/full")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("lean bench: --out = /dev/full: a file that can be written (No space left on device)", done.stderr)

    def test_bytes_that_are_no_text_cost_no_result(self):
        done = lean(*BENCH, "--json", "--commit", "a\udcff")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual({json.loads(line)["commit"] for line in done.stdout.splitlines()}, {"a\ufffd"})

    def test_svg_that_is_full(self):
        done = lean("schedule", *SMALL, "--svg", "/dev/full")
        self.assertEqual(done.returncode, 2)
        self.assertIn("lean schedule: --svg = /dev/full: a file that can be written (No space left on device)", done.stderr)
        done = lean("demo", "--trace", self.trace("ContextTokens\n5\n70\n"), "--repeat", "1", "--svg", "/dev/full")
        self.assertEqual(done.returncode, 2)
        self.assertIn("read bandwidth", done.stdout)  # what was computed is shown
        self.assertNotIn("Wrote", done.stdout)

    def test_the_demo_refuses_before_it_computes(self):
        done = lean("demo", "--svg", str(self.folder / "none" / "x.svg"))
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("x.svg: a file that can be written (No such file or directory)", done.stderr)
        self.assertNotIn("making", done.stderr)

    def test_the_demo_says_what_its_table_shows(self):
        svg = self.folder / "demo.svg"
        arguments = ("demo", "--trace", self.trace("ContextTokens\n5\n700\n"), "--repeat", "1", "--backend", "cpu", "--svg", str(svg))
        done = lean(*arguments, "--workers", "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("With 1 worker every schedule is balanced", done.stdout)
        self.assertIn("The column for 132 workers is\nthe point: ", done.stdout)
        self.assertIn(f"Wrote {svg}", done.stdout)
        self.assertIn("Next: ", done.stdout)
        ElementTree.parse(svg)
        self.assertIn("balance is what sets the times apart on 7 workers: lean ", lean(*arguments, "--workers", "7").stdout)

    def test_a_dash_is_stdout(self):
        done = lean("schedule", *SMALL, "--svg", "-", cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(ElementTree.fromstring(done.stdout).tag.endswith("svg"))
        for arguments in (("schedule", *SMALL, "--json", "--svg", "-"), ("demo", "--svg", "-"), ("bench", "--out", "-")):
            refused = lean(*arguments, cwd=self.folder)
            self.assertEqual((refused.returncode, refused.stdout), (2, ""))
            self.assertIn(" = -: the name of a file", refused.stderr)
        self.assertEqual(os.listdir(self.folder), [])


class NoKeys(unittest.TestCase):
    """Requests of which none has a key are computed as those beside others are."""

    def test_run(self):
        for more in ((), ("--layout", "hsd"), ("--layout", "bshd"), ("--page-tokens", "16"), ("--sinks",), ("--n-q", "3"), ("--kv-dtype", "fp8_e4m3")):
            done = lean("run", "--lens", "2x0", "--q-heads", "4", "--kv-heads", "2", "--head-dim", "8", "--repeat", "1", "--json", *more)
            with self.subTest(more=more):
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertTrue(json.loads(done.stdout)["passes"])

    def test_demo(self):
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write("ContextTokens\n0\n")
            file.flush()
            done = lean("demo", "--trace", file.name, "--repeat", "1", "--backend", "cpu", "--svg", os.devnull)
        self.assertEqual(done.returncode, 0, done.stderr)


class Simulations(unittest.TestCase):
    """`lean simulate`: what it says, and what it refuses to say."""

    def simulated(self, *arguments: str) -> dict:
        done = lean("simulate", "--json", *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return {gpu["gpu"]: {each["schedule"]: each for each in gpu["schedules"]} for gpu in json.loads(done.stdout)["gpus"]}

    def test_the_papers_figure(self):
        # 2 x 56 heads on 108 multiprocessors: 4 outputs are left for a second round, which lean has not.
        gpus = self.simulated("--lens", "2x64k", "--q-heads", "56", "--kv-heads", "56", "--head-dim", "64", "--dtype", "fp16", "--gpu", "a100,h200")
        self.assertEqual(list(gpus), ["a100", "h200"])
        a100 = gpus["a100"]
        self.assertGreater(a100["lean/data_parallel"]["us"], 1.5 * a100["lean"]["us"])
        self.assertGreater(a100["lean"]["occupancy"], 0.98)
        self.assertLess(a100["lean/data_parallel"]["occupancy"], 0.6)
        self.assertLess(gpus["h200"]["lean"]["us"], a100["lean"]["us"])
        busy = a100["lean/data_parallel"]["busy"]
        self.assertEqual((busy[0], busy[-1][1]), ([0, 108], 0))
        self.assertIn(4, [workers for _, workers in busy])

    def test_heads_are_divided(self):
        heads = ("--head-dim", "64", "--dtype", "fp16", "--gpu", "a100", "--lens", "4x16k")
        eighth = self.simulated(*heads, "--q-heads", "32", "--kv-heads", "32")
        self.assertEqual(self.simulated(*heads, "--q-heads", "256", "--kv-heads", "256", "--tensor-parallel", "8"), eighth)
        done = lean("simulate", "--tensor-parallel", "3")
        self.assertIn("lean simulate: --tensor-parallel = 3: a number that divides --kv-heads, which is 8", done.stderr)

    def test_the_text_names_what_was_never_measured(self):
        done = lean("simulate", "--lens", "8x4k", "--gpu", "all")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("A100 SXM 80 GB: 108 SMs, 2039 GB/s, 1410 MHz, never measured", done.stdout)
        self.assertIn("H200 SXM 141 GB: 132 SMs, 4800 GB/s, 1980 MHz\n", done.stdout)
        self.assertIn("Predicted, not measured", done.stdout)

    def test_measured_lines(self):
        line = {"row": "r", "impl": "lean", "lens": [1024], "q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bf16", "n_q": 1,
                "us": 7.6, "note": None, "device": "NVIDIA H200"}
        others = [line | change for change in ({"us": None}, {"n_q": 4}, {"kv_dtype": "fp8"}, {"impl": "xqa"}, {"device": "NVIDIA A100"},
                                               {"note": "void"}, {"dtype": "fp32"})]
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(json.dumps(each) + "\n" for each in [*others, line])
            file.flush()
            done = lean("simulate", "--json", "--measured", file.name)
            slow = lean("simulate", "--json", "--measured", file.name, "--coefficients", "flat.call_us=100")
            both = lean("simulate", "--gpu", "h200", "--measured", file.name)
        found = json.loads(done.stdout)
        self.assertEqual([(each["row"], each["us"]) for each in found], [("r", 7.6)])
        self.assertGreater(json.loads(slow.stdout)[0]["predicted_us"], 100)
        self.assertIn("--gpu = h200: no GPU with --measured", both.stderr)

    def test_measured_lines_that_say_nothing_sensible_are_refused_by_name(self):
        line = {"row": "r", "impl": "lean", "lens": [1024], "q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bf16", "us": 7.6,
                "device": "NVIDIA H200"}
        for change, words in (({"kv_heads": 0}, "kv_heads = 0: a whole number from 1 to "), ({"q_heads": 0}, "q_heads = 0: a whole "),
                              ({"q_heads": 7, "kv_heads": 2}, "q_heads = 7: a multiple of kv_heads"), ({"lens": []}, "lens = []: the tokens"),
                              ({"lens": [-1]}, "lens = -1: a whole number from 0"), ({"lens": [1.5]}, "lens = 1.5: a whole "),
                              ({"lens": [2**40]}, "lens = 1099511627776: a whole "), ({"head_dim": 128.7}, "head_dim = 128.7: a whole "),
                              ({"us": 0}, "us = 0: a time above 0"), ({"us": -3}, "us = -3: a time above 0"),
                              ({"q_heads": 2**31 - 1, "kv_heads": 1}, "--q-heads = 2147483647: at most 128 for each kv head")):
            with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
                file.write(json.dumps(line | change) + "\n")
                file.flush()
                done = lean("simulate", "--measured", file.name)
            self.assertEqual(done.returncode, 2, change)
            self.assertIn(words, done.stderr)

    def test_what_was_not_understood_is_refused(self):
        for arguments, words in ((("--n-q", "2"), "--n-q = 2: 1: the model was fitted on decode steps"),
                                 (("--q-heads", "129", "--kv-heads", "1"), "--q-heads = 129: at most 128 for each kv head: "),
                                 (("--gpu", "a100,v100"), "--gpu = v100: all, or some of a100, "),
                                 (("--gpu", ""), '--gpu = "": all, or some of a100, '),
                                 (("--coefficients", "speed=1"), "--coefficients = speed=1: NAME=NUMBER"),
                                 (("--coefficients", "memory_share=0"), "memory_share and worker_gbps above 0"),
                                 (("--measured", "/nothing"), "--measured = /nothing: a file that can be read"),
                                 (("--measured", "/dev/null"), "result files with calls of lean"),
                                 (("--kv-dtype", "fp8_e4m3"), "--kv-dtype = fp8_e4m3: auto"),
                                 (("--head-dim", "100"), "--head-dim = 100: a multiple of 8 up to 256"),
                                 (("--value-dim", "64"), "--value-dim = 64: 0: the model was fitted on values as wide as keys"),
                                 (("--latent", "--head-dim", "576"), "--latent: the model was fitted on values in memory of their own"),
                                 (("--dtype", "fp32"), "--dtype = fp32: fp16 or bf16")):
            done = lean("simulate", *arguments)
            with self.subTest(arguments=arguments):
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertIn(words, done.stderr)


def lines_of(text: str) -> list:
    return [json.loads(line) for line in text.splitlines()]


def listed(*arguments: str) -> list:
    done = lean("bench", "--list", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return lines_of(done.stdout)


class Suites(unittest.TestCase):
    """`lean bench`: the list that other programs read, and runs that are cut and gone on with."""

    # Fields of a row that are an option of `lean run`.
    WORDS = {"q_heads": "--q-heads", "kv_heads": "--kv-heads", "head_dim": "--head-dim", "dtype": "--dtype", "layout": "--layout",
             "n_q": "--n-q", "kv_dtype": "--kv-dtype", "page_tokens": "--page-tokens", "window_left": "--window-left",
             "window_right": "--window-right", "softcap": "--softcap", "value_dim": "--value-dim"}
    FLAGS = {"alibi": "--alibi", "sinks": "--sinks", "values_in_keys": "--latent"}
    ABOUT = {"row", "suite", "tier", "missing", "kv_bytes", "lens", "causal"}

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = pathlib.Path(folder.name) / "out.jsonl"

    def bench(self, *arguments: str) -> list:
        done = lean("bench", "--suite", "short", "--rounds", "1", "--out", str(self.out), *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return lines_of(self.out.read_text())

    def arguments_of(self, row: dict) -> list:
        self.assertEqual(set(row) - self.ABOUT - set(self.WORDS) - set(self.FLAGS), set(), row["row"])
        arguments = ["--lens", ",".join(map(str, row["lens"])), "--causal", "on" if row["causal"] else "off"]
        for field, option in self.WORDS.items():
            arguments += [option, str(row[field])] if field in row else []
        return arguments + [option for field, option in self.FLAGS.items() if row.get(field)]

    def test_what_is_listed_is_a_call_of_run(self):
        kinds = {}
        for row in listed("--suite", "all"):
            if row["missing"] is None and row["n_q"] <= 16 and row["head_dim"] < 256:
                kinds.setdefault(str([row.get(field) for field in (*self.WORDS, *self.FLAGS) if "heads" not in field]), row)
        self.assertGreater(len(kinds), 20)
        for row in kinds.values():
            row["lens"] = [min(tokens, 40 + 7 * i) for i, tokens in enumerate(row["lens"][:2])]  # of a test's size
            done = lean("run", "--json", "--repeat", "1", *self.arguments_of(row))
            with self.subTest(row=row["row"]):
                self.assertEqual(done.returncode, 0, done.stderr)
                ran = json.loads(done.stdout)
                fields = (set(row) | set(ran)) & {"lens", "causal", *self.WORDS, *self.FLAGS}
                self.assertEqual({field: ran.get(field) for field in fields}, {field: row.get(field) for field in fields})
                self.assertTrue(ran["passes"])

    def test_both_backends_list_the_same_rows_without_a_gpu(self):
        self.assertEqual(listed("--backend", "cuda", "--suite", "paper,wide"), listed("--suite", "paper,wide"))
        self.assertEqual({row["tier"] for row in listed("--backend", "cuda")}, {"a"})
        cuda, cpu = listed("--backend", "cuda", "--suite", "all"), listed("--suite", "all")
        self.assertEqual(cuda, [row for row in cpu if row["suite"] != "cpu"])
        self.assertEqual({row["suite"] for row in listed("--suite", "features")}, {"features"})
        self.assertEqual({row["suite"] for row in listed()}, {"cpu"})

    def test_rows_that_do_not_fit_are_lines(self):
        lines = self.bench("--row-seconds", "0.001", "--rows", "^short 1")
        self.assertEqual({line["row"] for line in lines}, {row["row"] for row in listed("--suite", "short", "--rows", "^short 1")})
        for line in lines:
            self.assertRegex(line["note"], r"^skipped: expected to take \d+ s, --row-seconds is 0.001$")
            self.assertIsNone(line["us"])
        note = lean("bench", "--suite", "wide", "--rows", "mixed", "--json")
        self.assertEqual(lines_of(note.stdout)[0]["note"], "skipped: this command makes no query lengths that differ in a batch")

    def test_a_run_is_gone_on_with(self):
        rows = ("--rows", "^short [23]x100 ")
        cut = self.bench(*rows, "--max-seconds", "0.001")
        self.assertEqual([line["note"] for line in cut[3:]], 3 * ["skipped: --max-seconds"])
        self.assertEqual({line["suite"] for line in cut}, {"short"})
        whole = self.bench(*rows, "--resume")
        self.assertEqual([line["row"] for line in whole], [line["row"] for line in cut])
        self.assertEqual(whole[:3], cut[:3])  # not measured again
        for line in whole:
            self.assertGreater(line["us"], 0)
            self.assertLessEqual(line["error_ratio"], 1)
        schema = json.loads((ROOT / "bench" / "results" / "schema.json").read_text())
        for line in cut + whole:
            self.assertEqual(list(check_results.faults(line, schema, schema)), [], line)
        text = self.out.read_text().splitlines(keepends=True)
        self.out.write_text("".join(text[:5]) + text[5][:30])  # stopped while it wrote
        again = self.bench(*rows, "--resume")
        self.assertEqual((len(again), again[:3]), (6, whole[:3]))
        self.assertEqual(self.bench(*rows, "--resume"), again)
        self.assertEqual([line["impl"] for line in again], 2 * ["lean", "lean/fixed_split", "lean/data_parallel"])

    def test_another_file_is_not_written_over(self):
        for text in ("notes without an end of line", '{"notes":', "notes\n", '{"row":"r","impl":"lean","threads":"two"}\n'):
            self.out.write_text(text)
            done = lean(*BENCH, "--out", str(self.out), "--resume")
            with self.subTest(text=text):
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn("a result file, to go on with", done.stderr)
                self.assertEqual(self.out.read_text(), text)

    def test_rows_of_other_lengths_are_not_taken_for_these(self):
        rows = ("bench", "--rounds", "1", "--threads", "1", "--rows", "^uniform b1 h1 g4 d128 fp32 bhsd n_q1$", "--out", str(self.out))
        done = lean(*rows, "--kv-mib", "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        text = self.out.read_text()
        done = lean(*rows, "--kv-mib", "2", "--resume")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("a result file of the same --kv-mib and --trace", done.stderr)
        self.assertEqual(self.out.read_text(), text)
        self.assertEqual(lean(*rows, "--kv-mib", "1", "--resume").returncode, 0)

    def test_what_does_not_go_together_is_refused(self):
        for arguments, words in ((("--suite", "cpu", "--backend", "cuda"), "--suite = cpu: goes with --backend cpu"),
                                 (("--suite", "paper", "--tier", "a", "--backend", "cuda"), "only one of --suite and --tier"),
                                 (("--resume",), "--resume goes with --out"), (("--trace", "x.csv"), "--trace goes with --suite ragged"),
                                 (("--tier", "a"), "--tier goes with --backend cuda"), (("--rows", "nothing"), "no row's id"),
                                 (("--row-seconds", "1", "--backend", "cuda"), "--row-seconds goes with --backend cpu"),
                                 (("--kv-mib", "5", "--suite", "models"), "--kv-mib goes with --suite cpu")):
            done = lean("bench", "--list", *arguments)
            with self.subTest(arguments=arguments):
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertIn(words, done.stderr)

    def test_the_list_names_its_rows_by_trace(self):
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write("ContextTokens\n" + "".join(f"{100 + i}\n" for i in range(128)))
            file.flush()
            rows = listed("--suite", "ragged", "--trace", file.name, "--rows", "^ragged trace")
        self.assertEqual([len(row["lens"]) for row in rows], [16, 64, 128])


class Energy(unittest.TestCase):
    def test_its_four_rows(self):
        done = lean("bench", "--energy", "--list", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([(row["row"], row["q_heads"], sum(row["lens"])) for row in rows],
                         [("energy 1x56x128k d64", 56, 131072), ("energy 1x56x512k d64", 56, 524288), ("energy L8B 1x128k", 32, 131072),
                          ("energy R1 128k+63x1k", 32, 131072 + 63 * 1024)])

    def test_its_rows_are_listed_and_chosen_as_others_are(self):
        done = lean("bench", "--energy", "--list", "--rows", "L8B", "--json")
        row = json.loads(done.stdout)
        self.assertEqual((row["row"], row["suite"], row["kv_bytes"], row["missing"]), ("energy L8B 1x128k", "energy", 2 * 8 * 131072 * 128 * 2, None))
        self.assertTrue(lean("bench", "--energy", "--list", "--rows", "L8B").stdout.startswith("energy   energy L8B 1x128k "))
        self.assertIn("no row's id of what was asked for has the pattern", lean("bench", "--energy", "--list", "--rows", "R2").stderr)

    def test_options_of_times_are_refused(self):
        done = lean("bench", "--energy", "--rounds", "3")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertEqual(done.stderr, "lean bench: --rounds does not go with --energy\n")

    @unittest.skipIf(list(pathlib.Path("/sys/class/powercap").glob("intel-rapl:*")), "here a run takes minutes")
    def test_a_machine_without_a_counter_has_lines_with_a_note(self):
        done = lean("bench", "--energy", "--rows", "L8B", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([line["impl"] for line in lines], ["lean", "lean/fixed_split", "lean/data_parallel"])
        for line in lines:
            self.assertIsNone(line["joules_per_call"])
            self.assertEqual(line["note"], "not measured: no energy counter: /sys/class/powercap has no intel-rapl:0")


class Traces(unittest.TestCase):
    def lengths(self, text: str) -> list:
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(text)
            file.flush()
            done = lean("schedule", "--trace", file.name, "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            return [sequence["kv_tokens"] for sequence in json.loads(done.stdout)["sequences"]]

    def test_cells_in_quotes(self):
        for text in ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023,7,1\n2023,300,2\n",
                     '"TIMESTAMP","ContextTokens","GeneratedTokens"\r\n"20,23","7","1"\r\n"a ""b""","300",2\r\n',
                     '\ufeffContextTokens\n7\n300\n'):
            self.assertEqual(self.lengths(text), [7, 300])


if __name__ == "__main__":
    LEAN = os.path.abspath(sys.argv.pop(1))
    unittest.main()
