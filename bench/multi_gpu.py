#!/usr/bin/env python3
"""One layer's decode attention on several GPUs: heads sharded, tokens sharded, torch's attention on the same shards, and one GPU.

Finds 2, 4 and 8 GPUs (--ranks 1,2,4,8 says which numbers), starts a process for each by torch.multiprocessing, and times calls in a
CUDA graph over copies of K and V that no cache holds together. A time is the slowest rank's. With --device cpu the processes talk by
gloo, which shows that everything works and nothing about GPUs.

Ways: one (a single rank with everything); tensor (TensorParallel: nothing is exchanged); context and context_all_to_all
(ContextParallel: states are exchanged and merged in the call); sdpa_context (torch's flash attention on the shards of
ContextParallel, then the same exchange; equal lengths only). context_fused is ContextParallel with the exchange over peer memory;
context_alone is its decode() without any exchange, what the exchange's time is counted from.

Each row of a way is a line of --json when it is done. A run takes up to --minutes; started again with the same file it goes on with
what is missing there. Lines of --quick runs say so, and are no results.

Usage: multi_gpu.py [--device cuda|cpu] [--ranks 1,2,4,8] [--ways one,tensor,...] [--rows REGEX] [--max-mb N] [--minutes 8.5]
                    [--quick] [--json FILE]
Needs torch 2.6 or newer.
"""

import argparse
import dataclasses
import datetime
import gc
import json
import pathlib
import re
import statistics
import subprocess
import tempfile
import time

import torch
import torch.distributed as dist
from graph_timing import graph_of

import lean_attention
from lean_attention.distributed import ContextParallel, TensorParallel
from lean_attention.distributed._exchange import EXCHANGES, Message, Rows

WAYS = ("one", "tensor", "context", "context_all_to_all", "context_fused", "context_alone", "sdpa_context")
EXCHANGE_OF = {"context_all_to_all": "all_to_all", "context_fused": "fused"}
ROUNDS = 7
L2_BYTES = 256 << 20  # what copies of K and V exceed together: twice an H200's L2 and more
SMALL_CALLS, LARGE_CALLS, LARGE_BYTES = (
    24,
    3,
    1 << 30,
)  # calls of a round; enough of small ones that ranks starting apart do not count
MEMORY_SHARE = 0.8  # of a GPU's free memory
TOLERANCE = 0.02  # against one call over everything, bf16, values of a normal distribution


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    lens: tuple

    @property
    def kv_bytes(self) -> int:
        return 2 * 2 * sum(self.lens) * self.kv_heads * self.head_dim


def rows() -> list:
    """The paper's figure of eight GPUs (section "Multi-GPU Execution"), then Llama shapes, in the order of their importance."""
    kilo = 1024
    found = []
    for model, q_heads in (("llama-8b", 32), ("llama-70b", 64)):
        for batch in (1, 8, 32):
            found += [Row(f"{model} {batch} x {n}k", q_heads, 8, 128, (n * kilo,) * batch) for n in (8, 32, 128, 512, 1024)]
        for n in (8, 128):  # from an eighth of the longest up, evenly
            found.append(Row(f"{model} 8 ragged to {n}k", q_heads, 8, 128, tuple(n * kilo * (i + 1) // 8 for i in range(8))))
    for n in (1, 4, 16, 64, 256, 1024):
        found.append(Row(f"paper 8a 256 heads 4 x {n}k", 256, 256, 64, (n * kilo,) * 4))
    found += [Row(f"paper 8b {heads} heads 4 x 256k", heads, heads, 64, (256 * kilo,) * 4) for heads in (64, 160, 320, 512)]
    found += [Row(f"paper 8c 256 heads {batch} x 256k", 256, 256, 64, (256 * kilo,) * batch) for batch in (1, 8, 32)]
    return sorted(found, key=lambda row: row.kv_bytes)


def quick_rows() -> list:
    return [Row("quick 8 heads 3 ragged", 8, 4, 64, (100, 1, 300)), Row("quick 8 heads 2 x 1k", 8, 2, 64, (1024, 1024))]


class Refused(Exception):
    """A way does not run a row; the text says why."""


@dataclasses.dataclass
class Bench:
    """One rank's side of a run."""

    device: torch.device
    contexts: dict  # by exchange
    control: object  # a gloo group: what ranks tell each other between rows

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def shard(self, row: Row, way: str) -> tuple:
        """(K/V heads, tokens of a sequence) that this rank keeps."""
        longest = max(row.lens)
        if way == "one":
            return row.kv_heads, longest
        if way == "tensor":
            if row.kv_heads < self.ranks:
                raise Refused(f"{row.kv_heads} K/V heads for {self.ranks} ranks: that is context parallelism")
            return -(-row.kv_heads // self.ranks), longest  # the most that TensorParallel deals out
        return row.kv_heads, self.contexts["all_gather"].placement.capacity(longest)

    def call(self, row: Row, way: str, q: torch.Tensor) -> object:
        """A function of one copy of (k, v) of the shard."""
        lens = torch.tensor(row.lens, dtype=torch.int32, device=self.device)
        if way in ("one", "tensor"):
            return lambda k, v: lean_attention.decode(q, k, v, seqlens=lens)
        if way == "sdpa_context":
            return self.sdpa_call(row, q)
        context = self.contexts[EXCHANGE_OF.get(way, "all_gather")]
        if way == "context_fused" and context.exchange != "fused":
            raise Refused("these GPUs do not reach each other's memory")
        if way == "context_alone":
            own = context.placement.local_tokens(lens, self.rank)
            return lambda k, v: lean_attention.decode(q, k, v, seqlens=own, return_lse=True)
        if context.exchange == "all_to_all" and row.q_heads % self.ranks:
            raise Refused(f"{self.ranks} ranks do not divide {row.q_heads} heads")
        return lambda k, v: context.decode(q, k, v, seqlens=lens)

    def sdpa_call(self, row: Row, q: torch.Tensor) -> object:
        """torch's flash attention with a group's heads as its queries, then the exchange."""
        if len(set(row.lens)) > 1:
            raise Refused("torch's attention has no lengths: equal ones only")
        tokens = self.contexts["all_gather"].placement.local_tokens(row.lens[0], self.rank)
        grouped = q.unflatten(1, (row.kv_heads, -1))
        message = Rows(row.q_heads, len(row.lens), row.head_dim, q.dtype)
        aten = torch.ops.aten

        def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = k[:, :, :tokens], v[:, :, :tokens]
            if self.device.type == "cuda":
                out, lse = aten._scaled_dot_product_flash_attention(grouped, k, v)[:2]
            else:
                out, lse = aten._scaled_dot_product_flash_attention_for_cpu(grouped, k, v)
            state = out.flatten(1, 2).transpose(0, 1), lse.flatten(1, 2).transpose(0, 1)
            merged, _ = EXCHANGES["all_gather"](Message.of(message, state, (0, 0), q.device), dist.group.WORLD)
            return merged.transpose(0, 1)

        return call

    def measured(self, row: Row, way: str) -> list:
        """Times of a call, us, of each round: the slowest rank's."""
        heads, tokens = self.shard(row, way)
        share_bytes = 4 * len(row.lens) * heads * tokens * row.head_dim
        copies = 1 if self.device.type == "cpu" else max(1, -(-L2_BYTES // share_bytes))
        calls = max(copies, LARGE_CALLS if share_bytes > LARGE_BYTES else SMALL_CALLS)
        q_heads = heads * row.q_heads // row.kv_heads
        q = torch.randn(len(row.lens), q_heads, row.head_dim, device=self.device).bfloat16()
        if way not in ("one", "tensor"):
            dist.broadcast(q, 0)
        call = self.call(row, way, q)
        shape = (2, len(row.lens), heads, tokens, row.head_dim)
        caches = [torch.empty(shape, device=self.device, dtype=torch.bfloat16).normal_() for _ in range(copies)]
        run = self.prepared(lambda: [call(*caches[i % copies]) for i in range(calls)])
        return [1e6 * self.slowest(run) / calls for _ in range(ROUNDS)]

    def prepared(self, run: object) -> object:
        """The calls warmed up, on a GPU as a CUDA graph; a function that runs them and returns seconds."""
        if self.device.type == "cpu":
            run()
            return lambda: timed(run)
        # Kinds of calls are agreed on, communicators and workspaces made, before the capture. NCCL's watchdog is another thread.
        graph = graph_of([run], capture_error_mode="thread_local")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def replayed() -> float:
            graph.replay()  # its exchanges bring the ranks' GPUs together
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return 1e-3 * start.elapsed_time(end)

        return replayed

    def slowest(self, run: object) -> float:
        """Seconds of one round, on the slowest rank."""
        dist.barrier(self.control)
        seconds = torch.tensor(run(), dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self.control)
        return seconds.item()

    def check(self) -> None:
        """Both forms against one call over everything, so that no time of a wrong result is recorded."""
        torch.manual_seed(1)
        q = torch.randn(2, 8, 64, device=self.device).bfloat16()
        k, v = torch.randn(2, 2, 8, 1000, 64, device=self.device).bfloat16()
        lens = torch.tensor([1000, 77], dtype=torch.int32, device=self.device)
        whole = lean_attention.decode(q, k, v, seqlens=lens)
        results = {name: c.decode(q, c.shard(k), c.shard(v), seqlens=lens) for name, c in self.contexts.items()}
        tensor = TensorParallel(8, 8)
        results["tensor"] = tensor.gather(
            tensor.decode(tensor.shard_q(q), tensor.shard_kv(k), tensor.shard_kv(v), seqlens=lens)
        )
        for name, result in results.items():
            difference = (result.float() - whole.float()).abs().max().item()
            if not difference <= TOLERANCE:
                raise SystemExit(f"multi_gpu: {name} differs from one call by {difference} on rank {self.rank}")


def timed(run: object) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def from_first(value: object, group: object) -> object:
    """What rank 0 has."""
    values = [value]
    dist.broadcast_object_list(values, 0, group=group)
    return values[0]


def done_in(file: pathlib.Path) -> set:
    if not file.exists():
        return set()
    lines = map(json.loads, file.read_text().splitlines())
    return {(line["row"], line["impl"], line["ranks"]) for line in lines}


def line_of(row: Row, way: str, ranks: int, times: list, note: object, options: argparse.Namespace) -> dict:
    line = dict(row=row.name, impl=f"lean/{way}" if not way.startswith("sdpa") else f"torch/{way}", ranks=ranks)
    line.update(lens=list(row.lens), q_heads=row.q_heads, kv_heads=row.kv_heads, head_dim=row.head_dim, dtype="bf16")
    line.update(kv_bytes=row.kv_bytes, us=None, note=note)
    if times:
        line.update(us=statistics.median(times), us_min=min(times), us_max=max(times), rounds=len(times))
    line.update(device=options.device_name, backend="nccl" if options.device == "cuda" else "gloo", torch=torch.__version__)
    line.update(commit=options.commit, date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))
    return {**line, "quick": True} if options.quick else line


def why_not(bench: Bench, row: Row, way: str, options: argparse.Namespace) -> str:
    """Why a row is not run at all, the same on every rank; empty where it is."""
    heads, tokens = bench.shard(row, way)
    needed = 4 * len(row.lens) * heads * tokens * row.head_dim
    room = options.max_mb << 20 if options.max_mb else None
    if bench.device.type == "cuda":
        free = torch.tensor(torch.cuda.mem_get_info()[0])
        dist.all_reduce(free, dist.ReduceOp.MIN, group=bench.control)
        room = min(room or free.item(), int(MEMORY_SHARE * free.item()))
    return f"K and V of a rank are {needed >> 20} MB, there is room for {room >> 20} MB" if room and needed > room else ""


def one_row(bench: Bench, row: Row, way: str, options: argparse.Namespace) -> None:
    times, note = [], None
    try:
        note = why_not(bench, row, way, options) or None
        if note is None:
            times = bench.measured(row, way)
    except Refused as refused:  # by every rank alike
        note = str(refused)
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    if bench.rank == 0:
        line = line_of(row, way, bench.ranks, times, note, options)
        with options.json.open("a") as file:
            file.write(json.dumps(line) + "\n")
        result = f"{line['us']:10.1f} us" if times else note
        print(f"{bench.ranks} x {line['impl']:24} {row.name:32} {result}", flush=True)


def rank_main(rank: int, ranks: int, store: str, options: argparse.Namespace) -> None:
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=ranks, timeout=limit)
    control = dist.new_group(backend="gloo", timeout=limit)
    bench = Bench(device, {name: ContextParallel(exchange=name) for name in ("all_gather", "all_to_all", "fused")}, control)
    bench.check()
    done = from_first(done_in(options.json), control)
    for row in quick_rows() if options.quick else rows():
        for way in options.ways:
            impl = f"torch/{way}" if way.startswith("sdpa") else f"lean/{way}"
            if (way == "one") != (ranks == 1) or (row.name, impl, ranks) in done or not re.search(options.rows, row.name):
                continue
            if from_first(time.time() > options.end, control):
                break
            one_row(bench, row, way, options)
    dist.barrier(control)
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", default="1,2,4,8", type=lambda text: [int(number) for number in text.split(",")])
    parser.add_argument("--ways", default=",".join(WAYS), type=lambda text: text.split(","))
    parser.add_argument("--rows", default="", help="a regular expression that their names contain")
    parser.add_argument("--max-mb", default=0, type=int, help="of K and V of a rank")
    parser.add_argument("--minutes", default=8.5, type=float)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", default=pathlib.Path("multi-gpu.jsonl"), type=pathlib.Path)
    options = parser.parse_args()
    unknown = set(options.ways) - set(WAYS)
    if unknown:
        raise SystemExit(f"multi_gpu: --ways {', '.join(unknown)}: there are {', '.join(WAYS)}")
    return options


def main() -> int:
    options = arguments()
    options.end = time.time() + 60 * options.minutes
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    if options.device == "cuda" and gpus < 2:
        print(f"multi_gpu: {gpus} GPUs here, 2 are needed; --device cpu runs by gloo")
        return 77
    name = torch.cuda.get_device_name(0) if gpus else f"{torch.get_num_threads()} threads of a CPU, gloo"
    options.device_name = name
    root = pathlib.Path(__file__).resolve().parent.parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    ).stdout.strip()
    options.commit = commit or "unknown"
    for ranks in options.ranks:
        if options.device == "cuda" and ranks > gpus:
            continue
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(rank_main, (ranks, f"file://{folder}/store", options), nprocs=ranks)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
