"""The table at a run's end, and what all rows come to: time over the read, the best peer of each row, rows that are lost."""
import math
import statistics

LOST = 1.02  # slower than the best peer by more


def rows_in(lines: list) -> dict:
    """row -> its lines, in the order of the file."""
    rows = {}
    for line in lines:
        rows.setdefault(line["row"], []).append(line)
    return rows


def is_ours(line: dict) -> bool:
    return line["impl"] == "lean"


def best_peer(lines: list):
    """The fastest line of a row that is of another library; None: no peer ran."""
    return min((line for line in lines if line.get("us") and not line["impl"].partition("/")[0] == "lean"), key=lambda line: line["us"], default=None)


def mean(values) -> float:
    """The geometric mean: these are ratios."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def share(line: dict) -> str:
    return f"{line['ceiling_us'] / line['us']:.0%}" if line.get("ceiling_us") else "-"


def row_text(name: str, lines: list) -> str:
    """One row: our time, our share of the read, the best peer, its time and share, ours / its."""
    ours, best = next((line for line in lines if is_ours(line)), None), best_peer(lines)
    head = f"{name:44.44} {lines[0]['kv_bytes'] / 1e6:9.2f}"
    if not ours or not ours.get("us"):
        note = ours["note"] if ours else "no line of lean"
        return f"{head}  lean: {note}" + (f"; best peer {best['impl']} {best['us']:.2f} us" if best else "")
    head += f" {ours['us']:11.2f} {share(ours):>7}"
    if best:
        head += f"  {best['impl']:38.38} {best['us']:11.2f} {share(best):>7} {ours['us'] / best['us']:7.3f}"
    return f"{head}  {ours['note']}" if ours.get("note") else head


HEAD = f"{'row':44} {'MB':>9} {'lean us':>11} {'of read':>7}  {'best peer':38} {'us':>11} {'of read':>7} {'ratio':>7}"


def against_peers(rows: dict, ours: str) -> list:
    """A form of ours beside each row's best peer, in two lines of text; void rows do not count."""
    ratios = {}
    for name, found in rows.items():
        line, best = next((line for line in found if line["impl"] == ours and line.get("us")), None), best_peer(found)
        if line and best and not (line.get("note") or "").startswith("void"):
            ratios[name] = line["us"] / best["us"], best["impl"]
    if not ratios:
        return []
    worst, lost = max(ratios, key=ratios.get), [name for name, (ratio, _) in ratios.items() if ratio > LOST]
    of = "" if ours == "lean" else f"{ours}: "
    return [f"{of}time / best peer's: geometric mean {mean(ratio for ratio, _ in ratios.values()):.3f} over {len(ratios)} rows, worst "
            f"{ratios[worst][0]:.2f} ({worst}, {ratios[worst][1]})",
            f"{of}rows lost by more than {LOST - 1:.0%}: {len(lost)}" + (f": {', '.join(lost)}" if lost else "")]


def summary(lines: list) -> list:
    """Lines of text over all rows of a run; rows whose times are void do not count, and are named."""
    rows, over, void = rows_in(lines), {}, []
    for name, found in rows.items():
        ours = next((line for line in found if is_ours(line) and line.get("us")), None)
        if not ours:
            continue
        if (ours.get("note") or "").startswith("void"):
            void.append(name)
        elif ours.get("ceiling_us"):
            over[name] = ours["us"] / ours["ceiling_us"]
    texts = []
    if over:
        worst = max(over, key=over.get)
        texts.append(f"time / read: geometric mean {mean(over.values()):.3f} over {len(over)} rows, worst {over[worst]:.2f} ({worst})")
    for impl in dict.fromkeys(["lean", *(line["impl"] for line in lines if line["impl"].startswith("lean/"))]):
        texts += against_peers(rows, impl)
    texts += [f"void: {', '.join(void)}"] if void else []
    unmeasured = [name for name, found in rows.items() if not any(is_ours(line) and line.get("us") for line in found)]
    return texts + ([f"without a time of ours: {', '.join(unmeasured)}"] if unmeasured else [])
