#!/usr/bin/env python3
"""Times decode attention of torch and ONNX Runtime on the CPU against lean: same shapes, same machine, same threads, one run.

A row is one decode call of Llama-like heads, d = 128, one query token, K/V already in memory, the output allocated by whoever
computes it. In a round everybody takes a turn: a call that is not timed, then as many as fill 2 ms. lean's turn is one `lean run`,
with the time it reports. The median of the rounds counts. K/V below the size of the last-level cache stay in it for everybody.

  torch/expanded          scaled_dot_product_attention on K/V expanded to all query heads beforehand: the copy is not timed
  torch/enable_gqa        the same call on K/V as they are, with enable_gqa=True
  torch/heads_as_queries  the same call with the query heads that share K/V passed as that many query tokens: K/V are read once
  onnxruntime/gqa         com.microsoft.GroupQueryAttention, past and present in one buffer; it also writes the newest token

A ragged batch is a loop: one such call for every sequence on a cache of its own. onnxruntime/gqa_padded, which can, takes the
whole batch in one call on caches padded to the longest. The best peer of a row is the fastest of all these.
A peer whose package is missing is skipped with a line that says so. Lines go to a file as docs/performance.md describes them, with
`error` (largest difference from fp64 on a sample / largest value) for peers, whose rounding has no derived bound.

Exit code: 0 ok, 1 lean failed or was wrong, 2 bad arguments.
"""
import argparse
import datetime
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

try:
    from cpu_peer_calls import ELEMENT_BYTES, HEAD_DIM, VARIANTS, OnnxRuntime, Pool, Refused, Row, Subject, Torch
    from cpu_peer_calls import applies, available_bytes, error_of, first_line, rows_of
except ModuleNotFoundError as missing:
    print(f"cpu_peers: {missing}: numpy makes the data (pip install numpy)", file=sys.stderr)
    sys.exit(2)

ROOT = pathlib.Path(__file__).resolve().parent.parent
ERROR_LIMIT = {"bf16": 0.05, "fp16": 0.05, "fp32": 1e-3}  # of the largest value; a wrong answer is at 1
MIN_TURN_US = 2000.0  # as lean measures
MAX_CALLS = 1000
SETTLE_SECONDS = 0.05  # before a turn: ONNX Runtime's threads spin for 16 ms after their last call


class LeanFailed(Exception):
    """The command printed no result; the text says why."""


class Lean:
    """`lean run` on the same shapes; it makes its own data, checks every row against fp64 and times a pure read too."""

    def __init__(self, command: pathlib.Path, threads: int, repeat: int):
        self.command, self.repeat = command, repeat
        self.environment = os.environ | {"OMP_NUM_THREADS": str(threads)}

    def json(self, *arguments: str) -> dict:
        full = [self.command, *arguments, "--json"]
        try:
            done = subprocess.run(full, env=self.environment, capture_output=True, text=True, check=False)
            if done.stdout:
                return json.loads(done.stdout)
        except (OSError, ValueError) as error:
            raise LeanFailed(first_line(error)) from error
        raise LeanFailed((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])

    def run(self, row: Row) -> dict:
        lens = ",".join(map(str, row.lens))
        heads = ["--q-heads", str(row.q_heads), "--kv-heads", str(row.kv_heads), "--head-dim", str(HEAD_DIM)]
        return self.json("run", "--lens", lens, *heads, "--dtype", row.dtype, "--repeat", str(self.repeat))


# ---- rounds -----------------------------------------------------------------------------------------------------------


def time_us(subject: Subject, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        subject.call()
    return (time.perf_counter() - started) * 1e6 / calls


def prepare(peer, variant: str, row: Row, pool: Pool) -> Subject:
    """Computed once, checked, and called often enough in a turn."""
    try:
        subject = peer.prepare(variant, row, pool)
        subject.error = error_of(subject, subject.outputs(subject.call()), row.dtype)
    except Refused:
        raise
    except Exception as error:  # whatever a peer raises is a line, not the end
        raise Refused(f"failed: {first_line(error)}") from error
    if subject.error > ERROR_LIMIT[row.dtype]:
        raise Refused(f"wrong: error {subject.error:.3g} of the largest value")
    subject.calls = min(MAX_CALLS, math.ceil(MIN_TURN_US / time_us(subject, 1)))
    return subject


class Bench:
    def __init__(self, options, lean: Lean, peers: dict):
        self.options, self.lean, self.peers = options, lean, peers
        machine = lean.json("doctor")
        self.context = {
            "device": machine["cpu"],
            "driver": "",
            "sm_clock_mhz": None,
            "isa": machine["isa"],
            "executor": machine["executor"],
            "last_level_cache_bytes": machine["last_level_cache_bytes"],
            "commit": options.commit,
            "quick": options.quick,
        }

    def measure(self, row: Row, pool: Pool) -> list:
        """The lines of a row: lean's, then the peers'."""
        subjects, notes = self.subjects_of(row, pool)
        runs = []
        for _ in range(self.options.rounds):
            time.sleep(SETTLE_SECONDS)
            runs.append(self.lean.run(row))
            for subject in subjects:
                time.sleep(SETTLE_SECONDS)
                subject.call()
                subject.us.append(time_us(subject, subject.calls))
        ceiling_us = statistics.median(run["ceiling_us"] for run in runs)
        checks = {"error_ratio": max(run["error_ratio"] for run in runs), "rows_checked": runs[0]["rows_checked"]}
        wrong = [f"wrong: {run['worst']}" for run in runs if not run["passes"]]
        note = wrong[0] if wrong else None
        lines = [self.line(row, "lean", runs[0]["layout"], [run["us"] for run in runs], ceiling_us, note=note, **checks)]
        lines += [self.line(row, s.impl, s.layout, s.us, ceiling_us, error=s.error) for s in subjects]
        return lines + [self.line(row, variant, None, [], ceiling_us, note=note) for variant, note in notes.items()]

    def subjects_of(self, row: Row, pool: Pool) -> tuple:
        """What the peers run, and why the others do not."""
        subjects, notes = [], {}
        for variant in VARIANTS:
            peer = self.peers[variant.split("/")[0]]
            if not applies(variant, row):
                continue
            if isinstance(peer, str):
                notes[variant] = f"skipped: {peer}"
            else:
                try:
                    subjects.append(prepare(peer, variant, row, pool))
                except Refused as refusal:
                    notes[variant] = str(refusal)
        return subjects, notes

    def line(self, row: Row, variant: str, layout=None, us=(), ceiling_us=None, error_ratio=None, **more) -> dict:
        version = getattr(self.peers.get(variant.split("/")[0]), "version", "")
        median = statistics.median(us) if us else None
        return {
            "row": row.id,
            "impl": variant.replace("/", f" {version}/") if version else variant,
            "lens": row.lens,
            "q_heads": row.q_heads,
            "kv_heads": row.kv_heads,
            "head_dim": HEAD_DIM,
            "dtype": row.dtype,
            "layout": layout,
            "n_q": 1,
            "causal": False,
            "threads": self.options.threads,
            "kv_bytes": row.kv_bytes,
            "us": median,
            "us_min": min(us, default=None),
            "us_max": max(us, default=None),
            "rounds": len(us),
            "tbps": row.kv_bytes / median / 1e6 if us else None,
            "ceiling_us": ceiling_us,
            "read_fraction": ceiling_us / median if us else None,
            "error_ratio": error_ratio,
            **self.context,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "note": None,
            **more,
        }


# ---- table ------------------------------------------------------------------------------------------------------------


def variant_of(line: dict) -> str:
    return re.sub(" [^/]*/", "/", line["impl"])  # without the version


class Table:
    """A line a row as it comes, then what all rows come to."""

    def __init__(self):
        self.ratios = {"best peer": []}
        self.lost = []
        names = [variant.split("/") for variant in VARIANTS]
        print(" " * 72 + "".join(f"{peer:>17}" for peer, _ in names))
        ways = "".join(f"{way:>17}" for _, way in names)
        print(f"{'row; times in ms':42}{'MB':>6}{'lean':>9}{'GB/s':>7}{'of read':>8}{ways}{'best / lean':>13}", flush=True)

    def add(self, row: Row, lines: list) -> None:
        lean, *others = lines
        head = f"{row.id:42}{row.kv_bytes / 1e6:6.0f}"
        if not lean["us"]:
            print(f"{head}  {lean['note']}", flush=True)
            return
        peers = {variant_of(line): line for line in others if line["us"]}
        ratios = {variant: line["us"] / lean["us"] for variant, line in peers.items()}
        best = min(ratios, key=ratios.get, default=None)
        head += f"{lean['us'] / 1e3:9.3f}{lean['tbps'] * 1e3:7.1f}{lean['read_fraction']:8.0%}"
        times = "".join(f"{peers[variant]['us'] / 1e3:17.3f}" if variant in peers else f"{'-':>17}" for variant in VARIANTS)
        ratio = f"{ratios[best]:13.2f}" if best else f"{'-':>13}"
        print(f"{head}{times}{ratio}  {lean['note'] or ''}".rstrip(), flush=True)
        for variant, ratio in ratios.items():
            self.ratios.setdefault(variant, []).append((ratio, row.id))
        if best:
            self.ratios["best peer"].append((ratios[best], row.id))
            if lean["us_min"] > peers[best]["us_max"]:  # beyond the spread of both
                self.lost.append(f"{row.id} ({best})")

    def summary(self) -> None:
        if not self.ratios["best peer"]:
            return
        print("\ntime / time of lean")
        for name, ratios in self.ratios.items():
            mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in ratios))
            least, place = min(ratios)
            print(f"  {name:<25} {len(ratios):3} rows, geometric mean {mean:6.2f}, least {least:6.2f} ({place})")
        print(f"  rows where lean was slower than the best peer: {', '.join(self.lost) or 'none'}")


# ---- command ----------------------------------------------------------------------------------------------------------


def commit_of(root: pathlib.Path) -> str:
    try:
        command = ["git", "-C", root, "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def load(peer, threads: int):
    """The peer, or why it is not there."""
    try:
        return peer(threads)
    except ImportError as error:
        return first_line(error)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--lean", type=pathlib.Path, default=ROOT / "build/bin/lean", help="the command (build/bin/lean)")
    parser.add_argument("--threads", type=int, default=cpus, help=f"of everybody; all by default ({cpus})")
    parser.add_argument("--rows", default="", help="only rows whose id matches this pattern")
    parser.add_argument("--rounds", type=int, help="7, or 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="short contexts, few rounds: shows that all runs, not how fast")
    parser.add_argument("--out", type=pathlib.Path, help="bench/results/cpu-peers-DEVICE-THREADSt.jsonl; with --quick none")
    parser.add_argument("--commit", default=commit_of(ROOT), help="commit to record in the lines; by default git's")
    options = parser.parse_args()
    options.rounds = options.rounds if options.rounds is not None else 2 if options.quick else 7
    options.lean = options.lean.resolve()
    if not 1 <= options.threads <= cpus:
        parser.error(f"--threads = {options.threads}: 1 to {cpus}")
    if options.rounds < 1:
        parser.error(f"--rounds = {options.rounds}: 1 or more")
    if not options.lean.is_file():
        parser.error(f"--lean = {options.lean}: no such file; `make build` makes build/bin/lean")
    try:
        options.chosen = [row for row in rows_of(options.quick) if re.search(options.rows, row.id)]
    except re.error as error:
        parser.error(f"--rows = {options.rows}: {error}")
    if not options.chosen:
        parser.error(f"--rows = {options.rows}: no row matches; '{rows_of(options.quick)[0].id}' is one")
    return options


def fits(row: Row) -> bool:
    """Its data here, and lean's."""
    return 2 * row.padded_elements * ELEMENT_BYTES[row.dtype] + row.kv_bytes <= available_bytes()


def measured_rows(bench: Bench, chosen: list, threads: int):
    """Yields each row with its lines. One dtype's data is gone before the next one's is made."""
    for dtype in ELEMENT_BYTES:
        rows = [row for row in chosen if row.dtype == dtype]
        fitting = [row for row in rows if fits(row)]
        pool = Pool(dtype, max(row.padded_elements for row in fitting), threads) if fitting else None
        for row in rows:
            try:
                lines = bench.measure(row, pool) if row in fitting else [bench.line(row, "lean", note="skipped: not enough memory")]
            except LeanFailed as error:
                lines = [bench.line(row, "lean", note=f"failed: {error}")]
            yield row, lines
        del pool


def main() -> int:
    options = parse_options()
    peers = {"torch": load(Torch, options.threads), "onnxruntime": load(OnnxRuntime, options.threads)}
    for name, peer in peers.items():
        print(f"{name}: skipped: {peer}" if isinstance(peer, str) else f"{name} {peer.version}", file=sys.stderr)
    try:
        bench = Bench(options, Lean(options.lean, options.threads, repeat=1 if options.quick else 3), peers)
    except LeanFailed as error:
        print(f"cpu_peers: --lean = {options.lean}: {error}", file=sys.stderr)
        return 2
    device = re.sub(r"\W+", "-", bench.context["device"].lower()).strip("-")
    if options.out is None and not options.quick:
        options.out = ROOT / f"bench/results/cpu-peers-{device}-{options.threads}t.jsonl"
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("")
    table, failed, reasons = Table(), False, set()
    for row, lines in measured_rows(bench, options.chosen, options.threads):
        table.add(row, lines)
        for reason in (f"{variant_of(line)} in {row.dtype}: {line['note']}" for line in lines[1:] if line["note"]):
            if reason not in reasons:
                print(reason, file=sys.stderr)
            reasons.add(reason)
        failed = failed or (lines[0]["note"] or "").startswith(("failed", "wrong"))
        if options.out:
            with options.out.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
    table.summary()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
