"""What the Python tests share: inputs, and which features this build has."""

from __future__ import annotations

import functools
import importlib.util

import numpy as np
import pytest

import lean_attention


def arrays(batch=2, q_heads=6, kv_heads=2, q_tokens=1, kv_tokens=37, dim=40, value_dim=None, seed=0, dtype=np.float32):
    """q [B, Hq, n_q, d], k [B, Hkv, n_kv, d], v [B, Hkv, n_kv, dv]."""
    random = np.random.default_rng(seed)
    shapes = [(batch, q_heads, q_tokens, dim), (batch, kv_heads, kv_tokens, dim), (batch, kv_heads, kv_tokens, value_dim or dim)]
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


@functools.lru_cache
def has(feature: str) -> bool:
    """Whether the CPU backend does a feature that came after the first version."""
    q, k, v = arrays(batch=1)
    slopes = np.ones(6, np.float32)
    pages = dict(block_table=np.zeros((1, 1), np.int32), seqlens=[1])
    if feature == "fp8":
        import ml_dtypes

        return bool(lean_attention.supports(q.astype(np.float16), *(x.astype(ml_dtypes.float8_e4m3fn) for x in (k, v))))
    arguments = {
        "window": dict(window=(3, 0)),
        "softcap": dict(softcap=2.0),
        "alibi": dict(alibi_slopes=slopes),
        "sinks": dict(sinks=slopes),
        "mask": dict(mask=np.ones((1, 1, 1, 37), bool)),
        "pages": pages,
        "append": dict(append_k=k[:, :, :1].copy(), append_v=v[:, :, :1].copy(), seqlens=np.array([3], np.int32)),
    }[feature]
    return bool(lean_attention.supports(q, k, v, **arguments))


def needs(*features: str):
    """Skips a test where a feature is missing. "fp8" needs ml_dtypes for its arrays too."""
    if "fp8" in features and importlib.util.find_spec("ml_dtypes") is None:
        return pytest.mark.skip(reason="no ml_dtypes")
    missing = [feature for feature in features if not has(feature)]
    return pytest.mark.skipif(bool(missing), reason=f"not in this build: {', '.join(missing)}")
