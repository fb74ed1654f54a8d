"""The implementations of one row, prepared, checked and timed in turns: on a GPU as CUDA graphs, on a CPU as calls."""
import dataclasses
import gc
import math
import statistics
import time

import torch

from peers import Peer, Prepared, Refused, allowed
from peers.rows import Form, Row
from peers.tensors import ERROR_LIMIT, Pool, Tensors, copies_of, shape_of

LEAST_CALLS, LARGE_BYTES, CALLS_OF_LARGE = 20, 2e9, 4
SETTLE_SECONDS = 0.05  # before a turn on a CPU: ONNX Runtime's threads spin for 16 ms after their last call
FIRST_ROUNDS = 2  # of each form, to find a peer's fastest


def text_of(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def value_of(result):
    """What a call gave; some libraries' results are made when asked for."""
    return result() if callable(result) else result


class DeviceLost(Exception):
    """After an implementation's error nothing runs on the GPU any more in this process."""


class GraphTurns:
    """Calls over all copies as one CUDA graph."""

    def __init__(self, call, row: Row, copies: int, turn_ms: float):
        from graph_timing import graph_of, time_us

        self.time_us, self.copies = time_us, copies
        self.calls = max(copies, CALLS_OF_LARGE) if row.kv_bytes > LARGE_BYTES else copies * math.ceil(LEAST_CALLS / copies)
        self.results = [None] * copies

        def at(i):
            def run():
                self.results[i] = call(i)
            return run

        self.graph = graph_of([at(i % copies) for i in range(self.calls)])
        self.graph.replay()
        self.replays = max(1, int(turn_ms * 1e3 / (time_us(self.graph, self.calls) * self.calls)))

    def time(self) -> float:
        return self.time_us(self.graph, self.calls, self.replays)

    def run(self) -> None:
        for _ in range(self.replays):
            self.graph.replay()
        torch.cuda.synchronize()

    @property
    def calls_of_run(self) -> int:
        return self.calls * self.replays

    def poisoned(self) -> tuple:
        """(copy, result) of calls whose outputs held NaN before."""
        for result in self.results:
            for part in result if isinstance(result, list) else [result]:
                part.fill_(math.nan)
        self.graph.replay()
        torch.cuda.synchronize()
        last = (self.calls - 1) % self.copies
        return last, self.results[last]


class CallTurns:
    """Calls on a CPU, over copies in turn."""

    def __init__(self, call, row: Row, copies: int, turn_ms: float):
        self.call, self.copies, self.at = call, copies, 0
        self.calls_of_run = 1
        self.run()
        self.calls_of_run = max(1, min(1000, math.ceil(turn_ms * 1e3 / max(self.measure(), 1e-3))))

    def run(self) -> None:
        for _ in range(self.calls_of_run):
            self.call(self.at % self.copies)
            self.at += 1

    def measure(self) -> float:
        started = time.perf_counter()
        self.run()
        return (time.perf_counter() - started) * 1e6 / self.calls_of_run

    def time(self) -> float:
        time.sleep(SETTLE_SECONDS)
        self.call(self.at % self.copies)  # not timed: wakes the threads
        return self.measure()

    def poisoned(self) -> tuple:
        result = value_of(self.call(0))
        for part in result if isinstance(result, list) else [result]:
            part.fill_(math.nan)  # where the call has memory of its own it is poisoned now
        return 0, value_of(self.call(0))


@dataclasses.dataclass
class Subject:
    """One implementation of a row in its best form."""

    peer: Peer
    form: Form
    turns: object
    tensors: Tensors
    error: float
    plan_us: float | None
    us: list = dataclasses.field(default_factory=list)


class Bench:
    """Everything that rows share: the device, its memory, and how long a turn is."""

    def __init__(self, device: str, cold_bytes: int, rounds: int, turn_ms: float, emit=lambda **event: None):
        self.device, self.cold_bytes, self.rounds, self.turn_ms, self.emit = device, cold_bytes, rounds, turn_ms, emit
        self.pool = Pool(device)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def wall_us(self, function) -> tuple:
        self.synchronize()
        started = time.perf_counter()
        result = function()
        self.synchronize()
        return (time.perf_counter() - started) * 1e6, result

    def subjects(self, row: Row, peers: list, left_out: dict) -> tuple:
        """([Subject], {peer name: note}): each peer in its fastest form, and why others are not there."""
        found, notes = [], {}
        for peer in peers:
            reason = left_out.get(peer.name) or peer.supports(row)
            forms = [] if reason else [form for form in peer.forms(row) if allowed(row, form)]
            tried, failures = [], []
            for form in forms:
                self.emit(started=peer.name)
                try:
                    tried.append(self.subject(row, peer, form))
                except (Refused, NotImplementedError, MemoryError) as refusal:
                    failures.append(text_of(refusal) if not isinstance(refusal, Refused) else str(refusal))
                except Exception as error:  # whatever a peer raises is its line
                    failures.append(text_of(error))
                    self.survive(peer, failures[-1])
            if tried:
                found.append(min(tried, key=lambda subject: statistics.median(subject.us)) if len(tried) > 1 else tried[0])
                found[-1].us.clear()
            else:
                notes[peer.name] = f"skipped: {reason}" if reason else "; ".join(dict.fromkeys(failures)) or "skipped: no layout for such rows"
            del tried
            gc.collect()
        return found, notes

    def survive(self, peer: Peer, message: str) -> None:
        try:
            self.synchronize()
        except Exception as lost:
            raise DeviceLost(peer.name, message) from lost

    def subject(self, row: Row, peer: Peer, form: Form) -> Subject:
        """Prepared and found right. Refused: it is wrong, or does not run."""
        copies = copies_of(row, self.cold_bytes)
        self.pool.fill(row.kv_dtype, math.prod(shape_of(row, form)) * copies)
        tensors = Tensors(row, form, self.pool, copies)
        prepared: Prepared = peer.prepare(row, tensors)
        plan_us = None
        if prepared.plan:
            prepared.plan()  # the first one loads modules
            plan_us = statistics.median(self.wall_us(prepared.plan)[0] for _ in range(3))
        first_us, result = self.wall_us(lambda: prepared.call(0))
        plan_us = (plan_us or 0) + first_us if prepared.first_call_plans else plan_us
        error = self.checked(row, tensors, 0, value_of(result))
        turns = (GraphTurns if self.device == "cuda" else CallTurns)(prepared.call, row, copies, self.turn_ms)
        error = max(error, self.checked(row, tensors, *turns.poisoned()))
        subject = Subject(peer, form, turns, tensors, error, plan_us)
        subject.us += [turns.time() for _ in range(FIRST_ROUNDS)]
        return subject

    def checked(self, row: Row, tensors: Tensors, copy: int, result) -> float:
        error = tensors.error(copy, result)
        limit = ERROR_LIMIT[min(tensors.kv_dtype.itemsize, tensors.dtype.itemsize)]
        if not error <= limit:
            raise Refused(f"wrong: error {error:.3g} of the largest value, allowed {limit:g}")
        return error

    def reserve(self, row: Row, peers: list) -> None:
        """The pool for every form of a row at once, so that no form's views are left behind in an older one; forms too large do without."""
        copies = copies_of(row, self.cold_bytes)
        forms = {form for peer in peers if not peer.supports(row) for form in peer.forms(row) if allowed(row, form)} | {row.form}
        for elements in sorted({math.prod(shape_of(row, form)) for form in forms}, reverse=True):
            try:
                return self.pool.fill(row.kv_dtype, elements * copies)
            except MemoryError:
                continue
        return None

    def measure(self, row: Row, peers: list, left_out: dict) -> tuple:
        """([Subject] with their times, notes)."""
        self.reserve(row, peers)
        found, notes = self.subjects(row, peers, left_out)
        for _ in range(self.rounds):
            for subject in found:
                self.emit(started=subject.peer.name)
                subject.us.append(subject.turns.time())
        return [subject for subject in found if self.still_right(row, subject, notes)], notes

    def still_right(self, row: Row, subject: Subject, notes: dict) -> bool:
        """After all turns: what another subject's plan has spoilt is no time of this one."""
        try:
            subject.error = max(subject.error, self.checked(row, subject.tensors, *subject.turns.poisoned()))
        except Refused as wrong:
            notes[subject.peer.name] = f"after its turns {wrong}"
            return False
        return True
