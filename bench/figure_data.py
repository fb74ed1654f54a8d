"""What the result files say: the data of every figure, every table and every number of the documents, and nothing else.

Reads bench/results/*.jsonl alone and needs nothing but Python. bench/figures.py draws and writes; tools/check_figures.py compares.
"""

import json
import math
import pathlib
import re
import statistics
from collections.abc import Iterable

import machine_data
import suite_data
import timeline_data

ROOT = pathlib.Path(__file__).resolve().parents[1]
OURS, ORDERED = "lean", "lean, in stream order"
TIER_A = "h200-tier-a-peers.jsonl"  # ours and every other, each row in one run
SCHEDULES = "h200-tier-a.jsonl"  # ours alone, under each schedule
H100 = "h100-tier-a.jsonl"
LATER = "experiments/h200-tier-a-1924266e.jsonl"  # of later kernels, without upstream's FlashAttention-3
ONE_RUN = "h100-tier-a-peers.jsonl"  # beside more of the others
FLAT, RAGGED_SCHEDULES = "h100-flat.jsonl", "h100-ragged-schedules.jsonl"
TIMELINE, GPU_TIMELINE = "cpu-timeline-2t.jsonl", "h200-timeline.jsonl"
ENERGY, UTILISATION = "h200-energy.jsonl", "h200-utilisation.jsonl"
ORT_GENERATION = "h200-ort-generation.jsonl"
CHUNKS, LATENT_ROWS, MIXED_ROWS = "h200-prefill.jsonl", "h200-mla.jsonl", "h100-mixed.jsonl"
H100_CHUNKS = "h100-prefill.jsonl"  # with FlashAttention-2, which the other file has not
GPU_PROMPTS, MASKED_PROMPTS = "h200-prompts.jsonl", "h200-prompts-masked.jsonl"
FP8_CHUNKS, SHORT_PAGES, MANY_RULED = "h200-prefill-fp8.jsonl", "h200-prefill-pages.jsonl", "h200-rules.jsonl"
MANY_RULES = {OURS: "lean", "cuDNN": r"(masked-)?cudnn\d*", "memory-efficient": "(masked-)?efficient", "FlashAttention-2": "flash", "FlexAttention": "flex"}
LATENT = {"lean": "lean", "FlashMLA": "flash_mla"}
LATENT_FP8_ROWS, LATENT_FP8 = "h200-mla-fp8.jsonl", {"lean": "lean", "FlashMLA, fp8 products": "fp8"}
MIXED = {"lean, one call": "lean", "lean, two calls": "two_calls", "FlashAttention-3, then lean": "fa3-then-lean", "FlashAttention-3": "fa3"}
SHORT_ROWS, FEATURES = "h200-short.jsonl", "h200-features.jsonl"
FEATURE, RULED, TOKEN_PAGES = {OURS: "lean", "FlashAttention-3": "fa3"}, "softcap|window|sinks|alibi", "^pages of 1 "
SHORT = {OURS: "lean", ORDERED: "lean/stream_order", "cuDNN": r"cudnn\d+", "XQA": "xqa", "FlashAttention-3": "fa3", "FlashInfer": "(cc|tc|batch)",
         "hpc-ops": "decode"}
UNEVEN = {"lean": r"(?<!/)lean", "FlashAttention-3": "fa3", "cuDNN": r"cudnn\d+", "FlashInfer": "(tc|batch)", "XQA": "xqa", "hpc-ops": "decode",
          "SGLang's lean": r"sglang-[\d.]+/lean"}
UNEVEN_ROWS = "h100-ragged.jsonl"
LOAD = "h100-vllm-load.jsonl"
ENGINE = "h200-vllm-engine.jsonl", "h100-vllm-engine.jsonl"
CPU_PROMPTS, ZEN_PROMPTS = "cpu-prompts-xeon-16t.jsonl", "cpu-prompts-zen5-2t.jsonl"
CPU_ENGINE, ZEN_ENGINE = "cpu-vllm-serve.jsonl", "cpu-vllm-serve-zen4.jsonl"
ENGINE_BUILT = {ENGINE[1]: ["c859a29"]}  # lines from before they said it
ENGINE_KINDS = {OURS: "CUSTOM", "FlashAttention-3": "FLASH_ATTN", "XQA": "FLASHINFER", "FlashInfer": "FLASHINFER"}
ENGINE_CACHES = {"auto": "bf16", "fp8": "E4M3", "fp8_e5m2": "E5M2"}
ENGINE_GRAPHS = {"default": "decode steps", "FULL": "steps of any kind"}
SERVERS = {"lean": "CUSTOM", "FlashAttention-3": "FLASH_ATTN"}
# Where a library has several kernels, the best one of each row counts: none is judged by a choice of ours.
FAMILIES = {"FlashAttention-3": r"/fa3$", "cuDNN": r"/cudnn", "FlashInfer": r"flashinfer.*/(cc|tc|batch)$", "XQA": r"/xqa$"}
# More that is in the H100's file.
EVERY_FAMILY = FAMILIES | {"FlashAttention-2": r"^torch[^/]*/flash$", "hpc-ops": r"^hpc-ops", "SGLang": r"^sglang"}
KNOWN_ROWS = {
    "Llama-3-8B, 1 x 1k": "L8B 1x1k", "Llama-3-8B, 1 x 8k": "L8B 1x8k", "Llama-3-8B, 1 x 128k": "L8B 1x128k",
    "Llama-3-8B, 8 x 8k": "L8B 8x8k", "Llama-3-8B, 32 x 4k": "L8B 32x4k", "Llama-3-8B, 34 x 16k": "L8B 34x16k",
    "Llama-3-8B, 1 x 128k beside 63 x 1k": "R1 128k+63x1k", "Llama-3-70B, 8 x 32k": "70B 8x32k",
    "Llama-3-70B, one of 8 GPUs, 1 x 128k": "70B/8 1x128k", "Phi-3-medium, 27 x 16k": "Phi3m 27x16k",
}
# What rows are called by: names of tier a, and the models whose heads they have (their config.json on the Hugging Face hub).
MODELS = {
    "L8B": "Llama-3-8B, Llama-3.1-8B, Mistral-7B, Qwen3-8B", "70B": "Llama-3-70B, Qwen2.5-72B", "70B/8": "Llama-3-70B, one of 8 GPUs",
    "Phi3m": "Phi-3-medium", "OSS": "gpt-oss-20b, gpt-oss-120b", "MHA": "Llama-2-7B", "R11": "Qwen3-30B-A3B",
}
MACHINES = {"Zen 3, 2 threads": "cpu-peers-zen3-2t.jsonl", "Zen 4, 2 threads": "cpu-peers-zen4-2t.jsonl",
            "Xeon 6, 2 threads": "cpu-peers-xeon6-2t.jsonl", "Xeon, 16 threads": "cpu-peers-xeon-16t.jsonl"}
ZEN_5_PEERS = "cpu-peers-zen5-2t.jsonl"
PROMPTS_BESIDE_TORCH = "experiments/cpu-zen5-prompts-beside-torch.jsonl"
ALL_ON_A_CPU = {"Zen 4, 2 threads": "cpu-peers-zen4-ggml-2t.jsonl"}
STEPS = {"LeanStaticCache": "lean_attention/lean", "flash, dynamic cache": "flash/dynamic", "sdpa, static cache": "sdpa/static",
         "sdpa, dynamic cache": "sdpa/dynamic", "LeanStaticCache, compiled": "lean_attention/lean+compiled",
         "sdpa, static cache, compiled": "sdpa/static+compiled", "LeanStaticCache, in a graph": "lean_attention/lean+captured"}
STEP_SHAPES = ("1x32k", "8x8k", "8x32k", "1x128k")


def lines(name: str) -> list:
    with open(ROOT / "bench" / "results" / name) as file:
        return [json.loads(line) for line in file]


def by_launch(name: str) -> list:
    """lines(), by the names of today. Before dependent launches were the default a call in stream order was "lean", and the other one
    lean/dependent_launch."""
    found = lines(name)
    rows = {line["row"] for line in found if line["impl"] == "lean/dependent_launch"}
    renamed = {"lean": "lean/stream_order", "lean/dependent_launch": "lean"}
    return [line | {"impl": renamed.get(line["impl"], line["impl"])} if line["row"] in rows else line for line in found]


def mean(values) -> float:
    """The geometric mean: these are ratios."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def by_name(row: str) -> str:
    return re.sub(r"(\d)x(\d)", r"\1 x \2", row)


def tier_a(name: str = TIER_A, families: dict = FAMILIES) -> list:
    """Each row's times over the read limit of the same run: ours, and each library's best kernel."""
    rows = {}
    found = [line for line in by_launch(name) if line.get("us")]
    for line in found:
        if line["impl"] in ("lean", "lean/stream_order"):
            row = rows.setdefault(line["row"], {"row": line["row"], "MB": line["kv_bytes"] / 1e6, "read": line["ceiling_us"], "over": {},
                                                "us": {}, "void": False})
            ours = OURS if line["impl"] == "lean" else ORDERED
            row["us"][ours], row["over"][ours] = line["us"], line["us"] / line["ceiling_us"]
            row["void"] |= (line["note"] or "").startswith("void")
    for line in found:
        for family, pattern in families.items():
            if re.search(pattern, line["impl"]):
                over = rows[line["row"]]["over"]
                over[family] = min(over.get(family, math.inf), line["us"] / line["ceiling_us"])
    return sorted(rows.values(), key=lambda row: (row["MB"], row["row"]))


def one_run() -> list:
    return tier_a(ONE_RUN, EVERY_FAMILY)


def without_version(impl: str) -> str:
    """"torch-2.13.0/flash" as "torch/flash"."""
    return re.sub(r"[- ][\w.+]*\d[\w.+]*(?=/|$)", "", impl)


def suite_rows(path: pathlib.Path) -> list:
    """Rows of a file of bench/suite.py as tier_a() has them, peers by their names without versions. Void rows are left out."""
    rows = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if line.get("us") and line.get("ceiling_us") and not (line.get("note") or "").startswith("void"):
            row = rows.setdefault(line["row"], {"row": line["row"], "MB": line["kv_bytes"] / 1e6, "over": {}})
            row["over"][without_version(line["impl"])] = line["us"] / line["ceiling_us"]
    return sorted(rows.values(), key=lambda row: (row["MB"], row["row"]))


def best_peer(row: dict) -> tuple:
    return min((over, family) for family, over in row["over"].items() if family not in (OURS, ORDERED))


def against_best(name: str, rows: list | None = None) -> list:
    return [row["over"][name] / best_peer(row)[0] for row in (tier_a() if rows is None else rows)]


def flatness() -> dict:
    """Outputs (kv heads x batch) of a read of 512 MB, and the time over the read limit, by schedule."""
    series = {}
    for line in lines(FLAT):
        outputs = int(line["row"].split()[1])
        series.setdefault(line["impl"].removeprefix("lean/"), []).append([outputs, line["us"] / line["ceiling_us"]])
    return series


def flat_times() -> list:
    return [line["us"] for line in lines(FLAT) if line["impl"] == "lean"]


def ragged_schedules() -> dict:
    """Average / longest length of 16 requests, and the time over the read limit, by schedule."""
    series = {}
    for line in lines(RAGGED_SCHEDULES):
        found = re.match(r"ragged avg/max ([\d.]+) b16 ", line["row"])
        if found and line["impl"] in ("lean", "lean/fixed_split", "lean/data_parallel"):
            series.setdefault(line["impl"].removeprefix("lean/"), []).append([float(found[1]), line["us"] / line["ceiling_us"]])
    return {name: sorted(points) for name, points in series.items()}


def ragged_rows() -> list:
    return [row for row in tier_a() if re.match(r"R\d", row["row"])]


def h100_over_read(megabytes: float = 0, impl: str = "lean") -> list:
    """Tier a on an H100, from so many MB on."""
    return [line["us"] / line["ceiling_us"] for line in lines(H100) if line["impl"] == impl and line["kv_bytes"] >= megabytes * 1e6]


def of_schedule(name: str, schedule: str) -> dict:
    """Times of the rows of a file under one of our schedules, ours under lean beside it: (theirs / ours)."""
    times = {}
    for line in lines(name):
        if line.get("us") and line["impl"] in ("lean", f"lean/{schedule}"):
            times.setdefault(line["row"], {})[line["impl"]] = line["us"]
    return {row: found[f"lean/{schedule}"] / found["lean"] for row, found in times.items() if len(found) == 2}


def paper_rows() -> list:
    """The rows of tier a that have the paper's shapes."""
    return [row for row in tier_a() if re.match(r"P\d", row["row"])]


def paper_over_fixed_split() -> list:
    """FlashDecoding's schedule over ours, both by our kernel: the paper's shapes of tier a and of tier b."""
    of_a, of_b = of_schedule(SCHEDULES, "fixed_split"), of_schedule("h200-tier-b.jsonl", "fixed_split")
    return [of_a[row["row"]] for row in paper_rows()] + [ratio for row, ratio in of_b.items() if row.startswith("paper")]


def paper_over(family: str) -> list:
    return [row["over"][family] / row["over"][OURS] for row in paper_rows()]


def ragged_over_fixed_split() -> list:
    """(average / longest, FlashDecoding's schedule over ours) of 16 requests."""
    schedules = ragged_schedules()
    return [(ratio, theirs / ours) for (ratio, ours), (_, theirs) in zip(schedules[OURS], schedules["fixed_split"])]


def serving() -> list:
    """Times of the libraries over ours, of the rows as servers keep K and V."""
    rows = {}
    for line in lines("h200-serving-peers.jsonl"):
        if line.get("us"):
            rows.setdefault(line["row"], {})[line["impl"]] = line["us"]
    return [{"row": row, "us": times} for row, times in rows.items()]


def serving_ratios() -> list:
    return [row["us"]["lean"] / min(us for impl, us in row["us"].items() if impl != "lean") for row in serving()]


def cpu_forms(name: str) -> dict:
    """Microseconds of each row of a file, of each library's best form."""
    rows = {}
    for line in lines(name):
        if line.get("us"):
            forms = rows.setdefault(line["row"], {})
            peer = re.split("[ -]", line["impl"])[0]
            forms[peer] = min(forms.get(peer, math.inf), line["us"])
    return rows


def cpu(machines: dict = MACHINES) -> dict:
    """Our time over the peer's best form, geometric mean over the rows of a type and group size, by machine and peer."""
    found = {}
    for machine, name in machines.items():
        for row, forms in cpu_forms(name).items():
            group, dtype = re.search(r" g(\d) d128 (\w+) ", row).groups()
            for peer in set(forms) - {"lean"}:
                found.setdefault(peer, {}).setdefault(machine, {}).setdefault(f"{dtype}, G = {group}", []).append(forms["lean"] / forms[peer])
    return {peer: {machine: {kind: mean(ratios) for kind, ratios in sorted(kinds.items())} for machine, kinds in machines.items()}
            for peer, machines in sorted(found.items())}


def steps() -> dict:
    """Milliseconds of one decode step of 8 layers of the Llama-8B shape, the last measured of each way, by shape."""
    found = {shape: {} for shape in STEP_SHAPES}
    for line in sorted(lines("h200-end-to-end.jsonl"), key=lambda line: line["date"]):
        for name, impl in STEPS.items():
            if line["model"] == "llama-8b" and line["shape"] in found and line["impl"] == impl and line["ms"]:
                found[line["shape"]][name] = line["ms"]
    return found


def onnx_runtime(name: str) -> list:
    """Microseconds of a layer by ONNX Runtime's CUDA provider, with this library's operators and with its own."""
    rows = {}
    for line in lines(name):
        row = rows.setdefault(line["row"], {"row": re.sub(r"^Phi3m | fp16| step$", "", line["row"]), "MB": line["kv_bytes"] / 1e6, "us": {}})
        row["us"][line["impl"]] = line["us"]
    return list(rows.values())


WAYS = {"one": "1 GPU", "tensor": "heads", "context_fused": "fused", "context": "all_gather", "context_all_to_all": "all_to_all",
        "sdpa_context": "torch + all_gather", "context_fused_apart": "fused, two launches", "context_alone": "shard",
        "context_alone_dependent": "dependent shard"}  # bench/multi_gpu.py has what they are
SHARDS = ("shard", "dependent shard")  # what an exchange is counted from
# What bench/multi_gpu.py has written, the newest first: the tables and the picture are of the first that there is.
SEVERAL_GPUS = ("h200-multi-gpu.jsonl", "h100-multi-gpu.jsonl")


def several_gpus(ranks: int) -> list:
    """Microseconds of a layer on so many GPUs in each way, and on one, in the order of MiB; "read" is the read limit of the shards, where
    the file has it. Rows that they do not hold are left out."""
    rows = {}
    name = next(name for name in SEVERAL_GPUS if (ROOT / "bench" / "results" / name).exists())
    for line in lines(name):
        if line["ranks"] not in (1, ranks) or not line.get("us"):
            continue
        row = rows.setdefault(line["row"], {"row": line["row"], "MiB": line["kv_bytes"] / 2**20, "us": {}})
        row["us"][WAYS[line["impl"].partition("/")[2]]] = line["us"]
        if line.get("ceiling_us") and line["impl"] == "lean/context_fused":
            row["us"]["read"] = line["ceiling_us"]
    return sorted((row for row in rows.values() if "fused" in row["us"]), key=lambda row: row["MiB"])


def speedups(ranks: int, mebibytes: int = 0) -> list:
    """One GPU's time over so many GPUs' by the fused exchange, of rows of so many MiB; of all of them where it is 0."""
    return [row["us"]["1 GPU"] / row["us"]["fused"] for row in several_gpus(ranks)
            if "1 GPU" in row["us"] and mebibytes in (0, round(row["MiB"]))]


def two_gpus() -> list:
    """several_gpus() of two, and the fused exchange's time on four where the file has it."""
    on_four = {row["row"]: row["us"]["fused"] for row in several_gpus(4)}
    rows = several_gpus(2)
    for row in rows:
        if row["row"] in on_four:
            row["us"]["fused, 4 GPUs"] = on_four[row["row"]]
    return rows


def ort_uneven() -> list:
    """Uneven batches by ONNX Runtime's default kernel over ours."""
    return [row["us"]["onnxruntime"] / row["us"]["lean_ort"] for row in onnx_runtime("h100-ort.jsonl") if "+" in row["row"]]


def ort_prompts() -> list:
    """Attention of prompts by ONNX Runtime's default kernel over ours, in the order of the file: 1 x 1k first."""
    attention = [line for line in lines(ORT_GENERATION) if line["n_q"] > 1 and not line["whole_step"]]
    return [us["ONNX Runtime"] / us["lean"] for us, _ in suite_data.times(attention, suite_data.ORT).values()]


def server_loads() -> dict:
    """Of each server, by offered load: the mean over its turns of tokens a second and of a client's waiting times."""
    found: dict = {}
    for name, attention in SERVERS.items():
        for line in lines(LOAD):
            if line["attention"] == attention:
                found.setdefault(name, {}).setdefault(f"{line['load']:g}", []).append(line)
    measured = ("tokens_per_s", "first_ms_p50", "first_ms_p99", "gap_ms_p50", "gap_ms_p99")
    return {name: {load: {key: statistics.fmean(line[key] for line in turns) for key in measured} for load, turns in loads.items()}
            for name, loads in found.items()}


def rounded(value, digits: int = 4):
    """Numbers of few digits, so that data are compared as text."""
    if isinstance(value, dict):
        return {str(key): rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


FIGURES = {
    "read-limit": tier_a,
    "flatness": flatness,
    "ragged": lambda: {"schedules": ragged_schedules(), "rows": ragged_rows()},
    "serving": serving,
    "cpu": cpu,
    "steps": steps,
    "onnx-runtime": lambda: onnx_runtime("h100-ort.jsonl"),
    "two-gpus": two_gpus,
    "vllm-load": server_loads,
    "timeline": lambda: timeline_data.timelines(lines(TIMELINE)),
    "timeline-gpu": lambda: timeline_data.timelines(lines(GPU_TIMELINE), every=4),
}


def figure_data(name: str) -> str:
    return json.dumps(rounded(FIGURES[name]()), indent=1) + "\n"


def markdown(head: list, rows: list) -> str:
    return "".join("| " + " | ".join(cells) + " |\n" for cells in [head, ["---"] * len(head), *rows])


def over_cells(row: dict, names: list) -> list:
    best = min(row["over"].values())
    texts = [f"{row['over'][name]:.2f}" if name in row["over"] else "-" for name in names]
    return [f"**{text}**" if text == f"{best:.2f}" else text for text in texts]


def known_rows_table() -> str:
    rows = {row["row"]: row for row in tier_a()}
    names = [OURS, *FAMILIES]
    return markdown(["heads, batch x context", "K and V, MB", "lean, us", *names],
                    [[shown, f"{rows[row]['MB']:.0f}", f"{rows[row]['us'][OURS]:.1f}", *over_cells(
                        {"over": {name: rows[row]["over"][name] for name in names}}, names)] for shown, row in KNOWN_ROWS.items()])


def heads_text(line: dict) -> str:
    return f"{line['q_heads']}/{line['kv_heads']} of {line['head_dim']}"


def tier_a_heads() -> dict:
    return {line["row"]: line for line in lines(TIER_A)}


def shapes_table() -> str:
    """Models by their heads, and where rows of such heads are."""
    tier, table = tier_a_heads(), []
    on_cpus = {heads_text(line) for name in MACHINES.values() for line in lines(name)}
    for name, models in MODELS.items():
        line = next(line for row, line in tier.items() if row.split()[0] == name)
        same = [row for row, other in tier.items() if heads_text(other) == heads_text(line)]
        starts = list(dict.fromkeys(row.split()[0] for row in same))
        kib = 2 * line["kv_heads"] * line["head_dim"] * 2 / 1024
        table.append([models, heads_text(line), f"{kib:g}", ", ".join(starts), "yes" if heads_text(line) in on_cpus else "-"])
    return markdown(["models", "query/kv heads of d", "KiB a token and layer", "rows on one H200", "rows on CPUs"], table)


def tier_a_table(rows: list, families: dict) -> str:
    names, tier = [OURS, ORDERED, *families], tier_a_heads()
    return markdown(["row", "heads of d", "MB", "read, us", "lean, us", *names, "lean / best other"],
                    [[by_name(row["row"]) + (" (void)" if row["void"] else ""), heads_text(tier[row["row"]]),
                      f"{row['MB']:.0f}", f"{row['read']:.4g}", f"{row['us'][OURS]:.4g}",
                      *over_cells(row, names), f"{row['over'][OURS] / best_peer(row)[0]:.2f}"] for row in rows])


def tier_a_means_table() -> str:
    rows = tier_a()
    table = []
    for name in (OURS, ORDERED, *FAMILIES, "the best other of each row"):
        values = [best_peer(row)[0] if name not in row["over"] else row["over"][name] for row in rows]
        worst = max(range(len(rows)), key=lambda i: values[i])
        table.append([name, f"{mean(values):.2f}", f"{values[worst]:.2f}, {by_name(rows[worst]['row'])}"])
    return markdown(["", "geometric mean of time / read limit", "worst row"], table)


def tier_a_h100_table() -> str:
    """Every row on an H100, ours alone: over the read limit, and the other two schedules over lean."""
    rows: dict = {}
    for line in lines(H100):
        rows.setdefault(line["row"], {})[line["impl"]] = line
    table = []
    for row, of in sorted(rows.items(), key=lambda item: item[1]["lean"]["kv_bytes"]):
        lean, dependent, *others = (of[impl] for impl in ("lean", "lean/dependent_launch", "lean/fixed_split", "lean/data_parallel"))
        table.append([by_name(row) + suite_data.void_mark(lean), f"{lean['kv_bytes'] / 1e6:.0f}", f"{lean['ceiling_us']:.4g}", f"{lean['us']:.4g}",
                      *(f"{line['us'] / line['ceiling_us']:.2f}" for line in (lean, dependent)), *(f"{line['us'] / lean['us']:.2f}" for line in others)])
    return markdown(["row", "MB", "read, us", "lean, us", "lean in stream order / read", "dependent launch / read", "fixed_split / lean", "data_parallel / lean"], table)


def load_table() -> str:
    servers = server_loads()
    digits = {"tokens_per_s": ".0f", "first_ms_p50": ".0f", "first_ms_p99": ".0f", "gap_ms_p50": ".2f", "gap_ms_p99": ".0f"}
    head = ["requests a second", "tokens a second", "first token, median, ms", "99 %, ms", "token to token, median, ms", "99 %, ms"]
    return markdown(head, [[load, *(" / ".join(f"{servers[name][load][key]:{form}}" for name in SERVERS) for key, form in digits.items())]
                           for load in servers["lean"]])


def serving_table() -> str:
    rows = []
    for row in serving():
        us, impl = min((us, impl) for impl, us in row["us"].items() if impl != "lean")
        rows.append([by_name(row["row"]), f"{row['us']['lean']:.1f}", f"{us:.1f}", impl, f"{row['us']['lean'] / us:.2f}"])
    return markdown(["row", "lean, us", "best other, us", "which", "lean / best other"], rows)


def over_best_on_zen_5(kind: str) -> list:
    """Our time over the best other's, of the rows whose names match."""
    return [forms["lean"] / min(us for peer, us in forms.items() if peer != "lean")
            for row, forms in cpu_forms(ZEN_5_PEERS).items() if re.search(kind, row)]


def zen_5_table() -> str:
    table = []
    for dtype in ("bf16", "fp16", "fp32"):
        found = [over_best_on_zen_5(rf" g{group} .* {dtype} ") for group in (1, 4, 8)]
        table.append([dtype, *(f"{mean(ratios):.2f} ({span_of(ratios)}, {len(ratios)} rows)" for ratios in found)])
    return markdown(["type", "G = 1", "G = 4", "G = 8"], table)


def cpu_table(of_machines: dict = MACHINES) -> str:
    table = []
    for peer, machines in cpu(of_machines).items():
        for machine, kinds in machines.items():
            table.append([peer, machine, *(f"{kinds[f'{dtype}, G = {group}']:.2f}" if f"{dtype}, G = {group}" in kinds else "-"
                                           for dtype in ("bf16", "fp16", "fp32") for group in (1, 4, 8))])
    return markdown(["against", "on", *(f"{dtype}, G = {group}" for dtype in ("bf16", "fp16", "fp32") for group in (1, 4, 8))], table)


def prompts_beside_torch() -> dict:
    """Our time over that of PyTorch's attention, of prompts and their like on one CPU: by row, then instruction set and type."""
    found = {}
    for line in lines(PROMPTS_BESIDE_TORCH):
        if " 1 of " not in line["row"]:  # a decode step
            isa = "AVX2" if line["isa"] == "avx2" else "AVX-512"
            row = line["row"].removesuffix(f", {line['dtype']}")
            found.setdefault(row, {})[f"{isa}, {line['dtype']}"] = line["us"]["lean"] / line["us"]["torch-2.13.0"]
    return found


def prompts_beside_torch_ratios(isa: str) -> list:
    return [ratio for kinds in prompts_beside_torch().values() for kind, ratio in kinds.items() if kind.startswith(isa)]


def prompts_beside_torch_table() -> str:
    kinds = [f"{isa}, {dtype}" for isa in ("AVX-512", "AVX2") for dtype in ("bf16", "fp16", "fp32")]
    return markdown(["", *kinds], [[row, *(f"{of[kind]:.2f}" for kind in kinds)] for row, of in prompts_beside_torch().items()])


def cpu_rows_table() -> str:
    """Our milliseconds of every row on every machine, and over the better of the others."""
    forms = {machine: cpu_forms(name) for machine, name in MACHINES.items()}
    described = {line["row"]: line for name in MACHINES.values() for line in lines(name)}

    def cell(machine: str, row: str) -> str:
        us = forms[machine].get(row)
        return f"{us['lean'] / 1e3:.3g} ({us['lean'] / min(v for k, v in us.items() if k != 'lean'):.2f})" if us else "-"

    def batch(line: dict) -> str:
        lens = line["lens"]
        return f"{len(lens)} x {lens[0] // 1024}k" if len(set(lens)) == 1 else f"{len(lens)}, 16k and half as long each"

    rows = sorted(described.values(), key=lambda line: (line["dtype"], -line["kv_heads"], line["kv_bytes"]))
    return markdown(["heads of d", "type", "batch x context", "MB", *MACHINES],
                    [[heads_text(line), line["dtype"], batch(line), f"{line['kv_bytes'] / 1e6:.0f}", *(cell(machine, line["row"]) for machine in MACHINES)]
                     for line in rows])


def steps_table() -> str:
    found = steps()
    return markdown(["batch x context", *STEPS], [[by_name(shape), *(f"{found[shape][name]:.1f}" if name in found[shape] else "-" for name in STEPS)]
                                                 for shape in STEP_SHAPES])


def flat_table() -> str:
    return markdown(["schedule", "least time / read limit", "most", "most outputs"],
                    [[name, f"{min(over for _, over in points):.2f}", f"{max(over for _, over in points):.2f}", str(max(n for n, _ in points))]
                     for name, points in flatness().items()])


def paper_table() -> str:
    fixed, whole = of_schedule(SCHEDULES, "fixed_split"), of_schedule(SCHEDULES, "data_parallel")
    rows = [[by_name(row["row"]) + (" (void)" if row["void"] else ""), f"{row['us'][OURS]:.4g}", f"{fixed[row['row']]:.2f}",
             f"{whole[row['row']]:.2f}", *(f"{row['over'][name] / row['over'][OURS]:.2f}" for name in FAMILIES)] for row in paper_rows()]
    return markdown(["batch x heads x tokens", "lean, us", "fixed_split", "data_parallel", *FAMILIES], rows)


def one_variant_table() -> str:
    """The schedules by one variant, that for any call, on the path of sm_80."""
    fixed, whole = (of_schedule("h200-sm80-path.jsonl", schedule) for schedule in ("fixed_split", "data_parallel"))
    return markdown(["by one variant", *map(by_name, fixed)], [["fixed_split / lean", *(f"{ratio:.2f}" for ratio in fixed.values())],
                                                               ["data_parallel / lean", *(f"{whole[row]:.2f}" for row in fixed)]])


def ragged_table() -> str:
    ratios = ragged_over_fixed_split()
    return markdown(["average / longest", *(f"{ratio:.2f}" for ratio, _ in ratios)], [["fixed_split / lean", *(f"{over:.2f}" for _, over in ratios)]])


def onnx_runtime_table() -> str:
    table = []
    for row in onnx_runtime("h100-ort.jsonl"):
        ours, default, flash = (row["us"][impl] for impl in ("lean_ort", "onnxruntime", "onnxruntime_flash"))
        table.append([by_name(row["row"]).replace("+", " + "), f"{row['MB']:.0f}", f"{ours:.1f}", f"{default:.1f}", f"{flash:.1f}", f"{default / ours:.2f}"])
    return markdown(["sequences x tokens", "K and V, MB", "lean, us", "ONNX Runtime, us", "its flash kernel, us", "default / lean"], table)


def onnx_runtime_cpu_table() -> str:
    """A layer on CPUs, both sessions in turns: times over this library's and microseconds, by machine and type."""
    machines = {"Zen 4, 2 threads": "ort-decode-zen4-2t.jsonl", "Xeon, 2 threads": "ort-decode-xeon-2t.jsonl",
                "Xeon, 16 threads": "ort-decode-xeon-16t.jsonl"}
    table = {}
    for machine, name in machines.items():
        for line in lines(name):
            row, dtype = re.fullmatch(r"Phi3m (.+) (fp\d\d)", line["row"]).groups()
            times = f"{line['speedup']:.1f} ({line['us'] / 1e3:.2f}, {line['onnxruntime_us'] / 1e3:.2f} ms)"
            table.setdefault((dtype, by_name(row).replace("+", " + ")), []).append(times)
    return markdown(["type", "sequences x tokens", *machines], [[*key, *cells] for key, cells in table.items()])


def onnx_runtime_cpu_prompts() -> dict:
    """(context, new tokens): {(type, shape): a line}, of one sequence each."""
    table = {}
    for line in lines("ort-prompts-zen5-2t.jsonl"):
        key = line["lens"][0] - line["n_q"], line["n_q"]
        table.setdefault(key, {})[line["dtype"], (line["q_heads"], line["kv_heads"])] = line
    return table


def onnx_runtime_cpu_prompts_table() -> str:
    table, columns = [], [(dtype, heads) for dtype in ("fp32", "fp16") for heads in ((40, 10), (32, 8))]
    for (context, tokens), cells in onnx_runtime_cpu_prompts().items():
        times = [f"{c['speedup']:.2f} ({c['us'] / 1e3:.2f}, {c['onnxruntime_us'] / 1e3:.2f} ms)" for c in (cells[column] for column in columns)]
        table.append([f"{tokens:,}", f"{context:,}", *times])
    return markdown(["new tokens", "behind", *(f"{dtype}, {heads[0]} / {heads[1]} heads" for dtype, heads in columns)], table)


def onnx_runtime_steps_table() -> str:
    return markdown(["sequences x tokens", "lean, ms", "ONNX Runtime, ms", "its flash kernel, ms", "default / lean"], [
        [by_name(row["row"]).replace("+", " + "), *(f"{row['us'][impl] * 40 / 1e3:.2f}" for impl in ("lean_ort", "onnxruntime", "onnxruntime_flash")),
         f"{row['us']['onnxruntime'] / row['us']['lean_ort']:.2f}"] for row in onnx_runtime("h100-ort-steps.jsonl")])


def short_batches() -> dict:
    """row: {column of SHORT: us}, a line of it; FlashAttention-3 and FlashInfer by the best of their kernels."""
    return suite_data.times(by_launch(SHORT_ROWS), SHORT)


def short_ratios(ours: str = OURS, fewest: int = 1, most: int = 1 << 30) -> dict:
    """Ours over the best of the others, of rows of so many tokens a request."""
    ratios = {}
    for row, (us, _) in short_batches().items():
        others = [us[name] for name in us if name not in (OURS, ORDERED)]
        tokens = int(re.match(r"\w+ \d+x(\d+) ", row)[1])
        if ours in us and others and fewest <= tokens <= most:
            ratios[row] = us[ours] / min(others)
    return ratios


def short_lost(ours: str = OURS) -> str:
    return slower(short_ratios(ours).values())


def short_table() -> str:
    """Rows of 32/8 heads: a batch a line, a context a column."""
    cells: dict = {}
    ratios, ordered = short_ratios(), short_ratios(ORDERED)
    for row, (us, line) in short_batches().items():
        found = re.match(r"short (\d+)x(\d+) 32/8 d128 ", row)
        if found and row in ratios:
            both = f"{ratios[row]:.2f}" + (f", {ordered[row]:.2f}" if row in ordered else "")
            cells.setdefault(int(found[1]), {})[int(found[2])] = f"{us[OURS]:.1f} ({both})" + suite_data.void_mark(line)
    contexts = sorted({tokens for of in cells.values() for tokens in of if len([1 for other in cells.values() if tokens in other]) > 1})
    return markdown(["requests", *(f"of {tokens}" for tokens in contexts)],
                    [[f"{batch}", *(of.get(tokens, "") for tokens in contexts)] for batch, of in sorted(cells.items()) if set(of) & set(contexts)])


def short_heads_table() -> str:
    """The suite's other rows: shorter requests, 9 to 16 query heads for each of few kv heads, and the two of TileOPs."""
    rows = {row: found for row, found in short_batches().items() if not re.match(r"short \d+x\d+00 32/8 d128 ", row)}
    columns = [name for name in SHORT if any(name in us for us, _ in rows.values())]
    ratios = short_ratios()
    rows = dict(sorted(rows.items(), key=lambda item: [int(number) for number in re.findall(r"(\d+)x(\d+)[^/]* (\d+)/(\d+)", item[0])[0][::-1]]))
    return markdown(["row", "K and V, MB", "read, us", *(f"{name}, us" for name in columns), "lean / best other"],
                    [[by_name(re.sub(r"^short | (bf16 bhsd )?n_q1$", "", row)) + suite_data.void_mark(line), f"{line['kv_bytes'] / 1e6:.1f}",
                      f"{line['ceiling_us']:.1f}", *(f"{us[name]:.1f}" if name in us else "" for name in columns),
                      f"{ratios[row]:.2f}" if row in ratios else ""] for row, (us, line) in rows.items()])


def feature_lines(rows: str) -> list:
    """Lines of suite `features` of rows that match a pattern."""
    return [line for line in lines(FEATURES) if re.search(rows, line["row"])]


def ruled_over_read(fewest_us: float) -> list:
    """Ours over the read, of rows with rules of scores that are read in so many microseconds and more."""
    return [line["us"] / line["ceiling_us"] for line in feature_lines(RULED) if line["impl"] == "lean" and line["ceiling_us"] >= fewest_us]


def ruled_table() -> str:
    return markdown(*suite_data.beside(feature_lines(RULED), FEATURE, lambda row: by_name(re.sub(" (bf16 bhsd )?n_q1$", "", row))))


def chunks(name: str = CHUNKS) -> list:
    """Microseconds of causal chunks of prompts: ours, FlashAttention-2 and FlexAttention of torch, FlashAttention-3."""
    rows = {}
    kinds = {"lean": "lean", "flash": "FlashAttention-2", "fa3": "FlashAttention-3", "flex": "FlexAttention"}
    for line in lines(name):
        if line.get("us") and not line["impl"].endswith("stream_order"):
            what = line["row"].removesuffix(" fp8")
            new, of = re.match(r"prefill (\w+) of (\w+) ", what).groups()
            narrow = re.search(r" d\d+/(\d+) ", what)
            layout = f", pages of {what.rsplit('/', 1)[1]}" if what.rsplit("/", 1)[1].isdigit() else ""
            layout = f", values of {narrow[1]}" if narrow else layout
            row = rows.setdefault(line["row"], {"chunk": f"{new} of {of}", "void": suite_data.void_mark(line), "heads": heads_text(line) + layout, "us": {}})
            kind = kinds[line["impl"].rsplit("/", 1)[-1]]  # there are two ways to call FlashAttention-3: the faster counts
            row["us"][kind] = min(line["us"], row["us"].get(kind, line["us"]))
    return list(rows.values())


def chunks_over_fa3(name: str = CHUNKS) -> list:
    """(row, ours over FlashAttention-3) of chunks of prompts."""
    return [(row, row["us"]["lean"] / row["us"]["FlashAttention-3"]) for row in chunks(name) if "FlashAttention-3" in row["us"]]


def fp8_chunks_over_bf16() -> list:
    """Ours over ours of the same row in bf16, which is of another run."""
    wide = {(row["chunk"], row["heads"]): row["us"]["lean"] for row in chunks()}
    return [row["us"]["lean"] / wide[row["chunk"], row["heads"]] for row in chunks(FP8_CHUNKS)]


def chunks_of_dims(*dims: int, name: str = CHUNKS, narrow: bool = False) -> list:
    """Ours over FlashAttention-3, of rows of these head dimensions; `narrow`: those whose values have fewer."""
    return [ratio for row, ratio in chunks_over_fa3(name)
            if int(re.search(r" of (\d+)", row["heads"])[1]) in dims and ("values of" in row["heads"]) == narrow]


def tokens_of(text: str) -> int:
    return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)


def chunks_of_long_contexts() -> list:
    """The same of 512 new tokens and more at the end of 32k and more."""
    found = [(*map(tokens_of, row["chunk"].split(" of ")), ratio) for row, ratio in chunks_over_fa3()]
    return [ratio for new, of, ratio in found if new >= 512 and of >= 32768]


def chunks_over_fa2() -> list:
    return [row["us"]["lean"] / row["us"]["FlashAttention-2"] for row in chunks(H100_CHUNKS) if "FlashAttention-2" in row["us"]]


def chunks_table(name: str = CHUNKS) -> str:
    names, rows = ("lean", "FlashAttention-3"), chunks(name)
    return markdown(["tokens", "heads of d", *(f"{name}, us" for name in names), "lean / FlashAttention-3"],
                    [[row["chunk"] + row["void"], row["heads"], *(f"{row['us'][name]:.1f}" if row["us"][name] < 100 else f"{row['us'][name]:.0f}" for name in names),
                      f"{row['us']['lean'] / row['us']['FlashAttention-3']:.2f}"] for row in rows])


def files_table() -> str:
    """Every result file: what measured it, of which commits, when."""
    table = []
    for path in sorted((ROOT / "bench" / "results").glob("*.jsonl")):
        of_file = lines(path.name)
        commits = list(dict.fromkeys(line.get("commit") or "not said" for line in of_file))
        dates = sorted(line["date"][:10] for line in of_file if line.get("date"))
        devices = dict.fromkeys(line["device"] for line in of_file if line.get("device"))
        table.append([f"`{path.name}`", f"{len(of_file)}", ", ".join(devices) or "not said", ", ".join(commits),
                      " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "not said"])
    return markdown(["file", "lines", "device", "commits", "dates"], table)


RULES = {"causal": "causality alone", "alibi": "ALiBi", "mask boolean": "a boolean mask", "mask fp32": "a mask of fp32", "mask bf16": "a mask of bf16",
         "tree": "a tree mask"}


def ruled_calls() -> dict:
    """(what is asked, its rule): {column: us} of suite `rules`; torch's kernels may be called with a mask or by what they have for causality."""
    found = {}
    for row, (us, _) in suite_data.times(lines(MANY_RULED), MANY_RULES).items():
        rule, asked = re.match(f"rules ({'|'.join(RULES)}) (.*) bf16", row).groups()
        found[asked, rule] = us
    return found


def over_causality(*rules: str, fewest: int) -> list:
    """Ours under a rule over ours under causality alone, of calls of so many new tokens and more."""
    calls = ruled_calls()
    return [us[OURS] / calls[asked, "causal"][OURS] for (asked, rule), us in calls.items()
            if rule in rules and tokens_of(asked.split()[2]) >= fewest]


def over_cudnn(*rules: str, fewest: int) -> list:
    """Ours over cuDNN's with a mask, likewise."""
    return [us[OURS] / us["cuDNN"] for (asked, rule), us in ruled_calls().items()
            if rule in rules and tokens_of(asked.split()[2]) >= fewest]


def many_ruled_table() -> str:
    def name_of(row: str) -> str:
        rule, asked, heads, dim = re.match(f"rules ({'|'.join(RULES)}) (.*) ([0-9]+/[0-9]+) d([0-9]+) bf16", row).groups()
        return f"{asked}: {RULES[rule]}" + (f", {heads} heads of {dim}" if (heads, dim) != ("32/8", "128") else "")

    return markdown(*suite_data.beside(lines(MANY_RULED), MANY_RULES, name_of))


PROMPTS = {"lean": "lean", "cuDNN": r"cudnn\d+", "FlashAttention-2": "flash", "FlashAttention-3": "fa3"}
MASKED = {"lean": "lean", "cuDNN": "masked-cudnn", "efficient": "masked-efficient"}


def prompts_table(name: str, columns: dict) -> str:
    return markdown(*suite_data.beside(lines(name), columns, lambda row: by_name(row.removeprefix("prompt ")), read=False))


def prompt_ratios(fewest: int, most: int) -> list:
    """Ours over the best of the others, of prompts of so many new tokens."""
    return suite_data.ratios([line for line in lines(GPU_PROMPTS) if fewest <= line["n_q"] <= most], PROMPTS)


def engine_kind(line: dict, beside: list) -> str | None:
    """Whose attention a line of bench/vllm_engine.py is of. FLASHINFER is XQA or FlashInfer's own, by the kernels of its run; None: unknown."""
    if line["attention"] != "FLASHINFER":
        return next(kind for kind, attention in ENGINE_KINDS.items() if attention == line["attention"])
    names = [kernel["name"] for other in [line, *beside] if other["attention"] == "FLASHINFER" for kernel in other.get("kernels") or []]
    return None if not names else "XQA" if any("kernel_mha" in name for name in names) else "FlashInfer"


def engine_runs(name: str) -> dict:
    """(cache, graphs, shape): for each run of them, in the file's order, {kind: line}. Only lines of one run are of one card."""
    found, together = {}, {}
    for line in lines(name):
        cache, graphs, run = line.get("cache", "auto"), line.get("graphs", "default"), line.get("run")
        found.setdefault((cache, graphs, line["shape"]), {}).setdefault(run, []).append(line)
        together.setdefault((run, cache, graphs), []).append(line)
    table = {}
    for (cache, graphs, shape), runs in found.items():
        kinds = [{engine_kind(line, together[run, cache, graphs]): line for line in of_run} for run, of_run in runs.items()]
        table[cache, graphs, shape] = [{kind: line for kind, line in of.items() if kind} for of in kinds]
    orders = list(ENGINE_CACHES), ["default"], list(dict.fromkeys(shape for *_, shape in table))

    def place(key: tuple) -> list:
        return [order.index(value) if value in order else len(order) for order, value in zip(orders, key)]

    return {key: table[key] for key in sorted(table, key=place)}


def engine_lines(runs: list, kind: str, field: str) -> tuple[dict, dict | None] | None:
    """A line of a kind that has a field, and ours of the same run, of the first run that has both: else the first that there is, alone."""
    have = [{name: line for name, line in of.items() if line.get(field)} for of in runs]
    both = ((of[kind], of[OURS]) for of in have if kind in of and OURS in of)
    return next(both, next(((of[kind], None) for of in have if kind in of), None))


def engine_ratio(line: dict, ours: dict | None) -> float | None:
    """Ours over a line, kernels of attention."""
    return ours["attention_s"] / line["attention_s"] if ours else None


def engine_ratios(name: str, kind: str = "FlashAttention-3") -> list:
    """Ours over a kind's."""
    found = (engine_lines(runs, kind, "attention_s") for runs in engine_runs(name).values())
    return [engine_ratio(*pair) for pair in found if pair and pair[1]]


def span_of(ratios: list, form: str = ".2f") -> str:
    return f"{min(ratios):{form}} to {max(ratios):{form}}"


def engine_range(name: str, kind: str = "FlashAttention-3") -> str:
    return span_of(engine_ratios(name, kind))


def engine_table_of(name: str, field: str, title, text) -> str:
    """A row for each cache, mode of graphs and shape of a file. Kinds that it lacks are left out, and a cache or mode that it has alone.

    title(kind) heads a column, text(line, ours) is what stands in it.
    """
    rows = {key: {kind: engine_lines(runs, kind, field) for kind in ENGINE_KINDS} for key, runs in engine_runs(name).items()}
    rows = {key: cells for key, cells in rows.items() if any(cells.values())}
    kinds = [kind for kind in ENGINE_KINDS if any(cells[kind] for cells in rows.values())]
    told = [place for place in (0, 1) if len({key[place] for key in rows}) > 1]
    table = []
    for key, cells in rows.items():
        said = ENGINE_CACHES.get(key[0], key[0]), "decode" if key[1] == "default" else key[1]
        table.append([by_name(key[2]).replace("~", " uneven of "), *(said[place] for place in told),
                      *(text(*cells[kind]) if cells[kind] else "" for kind in kinds)])
    return markdown(["batch x context", *(("cache", "graphs")[place] for place in told), *map(title, kinds)], table)


def engine_table(name: str) -> str:
    """Decode steps of vLLM's engine: attention's kernels, milliseconds, and ours over the others'."""
    def text(line: dict, ours: dict | None) -> str:
        return f"{1e3 * line['attention_s']:.3f}" + (f" ({engine_ratio(line, ours):.2f})" if ours and ours is not line else "")

    return engine_table_of(name, "attention_s", lambda kind: f"{kind}, ms" + " (lean / it)" * (kind != OURS), text)


def engine_steps_table(name: str) -> str:
    """The whole steps, milliseconds, and how long the host describes one to the layers."""
    def built(line: dict) -> list:
        return [seconds for seconds, _ in (line.get("host_s") or {}).get("build", [])]

    def text(line: dict, _) -> str:
        return f"{1e3 * statistics.median(line['step_s']):.2f}" + (f" ({1e6 * statistics.median(built(line)):.0f})" if built(line) else "")

    described = " (described in, us)" * any(built(line) for line in lines(name))
    return engine_table_of(name, "step_s", lambda kind: f"{kind}, ms{described}", text)


def engine_commits(name: str) -> str:
    """What built the lines of a file, as words after its name."""
    found = sorted({line["commit"] for line in lines(name) if "commit" in line}) or ENGINE_BUILT.get(name, [])
    return f", commit{'s' * (len(found) > 1)} {listed(found)}" if found else ""


def engine_has_run(field: str, names: dict) -> str:
    """Values of a field of ours in both files, in words."""
    found = {line.get(field, next(iter(names))) for name in ENGINE for line in lines(name) if line["attention"] == "CUSTOM"}
    return listed([text for value, text in names.items() if value in found])


def listed(words: list) -> str:
    return ", ".join(words[:-1]) + " and " * (len(words) > 1) + words[-1]


def several_gpus_table(ranks: int) -> str:
    def text(us: float | None) -> str:
        return "" if us is None else f"{us:.1f}" if us < 1000 else f"{us:.0f}"

    rows = several_gpus(ranks)
    ways = [way for way in (*WAYS.values(), "read") if way not in SHARDS and any(way in row["us"] for row in rows)]
    shards = [way for way in SHARDS if any(way in row["us"] for row in rows)]
    table = []
    for row in rows:
        us = row["us"]
        speedup = f"{us['1 GPU'] / us['fused']:.2f}" if "1 GPU" in us else ""
        above = (f"{us['fused'] - us[way]:.1f}" if way in us else "" for way in shards)
        table.append([row["row"], f"{row['MiB']:.0f}", *(text(us.get(way)) for way in ways), speedup, *above])
    return markdown(["row", "K/V, MiB", *ways, "1 GPU / fused", *(f"fused - {way}" for way in shards)], table)


def mixed_lines(traces: bool = False) -> list:
    """Of the rows that the suite has, or of those that it draws from traces."""
    return [line for line in lines(MIXED_ROWS) if traces == line["row"].startswith("Azure")]


def cpu_engine_table(name: str) -> str:
    return markdown(*suite_data.engines_on_a_cpu_table(lines(name), lambda shape: by_name(shape).replace("~", " uneven of ")))


def mixed_over_fa3(traces: bool = False) -> list:
    return suite_data.ratios(mixed_lines(traces), {"lean": "lean", "FlashAttention-3": "fa3"})


def mixed_over_calls(traces: bool = False) -> list:
    """Over the better of two calls, the first of which is ours or FlashAttention-3's."""
    return suite_data.ratios(mixed_lines(traces), {name: impl for name, impl in MIXED.items() if impl != "fa3"})


def mixed_table(traces: bool = False) -> str:
    return markdown(*suite_data.beside(mixed_lines(traces), MIXED, lambda row: re.sub("^AzureLLMInferenceTrace_(.*?) ", r"\1, ", row)))


TABLES = {"two gpus": lambda: several_gpus_table(2), "short": short_table, "short, other heads": short_heads_table, "rules": ruled_table, "files": files_table, "chunks": chunks_table, "chunks, fp8": lambda: chunks_table(FP8_CHUNKS), "chunks, short pages": lambda: chunks_table(SHORT_PAGES), "rules of many rows": many_ruled_table, "Zen 5": zen_5_table, "prompts": lambda: prompts_table(GPU_PROMPTS, PROMPTS), "prompts, masked": lambda: prompts_table(MASKED_PROMPTS, MASKED), "engine": lambda: engine_table(ENGINE[0]), "engine steps": lambda: engine_steps_table(ENGINE[0]),
          "engine, H100": lambda: engine_table(ENGINE[1]), "engine steps, H100": lambda: engine_steps_table(ENGINE[1]), "onnx runtime": onnx_runtime_table, "onnx runtime steps": onnx_runtime_steps_table,
          "known rows": known_rows_table, "tier a": lambda: tier_a_table(tier_a(), FAMILIES), "tier a, one run": lambda: tier_a_table(one_run(), EVERY_FAMILY), "tier a means": tier_a_means_table, "serving": serving_table,
          "shapes": shapes_table, "cpu": cpu_table, "cpu, all libraries": lambda: cpu_table(ALL_ON_A_CPU), "cpu rows": cpu_rows_table,
          "prompts beside torch": prompts_beside_torch_table, "steps": steps_table, "flatness": flat_table,
          "paper": paper_table, "one variant": one_variant_table, "paper ragged": ragged_table,
          "timeline": lambda: markdown(*timeline_data.table(lines(TIMELINE))),
          "timeline of a GPU": lambda: markdown(*timeline_data.table(lines(GPU_TIMELINE))),
          "latent": lambda: markdown(*suite_data.beside(lines(LATENT_ROWS), LATENT, lambda row: by_name(row.removeprefix("mla ")))),
          "latent, fp8": lambda: markdown(*suite_data.beside(lines(LATENT_FP8_ROWS), LATENT_FP8, lambda row: by_name(
              row.removeprefix("mla ").removesuffix(" fp8")))),
          "mixed": mixed_table, "mixed, traces": lambda: mixed_table(True),
          "uneven": lambda: markdown(*suite_data.beside(lines(UNEVEN_ROWS), UNEVEN, lambda row: by_name(re.sub("^ragged | 32/8.*", "", row)))),
          "uneven, H200": lambda: markdown(*suite_data.beside(lines("h200-ragged.jsonl"), UNEVEN, by_name)),
          "engine, CPU": lambda: cpu_engine_table(CPU_ENGINE), "engine, Zen 4": lambda: cpu_engine_table(ZEN_ENGINE),
          "load": load_table, "tier a, H100": tier_a_h100_table,
          "onnx runtime, H200": lambda: markdown(*suite_data.beside(lines("h200-ort.jsonl"), suite_data.ORT, lambda row: by_name(
              re.sub("^Phi3m | fp16$", "", row)).replace("+", " + "), read=False)),
          "onnx runtime, CPU": onnx_runtime_cpu_table, "onnx runtime prompts, CPU": onnx_runtime_cpu_prompts_table,
          "onnx runtime generation": lambda: markdown(*suite_data.generation_table(lines(ORT_GENERATION), by_name)),
          "onnx runtime prompts": lambda: markdown(*suite_data.prompts_table(lines(ORT_GENERATION), by_name)),
          "energy": lambda: markdown(*machine_data.energy_table(lines(ENERGY), by_name)),
          "utilisation": lambda: markdown(*machine_data.utilisation_table(lines(UTILISATION), by_name))}
if several_gpus(4):
    TABLES["four gpus"] = lambda: several_gpus_table(4)


def empty_parts_mean() -> str:
    """Percent that tier a takes longer with empty parts left out, the geometric mean over both cards."""
    times = {}
    for line in lines("experiments/h200-empty-parts.jsonl"):
        times.setdefault((line["card"], line["impl"], line["row"]), {})[line["commit"] == "663ac43"] = line["us"]
    return f"{100 * (mean(us[False] / us[True] for us in times.values()) - 1):.1f}"


def cpu_kinds(peer: str, *words: str) -> list:
    """Ratios of the machines with 2 threads, of the kinds that hold a word."""
    return [ratio for machine, kinds in cpu()[peer].items() for kind, ratio in kinds.items() if any(word in kind for word in words)]


def large(names: tuple, megabytes: float) -> list:
    return [row["over"][name] for row in tier_a() for name in names if row["MB"] >= megabytes]


def commits_of(name: str) -> str:
    """What built the rows of a file that have times: "1f87d02", or "02769b1 and 1f87d02"."""
    found = sorted({line["commit"] for line in lines(name) if line.get("us")})
    return ", ".join(found[:-1]) + (" and " if found[1:] else "") + found[-1]


def rows_timed(name: str) -> str:
    return f"{len({line['row'] for line in lines(name) if line['impl'] == 'lean' and line.get('us')})}"


def latent_of_rows(fewest: int, most: int) -> list:
    """Ours over FlashMLA where query heads times query tokens are so many."""
    def rows_of(line: dict) -> int:
        return line["q_heads"] * line["n_q"]

    return suite_data.ratios([line for line in lines(LATENT_ROWS) if fewest <= rows_of(line) <= most], LATENT)


def over_cpu_attn(dtype: str, name: str = CPU_PROMPTS) -> list:
    """Ours over vLLM's kernels for CPUs, of prompts of a type."""
    return suite_data.ratios([line for line in lines(name) if line["dtype"] == dtype], {"lean": "lean", "CPU_ATTN": "cpu"})


def slower(ratios: Iterable[float]) -> str:
    """Rows in which ours takes longer than the best of the others by more than 2 %."""
    return f"{sum(ratio > 1.02 for ratio in ratios)}"


NUMBERS = {
    "engine over FlashAttention-3": lambda: engine_range(ENGINE[0]),
    "engine over FlashAttention-3, H100": lambda: engine_range(ENGINE[1]),
    "engine over XQA, H100": lambda: engine_range(ENGINE[1], "XQA"),
    "engine over FlashInfer, H100": lambda: engine_range(ENGINE[1], "FlashInfer"),
    "engine commits": lambda: engine_commits(ENGINE[0]),
    "engine commits, H100": lambda: engine_commits(ENGINE[1]),
    "engine caches run": lambda: engine_has_run("cache", ENGINE_CACHES),
    "engine graphs run": lambda: engine_has_run("graphs", ENGINE_GRAPHS),
    "two gpus at 512 MiB": lambda: f"{min(speedups(2, 512)):.1f}",
    "two gpus, most": lambda: f"{max(speedups(2)):.1f}",
    "four gpus at 512 MiB": lambda: f"{min(speedups(4, 512)):.1f}",
    "four gpus at 1024 MiB": lambda: f"{min(speedups(4, 1024)):.1f}",
    "four gpus, most": lambda: f"{max(speedups(4)):.1f}",
    "short rows": lambda: rows_timed(SHORT_ROWS),
    "short commits": lambda: commits_of(SHORT_ROWS),
    "chunk rows": lambda: rows_timed(CHUNKS),
    "chunk commits": lambda: commits_of(CHUNKS),
    "fp8 chunk rows": lambda: rows_timed(FP8_CHUNKS),
    "fp8 chunk commits": lambda: commits_of(FP8_CHUNKS),
    "fp8 chunks over FlashAttention-3": lambda: f"{mean(ratio for _, ratio in chunks_over_fa3(FP8_CHUNKS)):.2f}",
    "fp8 chunks over FlashAttention-3, span": lambda: span_of([ratio for _, ratio in chunks_over_fa3(FP8_CHUNKS)], ".2f"),
    "fp8 chunks over bf16": lambda: f"{mean(fp8_chunks_over_bf16()):.2f}",
    "fp8 chunks over bf16, span": lambda: span_of(fp8_chunks_over_bf16(), ".2f"),
    "short pages commits": lambda: commits_of(SHORT_PAGES),
    "short pages rows": lambda: rows_timed(SHORT_PAGES),
    "short pages over FlashAttention-3": lambda: f"{mean(ratio for _, ratio in chunks_over_fa3(SHORT_PAGES)):.2f}",
    "short pages over FlashAttention-3, span": lambda: span_of([ratio for _, ratio in chunks_over_fa3(SHORT_PAGES)], ".2f"),
    "prompts commits": lambda: commits_of(GPU_PROMPTS),
    "prompts rows": lambda: rows_timed(GPU_PROMPTS),
    "short prompts rows": lambda: f"{len(prompt_ratios(1, 2048))}",
    "short prompts over best": lambda: f"{mean(prompt_ratios(1, 2048)):.2f}",
    "short prompts over best, most": lambda: f"{max(prompt_ratios(1, 2048)):.2f}",
    "long prompts rows": lambda: f"{len(prompt_ratios(2049, 1 << 30))}",
    "long prompts over best": lambda: f"{mean(prompt_ratios(2049, 1 << 30)):.2f}",
    "masked prompts rows": lambda: rows_timed(MASKED_PROMPTS),
    "masked prompts over best, span": lambda: span_of(suite_data.ratios(lines(MASKED_PROMPTS), MASKED), ".2f"),
    "many rules commits": lambda: commits_of(MANY_RULED),
    "many rules rows": lambda: rows_timed(MANY_RULED),
    "ALiBi over causality": lambda: f"{mean(over_causality('alibi', fewest=512)):.1f}",
    "masks over causality, span": lambda: span_of(over_causality("mask boolean", "mask fp32", "mask bf16", fewest=512), ".1f"),
    "trees over causality, span": lambda: span_of(over_causality("tree", fewest=1), ".2f"),
    "numbers over cuDNN, span": lambda: span_of(over_cudnn("mask fp32", "mask bf16", fewest=512), ".1f"),
    "chunk rows beside FlashAttention-2": lambda: f"{len(chunks_over_fa2())}",
    "chunks on an H100 over FlashAttention-3": lambda: f"{mean(chunks_of_dims(64, 96, 128, name=H100_CHUNKS)):.2f}",
    "chunks on an H100 over FlashAttention-3, most": lambda: f"{max(chunks_of_dims(64, 96, 128, name=H100_CHUNKS)):.2f}",
    "chunk commits beside FlashAttention-2": lambda: commits_of(H100_CHUNKS),
    "prompts on a CPU over CPU_ATTN": lambda: span_of(suite_data.prompts_on_a_cpu(lines(CPU_ENGINE)), ".1f"),
    "prompts on AMX over CPU_ATTN": lambda: f"{mean(over_cpu_attn('bf16')):.2f}",
    "prompts on AMX over CPU_ATTN, span": lambda: span_of(over_cpu_attn("bf16"), ".2f"),
    "fp16 prompts over CPU_ATTN": lambda: f"{mean(over_cpu_attn('fp16')):.2f}",
    "fp16 prompts over CPU_ATTN, span": lambda: span_of(over_cpu_attn("fp16"), ".2f"),
    "prompts on Zen 5 over CPU_ATTN": lambda: ", ".join(f"{span_of(over_cpu_attn(dtype, ZEN_PROMPTS))} in {dtype}" for dtype in ("bf16", "fp16", "fp32")),
    "prompts on Zen 5": lambda: rows_timed(ZEN_PROMPTS),
    "fp32 prompts beside CPU_ATTN": lambda: f"{len(over_cpu_attn('fp32'))}",
    "fp32 prompts over CPU_ATTN, span": lambda: span_of(over_cpu_attn("fp32"), ".2f"),
    "CPU_ATTN's prompts on Zen 4": lambda: span_of([1 / ratio for ratio in suite_data.prompts_on_a_cpu(lines(ZEN_ENGINE))], ".1f"),
    "CPU_ATTN's steps on Zen 4": lambda: span_of(suite_data.steps_on_a_cpu(lines(ZEN_ENGINE)), ".1f"),
    "chunks of any dims over FlashAttention-3": lambda: f"{mean([ratio for _, ratio in chunks_over_fa3()]):.2f}",
    "chunks of any dims over FlashAttention-3, most": lambda: f"{max(ratio for _, ratio in chunks_over_fa3()):.2f}",
    "chunks of 256 dims over FlashAttention-3, least": lambda: f"{min(chunks_of_dims(256)):.2f}",
    "chunks of 256 dims over FlashAttention-3, most": lambda: f"{max(chunks_of_dims(256)):.2f}",
    "chunks of few values over FlashAttention-3, least": lambda: f"{min(chunks_of_dims(192, narrow=True)):.2f}",
    "chunks of few values over FlashAttention-3, most": lambda: f"{max(chunks_of_dims(192, narrow=True)):.2f}",
    "chunks of 192 dims over FlashAttention-3, least": lambda: f"{min(chunks_of_dims(192)):.2f}",
    "chunks of 192 dims over FlashAttention-3, most": lambda: f"{max(chunks_of_dims(192)):.2f}",
    "chunks of long contexts over FlashAttention-3, least": lambda: f"{min(chunks_of_long_contexts()):.2f}",
    "chunks of long contexts over FlashAttention-3, most": lambda: f"{max(chunks_of_long_contexts()):.2f}",
    "latent rows": lambda: rows_timed(LATENT_ROWS),
    "latent commits": lambda: commits_of(LATENT_ROWS),
    "latent rows lost": lambda: slower(suite_data.ratios(lines(LATENT_ROWS), LATENT)),
    "mixed rows": lambda: f"{len(mixed_over_fa3())}",
    "mixed commits": lambda: commits_of(MIXED_ROWS),
    "flat commits": lambda: commits_of(FLAT),
    "feature rows": lambda: rows_timed(FEATURES),
    "feature commits": lambda: commits_of(FEATURES),
    "features over FlashAttention-3": lambda: f"{mean(suite_data.ratios(lines(FEATURES), FEATURE)):.2f}",
    "features beside FlashAttention-3": lambda: f"{len(suite_data.ratios(lines(FEATURES), FEATURE))}",
    "pages of a token over FlashAttention-3": lambda: f"{max(suite_data.ratios(feature_lines(TOKEN_PAGES), FEATURE)):.2f}",
    "features most over FlashAttention-3, but for pages of a token": lambda: f"{max(suite_data.ratios(feature_lines(f'^(?!{TOKEN_PAGES[1:]})'), FEATURE)):.2f}",
    "rules over read, most": lambda: f"{max(ruled_over_read(10)):.2f}",
    "short over best other": lambda: f"{mean(short_ratios().values()):.2f}",
    "short over best other from 300": lambda: f"{mean(short_ratios(fewest=300).values()):.2f}",
    "short over best other below 300": lambda: f"{mean(short_ratios(most=299).values()):.2f}",
    "short rows lost": short_lost,
    "short over best other, stream order": lambda: f"{mean(short_ratios(ORDERED).values()):.2f}",
    "short rows lost, stream order": lambda: short_lost(ORDERED),
    "chunks over FlashAttention-2": lambda: f"{mean(chunks_over_fa2()):.2f}",
    "chunks most over FlashAttention-2": lambda: f"{max(chunks_over_fa2()):.2f}",
    "empty parts, mean": empty_parts_mean,
    "latent fp8 rows": lambda: rows_timed(LATENT_FP8_ROWS),
    "latent fp8 commits": lambda: commits_of(LATENT_FP8_ROWS),
    "latent fp8 over FlashMLA": lambda: f"{mean(suite_data.ratios(lines(LATENT_FP8_ROWS), LATENT_FP8)):.2f}",
    "latent fp8 least over FlashMLA": lambda: f"{min(suite_data.ratios(lines(LATENT_FP8_ROWS), LATENT_FP8)):.2f}",
    "latent fp8 most over FlashMLA": lambda: f"{max(suite_data.ratios(lines(LATENT_FP8_ROWS), LATENT_FP8)):.2f}",
    "latent over FlashMLA": lambda: f"{mean(suite_data.ratios(lines(LATENT_ROWS), LATENT)):.2f}",
    "latent most over FlashMLA": lambda: f"{max(suite_data.ratios(lines(LATENT_ROWS), LATENT)):.2f}",
    "latent least over FlashMLA": lambda: f"{min(suite_data.ratios(lines(LATENT_ROWS), LATENT)):.2f}",
    "latent over FlashMLA of up to 32 rows": lambda: f"{mean(latent_of_rows(1, 32)):.2f}",
    "latent over FlashMLA of 33 to 64 rows": lambda: f"{mean(latent_of_rows(33, 64)):.2f}",
    "latent over FlashMLA of more than 64 rows": lambda: f"{mean(latent_of_rows(65, 512)):.2f}",
    "mixed least over FlashAttention-3": lambda: f"{min(mixed_over_fa3()):.2f}",
    "mixed most over FlashAttention-3": lambda: f"{max(mixed_over_fa3()):.2f}",
    "mixed over FlashAttention-3": lambda: f"{mean(mixed_over_fa3()):.2f}",
    "mixed over two calls": lambda: f"{mean(mixed_over_calls()):.2f}",
    "mixed over two calls, traces": lambda: f"{mean(mixed_over_calls(True)):.2f}",
    "mixed least over two calls": lambda: f"{min(mixed_over_calls() + mixed_over_calls(True)):.2f}",
    "mixed most over two calls": lambda: f"{max(mixed_over_calls() + mixed_over_calls(True)):.2f}",
    "mixed rows lost": lambda: slower(mixed_over_fa3()),
    "mixed rows of traces": lambda: f"{len(mixed_over_fa3(True))}",
    "mixed rows of traces lost": lambda: slower(mixed_over_fa3(True)),
    "mixed over FlashAttention-3, traces": lambda: f"{mean(mixed_over_fa3(True)):.2f}",
    "mixed least over FlashAttention-3, traces": lambda: f"{min(mixed_over_fa3(True)):.2f}",
    "mixed most over FlashAttention-3, traces": lambda: f"{max(mixed_over_fa3(True)):.2f}",
    "uneven rows": lambda: rows_timed(UNEVEN_ROWS),
    "uneven over best other": lambda: f"{mean(suite_data.ratios(lines(UNEVEN_ROWS), UNEVEN)):.2f}",
    "uneven, worst": lambda: f"{max(suite_data.ratios(lines(UNEVEN_ROWS), UNEVEN)):.2f}",
    "uneven over best other, H200": lambda: f"{mean(suite_data.ratios(lines('h200-ragged.jsonl'), UNEVEN)):.2f}",
    "ort most over best other": lambda: f"{max(suite_data.ratios(lines('h100-ort.jsonl'), suite_data.ORT)):.2f}",
    "h100 dependent over read": lambda: f"{mean(h100_over_read(impl='lean/dependent_launch')):.2f}",
    "fixed split over lean, energy": lambda: f"{mean(machine_data.energy_ratios(lines(ENERGY), 'fixed_split')):.2f}",
    "ort prompts of 1k": lambda: f"{ort_prompts()[0]:.2f}",
    "ort prompts least": lambda: f"{min(ort_prompts()[1:]):.2f}",
    "ort prompts most": lambda: f"{max(ort_prompts()[1:]):.2f}",
    "ort uneven least": lambda: f"{min(ort_uneven()):.1f}",
    "ort uneven most": lambda: f"{max(ort_uneven()):.1f}",
    "tier a rows": lambda: f"{len(tier_a())}",
    "tier a over read": lambda: f"{mean(row['over'][OURS] for row in tier_a()):.2f}",
    "tier a over read, stream order": lambda: f"{mean(row['over'][ORDERED] for row in tier_a()):.2f}",
    "best other over read": lambda: f"{mean(best_peer(row)[0] for row in tier_a()):.2f}",
    "best single other over read": lambda: f"{min(mean(row['over'][family] for row in tier_a()) for family in FAMILIES):.2f}",
    "tier a over best other": lambda: f"{mean(against_best(OURS)):.2f}",
    "tier a over best other, stream order": lambda: f"{mean(against_best(ORDERED)):.2f}",
    "later over read": lambda: f"{mean(row['over'][OURS] for row in tier_a(LATER)):.2f}",
    "later over read, stream order": lambda: f"{mean(row['over'][ORDERED] for row in tier_a(LATER)):.2f}",
    "later over best other": lambda: f"{mean(against_best(OURS, tier_a(LATER))):.2f}",
    "later over best other, stream order": lambda: f"{mean(against_best(ORDERED, tier_a(LATER))):.2f}",
    "later rows lost": lambda: slower(against_best(OURS, tier_a(LATER))),
    "later rows lost, stream order": lambda: slower(against_best(ORDERED, tier_a(LATER))),
    "one run rows": lambda: f"{len(one_run())}",
    "one run over read": lambda: f"{mean(row['over'][OURS] for row in one_run()):.2f}",
    "one run over read, stream order": lambda: f"{mean(row['over'][ORDERED] for row in one_run()):.2f}",
    "one run over best other": lambda: f"{mean(against_best(OURS, one_run())):.2f}",
    "one run over best other, stream order": lambda: f"{mean(against_best(ORDERED, one_run())):.2f}",
    "one run rows lost": lambda: slower(against_best(OURS, one_run())),
    "one run, worst": lambda: f"{max(against_best(OURS, one_run())):.2f}",
    "worst over best other": lambda: f"{max(against_best(OURS)):.2f}",
    "worst over best other, stream order": lambda: f"{max(against_best(ORDERED)):.2f}",
    "rows lost": lambda: slower(against_best(OURS)),
    "rows lost, stream order": lambda: slower(against_best(ORDERED)),
    "worst over read from 1 GB": lambda: f"{max(large((OURS,), 1000)):.2f}",
    "void rows": lambda: f"{sum(row['void'] for row in tier_a())}",
    "1 x 1k over read": lambda: f"{tier_a()[0]['over'][OURS]:.1f}",
    "serving rows": lambda: f"{len(serving())}",
    "serving over best other": lambda: f"{mean(serving_ratios()):.2f}",
    "serving least": lambda: f"{min(serving_ratios()):.2f}",
    "serving most": lambda: f"{max(serving_ratios()):.2f}",
    "flat least us": lambda: f"{min(flat_times()):.1f}",
    "flat most us": lambda: f"{max(flat_times()):.1f}",
    "flat ratio": lambda: f"{max(flat_times()) / min(flat_times()):.3f}",
    "h100 tier a over read": lambda: f"{mean(h100_over_read()):.2f}",
    "h100 worst over read from 1 GB": lambda: f"{max(h100_over_read(1000)):.2f}",
    "paper rows": lambda: f"{len(paper_over_fixed_split())}",
    "paper over fixed split": lambda: f"{mean(paper_over_fixed_split()):.2f}",
    "paper over fixed split, least": lambda: f"{min(paper_over_fixed_split()):.2f}",
    "paper over fixed split, most": lambda: f"{max(paper_over_fixed_split()):.2f}",
    "paper over FlashAttention-3": lambda: f"{mean(paper_over('FlashAttention-3')):.2f}",
    "paper over FlashAttention-3, most": lambda: f"{max(paper_over('FlashAttention-3')):.2f}",
    "paper over FlashInfer": lambda: f"{mean(paper_over('FlashInfer')):.2f}",
    "paper over FlashInfer, most": lambda: f"{max(paper_over('FlashInfer')):.2f}",
    "tier b rows": lambda: f"{len(of_schedule('h200-tier-b.jsonl', 'fixed_split'))}",
    "tier b over fixed split": lambda: f"{mean(of_schedule('h200-tier-b.jsonl', 'fixed_split').values()):.2f}",
    "tier b over fixed split, least": lambda: f"{min(of_schedule('h200-tier-b.jsonl', 'fixed_split').values()):.2f}",
    "tier b over fixed split, most": lambda: f"{max(of_schedule('h200-tier-b.jsonl', 'fixed_split').values()):.1f}",
    "cpu torch gqa 16 bits": lambda: f"{1 / max(cpu_kinds('torch', '16, G = 4', '16, G = 8')):.1f} to {1 / min(cpu_kinds('torch', '16, G = 4', '16, G = 8')):.0f}",
    "cpu onnxruntime gqa 16 bits": lambda: f"{1 / max(cpu_kinds('onnxruntime', '16, G = 4', '16, G = 8')):.1f} to {1 / min(cpu_kinds('onnxruntime', '16, G = 4', '16, G = 8')):.0f}",
    "Zen 5 rows": lambda: rows_timed(ZEN_5_PEERS),
    "prompts beside torch, AVX-512": lambda: span_of(prompts_beside_torch_ratios("AVX-512")),
    "prompts beside torch, AVX2": lambda: span_of(prompts_beside_torch_ratios("AVX2")),
    "cpu slowest": lambda: f"{max(max(kinds.values()) for machines in cpu().values() for kinds in machines.values()):.2f}",
}
