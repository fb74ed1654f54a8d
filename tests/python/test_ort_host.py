"""examples/onnxruntime_host.cpp: a C++ host that registers the operators, built with the C++ header that the build's C header came with."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import numpy as np
import pytest

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from ort_decoder import decoder  # noqa: E402
from ort_models import OPSET, model_of, needs_operators  # noqa: E402

import lean_attention.ort  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADERS = ROOT / ".venv-onnxruntime"  # tools/onnxruntime_headers.sh
RUNTIMES = sorted(pathlib.Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.1*"))
COMPILER = shutil.which("c++") or shutil.which("g++")

pytestmark = [
    needs_operators,
    pytest.mark.skipif(not (HEADERS / "onnxruntime_cxx_api.h").is_file(), reason="no C++ header of ONNX Runtime"),
    pytest.mark.skipif(not RUNTIMES or COMPILER is None, reason="no library of ONNX Runtime to link, or no compiler"),
]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")
    program, runtime = folder / "onnxruntime_host", folder / "libonnxruntime.so.1"  # by its SONAME
    runtime.symlink_to(RUNTIMES[0])
    source = ROOT / "examples" / "onnxruntime_host.cpp"
    command = [COMPILER, "-std=c++20", "-I", str(HEADERS), str(source), str(runtime), f"-Wl,-rpath,{folder}", "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return program


def run_host(host, model: bytes, folder) -> subprocess.CompletedProcess:
    (folder / "model.onnx").write_bytes(model)
    command = [str(host), str(folder / "model.onnx"), lean_attention.ort.library_path()]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_host_makes_a_session_on_a_model_as_it_is(host, tmp_path):
    done = run_host(host, decoder("gqa"), tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("7 inputs, 5 outputs\n"), done.stdout + done.stderr


def test_a_host_is_told_what_a_node_asks_and_nobody_does(host, tmp_path):
    feeds = {name: np.zeros((1, 2, 3, 8), np.float32) for name in "QKV"}
    done = run_host(host, model_of("Attention", feeds, ["Y"], domain="", opset=OPSET, softmax_precision=11), tmp_path)
    assert done.returncode == 1
    assert "lean_attention: Attention node 'node0': softmax_precision = 11: the softmax is in fp32" in done.stderr
