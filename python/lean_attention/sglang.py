"""SGLang: ``--attention-backend lean``, or ``--decode-attention-backend lean`` beside another for prefill.

SGLang finds register() by the entry point ``sglang.srt.plugins`` in each of its processes. The backend itself
(_sglang_backend.py) is imported where a model is run.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

NAME = "lean"
OLDEST = (0, 5, 23)


def register() -> None:
    """Adds "lean" to SGLang's attention backends.

    Raises:
        ImportError: SGLang is older than 0.5.23, whose backends are told of a CUDA graph in another way.
    """
    found = importlib.metadata.version("sglang")
    release = tuple(map(int, re.findall(r"\d+", found)[:3]))  # of 0.5.24rc1 (0, 5, 24)
    if release < OLDEST:
        raise ImportError(f"sglang {found}: lean_attention.sglang works with {'.'.join(map(str, OLDEST))} and newer")
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_backend_of)


def _backend_of(model_runner: Any) -> Any:
    from lean_attention._sglang_backend import LeanAttentionBackend

    return LeanAttentionBackend(model_runner)
