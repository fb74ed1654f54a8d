"""The operators for ONNX Runtime in what is installed: tests of the operators pass over a package that lacks them, this one does not."""

from __future__ import annotations

import ctypes
import importlib.metadata
import pathlib
import re
import subprocess
import sys

import pytest

import lean_attention.ort

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = ROOT / ".venv-onnxruntime" / "onnxruntime_c_api.h"  # tools/setup.sh puts it there, and a wheel is built with it
NAME = "liblean_attention_ort.so"
SYSTEM = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}

with_header = pytest.mark.skipif(not HEADER.is_file(), reason="ONNX Runtime's header was not there for the build")


@pytest.fixture
def wheel() -> set:
    """What the installed wheel holds."""
    try:
        return {str(file) for file in importlib.metadata.files("lean-attention") or []}
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("lean_attention is no installed wheel here")


@with_header
def test_the_wheel_has_the_operators(wheel):
    assert f"lean_attention/{NAME}" in wheel
    assert ctypes.CDLL(lean_attention.ort.library_path()).RegisterCustomOps


@with_header
def test_the_operators_need_nothing_but_the_system(wheel):
    """Neither ONNX Runtime nor a library of the machine that built them."""
    text = subprocess.run(["readelf", "--dynamic", lean_attention.ort.library_path()], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
    assert needed and needed - SYSTEM == set()


def test_the_doctor_says_whether_they_are_there():
    try:
        lean_attention.ort.library_path()
        expected = "in this build"
    except ImportError:
        expected = "not in this build"
    done = subprocess.run([sys.executable, "-m", "lean_attention", "doctor"], capture_output=True, text=True, check=True)
    assert re.search(rf"^  onnx ops   {expected}$", done.stdout, re.MULTILINE)
