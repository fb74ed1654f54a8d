"""An ONNX model whose attention this library computes: a layer of GroupQueryAttention, as exporters write it."""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

import lean_attention.ort

half, ints, cache = TensorProto.FLOAT16, TensorProto.INT32, ["B", 2, 256, 64]
inputs = dict(qkv=(half, ["B", "S", 12 * 64]), past_k=(half, cache), past_v=(half, cache), seqlens_k=(ints, ["B"]), total=(ints, [1]))
outputs = dict(y=(half, ["B", "S", 8 * 64]), present_k=(half, cache), present_v=(half, cache))
names = ["qkv", "", "", "past_k", "past_v", "seqlens_k", "total"]
node = helper.make_node("GroupQueryAttention", names, list(outputs), domain="com.microsoft", num_heads=8, kv_num_heads=2)
infos = [[helper.make_tensor_value_info(name, *form) for name, form in side.items()] for side in (inputs, outputs)]
opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(helper.make_graph([node], "layer", *infos), opset_imports=opsets, ir_version=10)

options = onnxruntime.SessionOptions()
lean_attention.ort.register(options, override=True)  # com.microsoft's GroupQueryAttention is ours in this session
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

random = np.random.default_rng(0)
qkv, k, v = (random.standard_normal(n).astype(np.float16) for n in ((1, 1, 768), (1, 2, 256, 64), (1, 2, 256, 64)))
lengths = dict(seqlens_k=np.array([200], np.int32), total=np.array([201], np.int32))  # 200 tokens are there, one is new
y, *_ = session.run(None, dict(qkv=qkv, past_k=k, past_v=v, **lengths))
print("one layer, one step:", y.shape, y.dtype)
