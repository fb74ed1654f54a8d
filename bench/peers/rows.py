"""The rows of bench/suite.py: read from the lines of `lean bench --suite NAME --list --json`, or declared here where the command has no
words for them: prefill chunks, mixed batches, MLA, and the rows of the CPU's other libraries.
"""
import csv
import dataclasses
import itertools
import json
import pathlib
import random
import subprocess

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
#: The command's names of K/V layouts (axes, slowest first; no b: packed) and ours.
KINDS = {"bhsd": "bhsd", "bshd": "bshd", "hsd": "htd", "shd": "thd"}
PAGED_KINDS = {"bhsd": "hnd", "bshd": "nhd"}


@dataclasses.dataclass(frozen=True)
class Form:
    """Where K and V lie: bhsd, bshd (padded to the longest), htd, thd (packed), blocks (each sequence's
    [Hkv, tokens, d] on its own, end to end), or in pages of so many tokens, hnd or nhd.

    `how` is the way to call a peer there; where it begins with "padded", every sequence is read to the longest one's end.
    """

    kind: str
    page: int = 0
    how: str = ""

    @property
    def text(self) -> str:
        return (f"{self.kind}/{self.page}" if self.page else self.kind) + (f", {self.how}" if self.how else "")

    @property
    def padded(self) -> bool:
        return self.how.startswith("padded")


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem. n_q: query tokens of each sequence. value_dim: 0 as head_dim; `latent`: V is the first dims of K, as in MLA."""

    row: str
    suite: str
    lens: tuple
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    n_q: tuple = ()
    kv_dtype: str = ""
    form: Form = Form("bhsd")
    causal: bool = False
    value_dim: int = 0
    latent: bool = False
    #: Of (name, value): window (left, right), softcap, alibi and sinks, whose numbers follow from the heads, mask ("boolean" or a type), tree.
    features: tuple = ()
    unknown: str = ""  # why no implementation can be asked for it here
    read_bytes: int = 0  # of K and V that a call must read, where that is not all of them

    def __post_init__(self):
        defaults = {"n_q": self.n_q or (1,) * len(self.lens), "kv_dtype": self.kv_dtype or self.dtype, "value_dim": self.value_dim or self.head_dim}
        for name, value in defaults.items():
            object.__setattr__(self, name, value)

    @property
    def batch(self) -> int:
        return len(self.lens)

    @property
    def longest(self) -> int:
        return max(self.lens)

    @property
    def uniform(self) -> bool:
        return len(set(self.lens)) == 1

    @property
    def even_queries(self) -> bool:
        return len(set(self.n_q)) == 1

    @property
    def decodes(self) -> bool:
        return set(self.n_q) == {1}

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def scale(self) -> float:
        return self.head_dim ** -0.5

    @property
    def narrow_values(self) -> bool:
        return self.value_dim < self.head_dim and not self.latent

    @property
    def kv_bytes(self) -> int:
        dims = self.head_dim + (0 if self.latent else self.value_dim)
        return self.read_bytes or sum(self.lens) * self.kv_heads * dims * ELEMENT_BYTES[self.kv_dtype]

    def feature(self, name: str, default=None):
        return dict(self.features).get(name, default)

    def fields(self) -> dict:
        """What a line of a result file says of the problem."""
        one = self.n_q[0] if self.even_queries else list(self.n_q)
        fields = {"row": self.row, "suite": self.suite, "lens": list(self.lens), "q_heads": self.q_heads, "kv_heads": self.kv_heads,
                  "head_dim": self.head_dim, "dtype": self.dtype, "n_q": one, "causal": self.causal, "kv_bytes": self.kv_bytes}
        fields |= {"kv_dtype": self.kv_dtype} if self.kv_dtype != self.dtype else {}
        fields |= {"value_dim": self.value_dim} if self.value_dim != self.head_dim else {}
        fields |= {"values_in_keys": True} if self.latent else {}
        return fields | ({"features": dict(self.features)} if self.features else {})


# ---- lines of the command ------------------------------------------------------------------------------------------------


def features_of(line: dict) -> tuple:
    """Windows, softcaps, ALiBi and sinks, as lines of the command have them."""
    found = {name: line[name] for name in ("softcap", "alibi", "sinks") if line.get(name)}
    window = line.get("window_left", -1), line.get("window_right", -1)
    return tuple(sorted((found | ({"window": window} if window != (-1, -1) else {})).items()))


def row_of(line: dict) -> Row:
    """ValueError: a field is missing or not understood."""
    try:
        page, kind = line.get("page_tokens", 0), line["layout"]
        form = Form(PAGED_KINDS[kind], page) if page else Form(KINDS[kind])
        lens, n_q = tuple(int(n) for n in line["lens"]), line.get("n_q", 1)
        if not lens or min(lens) < 1:
            raise ValueError(f"lens = {list(lens)}: 1 or more tokens each")
        return Row(line["row"], line.get("suite", ""), lens, line["q_heads"], line["kv_heads"], line["head_dim"], line["dtype"],
                   tuple(n_q) if isinstance(n_q, list) else (n_q,) * len(lens), line.get("kv_dtype", ""), form, bool(line.get("causal")),
                   features=features_of(line), unknown=line.get("missing") or "", read_bytes=line.get("kv_bytes", 0))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a row is not understood: {type(error).__name__}: {error}: {json.dumps(line)[:200]}") from error


def read_rows(lines) -> list:
    return [row_of(json.loads(line)) for line in lines if line.strip()]


def rows_of_command(command: pathlib.Path, suite: str, device: str, trace: str = "") -> list:
    """The rows of a suite of `lean bench`. ValueError: it has none of that name, or does not run."""
    arguments = [command, "bench", "--suite", suite, "--backend", device, "--list", "--json", *(["--trace", trace] if trace and suite == "ragged" else [])]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"--suite {suite}: {error}; `make build` makes build/bin/lean, --lean names another") from error
    if done.returncode:
        raise ValueError(f"--suite {suite}: {(done.stderr.strip().splitlines() or ['lean bench failed'])[-1]}; "
                         f"here are also {', '.join(OWN_SUITES)}")
    return read_rows(done.stdout.splitlines())


# ---- rows that the command has no words for --------------------------------------------------------------------------------


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def prefill_rows(_trace: str = "") -> list:
    """One chunk of a prompt, causal at its end, of what suite wide of the command lacks: pages under every chunk size and context, group
    sizes, head dims."""
    plans = [(n_q, context, 4, 128, 16) for n_q in (64, 256, 512, 1024, 2048, 4096, 8192, 16384)
             for context in (2048, 8192, 32768, 131072) if n_q <= context]
    plans += [(512, 8192, group, 128, 0) for group in (1, 2, 4, 8, 16)]
    plans += [(n_q, 8192, 4, dim, 0) for dim in (64, 96, 192, 256) for n_q in (512, 2048)]
    rows = []
    for n_q, context, group, dim, page in plans:
        name = f"prefill {short(n_q)} of {short(context)} {8 * group}/8 d{dim} bf16" + (f" nhd/{page}" if page else "")
        rows.append(Row(name, "prefill", (context,), 8 * group, 8, dim, "bf16", (n_q,), form=Form("nhd", page) if page else Form("bshd"), causal=True))
    for n_q in (512, 2048):  # DeepSeek's prompts, 128 heads on 8 GPUs
        rows.append(Row(f"prefill {short(n_q)} of 8k 16/16 d192/128 bf16", "prefill", (8192,), 16, 16, 192, "bf16", (n_q,), form=Form("bshd"),
                        causal=True, value_dim=128))
    return rows


def prompt_rows(_trace: str = "") -> list:
    """Whole prompts, causal, and chunks behind a short context: what PyTorch and Transformers ask for before the first token of output."""
    llama = [(batch, n_q, n_q, (32, 8), 128, "bf16") for batch, n_q in
             [(1, 128), (1, 256), (1, 512), (1, 1024), (1, 2048), (1, 4096), (1, 8192), (1, 32768), (4, 512), (16, 128), (16, 512), (4, 2048), (4, 8192)]]
    chunks = [(batch, n_q, context, (32, 8), 128, "bf16") for batch, n_q, context in
              [(1, 16, 256), (8, 16, 256), (8, 64, 512), (1, 128, 2048), (1, 512, 2048), (4, 512, 2048), (1, 128, 8192)]]
    others = [(1, n_q, n_q, heads, dim, dtype) for heads, dim, dtype in (((32, 8), 128, "fp16"), ((32, 32), 128, "bf16"), ((14, 2), 64, "bf16"),
              ((32, 32), 96, "bf16"), ((16, 16), 192, "bf16"), ((8, 4), 256, "bf16")) for n_q in (512, 2048, 8192)]
    rows = []
    for batch, n_q, context, heads, dim, dtype in llama + chunks + others:
        name = f"prompt {batch} x {short(n_q)} of {short(context)} {heads[0]}/{heads[1]} d{dim} {dtype}"
        rows.append(Row(name, "prompts", (context,) * batch, *heads, dim, dtype, (n_q,) * batch, form=Form("bshd"), causal=True))
    return rows


def prefill_fp8_rows(_trace: str = "") -> list:
    """Chunks over a cache in float8, of the dims that have a kernel for them."""
    return [dataclasses.replace(row, row=f"{row.row} fp8", suite="prefill-fp8", kv_dtype="fp8_e4m3") for row in prefill_rows()
            if row.n_q[0] in (64, 512, 2048, 8192) and row.head_dim in (64, 128, 256) and row.value_dim == row.head_dim]


def prefill_pages_rows(_trace: str = "") -> list:
    """Chunks from pages that hold no whole box of 16 tokens: SGLang's of one token, and others."""
    plans = [(n_q, context, 128, 1) for n_q, context in ((64, 8192), (512, 2048), (512, 8192), (2048, 2048), (2048, 8192), (8192, 8192))]
    plans += [(512, 8192, dim, 1) for dim in (64, 256)] + [(512, 8192, 128, page) for page in (8, 24)]
    return [Row(f"prefill {short(n_q)} of {short(context)} 32/8 d{dim} bf16 nhd/{page}", "prefill-pages", (context,), 32, 8, dim, "bf16", (n_q,),
                form=Form("nhd", page), causal=True) for n_q, context, dim, page in plans]


def rules_rows(_trace: str = "") -> list:
    """What the command has no words for: masks, tree masks, and ALiBi of many rows; each beside causality alone. Heads of Llama-3-8B, and of gpt-oss
    for trees of 64 dims."""
    masks = [("mask", kind) for kind in ("boolean", "fp32", "bf16")]
    plans = [(1, 512, (32, 8), 128, [None, ("alibi", True), *masks]), (1, 2048, (32, 8), 128, [None, ("alibi", True), masks[0]]),
             (8, 1, (32, 8), 128, [None, *masks])]
    plans += [(batch, drafts, (32, 8), 128, [None, ("tree", True)]) for drafts in (4, 16, 64) for batch in (1, 8)]
    plans += [(8, 16, (64, 8), 64, [None, ("tree", True)])]
    rows = []
    for batch, n_q, heads, dim, features in plans:
        for feature in features:
            what = "causal" if feature is None else f"{feature[0]} {feature[1]}" if feature[0] == "mask" else feature[0]
            name = f"rules {what} {batch} x {short(n_q)} of 8k {heads[0]}/{heads[1]} d{dim} bf16"
            rows.append(Row(name, "rules", (8192,) * batch, *heads, dim, "bf16", (n_q,) * batch, form=Form("bhsd"),
                            causal=feature is None or feature[0] == "alibi", features=() if feature is None else (feature,)))
    return rows


#: (requests, new tokens, context with them) of a step in which prompts' chunks and decode rows share a call
MIXES = [[(1, 512, 4096), (63, 1, 8192)], [(4, 512, 4096), (60, 1, 8192)], [(8, 256, 2048), (56, 1, 2048)],
         [(1, 2048, 2048), (32, 1, 4096)], [(2, 2048, 16384), (30, 1, 4096)], [(1, 256, 65536), (16, 1, 16384)]]


def mixed_row(name: str, requests: list) -> Row:
    return Row(name, "mixed", tuple(context for _, context in requests), 32, 8, 128, "bf16", tuple(new for new, _ in requests),
               form=Form("thd"), causal=True)


def trace_batch(prompts: list, decodes: int, chunk: int, seed: int) -> list:
    """(new, context): one prompt in chunks, somewhere in it, and requests that decode, each somewhere in its answer."""
    draw = random.Random(seed)
    prompt, _ = draw.choice(prompts)
    begin = chunk * draw.randrange(-(-prompt // chunk))
    requests = [(min(chunk, prompt - begin), min(prompt, begin + chunk))]
    return requests + [(1, context + draw.randrange(answer + 1)) for context, answer in draw.choices(prompts, k=decodes)]


def read_trace(path: str) -> list:
    """(prompt tokens, answer tokens) of the requests of a CSV with columns ContextTokens and GeneratedTokens."""
    with open(path, newline="") as file:
        requests = [(int(line["ContextTokens"]), int(line["GeneratedTokens"])) for line in csv.DictReader(file)]
    return [(prompt, answer) for prompt, answer in requests if prompt > 0]


def mixed_rows(trace: str = "") -> list:
    rows = [mixed_row(", ".join(f"{count} x {new} of {short(context)}" for count, new, context in groups),
                      [(new, context) for count, new, context in groups for _ in range(count)]) for groups in MIXES]
    if trace:
        requests, stem = read_trace(trace), pathlib.Path(trace).stem
        for chunk, decodes, seed in itertools.product((512, 2048), (15, 63), (1, 2)):
            rows.append(mixed_row(f"{stem} chunk {chunk} + {decodes} x 1, draw {seed}", trace_batch(requests, decodes, chunk, seed)))
    return rows


def mla_rows(_trace: str = "") -> list:
    """DeepSeek's latent cache: one K/V head of 576, V its first 512, pages of 64."""
    return [Row(f"mla {batch}x{short(context)} h{heads} n_q{n_q}", "mla", (context,) * batch, heads, 1, 576, "bf16", (n_q,) * batch,
                form=Form("nhd", 64), causal=n_q > 1, value_dim=512, latent=True)
            for heads in (16, 32, 64, 128) for n_q in (1, 2, 4) for batch, context in ((1, 8192), (16, 8192), (64, 4096))]


def mla_fp8_rows(_trace: str = "") -> list:
    """The same rows in float8."""
    return [dataclasses.replace(row, row=f"{row.row} fp8", suite="mla-fp8", kv_dtype="fp8_e4m3") for row in mla_rows() if row.n_q[0] < 4]


def cpu_peer_rows(_trace: str = "", contexts: tuple = (8192, 32768), longest: int = 16384) -> list:
    """Llama-like heads on a CPU: one and four sequences of each context, and eight whose lengths halve."""
    lens = [(context,) * batch for context in contexts for batch in (1, 4)] + [tuple(longest >> i for i in range(8))]
    rows = []
    for dtype, group, n in itertools.product(("bf16", "fp16", "fp32"), (1, 4, 8), lens):
        even = len(set(n)) == 1
        tokens = short(max(n)) if even else f"{short(min(n))}..{short(max(n))}"
        name = f"{'uniform' if even else 'halving'} b{len(n)} {tokens} h{32 // group} g{group} d128 {dtype} n_q1"
        rows.append(Row(name, "cpu-peers", n, 32, 32 // group, 128, dtype, form=Form("bhsd") if even else Form("htd")))
    return rows


def cpu_prompt_rows(_trace: str = "") -> list:
    """Whole prompts and their chunks on a CPU, causal at their end, of one request."""
    plans = [(heads, dim, dtype) for dtype in ("bf16", "fp16", "fp32") for heads, dim in (((32, 8), 128), ((32, 32), 128), ((32, 8), 64))]
    chunks = ((128, 2048), (512, 2048), (2048, 2048), (512, 8192), (2048, 8192))
    return [Row(f"prompt {short(n_q)} of {short(context)} {heads[0]}/{heads[1]} d{dim} {dtype}", "cpu-prompts", (context,), *heads, dim, dtype, (n_q,),
                form=Form("bshd"), causal=True) for heads, dim, dtype in plans for n_q, context in chunks]


OWN_SUITES = {
    "prefill": prefill_rows,
    "prefill-fp8": prefill_fp8_rows,
    "prefill-pages": prefill_pages_rows,
    "prompts": prompt_rows,
    "rules": rules_rows,
    "mixed": mixed_rows,
    "mla": mla_rows,
    "mla-fp8": mla_fp8_rows,
    "cpu-peers": cpu_peer_rows,
    "cpu-prompts": cpu_prompt_rows,
}


def quick_rows() -> list:
    """A row of each kind, small: shows that everything runs, not how fast."""
    heads = {"q_heads": 8, "kv_heads": 2, "head_dim": 64}
    return [Row("quick 2x256", "quick", (256, 256), dtype="fp32", **heads), Row("quick 2x256 bf16", "quick", (256, 256), dtype="bf16", **heads),
            Row("quick ragged", "quick", (300, 20), dtype="bf16", form=Form("htd"), **heads),
            Row("quick pages", "quick", (100, 33), dtype="bf16", form=Form("nhd", 32), **heads),
            Row("quick chunk 16 of 200", "quick", (200,), dtype="bf16", n_q=(16,), form=Form("bshd"), causal=True, **heads),
            Row("quick 1 x 8 of 64, 2 x 1 of 40", "quick", (64, 40, 40), dtype="bf16", n_q=(8, 1, 1), form=Form("thd"), causal=True, **heads),
            Row("quick chunk 16 of 200, d64/32", "quick", (200,), dtype="bf16", n_q=(16,), form=Form("bshd"), causal=True, value_dim=32, **heads),
            Row("quick mla", "quick", (90, 64), 4, 1, 96, "bf16", (2, 2), form=Form("nhd", 64), causal=True, value_dim=64, latent=True)]
