"""Which models of Transformers call their attention through its interface, and so may have this library's."""

from __future__ import annotations

import functools
import sys
from typing import Any, Iterable, Optional

from transformers import PreTrainedModel

_names: set[str] = set()


def refuse_models_without_interface(names: Iterable[str]) -> None:
    """From now on a model that would not call what `names` stand for raises when it is made or given such a name.

    Transformers asks each model whether it can do "sdpa"; of a registered name it asks nothing, and a model without the
    interface then runs its own function on a mask that is made for another. So this stands before its check, for these
    names.
    """
    _names.update(names)
    check = PreTrainedModel.get_correct_attn_implementation
    if hasattr(check, "lean_attention"):
        return

    @functools.wraps(check)
    def checked(self: PreTrainedModel, requested_attention: Optional[str], *arguments: Any, **keywords: Any) -> str:
        if requested_attention in _names:
            why = why_refused(type(self)) or why_sparse(self.config)
            if why is not None:
                raise ValueError(f"attn_implementation={requested_attention!r}: {why}: use attn_implementation=\"eager\"")
        return check(self, requested_attention, *arguments, **keywords)

    checked.lean_attention = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = checked


@functools.cache
def why_refused(model: type) -> Optional[str]:
    """None for a model that may have a registered attention.

    Those with softcap or sinks do not have "sdpa", and have the interface.
    """
    if not (model._supports_sdpa or model._supports_attention_backend):
        return f"{model.__name__} calls its attention without AttentionInterface (Transformers refuses \"sdpa\" for it too)"
    for base in model.__mro__:
        code = vars(sys.modules[base.__module__])
        by_name = [key for key, value in code.items() if isinstance(value, dict) and "eager" in value and "sdpa" in value]
        if base.__module__.startswith("transformers.models.") and by_name and "ALL_ATTENTION_FUNCTIONS" not in code:
            return f"{model.__name__} knows only the attentions of its own {by_name[0]}"
    return None


def why_sparse(config: Any) -> Optional[str]:
    """None for a model whose layers do not pick blocks of keys: these are in the masks of names that the model knows, and in no
    other's."""
    if "minimax_m3_sparse" not in (getattr(config, "layer_types", None) or ()):
        return None
    return f"{type(config).__name__} has layers that pick blocks of keys, which are not read here (\"sdpa\" has them too)"
