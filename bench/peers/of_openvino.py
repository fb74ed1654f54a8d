"""OpenVINO's scaled_dot_product_attention on a CPU, query heads that share K and V given as query tokens: its operator has no groups."""
import numpy as np
import torch

from peers import Peer, Prepared
from peers.of_onnxruntime import array_of
from peers.of_torch import EACH
from peers.rows import Form


class OpenVino(Peer):
    name = "openvino"
    devices = ("cpu",)
    dtypes = ("fp32", "fp16", "bf16")

    def __init__(self, device, threads):
        import openvino
        import openvino.opset13

        self.ov, self.core, self.threads = openvino, openvino.Core(), threads
        self.types = {"fp32": openvino.Type.f32, "fp16": openvino.Type.f16, "bf16": openvino.Type.bf16}
        self.impl = f"openvino-{openvino.__version__.split('-')[0]}/sdpa"

    def refuses(self, row):
        if row.form.page:
            return "its paged operator is not public"
        return None if row.decodes else "query heads stand in for tokens, which are causal here"

    def forms(self, row):
        return [Form("bhsd")] if row.uniform else [Form("blocks", how=EACH)]

    def request(self, row, q, k, v):
        """A compiled model of one operation, for arrays of these shapes."""
        op, element = self.ov.opset13, self.types[row.dtype]
        inputs = [op.parameter(list(x.shape), element) for x in (q, k, v)]
        model = self.ov.Model([op.scaled_dot_product_attention(*inputs, causal=False)], inputs)
        settings = {"INFERENCE_NUM_THREADS": self.threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": element}
        return self.core.compile_model(model, "CPU", settings).create_infer_request()

    def prepare(self, row, tensors):
        def split(q):
            return q.reshape(-1, row.kv_heads, row.group, row.head_dim)

        made = {}  # a compiled model for each shape

        def requests(q, k, v):
            if k.shape not in made:
                made[k.shape] = self.request(row, q, k, v)
            return made[k.shape], [self.ov.Tensor(array_of(x), list(x.shape), self.types[row.dtype]) for x in (q, k, v)]

        def parts(k, v):
            if tensors.form.how != EACH:
                return [(split(tensors.q), k, v)]
            return [(split(tensors.q[b:b + 1]), *(tensors.sequence(x, b)[None] for x in (k, v))) for b in range(row.batch)]

        calls = [[requests(*part) for part in parts(k, v)] for k, v in zip(tensors.k, tensors.v)]

        def call(i):
            results = []
            for request, inputs in calls[i]:
                for place, tensor in enumerate(inputs):
                    request.set_input_tensor(place, tensor)
                request.infer()
                results.append(request.get_output_tensor(0))
            return lambda: [self.output_of(result, row, tensors.dtype) for result in results]

        return Prepared(call)

    def output_of(self, result, row, dtype) -> torch.Tensor:
        if result.element_type == self.ov.Type.bf16:
            return torch.from_numpy(np.frombuffer(result.data.tobytes(), np.int16).copy()).view(dtype)
        return torch.from_numpy(np.array(result.data))


PEERS = (OpenVino,)
