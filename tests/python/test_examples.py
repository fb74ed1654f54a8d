"""The examples that docs/python.md shows run."""

import pathlib
import runpy
import sys

import pytest
from conftest import has

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "python"
NEEDS = {"torch_compile": "torch", "generate": "transformers", "flash_attn": "torch", "flashinfer_decode": "torch", "sdpa": "torch", "jax_decode": "jax"}


@pytest.mark.parametrize("example", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_example(example, capsys, monkeypatch):
    if example in NEEDS:
        pytest.importorskip(NEEDS[example])
    if example == "flashinfer_decode" and not has("pages"):
        pytest.skip("not in this build: pages")
    if example == "generate":
        pytest.importorskip("transformers", minversion="4.57")
    monkeypatch.setattr(sys, "argv", [example])
    runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    assert capsys.readouterr().out.strip()
