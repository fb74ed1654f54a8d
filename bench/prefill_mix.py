"""Prefill chunks mixed with decode rows on a GPU: one call of this library against two (the chunks, then the decode rows), and
torch's flash attention for ragged batches (torch.nn.attention.varlen) for the chunks and for all.

    python bench/prefill_mix.py [--rounds 9] [--out FILE.jsonl]

Llama-3-8B heads (32/8, d 128), bf16, K and V packed end to end, bottom-right causal. Calls take turns inside each round, each as a
CUDA graph of 10; the median round counts. Results are held against torch's, largest difference printed.
"""
import argparse
import json
import statistics
from datetime import datetime, timezone

import torch

import lean_attention
from graph_timing import graph_of, time_us

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CALLS_A_GRAPH = 10
#: (name, [(requests, new tokens, context with them)])
MIXES = [
    ("1 x 512 of 4k, 63 x 1 of 8k", [(1, 512, 4096), (63, 1, 8192)]),
    ("4 x 512 of 4k, 60 x 1 of 8k", [(4, 512, 4096), (60, 1, 8192)]),
    ("8 x 256 of 2k, 56 x 1 of 2k", [(8, 256, 2048), (56, 1, 2048)]),
    ("1 x 2048 of 2k, 32 x 1 of 4k", [(1, 2048, 2048), (32, 1, 4096)]),
    ("2 x 2048 of 16k, 30 x 1 of 4k", [(2, 2048, 16384), (30, 1, 4096)]),
    ("1 x 256 of 64k, 16 x 1 of 16k", [(1, 256, 65536), (16, 1, 16384)]),
]


def offsets(lengths):
    return torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(0).to(torch.int32)


class Part:
    """Some requests of a mix: their queries and their slice of the packed K and V."""

    def __init__(self, requests, q, k, v):
        self.q, self.k, self.v = q, k, v
        new, context = [n for n, _ in requests], [c for _, c in requests]
        self.cu_q, self.cu_k = offsets(new), offsets(context)
        self.max_q, self.max_k = max(new), max(context)
        self.out = torch.empty_like(q)

    def lean(self):
        lean_attention.decode(self.q.transpose(0, 1), self.k.transpose(0, 1), self.v.transpose(0, 1), cu_seqlens_q=self.cu_q,
                              cu_seqlens_k=self.cu_k, max_seqlen_q=self.max_q, max_seqlen_k=self.max_k, causal=True,
                              out=self.out.transpose(0, 1))

    def flash(self):
        from torch.nn.attention.varlen import varlen_attn
        group = Q_HEADS // KV_HEADS
        k, v = self.k, self.v
        try:
            return varlen_attn(self.q, k, v, self.cu_q, self.cu_k, self.max_q, self.max_k, is_causal=True, enable_gqa=True)
        except TypeError:
            return torch.ops.aten._flash_attention_forward(self.q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1),
                                                           self.cu_q, self.cu_k, self.max_q, self.max_k, 0.0, True, False)[0]


def measure(name, groups, rounds):
    torch.manual_seed(1)
    requests = [(new, context) for count, new, context in groups for _ in range(count)]
    tokens, keys = sum(n for n, _ in requests), sum(c for _, c in requests)
    q = torch.randn(tokens, Q_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(keys, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    v = torch.randn_like(k)
    chunks = [r for r in requests if r[0] > 1]
    q_cut, k_cut = sum(n for n, _ in chunks), sum(c for _, c in chunks)
    whole = Part(requests, q, k, v)
    prefill = Part(chunks, q[:q_cut], k[:k_cut], v[:k_cut])
    decode = Part([r for r in requests if r[0] == 1], q[q_cut:], k[k_cut:], v[k_cut:])

    def two_calls():
        prefill.lean()
        decode.lean()

    calls = {"one call": whole.lean, "two calls": two_calls, "prefill alone": prefill.lean, "decode alone": decode.lean}
    for part_name, part in (("flash prefill alone", prefill), ("flash one call", whole)):
        try:
            part.flash()
            calls[part_name] = part.flash
        except (RuntimeError, ImportError) as error:
            print(f"  {part_name}: {str(error).splitlines()[0]}")
    whole.lean()
    prefill.lean()
    decode.lean()
    torch.cuda.synchronize()
    line = {"row": name, "kv_bytes": 2 * 2 * keys * KV_HEADS * HEAD_DIM, "new_tokens": tokens}
    two = torch.cat([prefill.out, decode.out])
    line["largest_difference_of_two_calls"] = (whole.out.float() - two.float()).abs().max().item()
    if "flash prefill alone" in calls:
        line["largest_difference_of_flash"] = (prefill.flash().float() - prefill.out.float()).abs().max().item()
    graphs = {}
    for call_name, call in calls.items():
        try:
            graphs[call_name] = graph_of([call] * CALLS_A_GRAPH)
        except RuntimeError as error:
            print(f"  {call_name}: {str(error).splitlines()[0]}")
    times = {call_name: [] for call_name in graphs}
    for _ in range(rounds):
        for call_name, graph in graphs.items():
            times[call_name].append(time_us(graph, CALLS_A_GRAPH))
    line["us"] = {call_name: round(statistics.median(t), 1) for call_name, t in times.items()}
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    shared = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": arguments.commit,
              "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    for name, groups in MIXES:
        line = measure(name, groups, arguments.rounds)
        print(name, "  ".join(f"{n} {t}" for n, t in line["us"].items()),
              f"difference {line['largest_difference_of_two_calls']:.2g}, flash {line.get('largest_difference_of_flash', 0):.2g}", flush=True)
        if arguments.out:
            with open(arguments.out, "a", encoding="utf-8") as file:
                file.write(json.dumps({**line, **shared}) + "\n")


if __name__ == "__main__":
    main()
