"""bench/ort_cuda.py without a GPU: its models on the CPU, and what it makes of times. And rows of bench/ort_decode.py."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest

for package in ("torch", "onnx", "onnxruntime"):
    pytest.importorskip(package)
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import ort_cuda  # noqa: E402
import ort_decode  # noqa: E402
from ort_models import needs_operators, session_of  # noqa: E402

SPEC = importlib.util.spec_from_file_location("check_results", ROOT / "tools" / "check_results.py")
check_results = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_results)

SMALL = dict(Q_HEADS=4, KV_HEADS=2, HEAD_DIM=16, HIDDEN=32, FEED_FORWARD=48, VOCABULARY=29, Q_WIDTH=64, KV_WIDTH=32)
WEIGHTS = {"qkv": (32, 128), "o": (64, 32), "gate_up": (32, 96), "down": (48, 32), "norm": (32,), "logits": (32, 29)}
CAPACITY, LAYERS = 16, 2


@pytest.fixture
def small(monkeypatch):
    for name, value in {**SMALL, "WEIGHTS": WEIGHTS}.items():
        monkeypatch.setattr(ort_cuda, name, value)


class Cache:
    """Past and present of a model of the benchmark, fed token by token or many at once."""

    def __init__(self):
        random = np.random.default_rng(0)
        self.fixed = {name: (random.standard_normal(shape) * shape[0] ** -0.5).astype(np.float16) for name, shape in WEIGHTS.items()}
        self.fixed["norm"] = np.ones(32, np.float16)
        self.kept = {f"past_{what}_{i}": np.zeros((1, 2, CAPACITY, 16), np.float16) for i in range(LAYERS) for what in ("key", "value")}
        self.total = 0

    def feed(self, rows: np.ndarray, ours: bool) -> np.ndarray:
        self.total += rows.shape[1]
        model = ort_cuda.Step(LAYERS, CAPACITY, True, rows.shape[1]).model()
        session = session_of(model, ours=ours, override=ours)
        lengths = dict(seqlens_k=np.array([self.total - 1], np.int32), total_sequence_length=np.array([self.total], np.int32))
        names = [output.name for output in session.get_outputs()]
        results = dict(zip(names, session.run(None, {"x": rows, **self.fixed, **lengths, **self.kept})))
        self.kept = {name: results[name.replace("past", "present")] for name in self.kept}
        return results["y"].astype(np.float64)


@needs_operators
@pytest.mark.parametrize("ours", [False, True])
def test_a_prompt_ends_in_the_logits_of_its_tokens_one_by_one(small, ours):
    rows = np.random.default_rng(1).standard_normal((1, 7, 32)).astype(np.float16)
    whole, apart, chunks = Cache(), Cache(), Cache()
    at_once = whole.feed(rows, ours)
    for i in range(7):
        last = apart.feed(rows[:, i : i + 1], ours)
    chunks.feed(rows[:, :4], ours)
    for logits in (last, chunks.feed(rows[:, 4:], ours)):
        assert logits.shape == at_once.shape == (1, 1, 29)
        np.testing.assert_allclose(logits, at_once, rtol=0, atol=2e-2 * np.abs(at_once).max())


def faked(lens, capacity, whole, rounds, tokens=1, names=tuple(ort_cuda.SUBJECTS)):
    """Times of a machine on which a layer takes 1 us for each new token and 1 us for each thousand that a new token sees."""
    lines = []
    for name in names:
        us = tokens * (1 + 1e-3 * (max(lens) - tokens / 2)) * (1 if name == "lean" else 2)
        lines.append({"row": "x", "impl": name + "_ort" * (name == "lean"), "lens": lens, "n_q": tokens, "us": us, "us_min": us, "us_max": us,
                      "kv_bytes": 5120 * sum(lens), "whole_step": whole, "device": "none", "date": "2026-01-01", "difference": 0.0})  # fmt: skip
    return lines


def test_a_token_of_output_is_charged_its_eight_of_prompt(monkeypatch):
    monkeypatch.setattr(ort_cuda, "measure", faked)
    generation = ort_cuda.Generation(rounds=1)
    chunks = range(8192, 32768 + 1, 8192)  # all four, of which two are timed
    expected = sum(faked([total], total, True, 1, 8192)[0]["us"] for total in chunks) * ort_cuda.LAYERS / 1e3
    assert generation.prompt_ms(32768)["lean_ort"] == pytest.approx(expected)
    assert generation.prompt_ms(32768)["onnxruntime"] == pytest.approx(2 * expected)
    lines = generation.row([32768, 1024])
    assert [line["impl"] for line in lines] == ["lean_ort", "onnxruntime", "onnxruntime_flash"]
    ours = lines[0]
    assert ours["outputs"] == [4096, 128] and ours["lens"] == [32768 + 2048, 1024 + 64]
    assert ours["row"] == "Phi3m 32k+1x1k fp16 generation"
    share = expected / 4096 + generation.prompt_ms(1024)["lean_ort"] / 128
    assert ours["prompt_ms"] == pytest.approx(share)
    assert ours["token_ms"] == pytest.approx(ours["us"] * ort_cuda.LAYERS / 1e3 + share)
    schema = json.loads((ROOT / "bench" / "results" / "schema.json").read_text())
    for line in lines:
        assert list(check_results.faults(line, schema, schema)) == []
        assert line["token_ms"] > line["prompt_ms"] > 0


def test_reads_are_of_what_a_step_must_read(monkeypatch):
    asked = []

    class Command:
        def read_us(self, read_bytes):
            asked.append(read_bytes)
            return 1.0, None

    rows = [line for whole in (False, True) for line in faked([1024], 1024, whole, 1, names=("lean",))]
    prompt = faked([1024], 1024, True, 1, 1024, names=("lean",))
    ort_cuda.add_reads([*rows, *prompt], Command())
    layer = 2 * (5120 * 7680 + 5120 * 5120 + 5120 * 35840 + 17920 * 5120 + 5120) + 2 * 5120 * 32064 / 40  # weights, in bytes
    assert asked == [5120 * 1024, 5120 * 1024 + layer] and "ceiling_us" not in prompt[0]


@needs_operators
@pytest.mark.parametrize("shape, lens, tokens, name", [("Phi3m", [96], 1, "Phi3m 1x96 fp16"), ("Llama8B", [112], 16, "Llama8B 1x112 fp16 of 16")])
def test_rows_of_single_tokens_and_of_prompts(shape, lens, tokens, name):
    row = ort_decode.measure(shape, lens, tokens, "fp16", threads=1, rounds=1)
    assert (row["row"], row["n_q"], row["q_heads"], row["kv_heads"]) == (name, tokens, *ort_decode.HEADS[shape])
    assert row["kv_bytes"] == 2 * 2 * lens[0] * row["kv_heads"] * 128
    assert 0 < row["difference"] <= ort_decode.LARGEST_DIFFERENCE["fp16"]
    assert row["us_min"] <= row["us"] <= row["us_max"]
