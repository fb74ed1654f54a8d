#!/usr/bin/env python3
"""This library beside other libraries: the same rows in one run on one machine, in turns, on a GPU or on a CPU.

    make bench SUITE=ragged                               # GPU if torch has one
    python bench/suite.py --suite prefill --kit KIT --out h200-prefill.jsonl
    python bench/suite.py --suite cpu-peers --device cpu --threads 2
    python bench/suite.py --quick --device cpu            # seconds: does everything run?

Rows: those of `lean bench --suite NAME --list --json`, a file of such lines (--row-file), or a suite declared in bench/peers/rows.py
(prefill, prefill-fp8, prefill-pages, prompts, rules, mixed, mla, mla-fp8, cpu-peers, cpu-prompts). Every library that can be imported
takes part; --kit names folders to import from. K and V are N(0, 1), in as many copies as no cache holds; outputs hold NaN beforehand; each result is held against fp64 before it is timed, and a wrong
one is not timed. Peers may choose among their layouts, the fastest counts; pages keep their size. The median of the rounds counts. A plan
that a library's host must make anew when a length changes is timed apart (plan_us). The pure read of as many bytes is `lean run`'s, in
the same session. What is missing or refuses a row is a line with a note. Rows are measured in a process of their own: where a library
dies or hangs, the row is measured anew without it. A run goes on where a file of --out ends.

Exit code: 0 ok, 1 this library failed or was wrong somewhere, 2 bad arguments.
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

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(path) for path in (HERE,) if str(path) not in sys.path]

from checkout import git_commit  # noqa: E402
from option_lists import list_of  # noqa: E402
from peers import rows as suites  # noqa: E402
from peers import table  # noqa: E402

GPU_COLD_BYTES = 320_000_000
CACHES_OF_CPU = 4  # times the last-level cache
READ_BYTES = 512  # of K and V of a token, in the read's own row


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---- the command's part: the pure read, the machine's name ---------------------------------------------------------------------


class Command:
    """`lean`, which times a pure read of as many bytes on the same machine, and says what the machine is."""

    def __init__(self, path: pathlib.Path, device: str, threads: int):
        self.path, self.device = path, device
        self.environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.reads = {}

    def json(self, *arguments: str) -> dict:
        done = subprocess.run([self.path, *arguments, "--json"], env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode or not done.stdout:
            raise OSError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        return json.loads(done.stdout)

    def read_us(self, kv_bytes: int) -> tuple:
        """(us or None, why None). On a GPU once for a number of bytes; on a CPU, whose speed drifts, anew for each row."""
        if kv_bytes in self.reads and self.device == "cuda":
            return self.reads[kv_bytes]
        tokens = max(1, round(kv_bytes / READ_BYTES))
        try:
            found = self.json("run", "--backend", self.device, "--lens", str(tokens), "--q-heads", "1", "--kv-heads", "1", "--head-dim", "128",
                              "--dtype", "bf16", "--repeat", "3")
            self.reads[kv_bytes] = found["ceiling_us"] * kv_bytes / (tokens * READ_BYTES), None
        except (OSError, ValueError, KeyError) as error:
            self.reads[kv_bytes] = None, f"no pure read: {error}"
        return self.reads[kv_bytes]

    def machine(self) -> dict:
        try:
            return self.json("doctor")
        except (OSError, ValueError):
            return {}


# ---- the process that measures ---------------------------------------------------------------------------------------------------


def make_peers(device: str, threads: int, chosen: list) -> tuple:
    """([peers that are here], {name: why not})."""
    from peers import known_peers

    found, missing = [], {}
    for name, kind in known_peers(device).items():
        if name == "lean" or not chosen or name in chosen:
            try:
                found.append(kind(device, threads))
            except Exception as error:  # not installed, or of another machine
                missing[name] = f"not available: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
    return found, missing


class Worker:
    """Measures rows, one after another. Lives in a process that may die of a peer."""

    def __init__(self, settings: dict, emit):
        import torch

        from peers.turns import Bench

        sys.path[:0] = [kit for kit in settings["kits"] if kit not in sys.path]
        self.settings, self.emit, self.meter = settings, emit, None
        device = settings["device"]
        self.bench = Bench(device, settings["cold_bytes"], settings["rounds"], settings["turn_ms"], emit)
        self.peers, self.missing = make_peers(device, settings["threads"], settings["peers"])
        self.context = {"device": settings["machine"], "driver": "", "sm_clock_mhz": None, "torch": torch.__version__}
        if device == "cuda":
            self.context["device"] = torch.cuda.get_device_name()
            self.find_gpu(torch)
        self.idle = None

    def find_gpu(self, torch) -> None:
        from peers.meters import NoMeter, Nvml

        properties = torch.cuda.get_device_properties(0)
        bus = f"{getattr(properties, 'pci_domain_id', 0):08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        try:
            self.meter = Nvml(bus)
            self.context["driver"] = self.meter.driver()
        except NoMeter as reason:
            self.emit(say=f"clocks are not recorded: {reason}")
        ones = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(300):  # half a second of work: wakes the clocks
            ones @ ones
        torch.cuda.synchronize()

    def state(self) -> dict:
        return self.meter.state() if self.meter and self.settings["device"] == "cuda" else {}

    def lines(self, row, left_out: dict) -> list:
        from peers.meters import clock_note

        before = self.state()
        subjects, notes = self.bench.measure(row, self.peers, left_out)
        after = self.state()
        moved, energies = clock_note(before, after), {}
        if self.settings["energy"] and re.search(self.settings["energy"], row.row):
            energies = self.energies(row, subjects)
        names = {peer.name: peer.impl for peer in self.peers}
        lines = [self.line(row, subject.peer.impl, subject, note=moved, **after, **energies.get(subject.peer.name, {})) for subject in subjects]
        lines += [self.line(row, names.get(name, name), note=note) for name, note in (notes | self.missing).items()]
        return sorted(lines, key=lambda line: line["impl"] != "lean")

    def energies(self, row, subjects: list) -> dict:
        from peers import meters

        seconds = self.settings["energy_seconds"]
        try:
            meter = self.meter or meters.Rapl()
            self.idle = meters.watts(meter, seconds) if self.idle is None else self.idle
        except meters.NoMeter as reason:
            return {subject.peer.name: {"energy_note": str(reason)} for subject in subjects}
        found = {}
        for subject in subjects:
            self.emit(started=subject.peer.name)
            try:
                measured = meters.energy(meter, subject.turns.run, subject.turns.calls_of_run, row.kv_bytes, seconds, idle_w=self.idle)
            except meters.NoMeter as reason:
                measured = {"energy_note": str(reason)}
            found[subject.peer.name] = measured
        return found

    def line(self, row, impl: str, subject=None, **more) -> dict:
        us = sorted(subject.us) if subject else []
        median = statistics.median(us) if us else None
        line = {**row.fields(), "impl": impl, "layout": subject.form.text if subject else row.form.text, "us": median,
                "us_min": us[0] if us else None, "us_max": us[-1] if us else None, "rounds": len(us), "copies": subject.tensors.copies if subject else None,
                "tbps": row.kv_bytes / median / 1e6 if us else None, "error": subject.error if subject else None, "error_ratio": None,
                "plan_us": subject.plan_us if subject else None, "threads": self.settings["threads"], **self.context, "date": now(), "note": None}
        return {key: float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value for key, value in (line | more).items()}


def work(connection, settings: dict) -> None:
    """The process's main function: rows in, events out."""
    import torch
    from peers.turns import DeviceLost

    torch.set_grad_enabled(False)  # in this process, which is the rows' own
    channel = connection

    def emit(**event):
        channel.send(event)

    worker = Worker(settings, emit)
    emit(ready=[peer.impl for peer in worker.peers], missing=worker.missing)
    while (task := connection.recv()) is not None:
        row, left_out = task
        try:
            emit(lines=worker.lines(row, left_out))
        except DeviceLost as lost:
            emit(lost=lost.args)
            return


class Measuring:
    """A worker's process, made anew when it dies. `lines(row)` gives a row's lines whatever happens to it."""

    MOST_DEATHS = 20
    START_SECONDS = 600.0  # to import what there is

    def __init__(self, settings: dict, hang_seconds: float, target=None):
        import multiprocessing

        self.spawn, self.settings, self.hang_seconds, self.process = multiprocessing.get_context("spawn"), settings, hang_seconds, None
        self.target, self.starts = target or work, 0

    def start(self) -> None:
        self.connection, theirs = self.spawn.Pipe()
        self.process = self.spawn.Process(target=self.target, args=(theirs, self.settings), daemon=True)
        self.process.start()
        theirs.close()
        ready = self.wait_for("ready", seconds=max(self.hang_seconds, self.START_SECONDS))
        if not self.starts:
            print("taking part:", ", ".join(ready["ready"]), file=sys.stderr)
            for name, why in ready["missing"].items():
                print(f"  {name}: {why}", file=sys.stderr)
        self.starts += 1

    def wait_for(self, *keys, seconds: float = 0.0) -> dict:
        """The next event that has one of the keys. ChildProcessError(peer, why): the process is gone, or hung and was ended."""
        current, seconds = None, seconds or self.hang_seconds
        while True:
            try:
                if not self.connection.poll(seconds):
                    self.stop(kill=True)
                    raise ChildProcessError(current, f"no answer in {seconds:g} seconds")
                event = self.connection.recv()
            except (EOFError, OSError) as error:
                if isinstance(error, ChildProcessError):
                    raise
                self.process.join(10)
                code, self.process = self.process.exitcode, None
                raise ChildProcessError(current, f"the process died: status {code}") from error
            current = event.get("started", current)
            if "say" in event:
                print(event["say"], file=sys.stderr)
            if any(key in event for key in keys):
                return event

    def lines(self, row) -> list:
        left_out = {}
        while True:
            if self.process is None:
                self.start()
            try:
                self.connection.send((row, left_out))
                event = self.wait_for("lines", "lost")
                if "lines" in event:
                    return event["lines"]
                peer, why = event["lost"]
                self.stop()
            except ChildProcessError as death:
                peer, why = death.args
            if peer is None or len(left_out) >= self.MOST_DEATHS:
                return [{**row.fields(), "impl": "lean", "us": None, "device": self.settings["machine"], "date": now(), "note": f"failed: {why}"}]
            print(f"  {row.row}: {peer}: {why}; measured anew without it", file=sys.stderr)
            left_out[peer] = why

    def stop(self, kill: bool = False) -> None:
        if self.process is None:
            return
        if kill:
            self.process.kill()
        else:
            try:
                self.connection.send(None)
            except OSError:
                pass
        self.process.join(30)
        self.process = None


# ---- the run ---------------------------------------------------------------------------------------------------------------------


def kept_lines(out: pathlib.Path, shared: dict) -> list:
    """Lines of rows that a file has whole; a row cut short is taken out of the file. ValueError: they are of another commit or machine."""
    out.open("a").close()  # so that a file that cannot be written is known before anything is measured
    lines, texts = [], out.read_text().splitlines()
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
            lines[-1]["row"]
        except (ValueError, TypeError, KeyError):
            if number == len(texts) and '{"row"'.startswith(text[:6]):
                continue  # cut short as it was written
            raise ValueError(f"--out = {out}: line {number} is none of a suite; the file would be written over: take another") from None
    whole = [line for found in table.rows_in(lines).values() if len(found) == found[0].get("subjects") for line in found]
    for name, value in shared.items():
        others = sorted({str(line.get(name)) for line in whole if line.get(name) != value})
        if others:
            raise ValueError(f"--out = {out}: has rows of {name} {', '.join(others)}, not {value!r}: lines of one file are compared; take another")
    out.write_text("".join(json.dumps(line) + "\n" for line in whole))
    return whole


def chosen_rows(options) -> list:
    if options.quick:
        rows = suites.quick_rows()
    elif options.row_file:
        try:
            with open(options.row_file) as file:
                rows = suites.read_rows(file)
        except ValueError as error:
            raise ValueError(f"--row-file = {options.row_file}: {error}") from None
    else:
        rows = []
        for suite in options.suite:
            own = suites.OWN_SUITES.get(suite)
            rows += own(options.trace) if own else suites.rows_of_command(options.lean, suite, options.device, options.trace)
    rows = [row for row in rows if re.search(options.rows, row.row)]
    names = [row.row for row in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two rows are called {twice[0]!r}")
    if not rows:
        raise ValueError(f"--rows = {options.rows}: no row matches")
    return rows


def clock_text(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def with_read(lines: list, read_us, why) -> list:
    for line in lines:
        line["ceiling_us"] = read_us
        line["read_fraction"] = read_us / line["us"] if read_us and line["us"] else None
        line["ceiling_note"] = why
        line["subjects"] = len(lines)
    return lines


def run(options, rows: list, command: Command) -> int:
    machine = command.machine()
    settings = {"device": options.device, "threads": options.threads, "peers": options.peers, "kits": [str(path.resolve()) for path in options.kit],
                "rounds": options.rounds, "turn_ms": options.turn_ms, "energy": options.energy, "energy_seconds": options.energy_seconds,
                "machine": machine.get("cpu") or "CPU", "cold_bytes": cold_bytes(options, machine)}
    lines = kept_lines(options.out, {"commit": options.commit, "threads": options.threads}) if options.out else []
    done = set(table.rows_in(lines))
    left = [row for row in rows if row.row not in done]
    if done:
        print(f"{len(rows) - len(left)} of {len(rows)} rows are in {options.out}", file=sys.stderr)
    measuring, started, failed = Measuring(settings, options.hang_seconds), time.monotonic(), False
    print(table.HEAD)
    for place, row in enumerate(left):
        spent = time.monotonic() - started
        if spent > options.max_seconds:
            print(f"out of time: {len(left) - place} rows are left; the same command goes on", file=sys.stderr)
            break
        if sys.stderr.isatty():
            rest = clock_text(spent / place * (len(left) - place)) if place else "?"
            print(f"\r[{place}/{len(left)}, {rest} left] {row.row:60.60}", end="\r", file=sys.stderr)
        found = with_read(measuring.lines(row), *command.read_us(row.kv_bytes))
        found = [{**line, "commit": options.commit, "quick": True} if options.quick else {**line, "commit": options.commit} for line in found]
        failed |= (found[0]["note"] or "").startswith(("wrong", "failed")) or found[0]["impl"] == "lean" and not found[0]["us"] and \
            not (found[0]["note"] or "").startswith("skipped")
        lines += found
        if options.out:
            with options.out.open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in found))
        print(table.row_text(row.row, found), flush=True)
    measuring.stop()
    report(lines)
    return 1 if failed else 0


def report(lines: list) -> None:
    print()
    for text in table.summary(lines):
        print(text)
    notes = {}
    for line in lines:
        if line["note"] and not line["us"]:
            notes.setdefault((line["impl"], line["note"]), []).append(line["row"])
    for (impl, note), rows in notes.items():
        print(f"{impl}: {note} ({len(rows)} row{'s' if len(rows) > 1 else ''}: {rows[0]}{', ...' if len(rows) > 1 else ''})")


def cold_bytes(options, machine: dict) -> int:
    if options.cold_mb is not None:
        return int(options.cold_mb * 1e6)
    if options.quick:
        return 0
    return GPU_COLD_BYTES if options.device == "cuda" else CACHES_OF_CPU * machine.get("last_level_cache_bytes", 32 << 20)


def parser_of() -> argparse.ArgumentParser:
    cpus = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", default=[], help=f"of lean bench, or {', '.join(suites.OWN_SUITES)}; repeatable")
    parser.add_argument("--row-file", type=pathlib.Path, help="rows as `lean bench --list --json` prints them")
    parser.add_argument("--rows", default="", help="only rows whose ids match this pattern")
    parser.add_argument("--trace", default="", help="a CSV with columns ContextTokens and GeneratedTokens: more rows of mixed (and of ragged)")
    parser.add_argument("--list", action="store_true", help="print the rows as JSON lines and measure nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if torch has one")
    parser.add_argument("--peers", type=list_of(), default=[], help="some of them, with commas")
    parser.add_argument("--kit", type=pathlib.Path, action="append", default=[], help="a folder to import peers from; repeatable")
    parser.add_argument("--threads", type=int, default=cpus, help=f"of everybody on a CPU ({cpus})")
    parser.add_argument("--rounds", type=int, help="7, or 2 with --quick")
    parser.add_argument("--turn-ms", type=float, help="of one turn: 25 on a GPU, 2 calls' worth at least on a CPU: 2")
    parser.add_argument("--cold-mb", type=float, help="inputs rotate over so much: 320 on a GPU, 4 last-level caches on a CPU")
    parser.add_argument("--energy", default="", metavar="ROWS", help="energy of rows that match this pattern too")
    parser.add_argument("--energy-seconds", type=float, default=10.0, help="of one window of three")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="begin no row after so many; the same command goes on")
    parser.add_argument("--hang-seconds", type=float, default=300.0, help="end a process that says nothing for so long")
    parser.add_argument("--lean", type=pathlib.Path, default=ROOT / "build/bin/lean", help="the command: rows of suites, the pure read")
    parser.add_argument("--out", type=pathlib.Path, help="a file of JSON lines, which a run goes on with; none: only print")
    parser.add_argument("--commit", default=git_commit(), help="to record in the lines")
    parser.add_argument("--quick", action="store_true", help="a few small rows: shows that all runs, not how fast")
    return parser


def parse_options(arguments=None) -> argparse.Namespace:
    parser = parser_of()
    options = parser.parse_args(arguments)
    if options.device is None:
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.rounds = options.rounds if options.rounds is not None else 2 if options.quick else 7
    options.turn_ms = options.turn_ms if options.turn_ms is not None else 25.0 if options.device == "cuda" else 2.0
    if sum(map(bool, (options.suite, options.row_file, options.quick))) != 1:
        parser.error("one of --suite, --row-file and --quick says which rows")
    for name, least in (("rounds", 1), ("threads", 1), ("turn_ms", 1e-3), ("cold_mb", 0), ("energy_seconds", 1e-3), ("hang_seconds", 1)):
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            parser.error(f"--{name.replace('_', '-')} = {value}: {least:g} or more")
    if math.isnan(options.max_seconds):
        parser.error(f"--max-seconds = {options.max_seconds}: a number")
    for folder in options.kit:
        if not folder.is_dir():
            parser.error(f"--kit = {folder}: a folder is needed")
    for name in ("rows", "energy"):
        try:
            re.compile(getattr(options, name))
        except re.error as error:
            parser.error(f"--{name} = {getattr(options, name)}: {error}")
    from peers import known_peers

    unknown = set(options.peers) - set(known_peers(options.device))
    if unknown:
        parser.error(f"--peers = {','.join(sorted(unknown))}: on {options.device} there are {', '.join(known_peers(options.device))}")
    return options


def main(arguments=None) -> int:
    options = parse_options(arguments)
    try:
        rows = chosen_rows(options)
        if options.list:
            for row in rows:
                print(json.dumps({**row.fields(), "layout": row.form.text}))
            return 0
        return run(options, rows, Command(options.lean, options.device, options.threads))
    except (ValueError, OSError) as error:
        print(f"suite: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
