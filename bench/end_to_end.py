#!/usr/bin/env python3
"""Decode steps of whole models by Transformers: this library's attention beside the stock ones.

Models have the shape of OPT-6.7B, Phi-3-medium and Llama-3-8B with random weights and as many layers as asked for (fewer
than the real ones: times are of those layers, the embedding and the head). The cache is filled with random keys and values,
so no prefill runs. A step is a forward pass and an argmax, as greedy decoding does it; the median of the steps is reported.
`bound` is weights and keys and values that exist over a read of --gbps, where given.

Usage: end_to_end.py [--device cuda|cpu] [--models ...] [--contexts 1024,8192] [--batch 1] [--ragged] [--layers 8]
                     [--attention lean_attention,sdpa,eager] [--caches dynamic,static,lean] [--graphs] [--steps 16]
                     [--gbps 4500] [--json FILE] [--plot FILE]
Needs torch and transformers 4.56 or newer. A combination that does not fit in memory is reported and left out.
"""
import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import time

import torch
import transformers
from transformers import DynamicCache, StaticCache

import lean_attention.hf
from lean_attention.hf import LeanStaticCache


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    attention: str
    cache: str
    context: int
    batch: int
    ragged: bool
    graphs: bool


def config_of(name: str, layers: int, positions: int):
    common = dict(num_hidden_layers=layers, max_position_embeddings=positions, pad_token_id=0, eos_token_id=None)
    if name == "opt-6.7b":
        return transformers.OPTConfig(
            hidden_size=4096, ffn_dim=16384, num_attention_heads=32, vocab_size=50272, word_embed_proj_dim=4096, **common
        )
    if name == "phi-3-medium":
        return transformers.Phi3Config(
            hidden_size=5120, intermediate_size=17920, num_attention_heads=40, num_key_value_heads=10, vocab_size=32064, **common
        )
    if name == "llama-8b":
        return transformers.LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, **common
        )
    raise SystemExit(f"end_to_end: --models {name}: allowed {', '.join(MODELS)}")


MODELS = ("opt-6.7b", "phi-3-medium", "llama-8b")


def lengths_of(case: Case) -> list:
    """Tokens of each sequence; ragged: from an eighth of the context to all of it, evenly."""
    if not case.ragged or case.batch == 1:
        return [case.context] * case.batch
    first = case.context // 8
    return [first + (case.context - first) * b // (case.batch - 1) for b in range(case.batch)]


def filled_cache(model, case: Case, steps: int):
    """A cache that holds case.context random tokens of each sequence."""
    config, device, dtype = model.config, model.device, model.dtype
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = config.hidden_size // config.num_attention_heads
    shape = (case.batch, kv_heads, case.context, head_dim)
    if case.cache == "dynamic":
        cache = DynamicCache(config=config)
    else:
        kind = LeanStaticCache if case.cache == "lean" else StaticCache
        cache = kind(config=config, max_cache_len=case.context + steps)
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        cache.update(k, v, layer)
    return cache


class Decoder:
    """Steps of one model on one cache."""

    def __init__(self, model, case: Case, steps: int) -> None:
        self.cache = filled_cache(model, case, steps)
        lengths = torch.tensor(lengths_of(case), device=model.device)
        pads = case.context - lengths
        self.mask = (torch.arange(case.context + steps, device=model.device) >= pads[:, None]).long()
        self.position = lengths[:, None].clone()
        self.token = torch.full((case.batch, 1), 7, device=model.device)
        self.seen = case.context
        self.forward = torch.compile(model.forward, mode="reduce-overhead") if case.graphs else model.forward

    def step(self) -> None:
        self.seen += 1
        result = self.forward(
            input_ids=self.token, attention_mask=self.mask[:, : self.seen], position_ids=self.position, past_key_values=self.cache,
            use_cache=True,
        )  # fmt: skip
        self.token = result.logits[:, -1:].argmax(-1)
        self.position = self.position + 1


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def median_ms(decoder: Decoder, device: str, warm_up: int, steps: int) -> tuple:
    times = []
    for i in range(warm_up + steps):
        synchronize(device)
        begin = time.perf_counter()
        decoder.step()
        synchronize(device)
        if i >= warm_up:
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times), min(times), max(times)


def measure(model, case: Case, arguments) -> dict:
    warm_up = 5 if case.graphs else 2
    with torch.inference_mode():
        decoder = Decoder(model, case, warm_up + arguments.steps)
        middle, least, most = median_ms(decoder, arguments.device, warm_up, arguments.steps)
    config = model.config
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    token_bytes = 2 * kv_heads * config.hidden_size // config.num_attention_heads * model.dtype.itemsize * config.num_hidden_layers
    read = sum(p.numel() * p.element_size() for p in model.parameters()) + token_bytes * sum(lengths_of(case))
    row = dataclasses.asdict(case) | {"ms": middle, "ms_min": least, "ms_max": most, "tokens_per_s": 1e3 * case.batch / middle}
    return row | {"read_bytes": read} | ({"bound_ms": read / arguments.gbps / 1e6} if arguments.gbps else {})


def about(arguments) -> dict:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else lean_attention._core.machine()["cpu_isa"]
    return {
        "device": device, "dtype": arguments.dtype, "layers": arguments.layers, "threads": torch.get_num_threads(), "commit": commit,
        "torch": torch.__version__, "transformers": transformers.__version__, "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv[1:]),
    }  # fmt: skip


def plot(rows: list, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(1, len(models), figsize=(5 * len(models), 4), squeeze=False)
    for axis, model in zip(axes[0], models):
        series = {}
        for row in (row for row in rows if row["model"] == model):
            name = f"{row['attention']}, {row['cache']}" + (", ragged" if row["ragged"] else "") + f", batch {row['batch']}"
            series.setdefault(name, []).append((row["context"], row["ms"]))
        for name, points in series.items():
            axis.plot(*zip(*sorted(points)), marker="o", label=name)
        axis.set(title=model, xlabel="context in tokens", ylabel="ms a step", xscale="log", yscale="log")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def parse() -> argparse.Namespace:
    def words(text: str) -> list:
        return text.split(",")

    def numbers(text: str) -> list:
        return [int(part) for part in text.split(",")]

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", type=words, default=list(MODELS))
    parser.add_argument("--contexts", type=numbers, default=[1024, 8192, 32768, 131072] if cuda else [1024, 8192])
    parser.add_argument("--batch", type=numbers, default=[1])
    parser.add_argument("--ragged", action="store_true", help="batches above 1: lengths from an eighth of the context to all of it")
    parser.add_argument("--layers", type=int, default=8 if cuda else 2)
    parser.add_argument("--attention", type=words, default=["lean_attention", "sdpa", "eager"])
    parser.add_argument("--caches", type=words, default=["dynamic", "static"])
    parser.add_argument("--graphs", action="store_true", help="torch.compile(mode='reduce-overhead'), static caches only")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--gbps", type=float, default=0, help="a read speed to compare with, in GB/s")
    parser.add_argument("--json", help="append a line a row")
    parser.add_argument("--plot", help="draw to this file")
    return parser.parse_args()


def cases_of(arguments) -> list:
    cases = []
    for model, context, batch, cache, attention in itertools.product(
        arguments.models, arguments.contexts, arguments.batch, arguments.caches, arguments.attention
    ):
        if cache == "lean" and attention != "lean_attention":
            continue
        cases.append(Case(model, attention, cache, context, batch, arguments.ragged, arguments.graphs and cache != "dynamic"))
    return cases


def main() -> None:
    arguments = parse()
    lean_attention.hf.register()
    cases, rows, facts = cases_of(arguments), [], about(arguments)
    begin = time.monotonic()
    for name, group in itertools.groupby(enumerate(cases), lambda item: item[1].model):
        config = config_of(name, arguments.layers, max(arguments.contexts) + 64)
        with torch.device(arguments.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments.dtype)).eval()
        for done, case in group:
            print(f"\r[{done * 30 // len(cases) * '#':30}] {done}/{len(cases)} {time.monotonic() - begin:.0f} s ", end="", file=sys.stderr)
            model.set_attn_implementation(case.attention)
            torch._dynamo.reset()
            try:
                row = measure(model, case, arguments)
            except (torch.OutOfMemoryError, ImportError) as error:
                print(f"\r{case}: {type(error).__name__}", file=sys.stderr)
                continue
            rows.append(row)
            print(f"\r{name:13} {case.attention:15} {case.cache:8} {case.batch:3} x {case.context:6}{' ragged' if case.ragged else ''}"
                  f" {row['ms']:9.2f} ms ({row['ms_min']:.2f} to {row['ms_max']:.2f}) {row['tokens_per_s']:9.1f} tokens/s")  # fmt: skip
            if arguments.json:
                with open(arguments.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row | facts) + "\n")
        del model
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    if arguments.plot and rows:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
