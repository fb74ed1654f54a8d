"""The exchange over peer memory: ranks are processes of one host, a GPU each, and decode()'s own kernel, or one behind it, stores this
rank's rows into the other GPUs' memory, waits there for theirs, and merges. No collective is called for it; torch.distributed tells the
ranks each other's memory, once, and again where a call has more rows than all before.
"""

from __future__ import annotations

import datetime
import pathlib
import socket
from typing import Any, Optional

import torch

from lean_attention import _core
from lean_attention._arguments import lse_shape
from lean_attention._frameworks import framework_of
from lean_attention.distributed._agreement import Agreement, failure, listed

State = tuple[torch.Tensor, Optional[torch.Tensor]]

_DTYPES = {getattr(torch, name): number for number, name in enumerate(_core.QUERY_DTYPES)}
_LEAST_BYTES = 4 << 20  # of a first allocation


class PeerExchange:
    """Merges the states of all ranks by _core.exchange(). All ranks make it together, and call it in the same order.

    Attributes:
        limit: how long a call waits on the device for the other ranks.
        in_launch: decode() tries the call's own launch; else, and where that is refused, a launch behind it exchanges.
        missing: why this group has no peer memory, the same on every rank; None where it has, or nobody asked yet.
    """

    def __init__(self, agreement: Agreement, rank: int, limit: datetime.timedelta) -> None:
        self.limit = limit
        self.in_launch = True
        self.missing: Optional[str] = None
        self._agreement = agreement
        self._rank = rank
        self._held: list[Any] = []  # the last is in use, those before may be by a captured graph
        self._bytes = 0

    def prepare(self, device: torch.device, rows: int, value_dim: int, dtype: torch.dtype) -> Optional[str]:
        """Makes room for these rows; all ranks ask alike. Returns `missing`.

        Raises:
            RuntimeError: a rank did not come within the timeout of the comparisons.
        """
        if self.missing is not None:
            return self.missing
        ranks = len(self._agreement.ranks)
        if device.type != "cuda":
            self.missing = f"q is on {device.type}, and peer memory is of GPUs"
        elif ranks > _core.MAX_RANKS:
            self.missing = f"{ranks} ranks, and {_core.MAX_RANKS} are the most"
        else:
            needed = _core.exchange_bytes(ranks, rows, value_dim, _DTYPES[dtype])
            if needed > self._bytes:
                self.missing = self._grow(device, max(needed, 2 * self._bytes, _LEAST_BYTES))
        return self.missing

    def _grow(self, device: torch.device, size: int) -> Optional[str]:
        """Memory of `size` bytes on every rank, opened by all the others; why that is not possible, the same on every rank."""
        memory, own = None, {"host": _host(), "handle": b"", "error": ""}
        try:
            limit_ns = int(self.limit.total_seconds() * 1e9)
            index = torch.cuda.current_device() if device.index is None else device.index
            memory, own["handle"] = _core.make_exchange(index, self._rank, len(self._agreement.ranks), size, limit_ns)
        except (RuntimeError, NotImplementedError) as error:
            own["error"] = str(error)
        everybody = self._agreement.gather("peer memory", own)
        missing = self._first_error([each["error"] for each in everybody]) or self._other_host([each["host"] for each in everybody])
        if missing is not None:
            return missing
        error = self._opened(memory, [each["handle"] for each in everybody])
        missing = self._first_error(self._agreement.gather("opening peer memory", error))
        if missing is None:
            self._held.append(memory)
            self._bytes = size
        return missing

    def _opened(self, memory: Any, handles: list[bytes]) -> str:
        try:
            for rank, handle in enumerate(handles):
                if rank != self._rank:
                    _core.open_exchange(memory, rank, handle)
        except RuntimeError as error:
            return str(error)
        return ""

    def _first_error(self, errors: list[str]) -> Optional[str]:
        found = (f"rank {rank}: {error}" for rank, error in zip(self._agreement.ranks, errors) if error)
        return next(found, None)

    def _other_host(self, hosts: list[tuple]) -> Optional[str]:
        ranks = self._agreement.ranks
        others = [rank for rank, host in zip(ranks, hosts) if host != hosts[0]]
        return f"rank {listed(others)} is on another host than rank {ranks[0]}" if others else None

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: dict[str, Any], with_lse: bool) -> Optional[State]:
        """The state of all ranks (lse only `with_lse`) in decode()'s own launch, of this rank's k and v and the other arguments in
        `call`; None where that is no decode step that exchanges in its launch: nothing is done then."""
        if not self.in_launch or q.numel() == 0:
            return None
        framework = framework_of(q)
        out = framework.output(q, v)
        arguments = {**call, "out": out}
        if with_lse:
            shape = lse_shape(q.shape, call.get("cu_seqlens_q") is not None, call.get("layout", "bhsd"))
            arguments["lse"] = framework.empty_float32(q, shape)
        if not _core.decode_exchanged(framework, q, k, v, arguments, self._held[-1]):
            return None
        return out, arguments.get("lse")

    def __call__(self, out: torch.Tensor, lse: torch.Tensor) -> State:
        """The state of all ranks from this one's (out [..., dv] and lse [...], dense), which out's memory then holds."""
        if lse.numel() == 0:
            return out, lse
        merged_lse = torch.empty_like(lse)
        stream = torch.cuda.current_stream(out.device).cuda_stream
        rows, value_dim, dtype = lse.numel(), out.shape[-1], _DTYPES[out.dtype]
        addresses = (x.data_ptr() for x in (out, lse, out, merged_lse))
        _core.exchange(self._held[-1], *addresses, rows, value_dim, dtype, stream)
        return out, merged_lse

    def check(self) -> None:
        """Raises RuntimeError where a call that has ended met a fault. Waits for nothing."""
        for memory in self._held:
            fault = _core.exchange_fault(memory)
            if fault is not None:
                raise RuntimeError(failure("an exchange over peer memory", self._agreement.ranks, self.limit, RuntimeError(fault)))

    def reset(self) -> None:
        """After a fault: all ranks begin anew. All of them call it, and none may have a call in flight."""
        if self._held:
            torch.cuda.synchronize()
        self._agreement.gather("the end of all exchanges", None)
        for memory in self._held:
            _core.clear_exchange(memory)
        self._agreement.gather("exchanges cleared", None)


def _host() -> tuple:
    """What processes of one host have in common."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return (boot.read_text().strip(),) if boot.exists() else (socket.gethostname(),)
