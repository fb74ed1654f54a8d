"""A decode step that writes its new token to the cache, turned, on a GPU: one call of this library that does all of it (append_k,
append_v, rotary_cos, rotary_sin) against a call that only reads, and against PyTorch's operations for the rest before such a call.

    python bench/append_calls.py [--rounds 7] [--rows REGEX] [--out FILE.jsonl]

bf16, 32 query heads on 8 kv heads of 128 unless the row says otherwise, every sequence as long as its cache. Calls take turns inside
each round, each as a CUDA graph of calls over as many caches as exceed the L2 five times; the median round counts, in microseconds a
call. The one call's result is held against the others', largest difference printed.
"""
import argparse
import json
import math
import re
import statistics
from datetime import datetime, timezone

import torch

import lean_attention
from graph_timing import graph_of, time_us

HEAD_DIM = 128
COLD_BYTES = 320 << 20
#: name: (batch, tokens, q_heads, kv_heads, tokens of a page or 0, new tokens)
ROWS = {
    "1x1k": (1, 1024, 32, 8, 0, 1),
    "1x8k": (1, 8192, 32, 8, 0, 1),
    "1x32k": (1, 32768, 32, 8, 0, 1),
    "8x8k": (8, 8192, 32, 8, 0, 1),
    "32x4k": (32, 4096, 32, 8, 0, 1),
    "64x1k": (64, 1024, 32, 8, 0, 1),
    "70B/8 16x8k": (16, 8192, 8, 1, 0, 1),
    "8x8k pages of 16": (8, 8192, 32, 8, 16, 1),
    "8x8k pages of 64": (8, 8192, 32, 8, 64, 1),
    "8x8k n_q 4": (8, 8192, 32, 8, 0, 4),
}


def turn(x, cos, sin):
    """Half-split, as transformers' apply_rotary_pos_emb. x [B, H, n, d], cos and sin [B, 1, n, d]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


class Step:
    """The inputs of one call: a cache of its own."""

    def __init__(self, row):
        batch, tokens, q_heads, kv_heads, page, new = row
        device, dtype = "cuda", torch.bfloat16
        self.page, self.new, self.tokens, self.batch = page, new, tokens, batch
        self.q = torch.randn(batch, q_heads, new, HEAD_DIM, device=device, dtype=dtype)
        self.new_k = torch.randn(batch, kv_heads, new, HEAD_DIM, device=device, dtype=dtype)
        self.new_v = torch.randn_like(self.new_k)
        self.lengths = torch.full((batch,), tokens, device=device, dtype=torch.int32)
        if page:
            pages = batch * tokens // page
            self.k = torch.randn(pages, page, kv_heads, HEAD_DIM, device=device, dtype=dtype)
            self.table = torch.randperm(pages, device=device).to(torch.int32).view(batch, -1)
        else:
            self.k = torch.randn(batch, kv_heads, tokens, HEAD_DIM, device=device, dtype=dtype)
            self.table = None
        self.v = torch.randn_like(self.k)
        angles = torch.arange(tokens, device=device)[:, None] * torch.pow(1e4, -torch.arange(HEAD_DIM // 2, device=device) * 2 / HEAD_DIM)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        self.place = torch.arange(tokens - new, tokens, device=device)
        self.wide = [torch.cat([t, t], dim=-1).to(dtype) for t in (self.cos, self.sin)]
        self.out = torch.empty_like(self.q)

    def attend(self, q, **append):
        if self.page:  # the layout with tokens before heads is a view of the same arrays
            append = {name: x.transpose(1, 2) if name in ("append_k", "append_v") else x for name, x in append.items()}
            lean_attention.decode(q.transpose(1, 2), self.k, self.v, layout="bshd", seqlens=self.lengths, block_table=self.table,
                                  causal=True, out=self.out.transpose(1, 2), **append)
        else:
            lean_attention.decode(q, self.k, self.v, seqlens=self.lengths, causal=True, out=self.out, **append)
        return self.out

    def read(self):
        return self.attend(self.q)

    def append(self):
        return self.attend(self.q, append_k=self.new_k, append_v=self.new_v, rotary_cos=self.cos, rotary_sin=self.sin)

    def apart(self):
        cos, sin = (t[self.place][None, None] for t in self.wide)
        q, new_k = turn(self.q, cos, sin), turn(self.new_k, cos, sin)
        for cache, new in ((self.k, new_k), (self.v, self.new_v)):
            if self.page:
                page, slot = self.table[:, self.place // self.page].long(), (self.place % self.page).expand(self.batch, -1)
                cache.index_put_((page, slot), new.transpose(1, 2))
            else:
                cache.index_copy_(2, self.place, new)
        return self.attend(q)


def measure(row, rounds):
    torch.manual_seed(1)
    batch, tokens, _, kv_heads, _, _ = row
    kv_bytes = 2 * 2 * batch * tokens * kv_heads * HEAD_DIM
    steps = [Step(row) for _ in range(max(4, math.ceil(COLD_BYTES / kv_bytes)))]
    line = {"kv_bytes": kv_bytes, "calls_a_graph": len(steps), "rounds": rounds}
    results = {name: getattr(steps[0], name)().float().clone() for name in ("apart", "append")}
    line["largest_difference"] = (results["append"] - results["apart"]).abs().max().item()
    graphs = {name: graph_of([getattr(step, name) for step in steps]) for name in ("read", "append", "apart")}
    times = {name: [] for name in graphs}
    for _ in range(rounds + 1):
        for name, graph in graphs.items():
            times[name].append(time_us(graph, len(steps), max(1, 40 // len(steps))))
    line["us"] = {name: round(statistics.median(t[1:]), 2) for name, t in times.items()}
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", default=".*")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    shared = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": arguments.commit,
              "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    for name, row in ROWS.items():
        if not re.search(arguments.rows, name):
            continue
        line = measure(row, arguments.rounds)
        print(f"{name:20}", "  ".join(f"{n} {t:8.2f}" for n, t in line["us"].items()), f"  difference {line['largest_difference']:.2g}", flush=True)
        torch.cuda.empty_cache()
        if arguments.out:
            with open(arguments.out, "a", encoding="utf-8") as file:
                file.write(json.dumps({"row": name, **line, **shared}) + "\n")


if __name__ == "__main__":
    main()
