"""What the lines of `lean timeline --out` say: bars of each worker, and the share of workers that are busy, over time.

Needs nothing but Python. bench/figure_data.py takes the committed recording from here, bench/figures.py --timeline draws any.
"""

# What an event ends, by the event before it on its track; whatever else lies between two events is idleness.
ENDS = {"stream_end": "streaming", "stored": "storing", "written": "storing", "merge_end": "merging"}


def bars(track: dict) -> list:
    """[part, begin ns, end ns] of a worker, in order."""
    events = track["events"]
    return [[ENDS[event[0]], before[1], event[1]] for before, event in zip(events, events[1:]) if event[0] in ENDS]


def busy_steps(tracks: list, ns: int) -> list:
    """[ns, share of all workers that are busy from then on], a step each time it changes; 0 at the call's end."""
    changes: dict = {0: 0, ns: 0}
    for track in tracks:
        for _, begin, end in bars(track):
            if end > begin:
                changes[begin] = changes.get(begin, 0) + 1
                changes[end] = changes.get(end, 0) - 1
    busy, steps = 0, []
    for at in sorted(changes):
        busy += changes[at]
        share = busy / len(tracks)
        if not steps or steps[-1][1] != share:
            steps.append([at, share])
    return steps if steps[-1][0] == ns else [*steps, [ns, 0]]


def timelines(lines: list, every: int = 1) -> list:
    """One entry a schedule: times in us since the call's first event. `every`: of so many workers one has its bars; all count as busy."""
    return [{"schedule": line["impl"].removeprefix("lean/"), "us": line["ns"] / 1e3, "occupancy": line["occupancy"], "note": line["note"],
             "workers": [[[part, begin / 1e3, end / 1e3] for part, begin, end in bars(track)] for track in line["tracks"][::every]],
             "busy": [[at / 1e3, share] for at, share in busy_steps(line["tracks"], line["ns"])]} for line in lines]


def mean_busy(steps: list) -> float:
    """The mean over the call of busy_steps(), which the line calls occupancy."""
    whole = steps[-1][0] - steps[0][0]
    return sum(share * (after[0] - at) for (at, share), after in zip(steps, steps[1:])) / whole if whole else 0.0


def table(lines: list) -> tuple:
    """Head and rows of a table: a line a schedule, its parts as shares of all workers' time."""
    parts = ["streaming", "storing", "merging", "idle"]
    rows = [[line["impl"].removeprefix("lean/"), f"{line['ns'] / 1e6:.3g}", f"{100 * line['occupancy']:.1f} %",
             *(f"{100 * line['parts_ns'][part] / sum(line['parts_ns'].values()):.2f} %" for part in parts), line["note"] or ""] for line in lines]
    return ["schedule", "ms", "occupancy", *parts, "note"], rows
