"""What differs between array libraries: how an output is made and how a result is handed back.

Reading arrays needs nothing of this: the extension reads DLPack and NumPy's array interface itself.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Optional, Sequence

import numpy as np


class Framework:
    """NumPy, and what every other library starts from."""

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        """An uninitialised array of `like`'s type on its device."""
        return np.empty(shape, like.dtype)

    def empty_float32(self, like: Any, shape: Sequence[int]) -> Any:
        return np.empty(shape, np.float32)

    def output(self, q: Any, v: Any) -> Any:
        """Where the result goes: q's shape with v's last axis."""
        try:
            shape = (*q.shape[:-1], v.shape[-1])
        except (AttributeError, IndexError):
            name, array = ("v", v) if hasattr(q, "shape") else ("q", q)
            raise TypeError(f"{name}: {type(array)} is no array of two axes or more") from None
        return self.empty(q, shape)

    def int32(self, like: Any, values: Sequence[int]) -> Any:
        return np.asarray(values, np.int32)

    def finish(self, result: Any) -> Any:
        """What the caller gets for an array made by empty()."""
        return result

    def stream(self, like: Any) -> Optional[int]:
        """The stream the library works on now, as a cudaStream_t; None when the extension asks by itself."""
        return None


class TorchFramework(Framework):
    @property
    def ops(self) -> Any:
        """lean_attention.torch_ops, imported with the first tensor. Not a cached_property: before Python 3.12 that takes a lock,
        which torch.compile cannot trace."""
        from lean_attention import torch_ops

        return torch_ops

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        return like.new_empty(shape)

    def empty_float32(self, like: Any, shape: Sequence[int]) -> Any:
        return like.new_empty(shape, dtype=sys.modules["torch"].float32)

    def output(self, q: Any, v: Any) -> Any:
        """In q's own strides where it is dense: half the time of new_empty(), and q's layout for what comes next."""
        try:
            if q.shape[-1] == v.shape[-1]:
                return sys.modules["torch"].empty_like(q)
        except (AttributeError, IndexError):
            pass
        return super().output(q, v)

    def int32(self, like: Any, values: Sequence[int]) -> Any:
        torch = sys.modules["torch"]
        return torch.tensor(values, dtype=torch.int32, device=like.device)

    @functools.cached_property
    def _tells_by_itself(self) -> bool:
        """From 2.10 on the extension asks torch for its stream without a call of Python."""
        return hasattr(sys.modules["torch"].Tensor, "__dlpack_c_exchange_api__")

    def stream(self, like: Any) -> Optional[int]:
        if self._tells_by_itself or like.device.type != "cuda":
            return None
        return sys.modules["torch"].cuda.current_stream(like.device).cuda_stream


class CupyFramework(Framework):
    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        return sys.modules["cupy"].empty(shape, like.dtype)

    def empty_float32(self, like: Any, shape: Sequence[int]) -> Any:
        return sys.modules["cupy"].empty(shape, np.float32)

    def int32(self, like: Any, values: Sequence[int]) -> Any:
        return sys.modules["cupy"].asarray(values, np.int32)

    def stream(self, like: Any) -> Optional[int]:
        return sys.modules["cupy"].cuda.get_current_stream().ptr


class JaxFramework(Framework):
    """JAX arrays never change, so the result is written to host memory that becomes one. Arrays with memory on the host only."""

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        if isinstance(like, sys.modules["jax"].core.Tracer) or like.__dlpack_device__()[0] != 1:
            raise TypeError("q: JAX arrays that are traced or on a GPU are taken by lean_attention.jax.decode()")
        return np.empty(shape, like.dtype)

    def finish(self, result: Any) -> Any:
        return sys.modules["jax"].numpy.asarray(result)


NUMPY = Framework()
TORCH = TorchFramework()
_BY_PACKAGE = {"torch": TORCH, "cupy": CupyFramework(), "jax": JaxFramework(), "jaxlib": JaxFramework()}
_BY_TYPE: dict[type, Framework] = {}


def framework_of(array: Any) -> Framework:
    """The framework of an array; NumPy's rules for libraries that are not known (they need `out` on a device)."""
    kind = type(array)
    found = _BY_TYPE.get(kind)
    if found is None:
        packages = (base.__module__.partition(".")[0] for base in kind.__mro__)
        found = _BY_TYPE[kind] = next((_BY_PACKAGE[p] for p in packages if p in _BY_PACKAGE), NUMPY)
    return found
