"""vLLM's attention by this library: the plug-in that vLLM finds by itself (entry point ``vllm.general_plugins``).

On CUDA ``vllm serve MODEL --attention-backend CUSTOM`` chooses it. On the CPU, where vLLM lets nobody choose,
``LEAN_ATTENTION_VLLM=1`` in the environment puts it in the place of vLLM's own; ``LEAN_ATTENTION_VLLM=0`` keeps it out
of both. docs/vllm.md says which layers it computes.
"""

from __future__ import annotations

import os
import re

VARIABLE = "LEAN_ATTENTION_VLLM"
OLDEST, NEWEST = (0, 22), (0, 33)  # docs/vllm.md says how each was tried


def register() -> None:
    """What vLLM calls in each of its processes; may be called again.

    Raises:
        ValueError: LEAN_ATTENTION_VLLM is neither 0 nor 1.
        RuntimeError: LEAN_ATTENTION_VLLM=1, and this vLLM or its platform is not served.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} = {wanted!r}: expected 1 (use it) or 0 (do not)")
    if wanted == "0":
        return
    from vllm import __version__ as version
    from vllm.logger import init_logger
    from vllm.platforms import current_platform as platform

    device = "cuda" if platform.is_cuda() else "cpu" if platform.is_cpu() else platform.device_name  # ROCm's type is "cuda" too
    refused = refusal(version, device)
    if refused and wanted:
        raise RuntimeError(refused)
    log = init_logger("vllm.lean_attention")
    if refused:
        log.warning("%s", refused)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # older versions have none

    if device == "cuda":
        register_backend(AttentionBackendEnum.CUSTOM, "lean_attention._vllm_cuda.LeanCudaBackend")
    elif wanted:
        register_backend(AttentionBackendEnum.CPU_ATTN, "lean_attention._vllm_cpu.LeanCpuBackend")
        log.info("lean_attention in the place of CPU_ATTN (%s=1)", VARIABLE)


def refusal(version: str, device: str) -> str:
    """Why this vLLM on this kind of device is not served; empty if it is."""
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None or not OLDEST <= (int(number[1]), int(number[2])) <= NEWEST:
        oldest, newest = (".".join(map(str, which)) for which in (OLDEST, NEWEST))
        span = f"{oldest}.x" if oldest == newest else f"{oldest} to {newest}"
        return f"lean_attention: vllm {version} is not served, vllm {span} is: its attention is left as it was"
    if device not in ("cpu", "cuda"):
        return f"lean_attention: vLLM's platform {device!r} is not served, cpu and cuda are: its attention is left as it was"
    return ""
