"""ONNX Runtime: attention of a model by this library, as custom operators of a session.

``register(session_options)`` adds the domain ``lean_attention``; with ``override=True`` the operators stand under ONNX
Runtime's own names too, so that a model runs on them as it is. docs/onnxruntime.md says which operators, and what each
refuses. Nothing here imports ONNX Runtime.
"""

from __future__ import annotations

import pathlib
from typing import Any

__all__ = ["library_path", "register"]

OVERRIDE_KEY = "lean_attention.override"


def library_path() -> str:
    """Path of liblean_attention_ort.so, for register_custom_ops_library() and for C++ hosts."""
    path = pathlib.Path(__file__).with_name("liblean_attention_ort.so")
    if not path.is_file():
        raise ImportError(
            f"{path} is missing: this build of lean_attention has no operators for ONNX Runtime; "
            "build it with LEAN_ORT=ON (docs/onnxruntime.md)"
        )
    return str(path)


def register(session_options: Any, override: bool = False) -> None:
    """Makes the operators known to sessions that are made with these onnxruntime.SessionOptions. Once for each.

    override: under the built-in names too (``GroupQueryAttention`` of com.microsoft, ONNX's ``Attention``, ...): every
    such node of the model is then ours, and one that asks what we do not do is refused when the session is made.
    """
    session_options.add_session_config_entry(OVERRIDE_KEY, "1" if override else "0")
    session_options.register_custom_ops_library(library_path())
