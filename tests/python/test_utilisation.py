"""bench/utilisation.py with a made-up `ncu` on the path: what it asks for, and what its lines hold."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "utilisation.py"
SPEC = importlib.util.spec_from_file_location("check_results", ROOT / "tools" / "check_results.py")
check_results = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_results)

#: Prints what ncu prints of one launch: a name line, a unit line, the values; 66 of 132 multiprocessors' cycles are busy.
NCU = """#!/usr/bin/env python3
import sys
arguments = sys.argv[1:]
open({log!r}, "a").write(" ".join(arguments) + "\\n")
values = {{"gpu__time_duration.sum": "1,200,000", "sm__cycles_active.avg": "1,000", "sm__cycles_elapsed.avg": "2,000",
          "sm__throughput.avg.pct_of_peak_sustained_elapsed": "30", "dram__throughput.avg.pct_of_peak_sustained_elapsed": "91.5",
          "lts__throughput.avg.pct_of_peak_sustained_elapsed": "40", "sm__warps_active.avg.pct_of_peak_sustained_active": "18.75",
          "dram__bytes_read.sum": "4,831,838,208"}}
names = arguments[arguments.index("--metrics") + 1].split(",")
quoted = lambda words: ",".join('"' + word + '"' for word in words)
print("==PROF== Connected to process 1")
if "data-parallel" not in arguments:
    print(quoted(["ID", "Kernel Name", "Grid Size", *names]))
    print(quoted(["", "", "", *("unit" for _ in names)]))
    print(quoted(["0", "void decode_kernel<(Architecture)90, (DType)2>(DeviceCall, TensorMaps)", "(132, 1, 1)", *(values[name] for name in names)]))
"""


@pytest.fixture
def folder(tmp_path):
    for name, text in (("ncu", NCU.format(log=str(tmp_path / "asked"))), ("nvidia-smi", "#!/bin/sh\necho 'NVIDIA H200, 580.159.04'\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "lean").write_text("")
    return tmp_path


def run(folder, *arguments, path=None):
    environment = {**os.environ, "PATH": path or f"{folder}:{os.environ['PATH']}"}
    return subprocess.run([sys.executable, str(SCRIPT), "--lean", str(folder / "lean"), *arguments], env=environment, capture_output=True,
                          text=True, check=False)


def test_a_line_has_shares_and_microseconds(folder):
    out = folder / "results.jsonl"
    done = run(folder, "--rows", "P13 6x48x64k", "--commit", "abc", "--out", str(out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["impl"] for line in lines] == ["lean", "lean/fixed_split", "lean/data_parallel"]
    assert lines[0]["us"] == 1200.0 and lines[0]["multiprocessors"] == 0.5 and lines[0]["memory"] == 0.915 and lines[0]["warps"] == 0.1875
    assert lines[0]["read_bytes"] == 4831838208 and lines[0]["kernel"] == "decode_kernel" and lines[0]["ctas"] == "(132, 1, 1)"
    assert (lines[0]["device"], lines[0]["driver"]) == ("NVIDIA H200", "580.159.04")
    assert done.returncode == 1 and "ended with 0" in lines[2]["note"]  # the made-up ncu knows no data-parallel launch
    good = folder / "good.jsonl"
    good.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    assert not list(check_results.file_faults(good, json.loads((ROOT / "bench" / "results" / "schema.json").read_text())))


def test_clocks_are_left_as_they_are(folder):
    run(folder, "--rows", "R1 128k+63x1k")
    asked = (folder / "asked").read_text().splitlines()
    assert len(asked) == 3 and all("--clock-control none" in line and "--lens 128k,63x1k" in line for line in asked)


def test_bad_arguments_are_named(folder):
    assert "--rows: 'x': there are R1 128k+63x1k" in run(folder, "--rows", "x").stderr
    assert "ncu" in run(folder, path=str(pathlib.Path(sys.executable).parent)).stderr
