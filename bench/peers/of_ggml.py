"""llama.cpp's flash attention on a CPU: ggml_flash_attn_ext through ctypes, from the library that bench/peers/build_ggml.py builds.

Queries and results are fp32 there, K and V as they are. Where lengths differ, a graph has one such operation for each sequence.
"""
import ctypes
import os
import pathlib

import torch

from peers import Peer, Prepared
from peers.rows import Form

FOLDER = pathlib.Path(os.environ.get("LEAN_GGML") or pathlib.Path(__file__).resolve().parents[2] / "build-ggml")
TYPES = {"fp32": 0, "fp16": 1, "bf16": 30}  # enum ggml_type
TENSOR_BYTES = 1024  # room for a tensor's description; ggml asks for less


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Library:
    """The few functions of ggml that a graph of one operation needs."""

    def __init__(self, folder: pathlib.Path):
        found = {name: sorted(folder.rglob(f"lib{name}.so*")) for name in ("ggml-base", "ggml-cpu")}
        if not all(found.values()):
            raise ImportError(f"{folder} has no libggml-cpu: python3 bench/peers/build_ggml.py builds it")
        self.base, self.cpu = (ctypes.CDLL(str(paths[0]), mode=ctypes.RTLD_GLOBAL) for paths in found.values())
        pointer, long, single = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self.declare(self.base, "ggml_init", pointer, [InitParams])
        self.declare(self.base, "ggml_free", None, [pointer])
        self.declare(self.base, "ggml_new_tensor_4d", pointer, [pointer, ctypes.c_int, long, long, long, long])
        self.declare(self.base, "ggml_flash_attn_ext", pointer, [pointer] * 5 + [single] * 3)
        self.declare(self.base, "ggml_new_graph", pointer, [pointer])
        self.declare(self.base, "ggml_build_forward_expand", None, [pointer, pointer])
        self.declare(self.base, "ggml_nbytes", ctypes.c_size_t, [pointer])
        self.declare(self.base, "ggml_backend_cpu_buffer_from_ptr", pointer, [pointer, ctypes.c_size_t])
        self.declare(self.base, "ggml_backend_tensor_alloc", ctypes.c_int, [pointer, pointer, pointer])
        self.declare(self.base, "ggml_backend_graph_compute", ctypes.c_int, [pointer, pointer])
        self.declare(self.cpu, "ggml_backend_cpu_init", pointer, [])
        self.declare(self.cpu, "ggml_backend_cpu_set_n_threads", None, [pointer, ctypes.c_int])
        self.declare(self.cpu, "ggml_backend_cpu_set_threadpool", None, [pointer, pointer])
        self.declare(self.base, "ggml_threadpool_params_init", None, [pointer, ctypes.c_int])
        self.declare(self.cpu, "ggml_threadpool_new", pointer, [pointer])

    def declare(self, library, name: str, result, arguments: list) -> None:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        setattr(self, name.removeprefix("ggml_"), function)


class Ggml(Peer):
    name = "ggml"
    devices = ("cpu",)
    dtypes = ("fp32", "fp16", "bf16")

    def __init__(self, device, threads):
        self.library = library = Library(FOLDER)
        version = FOLDER / "version"
        self.impl = f"ggml-{version.read_text().strip() if version.exists() else '?'}/flash_attn_ext"
        self.backend = library.backend_cpu_init()
        library.backend_cpu_set_n_threads(self.backend, threads)
        params = ctypes.create_string_buffer(4096)  # struct ggml_threadpool_params: 512 flags and a few numbers
        library.threadpool_params_init(params, threads)
        library.backend_cpu_set_threadpool(self.backend, library.threadpool_new(params))

    def refuses(self, row):
        if row.form.page:
            return "no pages"
        return None if row.decodes else "a causal chunk needs a mask of its own type: not called so here"

    def forms(self, row):
        return [Form("bhsd")] if row.uniform else [Form("blocks")]

    def prepare(self, row, tensors):
        q, out = tensors.q.float().contiguous(), torch.full(tensors.q.shape, float("nan"), dtype=torch.float32)
        kept, graphs = [], []
        for k, v in zip(tensors.k, tensors.v):
            context = self.library.init(InitParams(TENSOR_BYTES * (8 * row.batch + 8) + (1 << 20), None, True))
            graph = self.library.new_graph(context)
            parts = [(0, row.batch, row.longest, k, v)] if row.uniform else [
                (b, 1, row.lens[b], tensors.sequence(k, b), tensors.sequence(v, b)) for b in range(row.batch)]
            for part in parts:
                self.add(context, graph, kept, row, q, out, *part)
            graphs.append(graph)

        def call(i):
            if self.library.backend_graph_compute(self.backend, graphs[i]):
                raise RuntimeError("ggml_backend_graph_compute failed")
            return out

        call.kept = kept, q
        return Prepared(call)

    def add(self, context, graph, kept, row, q, out, begin, count, tokens, k, v) -> None:
        """One operation over `count` sequences from `begin` on. ggml counts axes from the fastest one."""
        lib, dim = self.library, row.head_dim
        inputs = [lib.new_tensor_4d(context, 0, dim, 1, row.q_heads, count),
                  *(lib.new_tensor_4d(context, TYPES[row.dtype], dim, tokens, row.kv_heads, count) for _ in "kv")]
        result = lib.flash_attn_ext(context, *inputs, None, row.scale, 0.0, 0.0)
        for tensor, memory in zip((*inputs, result), (q[begin:begin + count], k, v, out[begin:begin + count])):
            size = lib.nbytes(tensor)
            buffer = lib.backend_cpu_buffer_from_ptr(memory.data_ptr(), size)
            lib.backend_tensor_alloc(buffer, tensor, memory.data_ptr())
            kept.append((memory, buffer))
        lib.build_forward_expand(graph, result)


PEERS = (Ggml,)
