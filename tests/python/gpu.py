"""What the tests on a GPU share: they are skipped without one, and in a build without the CUDA backend."""

import pytest

torch = pytest.importorskip("torch")

from conftest import arrays  # noqa: E402

from lean_attention import _core  # noqa: E402

if not (torch.cuda.is_available() and _core.machine()["cuda_built"]):
    pytest.skip("no GPU, or a build without the CUDA backend", allow_module_level=True)


def tensors(dtype=torch.bfloat16, dim=64, **sizes):
    """q [B, Hq, n_q, d], k and v [B, Hkv, n_kv, d] on the GPU."""
    return [torch.from_numpy(x).to("cuda", dtype) for x in arrays(dim=dim, **sizes)]


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def name_of(dtype):
    return str(dtype).removeprefix("torch.")
