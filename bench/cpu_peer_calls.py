"""The rows of cpu_peers.py, their data, and torch's and ONNX Runtime's ways to compute them.

A peer is an object with its `version` and `prepare(variant, row, pool)`, which gives a Subject ready to be called, or raises
Refused.
"""
import concurrent.futures
import dataclasses
import itertools
import math
import pathlib
import re
import sys

import numpy as np

HEADS = ((32, 32), (32, 8), (32, 4))  # query, key/value
HEAD_DIM = 128
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
STORAGE = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32}  # numpy has no bf16
VARIANTS = ("torch/expanded", "torch/enable_gqa", "torch/heads_as_queries", "onnxruntime/gqa", "onnxruntime/gqa_padded")


@dataclasses.dataclass(frozen=True)
class Row:
    lens: tuple
    q_heads: int
    kv_heads: int
    dtype: str

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def uniform(self) -> bool:
        return len(set(self.lens)) == 1

    @property
    def kv_bytes(self) -> int:
        return 2 * sum(self.lens) * self.kv_heads * HEAD_DIM * ELEMENT_BYTES[self.dtype]

    @property
    def padded_elements(self) -> int:
        """Of K, with every sequence as long as the longest."""
        return len(self.lens) * max(self.lens) * self.kv_heads * HEAD_DIM

    @property
    def id(self) -> str:
        tokens = short_count(max(self.lens)) if self.uniform else f"{short_count(min(self.lens))}..{short_count(max(self.lens))}"
        heads = f"h{self.kv_heads} g{self.group} d{HEAD_DIM}"
        return f"{'uniform' if self.uniform else 'halving'} b{len(self.lens)} {tokens} {heads} {self.dtype} n_q1"


@dataclasses.dataclass
class Batch:
    """Arrays of one call: q [b, Hq, 1, d], k and v [b, Hkv, capacity, d]."""

    lens: tuple
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


@dataclasses.dataclass
class Subject:
    """One way to compute a row. `call` returns what `outputs` turns into an array [b, Hq, d] for each batch."""

    impl: str
    layout: str
    batches: list
    call: object
    outputs: object
    calls: int = 1
    us: list = dataclasses.field(default_factory=list)
    error: float = math.nan


class Refused(Exception):
    """A peer does not run a row; the text says why."""


def short_count(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def applies(variant: str, row: Row) -> bool:
    """False where a variant would be the same call as another."""
    if variant in ("torch/enable_gqa", "torch/heads_as_queries"):
        return row.group > 1
    return variant != "onnxruntime/gqa_padded" or not row.uniform


def rows_of(quick: bool) -> list:
    contexts, longest = ((512,), 512) if quick else ((8192, 32768), 16384)
    lens = [(context,) * batch for context in contexts for batch in (1, 4)] + [tuple(longest >> i for i in range(8))]
    return [Row(n, *heads, dtype) for dtype in ELEMENT_BYTES for heads in HEADS for n in lens]


def first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def available_bytes() -> int:
    """As lean sees it: the machine's, or the container's limit where that is less."""
    meminfo, limit = pathlib.Path("/proc/meminfo"), pathlib.Path("/sys/fs/cgroup/memory.max")
    found = re.search(r"MemAvailable:\s*(\d+)", meminfo.read_text()) if meminfo.exists() else None
    most = limit.read_text().strip() if limit.exists() else "max"
    return min(int(found[1]) * 1024 if found else sys.maxsize, int(most) if most.isdigit() else sys.maxsize)


# ---- data -------------------------------------------------------------------------------------------------------------


def to_storage(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bf16":
        return x.astype(STORAGE[dtype])
    bits = x.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def to_float64(x: np.ndarray, dtype: str) -> np.ndarray:
    return ((x.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else x).astype(np.float64)


class Pool:
    """N(0, 1) numbers of one dtype, made and first touched by several threads; every row's K and V are carved from them."""

    CHUNK = 1 << 20

    def __init__(self, dtype: str, elements: int, threads: int):
        self.dtype = dtype
        self.k, self.v = (np.empty(elements, STORAGE[dtype]) for _ in range(2))
        chunks = [(seed, begin) for seed in (1, 2) for begin in range(0, elements, self.CHUNK)]
        parts = [chunks[len(chunks) * i // threads : len(chunks) * (i + 1) // threads] for i in range(threads)]
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            list(pool.map(self.fill, parts))

    def fill(self, chunks: list) -> None:
        for seed, begin in chunks:
            out = (self.k if seed == 1 else self.v)[begin : begin + self.CHUNK]
            out[:] = to_storage(np.random.default_rng((seed, begin)).standard_normal(out.size, np.float32), self.dtype)

    def batch(self, row: Row, lens: tuple, begin: int = 0) -> Batch:
        shape = (len(lens), row.kv_heads, max(lens), HEAD_DIM)
        end = begin + math.prod(shape)
        q = np.random.default_rng((3, begin)).standard_normal((len(lens), row.q_heads, 1, HEAD_DIM), np.float32)
        return Batch(lens, to_storage(q, self.dtype), self.k[begin:end].reshape(shape), self.v[begin:end].reshape(shape))

    def batches(self, row: Row) -> list:
        """One batch where lengths are equal, else one for every sequence."""
        if row.uniform:
            return [self.batch(row, row.lens)]
        begins = itertools.accumulate(row.lens, initial=0)
        return [self.batch(row, (n,), begin * row.kv_heads * HEAD_DIM) for n, begin in zip(row.lens, begins)]


def error_of(subject: Subject, outputs: list, dtype: str) -> float:
    """Largest difference from fp64 / largest value, over the first and last head of the first and last sequence."""
    sequences = [(batch, i) for batch in range(len(subject.batches)) for i in range(len(subject.batches[batch].lens))]
    worst = 0.0
    for (place, i), last_head in itertools.product({sequences[0], sequences[-1]}, (False, True)):
        batch = subject.batches[place]
        head, kv_head = (batch.q.shape[1] - 1, batch.k.shape[1] - 1) if last_head else (0, 0)
        k, v = (to_float64(x[i, kv_head, : batch.lens[i]], dtype) for x in (batch.k, batch.v))
        scores = k @ to_float64(batch.q[i, head, 0], dtype) / math.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max())
        expected = weights @ v / weights.sum()
        error = np.abs(outputs[place][i, head] - expected).max() / np.abs(expected).max()
        worst = max(worst, float(error) if np.isfinite(error) else math.inf)
    return worst


# ---- peers ------------------------------------------------------------------------------------------------------------


class Torch:
    def __init__(self, threads: int):
        import torch

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch, self.version = torch, torch.__version__
        self.dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

    def tensor(self, array: np.ndarray, dtype: str):
        bits = array.view(np.int16) if dtype == "bf16" else array
        return self.torch.from_numpy(bits).view(self.dtypes[dtype])

    def prepare(self, variant: str, row: Row, pool: Pool) -> Subject:
        if row.group > 1 and (1 + 2 * row.group) * row.kv_bytes > available_bytes():
            raise Refused("skipped: not enough memory")
        batches = pool.batches(row)
        calls = [self.call_of(variant, row, *(self.tensor(x, row.dtype) for x in (b.q, b.k, b.v))) for b in batches]
        return Subject(
            variant,
            "bhsd" if row.uniform else "bhsd, a call for each sequence",
            batches,
            lambda: [call() for call in calls],
            lambda raw: [o.reshape(o.shape[0], row.q_heads, HEAD_DIM).double().numpy() for o in raw],
        )

    def call_of(self, variant: str, row: Row, q, k, v):
        attend = self.torch.nn.functional.scaled_dot_product_attention
        if variant == "torch/enable_gqa":
            return lambda: attend(q, k, v, enable_gqa=True)
        if variant == "torch/heads_as_queries":
            rows = q.view(q.shape[0], row.kv_heads, row.group, HEAD_DIM)
            return lambda: attend(rows, k, v)
        if row.group > 1:
            k, v = k.repeat_interleave(row.group, dim=1), v.repeat_interleave(row.group, dim=1)
        return lambda: attend(q, k, v)


class OnnxRuntime:
    def __init__(self, threads: int):
        import onnx
        import onnxruntime

        self.onnx, self.ort, self.version = onnx, onnxruntime, onnxruntime.__version__
        onnxruntime.set_default_logger_severity(4)  # fatal only: a type without a kernel is a line of ours
        self.settings = onnxruntime.SessionOptions()
        self.settings.intra_op_num_threads = threads
        types = onnx.TensorProto
        self.types = {"bf16": types.BFLOAT16, "fp16": types.FLOAT16, "fp32": types.FLOAT}

    def prepare(self, variant: str, row: Row, pool: Pool) -> Subject:
        session = self.session_of(row)
        padded = variant == "onnxruntime/gqa_padded"
        batches = [pool.batch(row, row.lens)] if padded else pool.batches(row)
        arrays = [self.arrays_of(batch) for batch in batches]  # kept: ONNX Runtime does not own what it is given
        bindings = [self.binding_of(session, row, a) for a in arrays]

        def call():
            for binding in bindings:
                session.run_with_iobinding(binding)
            return arrays

        layout = "bhsd" if row.uniform else "bhsd, padded" if padded else "bhsd, a call for each sequence"
        return Subject(variant, layout, batches, call, lambda _: [self.output_of(binding, row) for binding in bindings])

    def output_of(self, binding, row: Row) -> np.ndarray:
        return to_float64(binding.get_outputs()[0].numpy(), row.dtype).reshape(-1, row.q_heads, HEAD_DIM)

    def session_of(self, row: Row):
        make, element = self.onnx.helper, self.types[row.dtype]
        cache = ["batch", row.kv_heads, "capacity", HEAD_DIM]
        shapes = {
            "query": ["batch", 1, row.q_heads * HEAD_DIM],
            "key": ["batch", 1, row.kv_heads * HEAD_DIM],
            "value": ["batch", 1, row.kv_heads * HEAD_DIM],
            "past_key": cache,
            "past_value": cache,
        }
        inputs = [make.make_tensor_value_info(name, element, shape) for name, shape in shapes.items()]
        inputs.append(make.make_tensor_value_info("seqlens_k", self.onnx.TensorProto.INT32, ["batch"]))
        inputs.append(make.make_tensor_value_info("total_sequence_length", self.onnx.TensorProto.INT32, [1]))
        results = {"output": shapes["query"], "present_key": cache, "present_value": cache}
        outputs = [make.make_tensor_value_info(name, element, shape) for name, shape in results.items()]
        names = ["GroupQueryAttention", [value.name for value in inputs], list(results)]
        node = make.make_node(*names, domain="com.microsoft", num_heads=row.q_heads, kv_num_heads=row.kv_heads)
        opsets = [make.make_opsetid("", 17), make.make_opsetid("com.microsoft", 1)]
        model = make.make_model(make.make_graph([node], "decode", inputs, outputs), opset_imports=opsets, ir_version=8)
        try:
            return self.ort.InferenceSession(model.SerializeToString(), self.settings, providers=["CPUExecutionProvider"])
        except Exception as error:  # its exceptions have no public base class
            raise Refused(f"skipped: {first_line(error)}") from error

    def arrays_of(self, batch: Batch) -> dict:
        """The newest token goes in as `key` and `value` and is written where it already stands: the cache stays as it is."""
        count, newest = len(batch.lens), np.array(batch.lens, np.int32) - 1
        arrays = {"query": batch.q.reshape(count, 1, -1), "past_key": batch.k, "past_value": batch.v}
        for name, cache in (("key", batch.k), ("value", batch.v)):
            arrays[name] = np.ascontiguousarray(cache[np.arange(count), :, newest]).reshape(count, 1, -1)
        return arrays | {"seqlens_k": newest, "total_sequence_length": np.array([max(batch.lens)], np.int32)}

    def binding_of(self, session, row: Row, arrays: dict):
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
