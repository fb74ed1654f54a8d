"""Models as servers keep them, on a GPU: pages of 16 tokens, fp8 K and V, four query tokens. This library beside FlashAttention-2 of
PyTorch, FlashAttention-3 and FlashInfer's kernels, taking turns on one GPU in one run.

    python bench/serving_peers.py [--kit DIR]... [--rounds 5] [--rows REGEX] [--out FILE.jsonl]

A kit is a folder that holds `lean_peers_fa3` (FlashAttention-3 as an importable package) or `flashinfer` with compiled kernels; what
cannot be imported, or refuses a row, gets a line that says why. Every call is captured in a CUDA graph over as many caches as exceed the
L2 five times; the median round counts, in microseconds a call. Plans that a peer must make anew when a length changes are made ahead and
not counted. Rows are measured in a process of their own: where a kernel reads what it may not, that one is lost, and the row is measured
anew without it. Each result is held against this library's: `difference` is the largest one over the largest value.
"""
import argparse
import concurrent.futures
import functools
import json
import math
import multiprocessing
import re
import statistics
import sys
from datetime import datetime, timezone

import torch

import lean_attention
from graph_timing import graph_of, time_us

HEAD_DIM = 128
COLD_BYTES = 320 << 20
WORKSPACE_BYTES = 1 << 30
PAGE = 16
#: name: (lengths, query heads, kv heads)
MODELS = {
    "L8B 1x8k": ([8192], 32, 8),
    "L8B 1x128k": ([131072], 32, 8),
    "L8B 8x8k": ([8192] * 8, 32, 8),
    "L8B 34x16k": ([16384] * 34, 32, 8),
    "70B 8x32k": ([32768] * 8, 64, 8),
    "R1 128k+63x1k": ([131072] + [1024] * 63, 32, 8),
}
#: name: (layout, type of K and V, query tokens)
FORMS = {
    "n_q 4": ("bshd", torch.bfloat16, 4),
    "pages nhd": ("nhd", torch.bfloat16, 1),
    "pages hnd": ("hnd", torch.bfloat16, 1),
    "pages nhd fp8": ("nhd", torch.float8_e4m3fn, 1),
    "pages hnd fp8": ("hnd", torch.float8_e4m3fn, 1),
}

#: name: (model, form). Lengths of one row of tokens are alike.
ROWS = {f"{model} {form}": (MODELS[model], FORMS[form]) for form in FORMS for model in MODELS
        if FORMS[form][0] != "bshd" or len(set(MODELS[model][0])) == 1}


class Row:
    """The inputs of one problem, with as many caches as it takes."""

    def __init__(self, model, form):
        self.lengths, self.q_heads, self.kv_heads = model
        self.layout, self.kv_dtype, self.n_q = form
        self.batch, self.longest = len(self.lengths), max(self.lengths)
        self.scale = HEAD_DIM ** -0.5
        self.kv_bytes = 2 * sum(self.lengths) * self.kv_heads * HEAD_DIM * self.kv_dtype.itemsize
        self.calls = max(2, math.ceil(COLD_BYTES / self.kv_bytes))
        pages = [n // PAGE for n in self.lengths]
        shape = {"bshd": (self.batch, self.longest, self.kv_heads, HEAD_DIM), "nhd": (sum(pages), PAGE, self.kv_heads, HEAD_DIM),
                 "hnd": (sum(pages), self.kv_heads, PAGE, HEAD_DIM)}[self.layout]
        self.caches = [tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(self.kv_dtype) for _ in "kv")
                       for _ in range(self.calls)]
        self.q = torch.randn(self.batch, self.n_q, self.q_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.seqlens = torch.tensor(self.lengths, device="cuda", dtype=torch.int32)
        if self.layout != "bshd":  # a sequence's pages lie scattered, as in a server that has run for a while
            ids = torch.randperm(sum(pages)).to(torch.int32)
            self.page_ids = ids.cuda()
            self.page_starts = torch.tensor([0, *pages]).cumsum(0).int()
            self.last_page_lens = torch.full((self.batch,), PAGE, dtype=torch.int32)
            self.table = torch.nn.utils.rnn.pad_sequence(ids.split(pages), batch_first=True).cuda()


def lean(row):
    out = torch.empty_like(row.q)
    if row.layout == "bshd":
        return lambda k, v: lean_attention.decode(row.q, k, v, layout="bshd", seqlens=row.seqlens, causal=row.n_q > 1, out=out)
    if row.layout == "nhd":
        return lambda k, v: lean_attention.decode(row.q, k, v, layout="bshd", seqlens=row.seqlens, block_table=row.table, out=out)
    q, o = row.q.transpose(1, 2), out.transpose(1, 2)
    return lambda k, v: lean_attention.decode(q, k, v, seqlens=row.seqlens, block_table=row.table, out=o).transpose(1, 2)


def need(condition, why):
    if not condition:
        raise NotImplementedError(why)


def torch_flash(row):
    need(row.layout == "bshd" and row.kv_dtype == torch.bfloat16, "neither pages nor fp8")
    return lambda k, v: torch.ops.aten._flash_attention_forward(
        row.q, k, v, None, None, row.n_q, row.longest, 0.0, row.n_q > 1, False, scale=row.scale)[0]


def fa3(row):
    need(row.layout != "hnd" and row.kv_dtype == torch.bfloat16, "no HND pages, and fp8 K and V only beside fp8 queries")
    import lean_peers_fa3
    lean_peers_fa3.load("tokenspeed")
    pages = {} if row.layout == "bshd" else {"page_table": row.table}
    return lambda k, v: torch.ops.flash_attn_3.fwd(row.q, k, v, seqused_k=row.seqlens, softmax_scale=row.scale,
                                                   is_causal=row.n_q > 1, num_splits=0, pack_gqa=True, **pages)[0]


@functools.cache
def workspace(owner):
    """A kernel's own: XQA keeps counters in its workspace, which must be 0 at first."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def flashinfer_wrapper(row, **options):
    need(row.layout != "bshd" and row.n_q == 1, "the kit has kernels for pages and one query token")
    import flashinfer
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(f"{options}"), row.layout.upper(), **options)
    wrapper.plan(row.page_starts, row.page_ids, row.last_page_lens, row.q_heads, row.kv_heads, HEAD_DIM, PAGE,
                 q_data_type=row.q.dtype, kv_data_type=row.kv_dtype)
    q, out = row.q[:, 0], torch.empty_like(row.q[:, 0])
    return lambda k, v: wrapper.run(q, (k, v), out=out).unsqueeze(1)


def flashinfer_batch(row):
    need(row.layout != "bshd" and row.n_q == 1, "the kit has kernels for pages and one query token")
    import flashinfer
    wrapper = flashinfer.BatchAttention(kv_layout=row.layout.upper(), device="cuda")
    wrapper.float_workspace_buffer = workspace("batch")
    wrapper.plan(torch.arange(row.batch + 1, dtype=torch.int32), row.page_starts, row.page_ids, row.seqlens.cpu(), row.q_heads,
                 row.kv_heads, HEAD_DIM, HEAD_DIM, PAGE, causal=False, q_data_type=row.q.dtype, kv_data_type=row.kv_dtype)
    q, out = row.q[:, 0], torch.empty_like(row.q[:, 0])
    lse = torch.empty(row.batch, row.q_heads, dtype=torch.float32, device="cuda")
    return lambda k, v: wrapper.run(q, (k, v), out=out, lse=lse)[0].unsqueeze(1)


def flashinfer_xqa(row):
    need(row.layout != "bshd" and row.n_q == 1, "the kit has kernels for pages and one query token")
    import flashinfer.decode
    q, out = row.q[:, 0], torch.empty_like(row.q[:, 0])
    return lambda k, v: flashinfer.decode.xqa_batch_decode_with_kv_cache(
        q, (k, v), workspace("xqa"), row.table, row.seqlens, row.table.shape[1] * PAGE, bmm1_scale=row.scale, bmm2_scale=1.0, out=out,
        kv_layout=row.layout.upper()).unsqueeze(1)


IMPLS = {
    "lean": lean,
    "torch flash": torch_flash,
    "fa3": fa3,
    "flashinfer cc": functools.partial(flashinfer_wrapper, use_tensor_cores=False),
    "flashinfer tc": functools.partial(flashinfer_wrapper, use_tensor_cores=True, backend="fa2"),
    "flashinfer batch": flashinfer_batch,
    "flashinfer xqa": flashinfer_xqa,
}


class GpuLost(Exception):
    """After an implementation's error nothing runs on the GPU any more in this process: (implementation, why)."""


def measure(row, rounds, left_out):
    """Implementation -> what its line says. `left_out`: the same, of those that are not asked."""
    lines, graphs, reference = dict(left_out), {}, None
    for name, prepare in IMPLS.items():
        if name in left_out:
            continue
        try:
            call = prepare(row)
            result = call(*row.caches[0]).float().clone()
            torch.cuda.synchronize()
            reference = result if reference is None else reference
            lines[name] = {"difference": ((result - reference).abs().max() / reference.abs().max()).item()}
            graphs[name] = graph_of([functools.partial(call, k, v) for k, v in row.caches])
            graphs[name].replay()
            torch.cuda.synchronize()
        except Exception as error:  # whatever a peer raises is its line
            lines[name] = {"note": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"}
            graphs.pop(name, None)
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                raise GpuLost(name, lines[name]["note"]) from None
    times = {name: [] for name in graphs}
    for _ in range(rounds + 1):
        for name, graph in graphs.items():
            times[name].append(time_us(graph, row.calls, max(1, 20 // row.calls)))
    for name, us in times.items():
        lines[name] |= {"us": round(statistics.median(us[1:]), 2), "us_min": round(min(us[1:]), 2), "us_max": round(max(us[1:]), 2)}
    return lines


def in_process(name, kits, rounds, left_out):
    """Measures a row by its name: the lines, and what its K and V weigh."""
    sys.path[:0] = [kit for kit in kits if kit not in sys.path]
    torch.manual_seed(1)
    row = Row(*ROWS[name])
    lines = measure(row, rounds, left_out)
    size = row.kv_bytes
    del row
    torch.cuda.empty_cache()
    return lines, size, torch.cuda.get_device_name()


def measured_rows(names, kits, rounds):
    """(name, lines, bytes of K and V, device) of each row."""
    start = functools.partial(concurrent.futures.ProcessPoolExecutor, 1, mp_context=multiprocessing.get_context("spawn"))
    process = start()
    for name in names:
        left_out = {}
        while True:
            try:
                yield (name, *process.submit(in_process, name, kits, rounds, left_out).result())
                break
            except GpuLost as lost:
                left_out[lost.args[0]] = {"note": lost.args[1]}
            process.shutdown()
            process = start()
    process.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kit", action="append", default=[], help="a folder to import peers from; repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default=".*")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    shared = {"torch": torch.__version__, "commit": arguments.commit, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    names = [name for name in ROWS if re.search(arguments.rows, name)]
    for name, lines, size, device in measured_rows(names, arguments.kit, arguments.rounds):
        print(f"{name:28}", "  ".join(f"{n} {line.get('us', '-')}" for n, line in lines.items()), flush=True)
        if arguments.out:
            with open(arguments.out, "a", encoding="utf-8") as file:
                for impl, line in lines.items():
                    file.write(json.dumps({"row": name, "impl": impl, "kv_bytes": size, **line, "device": device, **shared}) + "\n")


if __name__ == "__main__":
    main()
