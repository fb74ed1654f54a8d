#!/usr/bin/env python3
"""Makes every figure, table and number of the documents from bench/results alone.

Figures go to docs/figures: NAME.json is what is shown, NAME-light.svg and NAME-dark.svg show it and hold its digest. Documents have
`<!-- table: NAME -->` ... `<!-- table: end -->` and `<!--= NAME -->1.10<!--=-->`, whose insides are rewritten. tools/check_figures.py
checks all of it without drawing. Drawing needs matplotlib; --no-figures writes tables and numbers without it.
"""

import argparse
import hashlib
import json
import pathlib
import re

import figure_data
import timeline_data
from figure_data import FAMILIES, ORDERED, OURS

OUT = figure_data.ROOT / "docs" / "figures"
TABLE = re.compile(r"(<!-- table: ([^>]+?) -->\n).*?(<!-- table: end -->)", re.S)
NUMBER = re.compile(r"(<!--= ([^>]+?) -->)(.*?)(<!--=-->)", re.S)
# Told apart by shape and filling first, so that print in black and white tells them too; colours are safe for the colour-blind.
MARKERS = {OURS: "o", ORDERED: "*", "FlashAttention-3": "s", "cuDNN": "^", "FlashInfer": "D", "XQA": "x"}
COLOURS = {
    "light": {"ink": "#1f2328", "faint": "#d0d7de", "ours": "#0b57d0", "others": ["#b35900", "#2a7f62", "#8250df", "#6e7781"]},
    "dark": {"ink": "#e6edf3", "faint": "#3d444d", "ours": "#6cb6ff", "others": ["#f0a35e", "#57c7a0", "#c297ff", "#9da7b3"]},
}
OVER_TICKS = [1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20]
LIMIT_TEXT = "time / read limit   (1 = a pure read of K and V; lower is better)"


def documents() -> list:
    return [figure_data.ROOT / "README.md", figure_data.ROOT / "bench" / "README.md", *sorted((figure_data.ROOT / "docs").rglob("*.md"))]


def with_tables(text: str) -> str:
    """A document with its tables and numbers as the results have them. KeyError: it names one that nobody makes."""
    text = TABLE.sub(lambda found: found[1] + figure_data.TABLES[found[2]]() + found[3], text)
    return NUMBER.sub(number_in, text)


def number_in(found: re.Match) -> str:
    """A marked number as the results have it; the same words stay as they are, since a paragraph's line may end between them."""
    now = figure_data.NUMBERS[found[2]]()
    return found[1] + (found[3] if found[3].split() == now.split() else now) + found[4]


def digest(data: str) -> str:
    return "data " + hashlib.sha256(data.encode()).hexdigest()[:16]


def ticks(axis, places) -> None:
    axis.set_ticks(places, [f"{place:g}" for place in places])
    axis.set_ticks([], minor=True)


def points(axes, x, y, name: str, colours: dict, filled: bool = False, size: float = 26, **options):
    """A library's points: ours are filled, others hollow."""
    index = list(FAMILIES).index(name) if name in FAMILIES else 0
    colour = colours["ours"] if name in (OURS, ORDERED) else colours["others"][index]
    marker = MARKERS.get(name, "o")
    hollow = {} if marker == "x" else {"facecolors": colour if filled else "none", "edgecolors": colour}
    if marker == "x":
        hollow = {"color": colour}
    axes.scatter(x, y, s=size, marker=marker, linewidths=1.1, label=options.pop("label", name), zorder=3 if filled else 2, **hollow, **options)


def draw_read_limit(figure, data, colours, families=tuple(FAMILIES)):
    """Ours beside one other in each panel."""
    columns = 2 if len(families) > 1 else 1
    panels = figure.subplots(-(-len(families) // columns), columns, sharex=True, sharey=True, squeeze=False)
    most = max(40, 2 * max(over for row in data for over in row["over"].values()))
    for axes, family in zip(panels.flat, families):
        rows = [row for row in data if family in row["over"]]
        for name, size in ((family, 26), (OURS, 15)):
            shown = [row for row in rows if name in row["over"]]
            above = [max(row["over"][name], 1.004) - 1 for row in shown]  # the axis is of what lies above the limit, and has no 1
            points(axes, [row["MB"] for row in shown], above, name, colours, filled=name == OURS, size=size)
        axes.set(xscale="log", yscale="log", ylim=(0.003, most))
        axes.legend(loc="lower left", frameon=False, labelcolor=colours["ink"])
        axes.yaxis.set_ticks([place - 1 for place in OVER_TICKS], [f"{place:g}" for place in OVER_TICKS])
        axes.yaxis.set_ticks([], minor=True)
        if tuple(families) == tuple(FAMILIES):
            ticks(axes.xaxis, [4, 16, 64, 256, 1000, 4000])
    for axes in list(panels.flat)[len(families):]:
        axes.set_visible(False)
    figure.supxlabel("MB of K and V that a call reads", fontsize=9)
    figure.supylabel(LIMIT_TEXT, fontsize=9)


SCHEDULES = {"lean": ("o", "-"), "fixed_split": ("s", "--"), "data_parallel": ("^", ":")}


def draw_schedules(axes, series, colours):
    for (name, (marker, style)), colour in zip(SCHEDULES.items(), [colours["ours"], *colours["others"]]):
        x, y = zip(*series[name])
        axes.plot(x, y, style, marker=marker, color=colour, label=name, markersize=4.5, linewidth=1.3,
                  markerfacecolor=colour if name == "lean" else "none")
    axes.axhline(1, color=colours["ink"], linewidth=0.8)
    axes.legend(frameon=False, labelcolor=colours["ink"])


def draw_flatness(figure, data, colours):
    axes = figure.subplots()
    draw_schedules(axes, data, colours)
    axes.set(xscale="log", yscale="log", xlabel="outputs (kv heads x batch) that share a read of 512 MB", ylabel=LIMIT_TEXT.replace("   ", "\n"))
    ticks(axes.xaxis, [1, 2, 4, 8, 16, 32, 64, 132, 256, 512, 1024])
    ticks(axes.yaxis, [1, 2, 5, 10, 20, 50])


def draw_ragged(figure, data, colours):
    left, right = figure.subplots(1, 2, width_ratios=[2, 3])
    draw_schedules(left, data["schedules"], colours)
    left.set(xlabel="average / longest of 16 requests", ylabel=LIMIT_TEXT.replace("   ", "\n"), yscale="log")
    ticks(left.xaxis, [0.1, 0.25, 0.5, 0.75, 1])
    ticks(left.yaxis, [1, 1.5, 2, 3, 5, 10])
    names = [row["row"] for row in data["rows"]]
    for name in [*FAMILIES, OURS]:
        points(right, [row["over"][name] for row in data["rows"]], range(len(names)), name, colours, filled=name == OURS)
    right.axvline(1, color=colours["ink"], linewidth=0.8)
    right.set(xscale="log", xlabel="time / read limit, uneven batches (lower is better)")
    right.set_yticks(range(len(names)), names)
    ticks(right.xaxis, [1, 2, 5, 10, 20])
    right.legend(frameon=False, labelcolor=colours["ink"], loc="lower left", bbox_to_anchor=(0.45, 0.54))


def draw_serving(figure, data, colours):
    axes = figure.subplots()
    shapes = {"fa3": ("FlashAttention-3", "FlashAttention-3"), "flashinfer xqa": ("XQA", "XQA"), "torch flash": ("cuDNN", "FlashAttention-2")}
    shown = set()
    data = data[::-1]
    for place, row in enumerate(data):
        for impl, us in row["us"].items():
            if impl != "lean":
                name, label = shapes.get(impl, ("FlashInfer", "FlashInfer's other kernels"))
                points(axes, [us / row["us"]["lean"]], [place], name, colours, label=None if label in shown else label)
                shown.add(label)
    axes.axvline(1, color=colours["ours"], linewidth=1.6)
    axes.text(1, len(data) - 0.3, "lean", color=colours["ours"], ha="center", fontsize=8)
    axes.set(xscale="log", xlabel="time / lean's time   (right of the line: slower than lean)", ylim=(-1, len(data) + 0.7))
    axes.set_yticks(range(len(data)), [row["row"] for row in data])
    ticks(axes.xaxis, [0.9, 1, 1.5, 2, 3, 5, 10])
    figure.legend(frameon=False, labelcolor=colours["ink"], loc="outside upper center", ncols=4)


def draw_cpu(figure, data, colours):
    panels = figure.subplots(1, 2, sharex=True)
    markers = dict(zip(figure_data.MACHINES, "os^D"))
    for axes, (peer, machines) in zip(panels, sorted(data.items(), reverse=True)):
        kinds = sorted({kind for found in machines.values() for kind in found}, reverse=True)
        for (machine, marker), colour in zip(markers.items(), [colours["ours"], *colours["others"]]):
            found = machines.get(machine, {})
            axes.scatter(list(found.values()), [kinds.index(kind) for kind in found], marker=marker, facecolors="none", edgecolors=colour, label=machine)
        axes.axvline(1, color=colours["ink"], linewidth=0.8)
        axes.set_yticks(range(len(kinds)), kinds)
        axes.set(xscale="log", title={"torch": "torch", "onnxruntime": "ONNX Runtime"}[peer])
        ticks(axes.xaxis, [0.05, 0.1, 0.2, 0.5, 1])
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, labelcolor=colours["ink"], loc="outside upper center", ncols=4)
    figure.supxlabel("lean's time / the peer's   (lower is better; left of the line: faster than the peer)", fontsize=9)


def draw_steps(figure, data, colours):
    axes = figure.subplots()
    palette = [colours["ours"], *colours["others"][:3]]
    for index, name in enumerate(figure_data.STEPS):
        ours, late = "Lean" in name, "compiled" in name or "graph" in name
        places = [(place, times[name]) for place, times in enumerate(data.values()) if name in times]
        colour = colours["ours"] if ours else palette[1 + index % 3]
        marker = {"LeanStaticCache": "o", "LeanStaticCache, compiled": "P", "LeanStaticCache, in a graph": "*"}.get(name, "s^Dv"[index % 4])
        axes.scatter([ms for _, ms in places], [place for place, _ in places], marker=marker, s=48, label=name,
                     facecolors=colour if ours or late else "none", edgecolors=colour)
    axes.set(xscale="log", xlabel="ms of one decode step, 8 layers of the Llama-8B shape   (lower is better)", ylim=(-0.5, len(data) - 0.5), xlim=(1.8, 80))
    axes.set_yticks(range(len(data)), [figure_data.by_name(shape) for shape in data])
    axes.invert_yaxis()
    ticks(axes.xaxis, [2, 3, 5, 10, 20, 50])
    figure.legend(frameon=False, labelcolor=colours["ink"], loc="outside upper center", ncols=3)


def draw_onnx_runtime(figure, data, colours):
    axes = figure.subplots()
    names = {"onnxruntime": "ONNX Runtime's default (XQA)", "onnxruntime_flash": "its flash kernel"}
    for index, (impl, label) in enumerate(names.items()):
        axes.scatter([row["us"][impl] / row["us"]["lean_ort"] for row in data], range(len(data)), marker="os"[index], s=30, label=label,
                     facecolors="none", edgecolors=colours["others"][index])
    axes.axvline(1, color=colours["ours"], linewidth=1.6)
    axes.set(xscale="log", xlabel="time / lean's time   (right of the line: slower than lean)")
    axes.set_yticks(range(len(data)), [figure_data.by_name(row["row"]).replace("+", " + ") for row in data])
    axes.invert_yaxis()
    ticks(axes.xaxis, [0.9, 1, 1.2, 1.5, 2, 3, 4])
    figure.legend(frameon=False, labelcolor=colours["ink"], loc="outside upper center", ncols=2)


PARTS = {"streaming": ("ours", None), "storing": (0, None), "merging": (1, "////")}  # a colour, and a hatching for black and white


def draw_timeline(figure, data, colours):
    """Workers as rows and what they do as bars, a panel a schedule; below, the share of them that is busy."""
    *panels, below = figure.subplots(len(data) + 1, 1, sharex=True, height_ratios=[max(1, len(data[0]["workers"]) / 8)] * len(data) + [1.4])
    for panel, entry in zip(panels, data):
        for worker, bars in enumerate(entry["workers"]):
            for part, begin, end in bars:
                key, hatch = PARTS[part]
                colour = colours[key] if key == "ours" else colours["others"][key]
                panel.barh(worker, (end - begin) / 1e3, left=begin / 1e3, height=0.8, color=colour, hatch=hatch, linewidth=0)
        panel.set(ylim=(len(entry["workers"]) - 0.5, -0.5), ylabel="worker")
        panel.set_yticks(range(0, len(entry["workers"]), max(1, len(entry["workers"]) // 4)))
        panel.set_title(f"{entry['schedule']}: {entry['us'] / 1e3:.1f} ms, workers busy {entry['occupancy']:.0%} of the time", loc="left", fontsize=9)
    for (name, (_, style)), colour in zip(SCHEDULES.items(), [colours["ours"], *colours["others"]]):
        for entry in data:
            if entry["schedule"] == name:
                below.step([at / 1e3 for at, _ in entry["busy"]], [share for _, share in entry["busy"]], style, where="post", color=colour, label=name)
    below.set(xlabel="ms since the call's first event", ylabel="share of\nworkers busy", ylim=(-0.05, 1.1))
    ticks(below.yaxis, [0, 0.5, 1])
    below.legend(frameon=False, labelcolor=colours["ink"], ncols=3, loc="lower left")


def draw_two_gpus(figure, data, colours):
    axes = figure.subplots()
    shown = {"heads": "o", "fused": "D", "all_gather": "s", "torch + all_gather": "^"}
    colour_of = dict(zip(shown, [colours["ours"], colours["ours"], *colours["others"]]))
    most = 2
    if any("fused, 4 GPUs" in row["us"] for row in data):
        shown["fused, 4 GPUs"], colour_of["fused, 4 GPUs"], most = "P", colours["ours"], 4
    for way, marker in shown.items():
        colour = colour_of[way]
        rows = [row for row in data if way in row["us"] and "1 GPU" in row["us"]]
        axes.scatter([row["MiB"] for row in rows], [row["us"]["1 GPU"] / row["us"][way] for row in rows], marker=marker, s=24, label=way,
                     facecolors=colour if way == "fused" else "none", edgecolors=colour)
    for speedup in (1, 2, most):
        axes.axhline(speedup, color=colours["ink"], linewidth=0.8)
    label = "speedup of two GPUs over one" if most == 2 else "speedup over one GPU"
    axes.set(xscale="log", xlabel="MiB of K and V in a layer", ylabel=f"{label}\n(higher is better)", ylim=(0, most + 0.1))
    ticks(axes.xaxis, [32, 128, 512, 2048, 8192, 32768])
    axes.legend(frameon=False, labelcolor=colours["ink"], loc="lower right" if most == 2 else "upper right")  # where no point is


def draw_vllm_load(figure, data, colours):
    """A client's view of two servers over the load that was offered: medians as lines, 99th percentiles dotted."""
    shown = {"tokens_per_s": ("tokens a second", [""]), "first_ms": ("ms to the first token", ["_p50", "_p99"]), "gap_ms": ("ms from token to token", ["_p50", "_p99"])}
    panels = figure.subplots(1, len(shown))
    for axes, (key, (label, shares)) in zip(panels, shown.items()):
        for (name, loads), colour, marker in zip(data.items(), [colours["ours"], colours["others"][0]], "os"):
            for share, style in zip(shares, ("-", ":")):
                axes.plot([float(load) for load in loads], [of[key + share] for of in loads.values()], style, marker=marker, color=colour, markersize=4.5, linewidth=1.3,
                          markerfacecolor=colour if name == "lean" else "none", label=name if style == "-" else None)
        axes.set(xlabel="requests a second", ylabel=label, ylim=(0, None))
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, labelcolor=colours["ink"], loc="outside upper center", ncols=2)


DRAWN = {"vllm-load": (draw_vllm_load, 7.6, 2.8), "read-limit": (draw_read_limit, 7.6, 5.4), "flatness": (draw_flatness, 7.6, 3.6), "ragged": (draw_ragged, 7.6, 3.8),
         "serving": (draw_serving, 7.6, 6.4), "cpu": (draw_cpu, 7.6, 3.6), "steps": (draw_steps, 7.6, 3.0),
         "timeline": (draw_timeline, 7.6, 4.8), "timeline-gpu": (draw_timeline, 7.6, 6.4), "two-gpus": (draw_two_gpus, 7.6, 3.6), "onnx-runtime": (draw_onnx_runtime, 7.6, 3.0)}


def draw(name: str, text: str, png: pathlib.Path | None, out: pathlib.Path = OUT) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.figure

    way, width, height = DRAWN[name]
    for mode, colours in COLOURS.items():
        ink = {key: colours["ink"] for key in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")}
        with matplotlib.rc_context({**ink, "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 8.5, "font.family": "sans-serif",
                                    "axes.grid": True, "grid.color": colours["faint"], "grid.linewidth": 0.6, "axes.axisbelow": True,
                                    "axes.facecolor": "none", "axes.spines.top": False, "axes.spines.right": False}):
            figure = matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
            way(figure, json.loads(text), colours)
            figure.savefig(out / f"{name}-{mode}.svg", transparent=True, metadata={"Date": None, "Creator": None, "Description": digest(text)})
            if png:
                figure.savefig(png / f"{name}-{mode}.png", dpi=110, facecolor="white" if mode == "light" else "#0d1117")


def draw_suite(file: pathlib.Path, picture: pathlib.Path) -> None:
    """Time over the read against MB of K and V, ours and each peer of a file of bench/suite.py. ValueError: it has no such times."""
    import matplotlib.figure

    data = figure_data.suite_rows(file)
    families = sorted({name for row in data for name in row["over"] if name.partition("/")[0] != OURS})
    if not families:
        raise ValueError(f"--suite = {file}: no row with a peer's time and a pure read")
    figure = matplotlib.figure.Figure(figsize=(7.6, 1.2 + 2.1 * -(-len(families) // 2)), layout="constrained")
    draw_read_limit(figure, data, COLOURS["light"], tuple(families))
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-figures", action="store_true", help="tables and numbers alone")
    parser.add_argument("--png", type=pathlib.Path, help="a folder for pictures to look at as well")
    parser.add_argument("--suite", type=pathlib.Path, metavar="FILE", help="draw a file of bench/suite.py instead, into --to; writes nothing else")
    parser.add_argument("--to", type=pathlib.Path, metavar="PICTURE", help="an .svg, .png or .pdf file, for --suite")
    parser.add_argument("--timeline", type=pathlib.Path, nargs=2, metavar=("FILE", "FOLDER"),
                        help="draw the lines of `lean timeline --out FILE` into FOLDER, and nothing else")
    options = parser.parse_args()
    if bool(options.suite) != bool(options.to):
        parser.error("--suite and --to go together")
    if options.suite:
        return draw_suite(options.suite, options.to)
    if options.timeline:
        file, folder = options.timeline
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return draw("timeline", json.dumps(timeline_data.timelines(lines)), options.png, folder)
    OUT.mkdir(exist_ok=True)
    for name in () if options.no_figures else DRAWN:
        text = figure_data.figure_data(name)
        (OUT / f"{name}.json").write_text(text)
        draw(name, text, options.png)
    for document in documents():
        text = document.read_text()
        if with_tables(text) != text:
            document.write_text(with_tables(text))
            print(f"wrote {document.relative_to(figure_data.ROOT)}")


if __name__ == "__main__":
    main()
