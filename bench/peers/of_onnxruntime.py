"""ONNX Runtime's com.microsoft.GroupQueryAttention on a CPU, past and present in one buffer. It writes the newest token as well, to where
that stands already. Where lengths differ: a call for each sequence, or one call on caches as long as the longest."""
import numpy as np
import torch

from peers import Peer, Prepared, Refused
from peers.of_torch import EACH
from peers.rows import Form

BITS = {torch.bfloat16: torch.int16}  # numpy has no bf16


def array_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(BITS.get(tensor.dtype, tensor.dtype)).numpy()


class OnnxRuntime(Peer):
    name = "onnxruntime"
    devices = ("cpu",)
    dtypes = ("fp32", "fp16", "bf16")

    def __init__(self, device, threads):
        import onnx
        import onnxruntime

        self.onnx, self.ort = onnx, onnxruntime
        onnxruntime.set_default_logger_severity(4)  # fatal only: a type without a kernel is a line of ours
        self.settings = onnxruntime.SessionOptions()
        self.settings.intra_op_num_threads = threads
        types = onnx.TensorProto
        self.types = {"bf16": types.BFLOAT16, "fp16": types.FLOAT16, "fp32": types.FLOAT}
        self.impl = f"onnxruntime-{onnxruntime.__version__}/gqa"

    def refuses(self, row):
        if row.form.page:
            return "no pages on a CPU"
        return None if row.decodes else "one query token a sequence, called so"

    def forms(self, row):
        return [Form("bhsd")] if row.uniform else [Form("blocks", how=EACH), Form("bhsd", how="rows of the longest")]

    def prepare(self, row, tensors):
        session = self.session_of(row)
        if tensors.form.how == EACH:
            parts = [[self.arrays_of(tensors.q[b:b + 1], *(tensors.sequence(x, b)[None] for x in (k, v)), (row.lens[b],))
                      for b in range(row.batch)] for k, v in zip(tensors.k, tensors.v)]
        else:
            parts = [[self.arrays_of(tensors.q, k, v, row.lens)] for k, v in zip(tensors.k, tensors.v)]
        bindings = [[self.binding_of(session, row, arrays) for arrays in copy] for copy in parts]

        def call(i):
            for binding in bindings[i]:
                session.run_with_iobinding(binding)
            return lambda: [self.output_of(binding, tensors.dtype) for binding in bindings[i]]

        call.kept = parts  # ONNX Runtime does not own what it is given
        return Prepared(call)

    def output_of(self, binding, dtype) -> torch.Tensor:
        found = binding.get_outputs()[0].numpy()
        return torch.from_numpy(found.view(np.int16).copy()).view(dtype) if dtype in BITS else torch.from_numpy(found.copy())

    def session_of(self, row):
        make, element, dim = self.onnx.helper, self.types[row.dtype], row.head_dim
        cache = ["batch", row.kv_heads, "capacity", dim]
        shapes = {"query": ["batch", 1, row.q_heads * dim], "key": ["batch", 1, row.kv_heads * dim], "value": ["batch", 1, row.kv_heads * dim],
                  "past_key": cache, "past_value": cache}
        inputs = [make.make_tensor_value_info(name, element, shape) for name, shape in shapes.items()]
        inputs.append(make.make_tensor_value_info("seqlens_k", self.onnx.TensorProto.INT32, ["batch"]))
        inputs.append(make.make_tensor_value_info("total_sequence_length", self.onnx.TensorProto.INT32, [1]))
        results = {"output": shapes["query"], "present_key": cache, "present_value": cache}
        outputs = [make.make_tensor_value_info(name, element, shape) for name, shape in results.items()]
        node = make.make_node("GroupQueryAttention", [value.name for value in inputs], list(results), domain="com.microsoft",
                              num_heads=row.q_heads, kv_num_heads=row.kv_heads)
        opsets = [make.make_opsetid("", 17), make.make_opsetid("com.microsoft", 1)]
        model = make.make_model(make.make_graph([node], "decode", inputs, outputs), opset_imports=opsets, ir_version=8)
        try:
            return self.ort.InferenceSession(model.SerializeToString(), self.settings, providers=["CPUExecutionProvider"])
        except Exception as error:  # its exceptions have no public base class
            raise Refused((str(error).strip().splitlines() or ["no session"])[0][:200]) from error

    def arrays_of(self, q, k, v, lens: tuple) -> dict:
        newest = torch.tensor(lens) - 1
        arrays = {"query": q.reshape(len(lens), 1, -1), "past_key": k, "past_value": v}
        for name, cache in (("key", k), ("value", v)):
            arrays[name] = cache[torch.arange(len(lens)), :, newest].reshape(len(lens), 1, -1).contiguous()
        return {name: array_of(x) for name, x in arrays.items()} | {"seqlens_k": newest.to(torch.int32).numpy(),
                                                                   "total_sequence_length": np.array([max(lens)], np.int32)}

    def binding_of(self, session, row, arrays: dict):
        """past and present in one buffer; the output is allocated by ONNX Runtime."""
        make, int32 = self.ort.OrtValue.ortvalue_from_numpy_with_onnx_type, self.onnx.TensorProto.INT32
        types = {"seqlens_k": int32, "total_sequence_length": int32}
        values = {name: make(array, types.get(name, self.types[row.dtype])) for name, array in arrays.items()}
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("output")
        for name in ("key", "value"):
            binding.bind_ortvalue_output(f"present_{name}", values[f"past_{name}"])
        return binding


PEERS = (OnnxRuntime,)
