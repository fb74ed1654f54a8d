"""What differs between array libraries: how an output is made and how a result is handed back.

Reading arrays needs nothing of this: the extension reads DLPack and NumPy's array interface itself. It calls int32(),
float32() and on_host() for lengths and scales that are not where the call wants them. A library's class is imported
with its first array.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Optional, Sequence

import numpy as np


class Framework:
    """NumPy, and what every other library starts from."""

    #: lean_attention.torch_ops where calls may have to go through operators.
    ops: Any = None
    #: What the caller gets for an array made by output(); None: that array.
    finish: Optional[Callable[[Any], Any]] = None
    #: Told of the caller's arrays that a call has written to.
    wrote: Optional[Callable[[Sequence[Any]], None]] = None
    #: The stream the library works on now, as a cudaStream_t; None where the extension asks by itself.
    stream: Optional[Callable[[Any], int]] = None

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        """An uninitialised array of `like`'s type on its device."""
        return np.empty(shape, like.dtype)

    def empty_float32(self, like: Any, shape: Sequence[int]) -> Any:
        return np.empty(shape, np.float32)

    def output(self, q: Any, v: Any) -> Any:
        """Where the result goes: q's shape with v's last axis."""
        try:
            shape = (*q.shape[:-1], v.shape[-1])
        except (AttributeError, IndexError, TypeError):
            self._refuse_shapeless(q=q, v=v)
            raise
        return self.empty(q, shape)

    def _refuse_shapeless(self, **arrays: Any) -> None:
        for name, array in arrays.items():
            if hasattr(type(array), "__dlpack__") and not hasattr(array, "shape"):
                raise TypeError(f"{name}: {type(array)} has __dlpack__ and no shape: give out as well")
            if not getattr(array, "shape", ()):
                raise TypeError(f"{name}: {type(array)} is no array of two axes or more")

    def int32(self, like: Any, values: Sequence[int]) -> Any:
        """These numbers on `like`'s device."""
        return np.asarray(values, np.int32)

    def float32(self, like: Any, values: Sequence[float]) -> Any:
        return np.asarray(values, np.float32)

    def on_host(self, array: Any) -> Any:
        """An array of this library copied to the host, which waits for the device."""
        return array


class TorchFramework(Framework):
    def __init__(self) -> None:
        import torch

        from lean_attention import torch_ops

        self._torch = torch
        self.ops = torch_ops
        self.wrote = torch_ops.wrote
        if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):  # before 2.10 the extension cannot ask
            self.stream = self._stream

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        return like.new_empty(shape)

    def empty_float32(self, like: Any, shape: Sequence[int]) -> Any:
        return like.new_empty(shape, dtype=self._torch.float32)

    def output(self, q: Any, v: Any) -> Any:
        """In q's own strides where it is dense: half the time of new_empty(), and q's layout for what comes next."""
        try:
            if q.shape[-1] == v.shape[-1]:
                return self._torch.empty_like(q)
        except (AttributeError, IndexError):
            pass
        return super().output(q, v)

    def int32(self, like: Any, values: Sequence[int]) -> Any:
        return self._torch.tensor(values, dtype=self._torch.int32, device=like.device)

    def float32(self, like: Any, values: Sequence[float]) -> Any:
        return self._torch.tensor(values, dtype=self._torch.float32, device=like.device)

    def on_host(self, array: Any) -> Any:
        return array.cpu()

    def _stream(self, like: Any) -> Optional[int]:
        return self._torch.cuda.current_stream(like.device).cuda_stream if like.device.type == "cuda" else None


class CupyFramework(Framework):
    def __init__(self) -> None:
        import cupy

        self._cupy = cupy

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        return self._cupy.empty(shape, like.dtype)

    def empty_float32(self, like: Any, shape: Sequence[int]) -> Any:
        return self._cupy.empty(shape, np.float32)

    def int32(self, like: Any, values: Sequence[int]) -> Any:
        return self._cupy.asarray(values, np.int32)

    def float32(self, like: Any, values: Sequence[float]) -> Any:
        return self._cupy.asarray(values, np.float32)

    def on_host(self, array: Any) -> Any:
        return self._cupy.asnumpy(array)

    def stream(self, like: Any) -> int:
        return self._cupy.cuda.get_current_stream().ptr


class JaxFramework(Framework):
    """JAX arrays never change, so the result is written to host memory that becomes one. Arrays with memory on the host only."""

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        if isinstance(like, sys.modules["jax"].core.Tracer) or like.__dlpack_device__()[0] != 1:
            raise TypeError("q: JAX arrays that are traced or on a GPU are taken by lean_attention.jax.decode()")
        return np.empty(shape, like.dtype)

    def finish(self, result: Any) -> Any:
        return sys.modules["jax"].numpy.asarray(result)


_NUMPY = Framework()
_CLASSES = {"torch": TorchFramework, "cupy": CupyFramework, "jax": JaxFramework, "jaxlib": JaxFramework}
_BY_PACKAGE: dict[str, Framework] = {}
_BY_TYPE: dict[type, Framework] = {np.ndarray: _NUMPY}


def framework_of(array: Any) -> Framework:
    """The framework of an array; NumPy's rules for libraries that are not known (they need `out` on a device)."""
    return _BY_TYPE.get(type(array)) or _first_of(type(array))


def _first_of(kind: type) -> Framework:
    packages = [base.__module__.partition(".")[0] for base in kind.__mro__]
    package = next((p for p in packages if p in _CLASSES), None)
    if package is None:
        framework = _NUMPY
    else:
        if package not in _BY_PACKAGE:
            _BY_PACKAGE[package] = _CLASSES[package]()
        framework = _BY_PACKAGE[package]
    _BY_TYPE[kind] = framework
    return framework
