"""Modules of the peers' names, made of this library's doors; what there is no door for refuses by its name when it is called."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pathlib
import sys
import types
from typing import Any, Callable

import torch

import expected

FOLDER = pathlib.Path(os.environ["LEAN_PEERS_FOLDER"])


class _Missing:
    """A function or class of a peer that has no counterpart here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name}: there is no such door")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")


class _Module(types.ModuleType):
    """Anything that is asked for is there, and refuses."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class NoBackwardPass(Exception):
    """A test compares a gradient that there is none of; what it compared before held."""


class _NoGradient:
    """Takes any operation and printing, until it is compared. `parts`: of tensors that lie in one."""

    def __init__(self, parts: int = 0) -> None:
        self._parts = parts

    @classmethod
    def __torch_function__(cls, *_: Any) -> _NoGradient:
        return cls()

    def unbind(self, dim: int) -> tuple:
        return (self,) * self._parts

    def __getattr__(self, name: str) -> Callable:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def _same(self, *_: Any) -> _NoGradient:
        return self

    def _compare(self, *_: Any) -> bool:
        raise NoBackwardPass

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __getitem__ = _same
    __le__ = __lt__ = __ge__ = __gt__ = __bool__ = _compare  # type: ignore[assignment]


def install() -> None:
    gradients = torch.autograd.grad

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(outputs, torch.Tensor) and not outputs.requires_grad:
            return tuple(_NoGradient(x.shape[-3]) for x in (inputs if isinstance(inputs, tuple) else (inputs,)))
        return gradients(outputs, inputs, *args, **kwargs)

    torch.autograd.grad = grad  # type: ignore[assignment]
    _flash_attention()
    _vllm()
    _flashinfer()


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = _Module(name)
    module.__path__ = []  # type: ignore[attr-defined]  # a package: it may have submodules
    module.__dict__.update(contents)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    return module


def _door(module: str, name: str) -> Any:
    """Of an installed package that may not have it yet."""
    return getattr(importlib.import_module(f"lean_attention.compat.{module}"), name, None) or _Missing(name)


def _without_gradients(function: Callable) -> Callable:
    """The peers' tests compute gradients of their inputs; results here have none."""
    if isinstance(function, _Missing):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


def _of_one_tensor(door: Callable, one_length: bool, *args: Any, **kwargs: Any) -> Any:
    """qkv [..., 3, H, d], or q and kv [..., 2, Hkv, d]. `one_length`: cu_seqlens and max_seqlen serve queries and keys."""
    first, *rest = args
    if first.shape[-3] == 3 and (not rest or not isinstance(rest[0], torch.Tensor) or rest[0].dim() == 1):
        tensors = first.unbind(-3)
        if one_length:
            cu_seqlens, max_seqlen, *rest = rest
            rest = [cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest]
    else:
        tensors, rest = (first, *rest[0].unbind(-3)), rest[1:]
    return door(*tensors, *rest, **kwargs)


def _flash_attention() -> None:
    names = ("flash_attn_with_kvcache", "flash_attn_func", "flash_attn_varlen_func")
    doors = {name: _without_gradients(_door("flash_attn", name)) for name in names}
    for name in ("flash_attn_func", "flash_attn_varlen_func"):  # tensors that lie in one
        door, packed = doors[name], name.replace("_func", "")
        doors[f"{packed}_qkvpacked_func"] = functools.partial(_of_one_tensor, door, "varlen" in name)
        doors[f"{packed}_kvpacked_func"] = functools.partial(_of_one_tensor, door, False)
    _module("flash_attn", **doors)
    _module("flash_attn.flash_attn_interface", **doors, _get_block_size_n=lambda *_: 64, USE_TRITON_ROCM=False)
    _module("flash_attn.layers")
    _module("flash_attn.layers.rotary", apply_rotary_emb=expected.apply_rotary_emb)
    _module("flash_attn_interface", **doors, get_scheduler_metadata=lambda *args, **kwargs: None)
    source = FOLDER / "flash-attention" / "flash_attn" / "bert_padding.py"
    if source.is_file():
        spec = importlib.util.spec_from_file_location("flash_attn.bert_padding", source)
        assert spec is not None and spec.loader is not None
        padding = importlib.util.module_from_spec(spec)
        sys.modules["flash_attn.bert_padding"] = padding
        spec.loader.exec_module(padding)
        pad = padding.pad_input
        padding.pad_input = lambda x, *args: x if isinstance(x, _NoGradient) else pad(x, *args)


def _vllm() -> None:
    """Its copy of flash-attention, of any version."""
    _module("vllm")
    _module("vllm.platforms", current_platform=types.SimpleNamespace(seed_everything=torch.manual_seed))
    _module("vllm.vllm_flash_attn", flash_attn_varlen_func=_without_gradients(_door("flash_attn", "flash_attn_varlen_func")),
            is_fa_version_supported=lambda version: True, fa_version_unsupported_reason=lambda version: "")  # fmt: skip


def _flashinfer() -> None:
    wrappers = (
        "BatchDecodeWithPagedKVCacheWrapper", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper", "MultiLevelCascadeAttentionWrapper", "merge_state", "merge_state_in_place",
        "merge_states", "fast_decode_plan", "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper",
    )  # fmt: skip
    doors = {name: _door("flashinfer", name) for name in wrappers}
    single = {name: _door("flashinfer", name) for name in ("single_decode_with_kv_cache", "single_prefill_with_kv_cache")}
    if os.environ["LEAN_PEERS_SINGLE"] == "torch":
        single = {name: getattr(expected, name) for name in single}
    doors.update(single)
    _module("flashinfer", **doors, append_paged_kv_cache=expected.append_paged_kv_cache,
            get_batch_indices_positions=expected.get_batch_indices_positions, get_seq_lens=expected.get_seq_lens)  # fmt: skip
    for name in ("decode", "prefill", "cascade", "page", "mla"):
        _module(f"flashinfer.{name}", **doors)
    for name in ("jit", "jit.attention", "jit.attention.variants", "jit.utils"):
        _module(f"flashinfer.{name}")
    _module("flashinfer.fp4_quantization")
    _module(
        "flashinfer.utils", get_compute_capability=lambda *_: (9, 0), has_flashinfer_jit_cache=lambda: True,
        is_sm90a_supported=lambda *_: True, GPUArchitectureError=type("GPUArchitectureError", (Exception,), {}),
    )  # fmt: skip
    _module("tests.test_helpers.jit_utils")
    _module("tests.test_helpers.utils_fp4")
