"""How a call is carried out; what it computes does not depend on anything here beyond rounding."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Policy = Literal["lean", "fixed_split", "data_parallel", "fixed_chunk"]
Fixup = Literal["last_arriver", "two_kernels", "host_block"]
Determinism = Literal["run_to_run", "batch_invariant", "not_guaranteed"]

_POLICIES = ("lean", "fixed_split", "data_parallel", "fixed_chunk")
_FIXUPS = ("last_arriver", "two_kernels", "host_block")
_DETERMINISMS = ("run_to_run", "batch_invariant", "not_guaranteed")
_CPU_ISAS = ("best", "scalar", "native128", "avx2", "avx512", "avx512_bf16", "amx_bf16")


def flag(name: str, value: Any) -> bool:
    """What equals True or False; "no" and 0.5 would be either by some rule."""
    if value not in (True, False):
        raise TypeError(f"{name}: {value!r}: True or False is needed")
    return bool(value)


@dataclasses.dataclass(frozen=True)
class Options:
    """Schedule, fix-up and determinism of a call.

    Args:
        policy: "lean" (equal shares of one line of LeanTiles), "fixed_split" (FlashDecoding), "data_parallel"
            (one worker an output), "fixed_chunk" (cuts at multiples of ``chunk_tokens`` only).
        splits: with "fixed_split": runs of tiles an output is cut into; 0 asks for FlashDecoding's own rule.
        chunk_tokens: with "fixed_chunk": tokens of a chunk; 0 asks for the default.
        fixup: who merges the partials of a shared output: "last_arriver" (whoever comes last), "two_kernels" (a second
            pass), "host_block" (the worker of the output's first tile, which waits).
        determinism: "run_to_run" (same inputs, options and workers, same bits), "batch_invariant" (the bits of a
            sequence depend on that sequence alone), "not_guaranteed".
        workers: 0 means all threads, or one a multiprocessor, and two in some decode steps of more (sequence, K/V head) pairs
            than that.
        cpu_isa: the instruction set on the CPU; "best" takes the widest there is.
        dependent_launch: on a GPU (compute capability 9.0 and newer), programmatic dependent launch: the call's kernel
            may start before the one ahead of it on the stream has ended, whose results it waits for, and lets the next
            one do so. False: in stream order.
        check_workspace: on a GPU, kernels before and after the call look whether its workspace is used by another call.
        check_lengths: for debugging: lengths and page ids on a device are copied to the host and looked at before the
            call, which waits for the device and cannot be captured. Those on the host are always looked at.

    Raises:
        TypeError: a number or a flag is none.
        ValueError: a name is unknown. Combinations that make no sense are refused by the call itself.
    """

    policy: Policy = "lean"
    splits: int = 0
    chunk_tokens: int = 0
    fixup: Fixup = "last_arriver"
    determinism: Determinism = "run_to_run"
    workers: int = 0
    cpu_isa: str = "best"
    dependent_launch: bool = True
    check_workspace: bool = False
    check_lengths: bool = False
    encoded: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, allowed in (("policy", _POLICIES), ("fixup", _FIXUPS), ("determinism", _DETERMINISMS), ("cpu_isa", _CPU_ISAS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} = {value!r}: allowed {', '.join(allowed)}")
        for name in ("splits", "chunk_tokens", "workers"):
            if isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: {getattr(self, name)}: an integer is needed")
        for name in ("dependent_launch", "check_workspace", "check_lengths"):
            flag(name, getattr(self, name))
        object.__setattr__(self, "encoded", self._encode())

    def _encode(self) -> tuple[int, ...]:
        """The integers the extension reads, in its order."""
        return (
            _POLICIES.index(self.policy),
            self.splits,
            self.chunk_tokens,
            _FIXUPS.index(self.fixup),
            _DETERMINISMS.index(self.determinism),
            self.workers,
            _CPU_ISAS.index(self.cpu_isa),
            int(self.dependent_launch),
            int(self.check_workspace),
            int(self.check_lengths),
        )


def engine_options(batch_invariant: bool) -> Options:
    """Options of an engine's calls. The kernels ahead of them are torch's and Triton's, which let nothing start before their end: behind
    such a kernel calls in stream order are up to 0.4 us shorter (docs/notebook/short-calls.md)."""
    return Options(determinism="batch_invariant" if batch_invariant else "run_to_run", dependent_launch=False)
