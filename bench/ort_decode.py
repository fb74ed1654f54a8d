#!/usr/bin/env python3
"""Times one layer's decode attention in ONNX Runtime: its own GroupQueryAttention against this library's, in sessions of the same
settings, of the Phi-3-medium shape (40 query heads, 10 key/value heads, d = 128), past and present in one buffer. With --prompts
prompts of one sequence and chunks of them behind 4k tokens, of that shape and of Llama-3-8B's (32 and 8 heads).

In a round everybody takes a turn: a run that is not timed, then as many as fill 20 ms; the median of the rounds counts. `ceiling_us`
is how long the same bytes take to be read, by NumPy's dot() on as many threads, in the same rounds. Results of the two are compared.
On a machine that others use --processor-time counts what the process ran for, on one thread, in place of how long it took.

  pip install lean-attention[onnx] numpy      (or a build of this tree with LEAN_ORT=ON)
  python3 bench/ort_decode.py --threads 2 --out bench/results/NAME.jsonl
  python3 bench/ort_decode.py --threads 2 --prompts --out bench/results/NAME.jsonl

Exit code: 0 ok, 1 the two differ, 2 bad arguments or a missing package.
"""
import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import statistics
import sys
import time

from checkout import git_commit

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's reads are spread over threads here

try:
    import numpy as np
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    import lean_attention.ort
except ModuleNotFoundError as missing:
    print(f"ort_decode: {missing}", file=sys.stderr)
    sys.exit(2)

HEADS, HEAD_DIM = {"Phi3m": (40, 10), "Llama8B": (32, 8)}, 128  # query and key/value heads
PROMPTS = [(tokens, context) for context in (0, 4096) for tokens in (2, 8, 32, 128, 512, 2048)]
TYPES = {"fp32": (np.float32, TensorProto.FLOAT), "fp16": (np.float16, TensorProto.FLOAT16)}
CLOCK = time.perf_counter
TURN_SECONDS = 0.02
SETTLE_SECONDS = 0.05  # ONNX Runtime's threads spin for 16 ms after their last call
LARGEST_DIFFERENCE = {"fp32": 1e-5, "fp16": 1e-2}


def layer(dtype: int, q_heads: int, kv_heads: int) -> bytes:
    shapes = {
        "query": (dtype, ["B", "S", q_heads * HEAD_DIM]),
        "key": (dtype, ["B", "S", kv_heads * HEAD_DIM]),
        "value": (dtype, ["B", "S", kv_heads * HEAD_DIM]),
        "past_key": (dtype, ["B", kv_heads, "C", HEAD_DIM]),
        "past_value": (dtype, ["B", kv_heads, "C", HEAD_DIM]),
        "seqlens_k": (TensorProto.INT32, ["B"]),
        "total_sequence_length": (TensorProto.INT32, [1]),
    }
    results = {"output": shapes["query"], "present_key": shapes["past_key"], "present_value": shapes["past_value"]}
    node = helper.make_node(
        "GroupQueryAttention", list(shapes), list(results), domain="com.microsoft", num_heads=q_heads, kv_num_heads=kv_heads
    )
    infos = [[helper.make_tensor_value_info(name, *form) for name, form in side.items()] for side in (shapes, results)]
    graph = helper.make_graph([node], "layer", *infos)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()


class Side:
    """A session on `feeds`, whose caches are the bound buffers themselves."""

    def __init__(self, name: str, model: bytes, feeds: dict, threads: int):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        if name == "lean":
            lean_attention.ort.register(options, override=True)
        self.name, self.us = name, []
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        for key, value in feeds.items():
            self.binding.bind_ortvalue_input(key, value)
        self.binding.bind_output("output")
        for key in ("key", "value"):
            self.binding.bind_ortvalue_output(f"present_{key}", feeds[f"past_{key}"])

    def output(self) -> np.ndarray:
        self.session.run_with_iobinding(self.binding)
        return self.binding.get_outputs()[0].numpy().astype(np.float64)

    def turn(self) -> None:
        time.sleep(SETTLE_SECONDS)
        self.session.run_with_iobinding(self.binding)
        begin, runs = CLOCK(), 0
        while CLOCK() - begin < TURN_SECONDS or runs == 0:
            self.session.run_with_iobinding(self.binding)
            runs += 1
        self.us.append((CLOCK() - begin) / runs * 1e6)


class Reader:
    """The read limit: every byte of K and V once."""

    def __init__(self, arrays: list, threads: int):
        words = np.concatenate([array.reshape(-1).view(np.float32) for array in arrays])
        self.parts, self.us = np.array_split(words, threads), []
        self.pool = concurrent.futures.ThreadPoolExecutor(threads)

    def turn(self) -> None:
        time.sleep(SETTLE_SECONDS)
        begin, runs = CLOCK(), 0
        while CLOCK() - begin < TURN_SECONDS or runs == 0:
            list(self.pool.map(lambda part: np.dot(part, part), self.parts))
            runs += 1
        self.us.append((CLOCK() - begin) / runs * 1e6)


def measure(shape: str, lens: list, tokens: int, dtype: str, threads: int, rounds: int) -> dict:
    """`tokens`: new ones, of all in `lens`."""
    q_heads, kv_heads = HEADS[shape]
    storage, onnx_type = TYPES[dtype]
    random = np.random.default_rng(0)
    batch, capacity = len(lens), max(lens)
    arrays = {
        "query": random.standard_normal((batch, tokens, q_heads * HEAD_DIM), np.float32),
        "key": random.standard_normal((batch, tokens, kv_heads * HEAD_DIM), np.float32),
        "value": random.standard_normal((batch, tokens, kv_heads * HEAD_DIM), np.float32),
        "past_key": random.standard_normal((batch, kv_heads, capacity, HEAD_DIM), np.float32),
        "past_value": random.standard_normal((batch, kv_heads, capacity, HEAD_DIM), np.float32),
    }
    feeds = {name: onnxruntime.OrtValue.ortvalue_from_numpy(x.astype(storage)) for name, x in arrays.items()}
    feeds["seqlens_k"] = onnxruntime.OrtValue.ortvalue_from_numpy(np.array(lens, np.int32) - 1)
    feeds["total_sequence_length"] = onnxruntime.OrtValue.ortvalue_from_numpy(np.array([capacity], np.int32))
    model = layer(onnx_type, q_heads, kv_heads)
    sides = [Side(name, model, feeds, threads) for name in ("lean", "onnxruntime")]
    ours, theirs = (side.output() for side in sides)
    difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    read = [np.ascontiguousarray(arrays[f"past_{x}"].astype(storage)[b, :, :n]) for x in ("key", "value") for b, n in enumerate(lens)]
    reader = Reader(read, threads)
    for _ in range(rounds):
        for subject in (*sides, reader):
            subject.turn()
    us, peer_us, ceiling_us = (statistics.median(x.us) for x in (*sides, reader))
    kv_bytes = sum(x.nbytes for x in read)
    return {
        "row": f"{shape} {row_name(lens)} {dtype}" + (f" of {tokens}" if tokens > 1 else ""), "impl": "lean_ort",
        "lens": lens, "n_q": tokens, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": HEAD_DIM, "dtype": dtype, "threads": threads,
        "kv_bytes": kv_bytes, "us": us, "us_min": min(sides[0].us), "us_max": max(sides[0].us), "onnxruntime_us": peer_us,
        "speedup": peer_us / us, "gbps": kv_bytes / us / 1e3, "onnxruntime_gbps": kv_bytes / peer_us / 1e3,
        "ceiling_us": ceiling_us, "read_fraction": ceiling_us / us, "difference": difference, "rounds": rounds,
    }  # fmt: skip


def row_name(lens: list) -> str:
    """1x8k where all are as long, 16k+7x1k where the first is longer."""
    sizes = [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lens]
    return f"{len(lens)}x{sizes[0]}" if len(set(lens)) == 1 else f"{sizes[0]}+{len(lens) - 1}x{sizes[1]}"


def device_name() -> str:
    names = [line.split(":")[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return names[0] if names else "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="1k tokens alone, or a prompt of 32")
    parser.add_argument("--prompts", action="store_true", help="prompts and chunks of them in place of single tokens")
    parser.add_argument("--processor-time", action="store_true", help="on one thread, which does not spin: not how long, but how much")
    parser.add_argument("--note", default="", help="kept with the results, for example that the machine was shared")
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines are written here")
    arguments = parser.parse_args()
    if arguments.processor_time:
        if arguments.threads != 1:
            parser.error(f"--processor-time: must go with --threads 1, not {arguments.threads}: waiting threads spin")
        global CLOCK
        CLOCK = time.process_time
    commit = git_commit()
    if arguments.prompts:
        prompts = [(32, 0)] if arguments.quick else PROMPTS
        rows = [(shape, [context + tokens], tokens) for shape in HEADS for tokens, context in prompts]
    else:
        lengths = [[1024]] if arguments.quick else [[1024], [8192], [32768], [1024] * 8, [16384, *[1024] * 7]]
        rows = [("Phi3m", lens, 1) for lens in lengths]
    lines, wrong = [], 0
    for dtype in TYPES:
        for shape, lens, tokens in rows:
            row = measure(shape, lens, tokens, dtype, arguments.threads, arguments.rounds)
            row |= {"device": device_name(), "onnxruntime": onnxruntime.__version__, "commit": commit, "note": arguments.note,
                    "clock": "processor time" if arguments.processor_time else "wall",
                    "date": datetime.date.today().isoformat()}  # fmt: skip
            lines.append(json.dumps(row))
            right = row["difference"] <= LARGEST_DIFFERENCE[dtype]
            wrong += not right
            print(
                f"{row['row']}: lean {row['us']:.0f} us, {row['gbps']:.1f} GB/s, "
                f"{row['read_fraction']:.0%} of reading; onnxruntime {row['onnxruntime_us']:.0f} us, {row['onnxruntime_gbps']:.1f} GB/s; "
                f"{row['speedup']:.2f}x{'' if right else '; DIFFERENT'}",
                flush=True,
            )
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
