"""How states (O and log-sum-exp of finished rows) travel between ranks and become one: torch.distributed alone.

A message holds rows by head, so that it can be cut by heads: [Hq, pitch] bytes, of each head a header (HEADER int64), lse in
float32, O in its own type, and what makes the next head begin at a multiple of 16 bytes. The header says whether the sender's own
call succeeded and what it was asked; where the message lies in host memory, the receiver looks.

Every exchange merges in rank order by merge_states() in float32 and rounds once, at the end. So all ranks get the same bits, and
the same as one process that merges the same states in that order.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Optional, Sequence

import torch
import torch.distributed as dist

from lean_attention._merge import merge_states
from lean_attention.distributed._agreement import listed

HEADER = 2  # int64: status (0: fine), digest of what was asked
_ALIGNMENT = 16  # bytes

State = tuple[torch.Tensor, torch.Tensor]
#: The states of all ranks, by rank, from the message of each; None where this rank could make none.
Exchange = Callable[["Message", Any], State]


def merge_in_order(states: Sequence[State], dtype: torch.dtype) -> State:
    """One state (o, lse) from several `states` over disjoint keys, merged from the first to the last in float32, o then rounded
    to `dtype`.
    """
    if not states:
        raise ValueError("states: one or more are needed")
    out, lse = states[0][0].float(), states[0][1]
    for next_out, next_lse in states[1:]:
        out, lse = merge_states(out, lse, next_out.float(), next_lse)
    return out.to(dtype), lse


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a message: [heads, rows] of `value_dim` elements."""

    heads: int
    rows: int
    value_dim: int
    dtype: torch.dtype

    @property
    def lse_bytes(self) -> int:
        return 4 * self.rows

    @property
    def pitch(self) -> int:
        """Bytes of a head."""
        used = 8 * HEADER + self.lse_bytes + self.rows * self.value_dim * self.dtype.itemsize
        return -(-used // _ALIGNMENT) * _ALIGNMENT

    def of(self, heads: int) -> Rows:
        return dataclasses.replace(self, heads=heads)

    def unpack(self, data: torch.Tensor) -> State:
        """(O [heads, rows, dv], lse [heads, rows]) as views of data [heads, pitch]."""
        at = 8 * HEADER
        lse = data[:, at : at + self.lse_bytes].view(torch.float32)
        at += self.lse_bytes
        out = data[:, at : at + self.rows * self.value_dim * self.dtype.itemsize].view(self.dtype)
        return out.view(self.heads, self.rows, self.value_dim), lse

    def header(self, data: torch.Tensor) -> torch.Tensor:
        """[heads, HEADER]"""
        return data[:, : 8 * HEADER].view(torch.int64)


@dataclasses.dataclass
class Message:
    """What a rank sends: data [heads, pitch], bytes."""

    rows: Rows
    data: torch.Tensor

    @classmethod
    def of(cls, rows: Rows, state: Optional[State], header: Sequence[int], device: torch.device) -> Message:
        data = torch.empty((rows.heads, rows.pitch), dtype=torch.uint8, device=device)
        if device.type == "cpu":  # elsewhere nobody looks, and a copy from the host could not be captured
            rows.header(data).copy_(torch.tensor(header, dtype=torch.int64))
        out, lse = rows.unpack(data)
        if state is None:  # whoever cannot look at the header sees that there is no result
            out.fill_(torch.nan)
            lse.zero_()
        else:
            out.copy_(state[0].reshape(out.shape))
            lse.copy_(state[1].reshape(lse.shape))
        return cls(rows, data)


class Disagreement(RuntimeError):
    """Ranks do not compute the same call. Every rank that can see it raises it."""


def all_gather(message: Message, group: Any) -> State:
    """Every rank gets every state and merges all heads: one exchange, (ranks - 1) messages to each rank."""
    return _merge(gathered(message.data, group), message.rows, group)


def all_to_all(message: Message, group: Any) -> State:
    """Every rank merges the heads it owns, Hq / ranks of them, and the results are gathered: two exchanges, and less to read for
    each rank the more there are. Needs heads that the ranks divide."""
    ranks, rows = dist.get_world_size(group), message.rows
    received = torch.empty_like(message.data)
    dist.all_to_all_single(received, message.data, group=group)
    own = rows.of(rows.heads // ranks)
    states = received.view(ranks, own.heads, own.pitch)
    merged = Message.of(own, _merge(states, own, group), [0] * HEADER, received.device)
    return rows.unpack(gathered(merged.data, group).view(rows.heads, rows.pitch))


EXCHANGES = {"all_gather": all_gather, "all_to_all": all_to_all}


def gathered(data: torch.Tensor, group: Any) -> torch.Tensor:
    """[ranks, *data.shape]: what each rank has, by rank."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the newer name of one function
    ranks = dist.get_world_size(group)
    received = data.new_empty((ranks * data.shape[0], *data.shape[1:]))
    gather(received, data, group=group)
    return received.view(ranks, *data.shape)


def _merge(data: torch.Tensor, rows: Rows, group: Any) -> State:
    """The states of all ranks [ranks, heads, pitch] as one, if all of them are of one call."""
    if data.device.type == "cpu":
        _check_headers([rows.header(each)[0].tolist() for each in data], group)
    states = [rows.unpack(each) for each in data]
    return merge_in_order([(out, lse.contiguous()) for out, lse in states], rows.dtype)


def _check_headers(headers: list[list[int]], group: Any) -> None:
    ranks = dist.get_process_group_ranks(group)
    failed = [rank for rank, (status, _) in zip(ranks, headers) if status != 0]
    if failed:
        raise Disagreement(f"lean_attention.distributed: the call was refused on rank {listed(failed)}, which has said why")
    differ = [rank for rank, header in zip(ranks, headers) if header != headers[0]]
    if differ:
        raise Disagreement(f"seqlens, leftpad or cu_seqlens_k: rank {listed(differ)} has other values than rank {ranks[0]}")
