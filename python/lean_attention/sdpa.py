"""PyTorch's scaled_dot_product_attention with this library behind its decode calls, and on a CPU behind its prompts.

enable_sdpa() replaces the flash-attention kernels that PyTorch's own dispatch chooses, by the hook made for it
(torch.nn.attention.register_flash_attention_impl, torch 2.11 and newer), for the CPU and CUDA. Other calls (on a GPU
several queries, is_causal with other than as many keys as queries, dropout, gradients, masks the backend lacks) go on to
PyTorch's kernel. Where the hook is missing, call scaled_dot_product_attention() of this module in place of PyTorch's.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, Optional

import torch

from lean_attention import torch_ops
from lean_attention._accepts import accepts
from lean_attention._decode import decode
from lean_attention._prompts import are_prompts_ours

NAME = "LEAN"


def enable_sdpa() -> None:
    """Decode calls of torch.nn.functional.scaled_dot_product_attention, and on a CPU those of several queries, come here from
    now on, until disable_sdpa().

    Raises:
        RuntimeError: this torch has no hook (before 2.11).
    """
    from torch.nn import attention

    if not hasattr(attention, "register_flash_attention_impl"):
        raise RuntimeError("enable_sdpa() needs torch 2.11 or newer; call lean_attention.sdpa.scaled_dot_product_attention()")
    attention.register_flash_attention_impl(NAME, register_fn=_Registered)
    attention.activate_flash_attention_impl(NAME)


def disable_sdpa() -> None:
    """Gives PyTorch its own kernels back."""
    from torch.nn import attention

    if attention.current_flash_attention_impl() == NAME:
        attention.restore_flash_attention_impl()


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Optional[torch.Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention: decode calls, and on a CPU those of several queries, by this library, others
    by PyTorch.

    Args:
        query: ``[B, Hq, n_q, d]``.
        key, value: ``[B, Hkv, n_kv, d]``; Hkv may be less than Hq with enable_gqa.
        attn_mask: boolean (True: seen) or additive, broadcast to ``[B, Hq, n_q, n_kv]``.
        dropout_p: calls that ask for it go to PyTorch.
        is_causal: query i sees the first i + 1 keys; calls with other than as many keys as queries go to PyTorch.
        scale: None is 1 / sqrt(d).

    Returns:
        ``[B, Hq, n_q, dv]`` in query's type.
    """
    query, key, value, attn_mask = torch_ops.as_autocast(query, key, value, attn_mask)
    grouped = query.dim() != 4 or query.shape[1] == key.shape[1] or enable_gqa
    if grouped and _is_ours(query, key, value, attn_mask, dropout_p, is_causal):
        return decode(query, key, value, mask=_as_4d(attn_mask), causal=is_causal, scale=scale)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _as_4d(mask: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return mask if mask is None else mask[(None,) * (4 - mask.dim())]


def _is_ours(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Optional[torch.Tensor],
    dropout_p: float,
    is_causal: bool,
) -> bool:
    """One query of each sequence, or several on a CPU, and nothing this library lacks. is_causal is top-left there, and so is ours
    where there are as many keys as queries; one query would see one key."""
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4 or dropout_p != 0.0:
        return False
    tokens, keys = query.shape[2], key.shape[2]
    if tokens != 1 and not (query.device.type == "cpu" and are_prompts_ours(query.device, query.dtype, tokens, keys)):
        return False
    if is_causal and (tokens == 1 or tokens != keys or mask is not None):
        return False
    if mask is not None and (mask.dim() > 4 or torch_ops.is_transformed(mask)):
        return False
    if query.device.type not in ("cpu", "cuda") or key.shape[0] != query.shape[0] or torch_ops.is_transformed(query, key, value):
        return False
    return accepts(query, key, value, mask=_as_4d(mask), causal=is_causal)


class _Registered:
    """PyTorch's kernels replaced by ours; the handle of torch.nn.attention's registry."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        self._replace("_scaled_dot_product_flash_attention_for_cpu", "CPU", _cpu_kernel)
        if torch.backends.cuda.is_built():
            self._replace("_scaled_dot_product_flash_attention", "CUDA", _cuda_kernel)

    def _replace(self, name: str, key: str, kernel: Callable) -> None:
        original = torch.library.get_kernel(f"aten::{name}", key)

        def call(keyset: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
            dropout_p, is_causal = (*rest, *(0.0, False)[len(rest) :])[:2]
            dropout_p, is_causal = keywords.get("dropout_p", dropout_p), keywords.get("is_causal", is_causal)
            debug = any(rest[2:]) or keywords.get("return_debug_mask", False)
            mask = keywords.get("attn_mask")
            if not debug and _is_ours(query, key, value, mask, dropout_p, is_causal):
                return kernel(query, key, value, mask, is_causal, keywords.get("scale"))
            return original.call_boxed(keyset, query, key, value, *rest, **keywords)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(?s).*[Oo]verrid")  # that is what this is for
            self._library.impl(name, call, key, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        self._library._destroy()


def _cpu_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Optional[torch.Tensor], is_causal: bool, scale: Optional[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """out in query's strides and lse with heads innermost, as the kernel's meta function promises."""
    out = torch.empty_like(query) if value.shape[3] == query.shape[3] else None
    lse = query.new_empty((query.shape[0], query.shape[2], query.shape[1]), dtype=torch.float32).transpose(1, 2)
    return decode(query, key, value, mask=_as_4d(mask), causal=is_causal, scale=scale, out=out, lse=lse, return_lse=True)


def _cuda_kernel(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> tuple:
    """The nine results of aten::_scaled_dot_product_flash_attention; those of dropout and of ragged batches are empty."""
    out, lse = _cpu_kernel(query, key, *rest)
    state, unused = (query.new_empty(shape, dtype=torch.uint64) for shape in (2, ()))  # dropout's: nobody reads them
    return out, lse, None, None, query.shape[2], key.shape[2], state, unused, query.new_empty(0)
