#!/usr/bin/env python3
"""Times attention in ONNX Runtime's CUDA provider: its own GroupQueryAttention against this library's, of the Phi-3-medium shape (40
query heads, 10 key/value heads, d = 128) in fp16 with rotary embedding, past and present in one buffer.

A model is a chain of attention nodes, as many as a decode step has layers, each with a cache of its own as far as memory goes;
with --whole all the layers' products stand between them, with the weights of one layer. Sessions on the same buffers run as CUDA
graphs and take turns; a turn is as many steps as fill 5 ms after one that is not timed, and the median of the turns counts,
divided by the layers. ONNX Runtime's is taken as it is, and with ORT_ENABLE_XQA=1 and =0. Results of all are compared. --lean
names the `lean` command, which times a pure read of as many bytes in the same run.

--generation answers what the paper's figure shows: how long an output token takes where every sequence has eight tokens of prompt
for one of output. A row's step is timed at the lengths in the middle of its outputs, its prompts one by one in chunks of 8,192
tokens: the first and the last of them are timed, in a model of 4 layers, and those between lie on a line. Attention of prompts
alone is timed too.

  pip install lean-attention onnxruntime-gpu torch onnx      (a build with the CUDA backend and LEAN_ORT=ON)
  python3 bench/ort_cuda.py --lean build/bin/lean --out bench/results/NAME.jsonl
  python3 bench/ort_cuda.py --lean build/bin/lean --whole --out bench/results/NAME.jsonl
  python3 bench/ort_cuda.py --lean build/bin/lean --generation --out bench/results/NAME.jsonl

Exit code: 0 ok, 1 results differ, 2 bad arguments or a missing package.
"""
import argparse
import datetime
import json
import os
import pathlib
import statistics
import sys
import time

from checkout import git_commit

try:
    import numpy as np
    import onnx
    import torch  # before onnxruntime, which finds the CUDA libraries that it loads
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    import lean_attention.ort
    from option_lists import list_of
    from suite import Command
except ModuleNotFoundError as missing:
    print(f"ort_cuda: {missing}", file=sys.stderr)
    sys.exit(2)

Q_HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FEED_FORWARD, VOCABULARY, LAYERS = 40, 10, 128, 5120, 17920, 32064, 40
Q_WIDTH, KV_WIDTH = Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
TURN_SECONDS = 0.005
CACHE_BYTES = 16e9  # of all layers' caches; beyond, layers share
LARGEST_DIFFERENCE = 2e-2
SUBJECTS = {"lean": None, "onnxruntime": None, "onnxruntime_xqa": "1", "onnxruntime_flash": "0"}  # name: ORT_ENABLE_XQA
OF_GENERATION = ("lean", "onnxruntime", "onnxruntime_flash")
OF_PROMPTS = ("lean", "onnxruntime")  # XQA is for single tokens
PROMPT_LAYERS, CHUNK, PROMPT_OF_OUTPUT = 4, 8192, 8
WEIGHTS = {"qkv": (HIDDEN, Q_WIDTH + 2 * KV_WIDTH), "o": (Q_WIDTH, HIDDEN), "gate_up": (HIDDEN, 2 * FEED_FORWARD),
           "down": (FEED_FORWARD, HIDDEN), "norm": (HIDDEN,), "logits": (HIDDEN, VOCABULARY)}  # fmt: skip
MICROSOFT = "com.microsoft"


class Step:
    """A step of the model for `tokens` of each sequence: `layers` of attention alone, or of all, with the logits of the last token."""

    def __init__(self, layers: int, capacity: int, whole: bool, tokens: int = 1):
        self.nodes, self.layers, self.whole = [], layers, whole
        angles = np.outer(np.arange(capacity), 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        tables = {"cos": np.cos(angles), "sin": np.sin(angles)}
        self.constants = [numpy_helper.from_array(x.astype(np.float16), name) for name, x in tables.items()]
        half = TensorProto.FLOAT16
        self.inputs = {"x": (half, ["B", tokens, HIDDEN if whole else Q_WIDTH])}
        if whole:
            self.inputs |= {name: (half, list(shape)) for name, shape in WEIGHTS.items()}
            self.constants.append(numpy_helper.from_array(np.array([FEED_FORWARD] * 2, np.int64), "halves"))
        else:
            self.inputs |= {name: (half, ["B", tokens, KV_WIDTH]) for name in ("key", "value")}
        self.inputs |= {"seqlens_k": (TensorProto.INT32, ["B"]), "total_sequence_length": (TensorProto.INT32, [1])}
        self.outputs = {}
        x = "x"
        for layer in range(layers):
            x = self._layer(x, layer)
        if whole and tokens > 1:
            ends = {"first": [-1], "end": [2**31 - 1], "axis": [1]}
            self.constants += [numpy_helper.from_array(np.array(at, np.int64), name) for name, at in ends.items()]
            x = self._add("Slice", [x, *ends], "last_token")
        if whole:
            x = self._add("MatMul", [self._norm(x, "last"), "logits"], "result")
        self.nodes[-1].output[0] = "y"
        self.outputs["y"] = (half, ["B", 1 if whole else tokens, VOCABULARY if whole else Q_WIDTH])

    def _add(self, op: str, inputs: list, output: str, domain: str = "", **attributes) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], domain=domain, name=output, **attributes))
        return output

    def _norm(self, x: str, name: str) -> str:
        return self._add("SimplifiedLayerNormalization", [x, "norm"], f"norm_{name}", axis=-1, epsilon=1e-5, stash_type=1)

    def _attention(self, inputs: list, layer: int) -> str:
        past, present = ([f"{side}_{what}_{layer}" for what in ("key", "value")] for side in ("past", "present"))
        cache = (TensorProto.FLOAT16, ["B", KV_HEADS, "C", HEAD_DIM])
        self.inputs |= dict.fromkeys(past, cache)
        self.outputs |= dict.fromkeys(present, cache)
        inputs = [*inputs, *past, "seqlens_k", "total_sequence_length", "cos", "sin"]
        heads = dict(num_heads=Q_HEADS, kv_num_heads=KV_HEADS, do_rotary=1)
        self._add("GroupQueryAttention", inputs, f"attention_{layer}", MICROSOFT, **heads)
        self.nodes[-1].output.extend(present)
        return f"attention_{layer}"

    def _layer(self, x: str, layer: int) -> str:
        if not self.whole:
            return self._attention([x, "key", "value"], layer)
        qkv = self._add("MatMul", [self._norm(x, f"in_{layer}"), "qkv"], f"qkv_{layer}")
        o = self._add("MatMul", [self._attention([qkv, "", ""], layer), "o"], f"o_{layer}")
        x = self._add("Add", [x, o], f"middle_{layer}")
        both = self._add("MatMul", [self._norm(x, f"up_{layer}"), "gate_up"], f"gate_up_{layer}")
        self._add("Split", [both, "halves"], f"gate_{layer}", axis=-1)
        self.nodes[-1].output.append(f"up_{layer}")
        gate = self._add("Mul", [f"gate_{layer}", self._add("Sigmoid", [f"gate_{layer}"], f"sigmoid_{layer}")], f"silu_{layer}")
        product = self._add("Mul", [gate, f"up_{layer}"], f"product_{layer}")
        return self._add("Add", [x, self._add("MatMul", [product, "down"], f"down_{layer}")], f"out_{layer}")

    def model(self) -> bytes:
        infos = [[helper.make_tensor_value_info(name, *form) for name, form in side.items()] for side in (self.inputs, self.outputs)]
        graph = helper.make_graph(self.nodes, "decode_step", *infos, self.constants)
        imports = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()


class Buffers:
    """What all sessions of a row are bound to."""

    def __init__(self, lens: list, capacity: int, layers: int, whole: bool, tokens: int = 1):
        torch.manual_seed(0)
        batch = len(lens)
        cache = (batch, KV_HEADS, capacity, HEAD_DIM)
        kept = max(1, min(layers, int(CACHE_BYTES / (4.0 * np.prod(cache)))))
        caches = [[self._random(*cache) for _ in range(2)] for _ in range(kept)]
        self.tensors = {"x": self._random(batch, tokens, HIDDEN if whole else Q_WIDTH)}
        if whole:
            self.tensors |= {name: self._random(*shape) * shape[0] ** -0.5 for name, shape in WEIGHTS.items()}
            self.tensors["norm"] = torch.ones(HIDDEN, dtype=torch.float16, device="cuda")
        else:
            self.tensors |= {name: self._random(batch, tokens, KV_WIDTH) for name in ("key", "value")}
        for layer in range(layers):
            self.tensors |= {f"past_{what}_{layer}": caches[layer % kept][i] for i, what in enumerate(("key", "value"))}
        self.tensors["seqlens_k"] = torch.tensor(lens, dtype=torch.int32, device="cuda") - 1
        self.tensors["total_sequence_length"] = torch.tensor([max(lens)], dtype=torch.int32)
        self.caches_kept = kept

    @staticmethod
    def _random(*shape: int):
        return torch.randn(*shape, dtype=torch.float16, device="cuda")


class Subject:
    """A session on the buffers; one for single tokens runs as a CUDA graph."""

    def __init__(self, name: str, step: Step, buffers: Buffers, batch: int):
        self.name, self.us, self.runs = name, [], 4
        xqa = SUBJECTS[name]
        os.environ.pop("ORT_ENABLE_XQA", None)
        if xqa is not None:
            os.environ["ORT_ENABLE_XQA"] = xqa
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if name == "lean":
            lean_attention.ort.register(options, override=True)
        self.graph = step.inputs["x"][1][1] == 1
        settings = {"enable_cuda_graph": "1"} if self.graph else {"arena_extend_strategy": "kSameAsRequested"}
        self.session = onnxruntime.InferenceSession(step.model(), options, providers=[("CUDAExecutionProvider", settings)])
        self.binding = self.session.io_binding()
        self.y = torch.zeros(batch, *step.outputs["y"][1][1:], dtype=torch.float16, device="cuda")
        for key, tensor in buffers.tensors.items():
            dtype = np.int32 if tensor.dtype == torch.int32 else np.float16
            self.binding.bind_input(key, tensor.device.type, 0, dtype, tuple(tensor.shape), tensor.data_ptr())
        for key in step.outputs:
            tensor = self.y if key == "y" else buffers.tensors[key.replace("present", "past")]
            self.binding.bind_output(key, "cuda", 0, np.float16, tuple(tensor.shape), tensor.data_ptr())
        self.without_wait = onnxruntime.RunOptions()
        self.without_wait.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def output(self) -> torch.Tensor:
        for _ in range(3 if self.graph else 2):  # the first captures, or finds the products' kernels
            begin = time.perf_counter()
            self.session.run_with_iobinding(self.binding)
            torch.cuda.synchronize()
        if time.perf_counter() - begin > 4 * TURN_SECONDS:
            self.runs = 1
        return self.y.clone()

    def turn(self) -> None:
        if self.runs > 1:
            self.session.run_with_iobinding(self.binding)
        torch.cuda.synchronize()
        begin, runs = time.perf_counter(), 0
        while True:
            for _ in range(self.runs):
                self.session.run_with_iobinding(self.binding, self.without_wait)
            runs += self.runs
            torch.cuda.synchronize()
            if time.perf_counter() - begin > TURN_SECONDS:
                break
        self.us.append((time.perf_counter() - begin) / runs * 1e6)


def difference_of(subject: Subject, reference: Subject, lens: list) -> float:
    """The largest, over the reference's largest number; rows of padding may hold anything."""
    rows = zip(lens, subject.first, reference.first)
    pairs = [(ours[: min(n, len(ours))].float(), theirs[: min(n, len(ours))].float()) for n, ours, theirs in rows]
    return float(max((ours - theirs).abs().max() for ours, theirs in pairs) / max(theirs.abs().max() for _, theirs in pairs))


def in_turns(names: tuple, step: Step, buffers: Buffers, lens: list, rounds: int) -> list:
    """Each subject that runs, with the times of its turns; one that does not is said on stderr."""
    subjects = []
    for name in names:
        try:
            subject = Subject(name, step, buffers, len(lens))
            subject.first = subject.output()
            subjects.append(subject)
        except Exception as error:  # ONNX Runtime's exceptions have no common class
            print(f"{name}: {str(error)[:300]}", file=sys.stderr, flush=True)
    for _ in range(rounds):
        for subject in subjects:
            subject.turn()
    reference = next((subject for subject in subjects if subject.name == "onnxruntime"), None)
    for subject in subjects:
        subject.difference = None if reference is None else difference_of(subject, reference, lens)
        del subject.session, subject.binding  # and their memory
    return subjects


def measure(lens: list, capacity: int, whole: bool, rounds: int, tokens: int = 1, names: tuple = tuple(SUBJECTS)) -> list:
    layers = LAYERS if tokens == 1 else PROMPT_LAYERS
    buffers = Buffers(lens, capacity, layers, whole, tokens)
    subjects = in_turns(names, Step(layers, capacity, whole, tokens), buffers, lens, rounds)
    kv_bytes = sum(lens) * KV_HEADS * HEAD_DIM * 4
    rows = []
    for subject in subjects:
        us = statistics.median(subject.us) / layers
        rows.append({
            "row": f"Phi3m {row_name(lens)} fp16" + (f" of {tokens}" if tokens > 1 else "") + (" step" if whole else ""),
            "impl": subject.name + "_ort" * (subject.name == "lean"), "lens": lens, "capacity": capacity, "n_q": tokens,
            "q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "fp16", "layers": layers,
            "caches": buffers.caches_kept, "whole_step": whole, "kv_bytes": kv_bytes, "us": us,
            "us_min": min(subject.us) / layers, "us_max": max(subject.us) / layers,
            "gbps": kv_bytes / us / 1e3, "difference": subject.difference, "rounds": rounds,
        })  # fmt: skip
    return rows


def add_reads(rows: list, command: Command) -> None:
    """ceiling_us of a layer of one token: a pure read of its K and V, and in a whole step of its weights. Prompts have none."""
    for row in rows:
        if row["n_q"] > 1:
            continue
        weights = 2 * sum(int(np.prod(shape)) for name, shape in WEIGHTS.items() if name != "logits")
        weights += 2 * HIDDEN * VOCABULARY / LAYERS
        row["ceiling_us"], why = command.read_us(row["kv_bytes"] + int(weights) * row["whole_step"])
        if why:
            row["note"] = why


def row_name(lens: list) -> str:
    """1x8k where all are as long, 16k+7x1k where the first is longer."""
    sizes = [f"{n // 1024}k" for n in lens]
    return f"{len(lens)}x{sizes[0]}" if len(set(lens)) == 1 else f"{sizes[0]}+{len(lens) - 1}x{sizes[1]}"


def shapes(whole: bool) -> list:
    """(lengths, capacity) of each row."""
    k = 1024
    if whole:
        return [([n * k] * b, n * k) for b, n in ((1, 1), (1, 16), (1, 64), (1, 128), (8, 16))] + [([32 * k, *[k] * 15], 32 * k)]
    even = [([n * k] * b, n * k) for b in (1, 8) for n in (1, 8, 32, 128)]
    return even + [([n * k, *[k] * 31], n * k) for n in (32, 64)]


GENERATIONS = [[8192], [32768], [131072], [16384] * 8, [32768, *[1024] * 15], [131072, *[1024] * 31]]  # prompts of each row
PROMPTS = [([1024], 1024), ([8192], 8192), ([32768], CHUNK), ([32768], 512), ([8192, *[1024] * 7], 8192)]  # lengths, new tokens of each


class Generation:
    """Output tokens of rows whose sequences have eight tokens of prompt for one of output."""

    def __init__(self, rounds: int):
        self.rounds, self.chunks, self.prompts = rounds, {}, {}

    def chunk(self, total: int, tokens: int) -> list:
        """A prompt's last `tokens` of `total`, by each subject; measured once."""
        if (total, tokens) not in self.chunks:
            self.chunks[total, tokens] = measure([total], total, True, self.rounds, tokens, OF_PROMPTS)
        return self.chunks[total, tokens]

    def prompt_ms(self, tokens: int) -> dict:
        """All layers of a prompt, by subject. A chunk's time grows by a fixed amount for each one ahead of it."""
        if tokens not in self.prompts:
            size = min(tokens, CHUNK)
            first, last = ({line["impl"]: line["us"] for line in self.chunk(total, size)} for total in (size, tokens))
            self.prompts[tokens] = {impl: LAYERS * tokens / size * (first[impl] + last[impl]) / 2e3 for impl in first if impl in last}
        return self.prompts[tokens]

    def row(self, prompts: list) -> list:
        outputs = [tokens // PROMPT_OF_OUTPUT for tokens in prompts]
        lens = [tokens + n // 2 for tokens, n in zip(prompts, outputs)]
        lines = measure(lens, max(lens), True, self.rounds, names=OF_GENERATION)
        for line in lines:
            prompt = [self.prompt_ms(tokens).get(line["impl"].replace("_flash", "")) for tokens in prompts]
            line["row"] = f"Phi3m {row_name(prompts)} fp16 generation"
            if None in prompt:
                continue
            line |= {"prompts": prompts, "outputs": outputs, "step_ms": line["us"] * LAYERS / 1e3}
            line["prompt_ms"] = sum(ms / n for ms, n in zip(prompt, outputs))  # for each token that all sequences put out
            line["token_ms"] = line["step_ms"] + line["prompt_ms"]
        return lines


def measurements(arguments: argparse.Namespace):
    """Calls that give lines, one a row."""

    def asked(lens: list) -> bool:
        return not arguments.rows or row_name(lens) in arguments.rows

    if not arguments.generation:
        return [lambda row=row: measure(*row, arguments.whole, arguments.rounds) for row in shapes(arguments.whole) if asked(row[0])]
    generation = Generation(arguments.rounds)
    of_prompts = [
        lambda lens=lens, tokens=tokens: measure(lens, max(lens), False, arguments.rounds, tokens, OF_PROMPTS)
        for lens, tokens in PROMPTS
        if asked(lens)
    ]
    rows = [lambda prompts=prompts: generation.row(prompts) for prompts in GENERATIONS if asked(prompts)]
    return [*of_prompts, *rows, lambda: [line for lines in generation.chunks.values() for line in lines]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true", help="whole decode steps of 40 layers")
    parser.add_argument("--generation", action="store_true", help="output tokens with eight of prompt each, and prompts alone")
    parser.add_argument("--lean", type=pathlib.Path, help="the `lean` command: times of a pure read go beside ours")
    parser.add_argument("--rows", type=list_of(), help="these alone, by their lengths, as 8x1k,32k+31x1k")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new row is begun after these")
    parser.add_argument("--commit", help="of the build, where this is no checkout of it")
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines are written here")
    arguments = parser.parse_args()
    commit = arguments.commit or git_commit()
    command = Command(arguments.lean, "cuda", 1) if arguments.lean else None
    begin, lines, wrong = time.monotonic(), [], 0
    for rows_of in measurements(arguments):
        if time.monotonic() - begin > arguments.seconds:
            print(f"ort_cuda: stopped after {arguments.seconds:.0f} s, rows are missing", file=sys.stderr)
            break
        rows = rows_of()
        torch.cuda.empty_cache()
        if command:
            add_reads(rows, command)
        for row in rows:
            row |= {"device": torch.cuda.get_device_name(), "onnxruntime": onnxruntime.__version__, "commit": commit,
                    "date": datetime.date.today().isoformat()}  # fmt: skip
            lines.append(json.dumps(row))
            right = row["difference"] is not None and row["difference"] <= LARGEST_DIFFERENCE
            wrong += not right
            token = f", {row['token_ms']:.2f} ms a token" if "token_ms" in row else ""
            said = f"{row['us']:.1f} us a layer, {row['gbps']:.0f} GB/s{token}{'' if right else '; DIFFERENT'}"
            print(f"{row['row']} {row['impl']}: {said}", flush=True)
        if arguments.out:
            arguments.out.write_text("\n".join(lines) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
