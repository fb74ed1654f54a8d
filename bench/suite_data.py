"""Tables of bench/suite.py's and bench/ort_cuda.py's files: microseconds beside each other, and ours over the best of the others.

Needs nothing but Python. bench/figure_data.py takes the committed files from here.
"""
import re
import statistics


def times(lines: list, columns: dict) -> dict:
    """row: ({column: us}, a line of it), of the columns' implementations alone. `columns`: name of a column -> what ends its impl."""
    rows: dict = {}
    for line in lines:
        for name, end in columns.items():
            if line.get("us") and re.search(rf"(^|/){end}$", line["impl"]):
                us, _ = rows.setdefault(line["row"], ({}, line))
                us[name] = min(line["us"], us.get(name, line["us"]))
    return rows


def us_text(us: float) -> str:
    return f"{us:.4g}" if us < 9999.5 else f"{us:.0f}"


def void_mark(line: dict) -> str:
    """Of a row in which a clock of the card moved by more than 3 % (bench/suite.py)."""
    return " (void)" if (line.get("note") or "").startswith("void") else ""


def beside(lines: list, columns: dict, name_of, read: bool = True) -> tuple:
    """Head and rows: the first column is ours. The read limit stands before it where the file has it."""
    ours, *others = columns
    head = ["row", "K and V, MB", *["read, us"] * read, *(f"{name}, us" for name in columns), f"{ours} / best other"]
    table = []
    for row, (us, line) in times(lines, columns).items():
        best = min((us[name] for name in others if name in us), default=None)
        table.append([name_of(row) + void_mark(line), f"{line['kv_bytes'] / 1e6:.0f}", *[us_text(line["ceiling_us"])] * read,
                      *(us_text(us[name]) if name in us else "" for name in columns), f"{us[ours] / best:.2f}" if best else ""])
    return head, table


def ratios(lines: list, columns: dict) -> list:
    """Ours over the best of the others, a row each."""
    ours, *others = columns
    found = [us for us, _ in times(lines, columns).values()]
    return [us[ours] / min(us[name] for name in others if name in us) for us in found if ours in us and any(name in us for name in others)]


#: Columns of bench/ort_cuda.py's files.
ORT = {"lean": "lean_ort", "ONNX Runtime": "onnxruntime", "its flash kernel": "onnxruntime_flash"}


def generations(lines: list) -> dict:
    """row: {column: line}, of output tokens with eight tokens of prompt each."""
    rows: dict = {}
    for line in lines:
        for name, impl in ORT.items():
            if "token_ms" in line and line["impl"] == impl:
                rows.setdefault(line["row"], {})[name] = line
    return rows


def generation_table(lines: list, name_of) -> tuple:
    """Head and rows: milliseconds of a step of all layers, and of a token of output with its share of the prompts."""
    head = ["sequences x tokens of prompt", *(f"a step, {name}, ms" for name in ORT), "default / lean", *(f"with prompts, {name}, ms" for name in ORT),
            "default / lean"]
    table = []
    for row, of in generations(lines).items():
        cells = [name_of(row.removeprefix("Phi3m ").removesuffix(" fp16 generation")).replace("+", " + ")]
        for field in ("step_ms", "token_ms"):
            cells += [f"{of[name][field]:.2f}" for name in ORT] + [f"{of['ONNX Runtime'][field] / of['lean'][field]:.2f}"]
        table.append(cells)
    return head, table


def prompts_table(lines: list, name_of) -> tuple:
    """Head and rows: microseconds of one layer's attention over prompts."""
    attention = [line for line in lines if line["n_q"] > 1 and not line["whole_step"]]
    table = []
    for row, (us, line) in times(attention, ORT).items():
        name = re.sub(r"^Phi3m | fp16 of \d+$", "", row)
        table.append([name_of(name).replace("+", " + "), f"{line['n_q']:,}", f"{us['lean']:.0f}", f"{us['ONNX Runtime']:.0f}",
                      f"{us['ONNX Runtime'] / us['lean']:.2f}"])
    return ["sequences x tokens", "new tokens", "lean, us", "ONNX Runtime, us", "default / lean"], table


def turn_ratios(theirs: list, ours: list) -> list:
    """Their time over ours, of calls that took turns, a few each: of each turn, which is beside one of the other."""
    medians = [[statistics.median(turn) for turn in turns] for turns in (theirs, ours)]
    return [their / our for their, our in zip(*medians, strict=True)]


def in_turns(theirs: list, ours: list) -> str:
    """turn_ratios(): the median and the quartiles."""
    ratios = turn_ratios(theirs, ours)
    low, _, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"


def engines_on_a_cpu(lines: list) -> dict:
    """(model, shape): {attention: line} of bench/vllm_serve.py."""
    rows: dict = {}
    for line in lines:
        rows.setdefault((line["model"], line["shape"]), {})[line["attention"]] = line
    return rows


def prompts_on_a_cpu(lines: list) -> list:
    """Ours over CPU_ATTN's time in attention while prompts are read."""
    return [of["lean"]["prompts_attention_s"] / of["cpu_attn"]["prompts_attention_s"] for of in engines_on_a_cpu(lines).values()]


def steps_on_a_cpu(lines: list) -> list:
    """CPU_ATTN's time over ours in attention of decode steps, the median over turns."""
    return [statistics.median(turn_ratios(of["cpu_attn"]["attention_step_s"], of["lean"]["attention_step_s"]))
            for of in engines_on_a_cpu(lines).values()]


def engines_on_a_cpu_table(lines: list, name_of) -> tuple:
    """Head and rows: attention of a layer and decode step, its share of the step, and of all prompts."""
    head = ["layers of", "batch x context", "CPU_ATTN, us", "of the step", "lean, us", "of the step", "CPU_ATTN / lean (quartiles of turns)", "prompts, CPU_ATTN / lean"]
    table = []
    for (model, shape), of in engines_on_a_cpu(lines).items():
        theirs, ours = of["cpu_attn"], of["lean"]
        cells = [cell for line in (theirs, ours) for cell in (
            f"{1e6 * line['attention_s'] / line['layers']:.0f}", f"{100 * line['attention_s'] / statistics.median(line['step_s']):.0f} %")]
        table.append([model, name_of(shape), *cells, in_turns(theirs["attention_step_s"], ours["attention_step_s"]),
                      f"{theirs['prompts_attention_s'] / ours['prompts_attention_s']:.2f}"])
    return head, table
