"""ONNX Runtime: attention of a model by this library, as custom operators of a session.

``register(session_options)`` adds the domain ``lean_attention``; with ``override=True`` the operators stand under ONNX
Runtime's own names too, so that a model runs on them as it is. ``rewrite(model)`` moves those nodes of a model that the
operators serve to the domain, and says why it left the others. docs/onnxruntime.md has what each operator does and refuses.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any, Optional

__all__ = ["Report", "library_path", "register", "rewrite"]

DOMAIN = "lean_attention"
OVERRIDE_KEY = "lean_attention.override"
UNKNOWN_KEY = "lean_attention.unknown"
NEWEST_OPSET, NEWEST_DEFINITION = 28, 25  # of ONNX's that were looked at, and where Attention changed last
# (domain, name) that the operators serve.
SERVED = frozenset(
    [("", "Attention"), *(("com.microsoft", name) for name in ("GroupQueryAttention", "MultiHeadAttention", "PagedAttention"))]
)


_GROUPED = frozenset(
    ("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "do_rotary", "rotary_interleaved", "smooth_softmax")
    + ("k_quant_type", "v_quant_type", "q_norm_epsilon", "k_norm_epsilon", "qk_norm_epsilon")  # the last three: of refused inputs
)
#: By operator: what is read, and what means nothing without inputs or outputs that are refused.
ATTRIBUTES = {
    "Attention": frozenset(
        ("q_num_heads", "kv_num_heads", "scale", "softcap", "is_causal", "left_window_size", "right_window_size")
        + ("softmax_precision", "qk_matmul_output_mode")
    ),
    "GroupQueryAttention": _GROUPED | {"causal", "qk_output", "sliding_window_cache", "kv_cache_bit_width"},
    "MultiHeadAttention": frozenset(("num_heads", "scale", "unidirectional", "mask_filter_value")),
    "PagedAttention": _GROUPED
    | {"is_causal", "kv_cache_layout", "v_head_size", "rotary_offset", "k_cache_dtype", "v_cache_dtype"},
}


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
    """Makes the operators known to sessions that are made with session_options, an onnxruntime.SessionOptions. Once for each.

    override: under the built-in names too (``GroupQueryAttention`` of com.microsoft, ONNX's ``Attention``, ...): every
    such node of the model is then ours, and one that asks what we do not do is refused when the session is made, also what
    only the installed ONNX Runtime knows.
    """
    unknown = _unknown()
    if unknown is not None:  # else the library takes no release that is newer than it
        session_options.add_session_config_entry(UNKNOWN_KEY, " ".join(unknown))
    session_options.add_session_config_entry(OVERRIDE_KEY, "1" if override else "0")
    session_options.register_custom_ops_library(library_path())


@functools.lru_cache
def _unknown() -> Optional[tuple[str, ...]]:
    """What the installed ONNX Runtime's own operators have and ours do not know, "Operator.attribute" and "Operator@opset"; None if it
    does not say."""
    try:
        from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
    except ImportError:
        return None
    schemas = [schema for schema in get_all_operator_schema() if (schema.domain, schema.name) in SERVED]
    attributes = {f"{x.name}.{name}" for x in schemas for name in x.attributes if name not in ATTRIBUTES[x.name]}
    return tuple(sorted(attributes | {f"{x.name}@{x.since_version}" for x in schemas if x.since_version > NEWEST_DEFINITION}))


@dataclasses.dataclass
class Report:
    """What rewrite() did: names of nodes that are ours now, and of attention nodes that were left with the reason."""

    rewritten: list[str] = dataclasses.field(default_factory=list)
    left: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.rewritten)} rewritten, {len(self.left)} left"]
        return "\n".join([*lines, *(f"  {name}: {reason}" for name, reason in self.left.items())])


def rewrite(model: Any) -> tuple[Any, Report]:
    """Moves every attention node that the operators serve to the domain lean_attention.

    `model`: an onnx.ModelProto, or an onnx_ir.Model, which is changed. Returns the same kind, and a Report. A node is
    asked by the operator itself, in a session of its own, so needs onnxruntime; what its values refuse is found at a run.
    """
    import onnx_ir

    as_proto = not isinstance(model, onnx_ir.Model)
    changed = onnx_ir.from_proto(model) if as_proto else model
    report = Report()
    for function in changed.functions.values():
        for node in function:
            if (node.domain, node.op_type) in SERVED:
                report.left[node.name or node.op_type] = f"is in the function {function.name}: inline it first"
    for place, node in enumerate(changed.graph.all_nodes()):
        if (node.domain, node.op_type) not in SERVED:
            continue
        name = node.name or f"{node.op_type} {place}"
        reason = _newer_opset(node, changed.opset_imports) or _unknown_attribute(node) or _refusal(node)
        if reason:
            report.left[name] = reason
        else:
            node.domain, node.version = DOMAIN, None
            report.rewritten.append(name)
    if report.rewritten:
        changed.opset_imports[DOMAIN] = 1
    return (onnx_ir.to_proto(changed) if as_proto else changed), report


def _newer_opset(node: Any, imports: Any) -> str:
    """A later opset may mean something else by the same name; "" for one that was looked at."""
    opset = imports.get("", 0) if node.domain == "" else 0
    return f"opset {opset}: allowed 23 to {NEWEST_OPSET}" if opset > NEWEST_OPSET else ""


def _unknown_attribute(node: Any) -> str:
    """An operator cannot see an attribute it does not ask for, such as one that a later release adds; "" where there is none."""
    for name in node.attributes:
        if name not in ATTRIBUTES[node.op_type]:
            return f"{name}: {node.op_type} has no such attribute here"
    return ""


def _refusal(node: Any) -> str:
    """Why the operator does not take a node; "" when it does."""
    import onnx
    import onnx_ir
    import onnxruntime

    proto = onnx_ir.to_proto(node)
    proto.domain = DOMAIN
    types: dict[str, int] = {}
    first = next((x.dtype for x in node.inputs if x is not None and x.dtype is not None), onnx_ir.DataType.FLOAT)
    for index, value in enumerate(node.inputs):
        if value is not None and value.name:  # a type that the model does not say: the first's, which is the queries'
            types.setdefault(value.name, int(value.dtype or _INTEGERS.get((node.op_type, index), first)))
    infos = [onnx.helper.make_tensor_value_info(name, dtype, None) for name, dtype in types.items()]
    results = [onnx.helper.make_empty_tensor_value_info(name) for name in proto.output if name]
    graph = onnx.helper.make_graph([proto], "one_node", infos, results)
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(DOMAIN, 1)]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the reason goes into the report
    register(options)
    try:
        made = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
        onnxruntime.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error).rpartition("': ")[2] or str(error)
    return ""


# Inputs that hold integers, by operator and place; onnx_ir.DataType's numbers.
_INT32, _INT64 = 6, 7
_INTEGERS = {
    **{("GroupQueryAttention", i): _INT32 for i in (5, 6, 16)},
    ("GroupQueryAttention", 9): _INT64,
    ("Attention", 6): _INT64,
    **{("MultiHeadAttention", i): _INT32 for i in (4, 8, 9)},
    **{("PagedAttention", i): _INT32 for i in (5, 6, 7, 10, 16)},
}
