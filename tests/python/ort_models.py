"""ONNX graphs of one node, and sessions on them with and without this library's operators."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import lean_attention.ort

RELEASE = tuple(map(int, onnxruntime.__version__.split(".")[:2]))
IR_VERSION, OPSET = (11, 23) if RELEASE >= (1, 23) else (10, 21)

OWN, MICROSOFT, ONNX = "lean_attention", "com.microsoft", ""
TYPE_OF = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.bool_): TensorProto.BOOL,
    np.dtype(np.float64): TensorProto.DOUBLE,
}
NARROW = {"bfloat16": TensorProto.BFLOAT16, "float8_e4m3fn": TensorProto.FLOAT8E4M3FN}  # ml_dtypes' names


def type_of(array: np.ndarray) -> int:
    return NARROW.get(array.dtype.name) or TYPE_OF[array.dtype]


_state = onnxruntime.capi.onnxruntime_pybind11_state
ERRORS = (_state.Fail, _state.InvalidArgument, _state.InvalidGraph, _state.NotImplemented, _state.RuntimeException)


def _missing() -> str:
    try:
        lean_attention.ort.library_path()
    except ImportError as error:
        return str(error)
    return ""


needs_operators = pytest.mark.skipif(bool(_missing()), reason=_missing())


def model_of(
    op: str,
    feeds: dict[str, Optional[np.ndarray]],
    outputs: Sequence[str],
    domain: str = OWN,
    opset: int = OPSET,
    constants: Sequence[str] = (),
    **attributes: Any,
) -> bytes:
    """A node whose inputs are `feeds` in order (None: left away), of these types and ranks; `constants` of them fixed."""
    given = {name: array for name, array in feeds.items() if array is not None}
    first = next(iter(given.values()))
    node = helper.make_node(
        op, [name if name in given else "" for name in feeds], list(outputs), domain=domain, name="node0", **attributes
    )
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(name, type_of(array), [f"{name}_{axis}" for axis in range(array.ndim)])
            for name, array in given.items()
            if name not in constants
        ],
        [helper.make_tensor_value_info(name, type_of(given.get(name.replace("present", "past"), first)), None) for name in outputs],
        [onnx.numpy_helper.from_array(given[name], name) for name in constants],
    )
    imports = [helper.make_opsetid(ONNX, opset)]
    if domain:
        imports.append(helper.make_opsetid(domain, 1))
    return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION).SerializeToString()


CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def session_of(
    model: bytes, ours: bool = True, override: bool = False, provider: Any = CPU, **settings: Any
) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for name, value in settings.items():
        setattr(options, name, value)
    if ours:
        lean_attention.ort.register(options, override=override)
    return onnxruntime.InferenceSession(model, options, providers=[provider, *([CPU] if provider != CPU else [])])


def run_node(
    op: str, feeds: dict[str, Optional[np.ndarray]], outputs: Sequence[str], provider: Any = CPU, **arguments: Any
) -> list[np.ndarray]:
    """`arguments` as model_of() has them; domain com.microsoft or "" means ONNX Runtime's own operator."""
    model = model_of(op, feeds, outputs, **arguments)
    session = session_of(model, ours=arguments.get("domain", OWN) == OWN, provider=provider)
    fed = {name: x for name, x in feeds.items() if x is not None and name not in arguments.get("constants", ())}
    return session.run(None, fed)


def as_ort_value(array):
    if array.dtype.name in NARROW:
        storage = {1: np.uint8, 2: np.uint16}[array.itemsize]
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(storage), NARROW[array.dtype.name])
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def with_readable_outputs(model):
    """NumPy has no bfloat16 or fp8: such outputs are cast to float32."""
    for output in model.graph.output:
        if output.type.tensor_type.elem_type not in NARROW.values():
            continue
        node = model.graph.node[0]
        node.output[list(node.output).index(output.name)] = output.name + "_narrow"
        cast = helper.make_node("Cast", [output.name + "_narrow"], [output.name], to=TensorProto.FLOAT)
        model.graph.node.append(cast)
        output.type.tensor_type.elem_type = TensorProto.FLOAT
    return model.SerializeToString()


def run_values(session, feeds):
    """run(), with inputs of such types too."""
    values = {name: as_ort_value(array)._ortvalue for name, array in feeds.items() if array is not None}
    return [x.numpy() for x in session._sess.run_with_ort_values(values, [o.name for o in session.get_outputs()], None)]
