"""python -m lean_attention doctor: what is installed, what this machine offers, and whether a call comes out right."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys

import numpy as np

import lean_attention.ort
from lean_attention import _core


def self_test() -> tuple[int, float]:
    """Calls of small ragged batches against float64; returns how many and the worst absolute error in float32."""
    random = np.random.default_rng(0)
    worst = 0.0
    shapes = [(1, 1, 1, 16, 1), (2, 8, 2, 64, 37), (3, 6, 6, 80, 300), (1, 32, 4, 128, 2049)]
    for batch, q_heads, kv_heads, dim, capacity in shapes:
        q = random.standard_normal((batch, q_heads, dim), np.float32)
        k, v = (random.standard_normal((batch, kv_heads, capacity, dim), np.float32) for _ in range(2))
        seqlens = random.integers(0, capacity + 1, batch)
        out = lean_attention.decode(q, k, v, seqlens=seqlens)
        for b, head in np.ndindex(batch, q_heads):
            keys, values = (x[b, head * kv_heads // q_heads, : seqlens[b]].astype(np.float64) for x in (k, v))
            scores = keys @ q[b, head] / np.sqrt(dim)
            weights = np.exp(scores - scores.max(initial=-np.inf))
            expected = weights @ values / weights.sum() if seqlens[b] else np.zeros(dim)
            worst = max(worst, float(np.abs(out[b, head] - expected).max()))
    return len(shapes), worst


def _operators() -> str:
    """Whether the build has the operators for ONNX Runtime (docs/onnxruntime.md)."""
    try:
        lean_attention.ort.library_path()
    except ImportError:
        return "not in this build"
    return "in this build"


def main() -> int:
    machine = _core.machine()
    print(f"lean-attention {lean_attention.__version__}, Python {platform.python_version()}, {platform.machine()}")
    print(f"  isa        {machine['cpu_isa']} (found: {', '.join(machine['cpu_isas'])})")
    print(f"  threads    {machine['threads']}, {machine['executor']}")
    built = "in this build" if machine["cuda_built"] else "not in this build"
    print(f"  cuda       {built}, {machine['cuda_devices']} devices")
    print(f"  onnx ops   {_operators()}")
    for package in ("numpy", "torch", "transformers", "jax", "cupy"):
        found = importlib.util.find_spec(package) is not None
        version = importlib.metadata.version(package) if found and package != "cupy" else "found" if found else "not installed"
        print(f"  {package:<10} {version}")
    calls, worst = self_test()
    ok = worst < 1e-5
    print(f"  self-test  {'ok' if ok else 'FAILED'}: {calls} calls, worst error {worst:.1e}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
