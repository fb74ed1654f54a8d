"""A small Phi-3-shaped decoder as an ONNX graph, with the three ways that exporters write attention with a cache, and greedy
generation with it."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

LAYERS, HIDDEN, Q_HEADS, KV_HEADS, DIM, FEED_FORWARD, VOCABULARY, CAPACITY = 2, 64, 8, 2, 16, 96, 97, 96
KINDS = ("gqa", "scatter", "concat")


class Graph:
    def __init__(self, kind: str, dtype: type = np.float32, seed: int = 0):
        self.kind, self.dtype, self.random = kind, np.dtype(dtype), np.random.default_rng(seed)
        self.onnx_type = helper.np_dtype_to_tensor_dtype(self.dtype)
        self.nodes, self.inputs, self.outputs, self.constants = [], [], [], []

    def add(self, op: str, inputs: list[str], output: str, domain: str = "", more_outputs: tuple = (), **attributes) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output, *more_outputs], domain=domain, name=f"{op}/{output}", **attributes))
        return output

    def constant(self, name: str, array: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        return self.constant(name, (2.0 * self.random.standard_normal(shape) / np.sqrt(shape[0])).astype(self.dtype))

    def linear(self, x: str, name: str, inputs: int, outputs: int) -> str:
        return self.add("MatMul", [x, self.weight(f"{name}_weight", inputs, outputs)], name)

    def norm(self, x: str, name: str) -> str:
        scale = self.constant(f"{name}_scale", self.random.uniform(0.5, 1.5, HIDDEN).astype(self.dtype))
        return self.add("RMSNormalization", [x, scale], name, axis=-1, epsilon=1e-5)

    def cache(self, layer: int) -> tuple[list[str], list[str]]:
        past, present = ([f"{side}_{what}_{layer}" for what in ("key", "value")] for side in ("past", "present"))
        tokens = ("past_tokens", "all_tokens") if self.kind == "concat" else (CAPACITY, CAPACITY)
        for names, infos, n in ((past, self.inputs, tokens[0]), (present, self.outputs, tokens[1])):
            infos += [helper.make_tensor_value_info(x, self.onnx_type, ["B", KV_HEADS, n, DIM]) for x in names]
        return past, present

    def split_heads(self, x: str, heads: int) -> str:
        shape = self.constant(f"{x}_shape", np.array([0, 0, heads, DIM], np.int64))
        return self.add("Transpose", [self.add("Reshape", [x, shape], f"{x}_heads")], f"{x}_transposed", perm=[0, 2, 1, 3])

    def attention(self, qkv: str, layer: int) -> str:
        past, present = self.cache(layer)
        if self.kind == "gqa":
            inputs = [qkv, "", "", *past, "seqlens_k", "total_sequence_length", "cos", "sin"]
            heads = dict(num_heads=Q_HEADS, kv_num_heads=KV_HEADS, do_rotary=1)
            return self.add("GroupQueryAttention", inputs, f"attention_{layer}", "com.microsoft", tuple(present), **heads)
        parts = [f"{x}_{layer}" for x in "qkv"]
        self.add("Split", [qkv, "split"], parts[0], more_outputs=tuple(parts[1:]), axis=-1)
        q, k = (
            self.add("RotaryEmbedding", [x, "cos", "sin", "position_ids"], f"{x}_rotated", num_heads=heads)
            for x, heads in zip(parts, (Q_HEADS, KV_HEADS))
        )
        heads = dict(q_num_heads=Q_HEADS, kv_num_heads=KV_HEADS)
        if self.kind == "concat":
            inputs = [q, k, parts[2], "", *past]
            return self.add("Attention", inputs, f"attention_{layer}", more_outputs=tuple(present), is_causal=1, **heads)
        for x, old, new in zip((k, parts[2]), past, present):
            self.add("TensorScatter", [old, self.split_heads(x, KV_HEADS), "write_indices"], new, axis=2, mode="linear")
        inputs = [self.split_heads(q, Q_HEADS), *present, "", "", "", "nonpad_kv_seqlen"]
        heads_first = self.add("Attention", inputs, f"attention_{layer}_heads", is_causal=1)
        back = self.add("Transpose", [heads_first], f"attention_{layer}_back", perm=[0, 2, 1, 3])
        return self.add("Reshape", [back, "row_shape"], f"attention_{layer}")

    def layer(self, x: str, layer: int) -> str:
        qkv = self.linear(self.norm(x, f"norm_{layer}"), f"qkv_{layer}", HIDDEN, (Q_HEADS + 2 * KV_HEADS) * DIM)
        o = self.linear(self.attention(qkv, layer), f"o_{layer}", Q_HEADS * DIM, HIDDEN)
        x = self.add("Add", [x, o], f"middle_{layer}")
        gate = self.linear(self.norm(x, f"norm_up_{layer}"), f"gate_{layer}", HIDDEN, FEED_FORWARD)
        up = self.add("Mul", [gate, self.add("Sigmoid", [gate], f"sigmoid_{layer}")], f"up_{layer}")
        return self.add("Add", [x, self.linear(up, f"down_{layer}", FEED_FORWARD, HIDDEN)], f"residual_{layer}")


def decoder(kind: str, dtype: type = np.float32) -> bytes:
    graph = Graph(kind, dtype)
    angles = np.outer(np.arange(CAPACITY), 10000.0 ** (-np.arange(0, DIM, 2) / DIM))
    graph.constant("cos", np.cos(angles).astype(dtype))
    graph.constant("sin", np.sin(angles).astype(dtype))
    scalars = {
        "gqa": [("seqlens_k", TensorProto.INT32, ["B"]), ("total_sequence_length", TensorProto.INT32, [1])],
        "scatter": [(x, TensorProto.INT64, ["B"]) for x in ("write_indices", "nonpad_kv_seqlen")],
        "concat": [],
    }[kind]
    if kind != "gqa":
        scalars = [*scalars, ("position_ids", TensorProto.INT64, ["B", "S"])]
        graph.constant("split", np.array([Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], np.int64))
        graph.constant("row_shape", np.array([0, 0, Q_HEADS * DIM], np.int64))
    graph.inputs = [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["B", "S"])]
    graph.inputs += [helper.make_tensor_value_info(*x) for x in scalars]
    x = graph.add("Gather", [graph.weight("embedding", VOCABULARY, HIDDEN), "tokens"], "embedded")
    for layer in range(LAYERS):
        x = graph.layer(x, layer)
    graph.linear(graph.norm(x, "norm_last"), "logits", HIDDEN, VOCABULARY)
    logits = helper.make_tensor_value_info("logits", graph.onnx_type, ["B", "S", VOCABULARY])
    made = helper.make_graph(graph.nodes, kind, graph.inputs, [logits, *graph.outputs], graph.constants)
    imports = [helper.make_opsetid("", 24 if kind == "scatter" else 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=imports, ir_version=11).SerializeToString()


def generate(session, kind: str, prompt: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens [B, steps] after `prompt` [B, S], and the last step's logits."""
    batch = len(prompt)
    width = 0 if kind == "concat" else CAPACITY
    pasts = [x for x in session.get_inputs() if x.name.startswith("past")]
    dtype = np.float16 if "float16" in pasts[0].type else np.float32
    names = [x.name for x in pasts]
    caches = {name: np.zeros((batch, KV_HEADS, width, DIM), dtype) for name in names}
    tokens, past, made = prompt, 0, []
    for _ in range(steps):
        total = past + tokens.shape[1]
        scalars = {
            "gqa": {"seqlens_k": np.full(batch, total - 1, np.int32), "total_sequence_length": np.array([total], np.int32)},
            "scatter": {"write_indices": np.full(batch, past), "nonpad_kv_seqlen": np.full(batch, total)},
            "concat": {},
        }[kind]
        if kind != "gqa":
            scalars["position_ids"] = np.tile(np.arange(past, total), (batch, 1))
        logits, *present = session.run(None, {"tokens": tokens, **scalars, **caches})
        caches = dict(zip(names, present))
        tokens, past = logits[:, -1:].argmax(-1), total
        made.append(tokens)
    return np.concatenate(made, 1), logits
