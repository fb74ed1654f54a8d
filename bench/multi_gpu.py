#!/usr/bin/env python3
"""One layer's decode attention on several GPUs: heads sharded, tokens sharded, torch's attention on the same shards, and one GPU.

Starts a process for each GPU by torch.multiprocessing, as many as the largest number of --gpus that there are, and times calls in a
CUDA graph over copies of K and V that no cache holds together. The calls of a graph are the layers of a step: what follows from lengths
alone is worked out once in it. A time is the slowest rank's. With --device cpu the processes talk by gloo, which shows that everything
works and nothing about GPUs.

Ways: one (a single rank with everything); tensor (TensorParallel: nothing is exchanged); context and context_all_to_all
(ContextParallel: states are exchanged by NCCL and merged in the call); context_fused (ContextParallel with the exchange over peer
memory, in decode()'s own launch where it has one); context_fused_apart (the same by a launch behind decode()'s); sdpa_context (torch's
flash attention on the shards of ContextParallel, then the exchange of `context`; equal lengths only); context_alone and
context_alone_dependent (decode() of the shard without any exchange, what an exchange's time is counted from; the latter as a dependent
launch, as those of context_fused are). Every line has the read limit too, ceiling_us: a kernel that only reads the bytes of K and V that
the way's ranks hold, on the same GPUs at the same time, the slowest rank's; the best of several such kernels.

Rows come in the order of what they decide, every number of GPUs of a row before the next row, and each is a line of --json when it is
done. A run takes up to --minutes; started again with the same file it goes on with what is missing there. Lines of --quick runs say so,
and are no results.

Usage: multi_gpu.py [--device cuda|cpu] [--gpus 1,2,4,8] [--ways one,tensor,...] [--rows REGEX] [--max-mb N] [--minutes 8.5]
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
import tempfile
import time

import torch
import torch.distributed as dist
from checkout import git_commit
from graph_timing import graph_of
from multi_gpu_rows import Row, quick_rows, rows
from option_lists import list_of
from read_limit import readers

import lean_attention
from lean_attention.distributed import ContextParallel, TensorParallel
from lean_attention.distributed._exchange import EXCHANGES, Message, Rows

WAYS = ("one", "context_fused", "context_alone", "context", "sdpa_context", "tensor", "context_alone_dependent", "context_fused_apart")
EXCHANGE_OF = {
    "context": "all_gather",
    "sdpa_context": "all_gather",
    "context_all_to_all": "all_to_all",
    "context_fused": "fused",
    "context_fused_apart": "fused",
}
ALONE = ("context_alone", "context_alone_dependent")
ALL_WAYS = (*WAYS, "context_all_to_all")
ROUNDS = 7
L2_BYTES = 256 << 20  # what copies of K and V exceed together: twice an H200's L2 and more
SMALL_CALLS, LARGE_CALLS, LARGE_BYTES = (
    24,
    3,
    1 << 30,
)  # calls of a round; enough of small ones that ranks starting apart do not count
MEMORY_SHARE = 0.8  # of a GPU's free memory
TOLERANCE = 0.02  # against one call over everything, bf16, values of a normal distribution


class Refused(Exception):
    """A way does not run a row; the text says why."""


@dataclasses.dataclass
class Bench:
    """One rank's side of the measurements on some GPUs."""

    device: torch.device
    group: object
    control: object  # a gloo group: what ranks tell each other between rows
    contexts: dict  # by way
    readers: list
    held: tuple = (None, [])  # copies of K and V that the last way had, and what they are of
    ceilings: dict = dataclasses.field(default_factory=dict)  # us, by (row, bytes of a rank)

    @classmethod
    def of(cls, ranks: int, device: torch.device, groups: tuple, options: argparse.Namespace) -> object:
        contexts = {}
        if ranks > 1:
            for way in options.ways:
                if way in EXCHANGE_OF or way in ALONE:
                    contexts[way] = ContextParallel(groups[0], exchange=EXCHANGE_OF.get(way, "all_gather"))
            if "context_fused_apart" in contexts:
                contexts["context_fused_apart"]._peers.in_launch = False
        return cls(device, *groups, contexts, readers(device))

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    def shard(self, row: Row, way: str) -> tuple:
        """(K/V heads, tokens of a sequence) that this rank keeps."""
        longest = max(row.lens)
        if way == "one":
            return row.kv_heads, longest
        if way == "tensor":
            if row.kv_heads < self.ranks:
                raise Refused(f"{row.kv_heads} K/V heads for {self.ranks} ranks: that is context parallelism")
            return -(-row.kv_heads // self.ranks), longest  # the most that TensorParallel deals out
        return row.kv_heads, self.contexts[way].placement.capacity(longest)

    def read_bytes(self, row: Row, way: str) -> int:
        """Of K and V, by this rank in a call."""
        heads, tokens = self.shard(row, way)[0], row.lens
        if way in self.contexts:
            tokens = [self.contexts[way].placement.local_tokens(n, self.rank) for n in row.lens]
        return 4 * heads * row.head_dim * sum(tokens)

    def step(self, row: Row, way: str, q: torch.Tensor) -> object:
        """A function that begins a step: it returns a layer, a function of one copy of (k, v) of the shard."""
        lens = torch.tensor(row.lens, dtype=torch.int32, device=self.device)
        if way in ("one", "tensor"):
            return lambda: lambda k, v: lean_attention.decode(q, k, v, seqlens=lens)
        context = self.contexts[way]
        if way == "sdpa_context":
            return self.sdpa_step(row, q)
        if EXCHANGE_OF.get(way) == "fused" and context.exchange != "fused":
            raise Refused("these GPUs do not reach each other's memory")
        if way in ALONE:
            own = context.placement.local_tokens(lens, self.rank)
            options = lean_attention.Options(dependent_launch=way == "context_alone_dependent")
            return lambda: lambda k, v: lean_attention.decode(q, k, v, seqlens=own, return_lse=True, options=options)
        if context.exchange == "all_to_all" and row.q_heads % self.ranks:
            raise Refused(f"{self.ranks} ranks do not divide {row.q_heads} heads")

        def begin() -> object:
            lengths = context.step_lengths(lens)
            return lambda k, v: context.decode(q, k, v, seqlens=lengths)

        return begin

    def sdpa_step(self, row: Row, q: torch.Tensor) -> object:
        """torch's flash attention with a group's heads as its queries, then the exchange."""
        if len(set(row.lens)) > 1:
            raise Refused("torch's attention has no lengths: equal ones only")
        tokens = self.contexts["sdpa_context"].placement.local_tokens(row.lens[0], self.rank)
        grouped = q.unflatten(1, (row.kv_heads, -1))
        message = Rows(row.q_heads, len(row.lens), row.head_dim, q.dtype)
        aten = torch.ops.aten

        def layer(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = k[:, :, :tokens], v[:, :, :tokens]
            if self.device.type == "cuda":
                out, lse = aten._scaled_dot_product_flash_attention(grouped, k, v)[:2]
            else:
                out, lse = aten._scaled_dot_product_flash_attention_for_cpu(grouped, k, v)
            state = out.flatten(1, 2).transpose(0, 1), lse.flatten(1, 2).transpose(0, 1)
            merged, _ = EXCHANGES["all_gather"](Message.of(message, state, (0, 0), q.device), self.group)
            return merged.transpose(0, 1)

        return lambda: layer

    def caches(self, shape: tuple, copies: int) -> list:
        """Copies of K and V [2, *shape], which no way writes to: those of the last way, where they are alike."""
        if self.held[0] != (shape, copies):
            self.release()
            self.held = (shape, copies), [
                torch.empty(shape, device=self.device, dtype=torch.bfloat16).normal_() for _ in range(copies)
            ]
        return self.held[1]

    def release(self) -> None:
        self.held = (None, [])
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def measured(self, row: Row, way: str) -> tuple:
        """Times of a call, us, of each round, the slowest rank's; and the read limit."""
        heads, tokens = self.shard(row, way)
        share_bytes = 4 * len(row.lens) * heads * tokens * row.head_dim
        copies = 1 if self.device.type == "cpu" else max(1, -(-L2_BYTES // share_bytes))
        calls = max(copies, LARGE_CALLS if share_bytes > LARGE_BYTES else SMALL_CALLS)
        q_heads = heads * row.q_heads // row.kv_heads
        q = torch.randn(len(row.lens), q_heads, row.head_dim, device=self.device).bfloat16()
        if way in self.contexts:
            dist.broadcast(q, 0, group=self.group)
        begin = self.step(row, way, q)
        caches = self.caches((2, len(row.lens), heads, tokens, row.head_dim), copies)

        def layers() -> None:
            layer = begin()
            for i in range(calls):
                layer(*caches[i % copies])

        times = self.rounds(layers, calls)
        key = (row.name, heads, tokens)
        if key not in self.ceilings:
            self.ceilings[key] = min(self.read_us(caches, self.read_bytes(row, way), calls, read) for read in self.readers)
        return times, self.ceilings[key]

    def read_us(self, caches: list, size: int, calls: int, read: object) -> float:
        parts = [cache.view(-1)[: size // 2].view(torch.uint8) for cache in caches]
        return statistics.median(self.rounds(lambda: [read(parts[i % len(parts)]) for i in range(calls)], calls))

    def rounds(self, run: object, calls: int) -> list:
        """us a call of each round."""
        prepared = self.prepared(run)
        return [1e6 * self.slowest(prepared) / calls for _ in range(ROUNDS)]

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
        tensor = TensorParallel(8, 8, self.group)
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


def line_of(row: Row, way: str, ranks: int, found: tuple, note: object, options: argparse.Namespace) -> dict:
    times, ceiling_us = found
    line = dict(row=row.name, impl=f"lean/{way}" if not way.startswith("sdpa") else f"torch/{way}", ranks=ranks)
    line.update(lens=list(row.lens), q_heads=row.q_heads, kv_heads=row.kv_heads, head_dim=row.head_dim, dtype="bf16")
    line.update(kv_bytes=row.kv_bytes, us=None, note=note)
    if times:
        line.update(us=statistics.median(times), us_min=min(times), us_max=max(times), rounds=len(times), ceiling_us=ceiling_us)
    line.update(device=options.device_name, backend="nccl" if options.device == "cuda" else "gloo", torch=torch.__version__)
    line.update(commit=options.commit, date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))
    return {**line, "quick": True} if options.quick else line


def why_not(bench: Bench, row: Row, way: str, options: argparse.Namespace) -> str:
    """Why a row is not run at all, the same on every rank; empty where it is."""
    heads, tokens = bench.shard(row, way)
    needed = 4 * len(row.lens) * heads * tokens * row.head_dim
    room = options.max_mb << 20 if options.max_mb else None
    if bench.device.type == "cuda":
        free = torch.tensor(torch.cuda.mem_get_info()[0] + sum(cache.nbytes for cache in bench.held[1]))
        dist.all_reduce(free, dist.ReduceOp.MIN, group=bench.control)
        room = min(room or free.item(), int(MEMORY_SHARE * free.item()))
    return f"K and V of a rank are {needed >> 20} MB, there is room for {room >> 20} MB" if room and needed > room else ""


def one_row(bench: Bench, row: Row, way: str, options: argparse.Namespace) -> None:
    found, note = ([], None), None
    try:
        note = why_not(bench, row, way, options) or None
        if note is None:
            found = bench.measured(row, way)
    except Refused as refused:  # by every rank alike
        note = str(refused)
    if bench.rank == 0:
        line = line_of(row, way, bench.ranks, found, note, options)
        with options.json.open("a") as file:
            file.write(json.dumps(line) + "\n")
        result = f"{line['us']:10.1f} us, read {line['ceiling_us']:.1f}" if found[0] else note
        print(f"{bench.ranks} x {line['impl']:28} {row.name:32} {result}", flush=True)


def missing_ways(row: Row, ranks: int, done: set, options: argparse.Namespace) -> list:
    """Of this row on so many ranks: all but those that the file has."""
    impls = {way: f"torch/{way}" if way.startswith("sdpa") else f"lean/{way}" for way in options.ways}
    return [way for way, impl in impls.items() if (way == "one") == (ranks == 1) and (row.name, impl, ranks) not in done]


def rank_main(rank: int, world: int, store: str, options: argparse.Namespace) -> None:
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=world, timeout=limit)
    benches, groups = {}, ()
    everybody = dist.new_group(backend="gloo", timeout=5 * limit)
    for ranks in options.gpus:  # torch names a group by how many its ranks are in: all are in as many, and the first ones' is measured
        for first in range(0, world, ranks):
            members = list(range(first, first + ranks))
            made = dist.new_group(members, timeout=limit), dist.new_group(members, backend="gloo", timeout=limit)
            groups = made if rank in members else groups
        benches[ranks] = Bench.of(ranks, device, groups, options)
        if ranks > 1:
            benches[ranks].check()
    done = from_first(done_in(options.json), everybody)
    for row in quick_rows() if options.quick else rows():
        if not re.search(options.rows, row.name):
            continue
        for ranks in options.gpus:
            ways = missing_ways(row, ranks, done, options)
            dist.barrier(everybody)  # other GPUs of the host are idle while some are measured
            for way in ways if rank < ranks else ():
                if from_first(time.time() > options.end, benches[ranks].control):
                    break
                one_row(benches[ranks], row, way, options)
            benches[ranks].release()
    dist.barrier(everybody)
    dist.destroy_process_group()


def number_of_gpus(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("1 or more")
    return number


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", default="1,2,4,8", type=list_of(number_of_gpus))
    parser.add_argument("--ways", default=",".join(WAYS), type=list_of(known=ALL_WAYS))
    parser.add_argument("--rows", default="", help="a regular expression that their names contain")
    parser.add_argument("--max-mb", default=0, type=int, help="of K and V of a rank")
    parser.add_argument("--minutes", default=8.5, type=float)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", default=pathlib.Path("multi-gpu.jsonl"), type=pathlib.Path)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    options.end = time.time() + 60 * options.minutes
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    if options.device == "cuda" and gpus < 2:
        print(f"multi_gpu: {gpus} GPUs here, 2 are needed; --device cpu runs by gloo")
        return 77
    name = torch.cuda.get_device_name(0) if gpus else f"{torch.get_num_threads()} threads of a CPU, gloo"
    options.device_name = name
    options.commit = git_commit() or "unknown"
    asked, options.gpus = options.gpus, [ranks for ranks in options.gpus if options.device == "cpu" or ranks <= gpus]
    if not options.gpus:
        raise SystemExit(f"multi_gpu: --gpus {asked}: {gpus} are here")
    world = max(options.gpus)
    if any(world % ranks for ranks in options.gpus):
        raise SystemExit(f"multi_gpu: --gpus {options.gpus}: all must divide the largest")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (world, f"file://{folder}/store", options), nprocs=world)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
