"""TensorParallel: attention whose heads are sharded over ranks."""

from __future__ import annotations

import datetime
from typing import Any, Optional

import torch
import torch.distributed as dist

from lean_attention._decode import decode
from lean_attention.distributed._agreement import Agreement, WeakGroup, failure, membership, timeout_of
from lean_attention.distributed._context import ContextParallel
from lean_attention.distributed._exchange import gathered
from lean_attention.distributed._local_call import Form, kv_head_axis
from lean_attention.distributed._placement import Placement


class TensorParallel:
    """The heads of a model dealt out over the ranks of a process group. Nothing is exchanged inside attention.

    Each rank has a run of K/V heads and the query heads that read them; the numbers of ranks that are not divisors differ by one
    K/V head at most. Where there are fewer K/V heads than ranks, no K or V is copied: the ranks are cut into as many runs as
    there are K/V heads, and the ranks of a run shard the tokens of their head by a ContextParallel of their own.

    Args:
        q_heads, kv_heads: of the whole model; q_heads is a multiple of kv_heads.
        group: a process group. Default: all processes.
        context: over the tokens of this rank's heads, where `group` is one axis of a device mesh and this the other. Not with
            fewer K/V heads than ranks, which makes its own.
        block_tokens, exchange, timeout: for the ContextParallel that is made here.

    All ranks of the group make it together.

    Attributes:
        rank, ranks: this process's number in the group, and how many there are.
        q_heads, kv_heads: this rank's heads, as ranges of the model's.
        context: the ContextParallel over the tokens of these heads, or None.
    """

    group = WeakGroup()

    def __init__(
        self,
        q_heads: int,
        kv_heads: int,
        group: Any = None,
        *,
        context: Optional[ContextParallel] = None,
        block_tokens: int = Placement.block_tokens,
        exchange: str = "all_gather",
        timeout: Optional[datetime.timedelta] = None,
    ) -> None:
        self.group, self.rank, self.ranks = membership(group)
        self._agreement = Agreement(self.group, timeout)
        self._agreement.reach({"q_heads": q_heads, "kv_heads": kv_heads, "context": context is not None})
        for name, heads in (("q_heads", q_heads), ("kv_heads", kv_heads)):
            if not isinstance(heads, int):
                raise TypeError(f"{name} = {heads!r}: an integer is needed")
        if kv_heads < 1 or q_heads < kv_heads or q_heads % kv_heads != 0:
            raise ValueError(f"q_heads = {q_heads}: must be a multiple of kv_heads = {kv_heads}, which must be 1 or more")
        self._all_q_heads, self._group_size = q_heads, q_heads // kv_heads
        self.kv_heads, self.context = self._dealt(kv_heads, self.rank), context
        self.q_heads = range(self.kv_heads.start * self._group_size, self.kv_heads.stop * self._group_size)
        self._all_kv_heads = kv_heads
        self._last_gathered: Any = None  # what gather() was last given in host memory
        if kv_heads < self.ranks:
            if context is not None:
                raise ValueError(f"context: {kv_heads} K/V heads for {self.ranks} ranks make one of their own: give none")
            self.context = self._context_of_head(dict(block_tokens=block_tokens, exchange=exchange, timeout=timeout))

    def shard_q(self, x: torch.Tensor, axis: int = 1) -> torch.Tensor:
        """This rank's query heads of a tensor `x` with all of them along `axis`, as a view: q, sinks, alibi_slopes, a mask."""
        return self._run_of(x, axis, self.q_heads, self._all_q_heads)

    def shard_kv(self, x: torch.Tensor, axis: int = 1) -> torch.Tensor:
        """This rank's K/V heads of a tensor `x` with all of them along `axis`, as a view: k, v, k_scale, v_scale."""
        return self._run_of(x, axis, self.kv_heads, self._all_kv_heads)

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        """lean_attention.decode() of this rank's heads: q has those of `q_heads`, k and v those of `kv_heads`.

        With a `context`, ContextParallel.decode(): k and v are also shards of the tokens. Arguments with an axis of heads have
        this rank's (shard_q(), shard_kv()).

        Returns:
            out, or (out, lse), of this rank's heads; what a row-parallel output projection takes. gather() has all heads.

        Raises:
            ValueError: q, k or v has another number of heads than this rank's.
            Others: as the two functions.
        """
        self._check_heads(q, k, v, arguments)
        return (decode if self.context is None else self.context.decode)(q, k, v, **arguments)

    def gather(self, out: torch.Tensor, axis: int = 1) -> torch.Tensor:
        """All heads, on every rank, of a tensor `out` that has this rank's query heads along `axis`.

        Raises:
            ValueError: `out` has another number of heads than this rank's; or its other axes or its type differ between ranks.
            RuntimeError: `out` requires a gradient, which the exchange would lose.
        """
        if torch.is_grad_enabled() and out.requires_grad:
            raise RuntimeError("out: requires a gradient, and gather() has no backward pass: call under torch.no_grad()")
        if out.shape[axis] != len(self.q_heads):
            raise ValueError(f"out: {out.shape[axis]} heads: {self._says_heads(self.q_heads)}")
        others = (str(out.dtype), tuple(out.movedim(axis, 0).shape[1:]), out.device.type)
        self._agreement.reach({"out": others, "axis": axis}, again=out.device.type == "cpu" and others != self._last_gathered)
        self._last_gathered = others
        most = max(len(self._dealt(self._all_kv_heads, rank)) for rank in range(self.ranks)) * self._group_size
        mine = out.new_zeros((most, *out.movedim(axis, 0).shape[1:]))  # every rank's are as many for the exchange
        mine[: len(self.q_heads)] = out.movedim(axis, 0)
        try:
            received = gathered(mine, self.group)
        except RuntimeError as error:
            raise RuntimeError(failure("gather()", self._agreement.ranks, timeout_of(self.group), error)) from error
        parts, heads = [], 0
        for rank in range(self.ranks):
            dealt = self._dealt(self._all_kv_heads, rank)
            if dealt.start * self._group_size == heads:  # the first of those that have these heads
                parts.append(received[rank, : len(dealt) * self._group_size])
                heads += len(dealt) * self._group_size
        return torch.cat(parts).movedim(0, axis).contiguous()

    @staticmethod
    def _run_of(x: torch.Tensor, axis: int, heads: range, all_heads: int) -> torch.Tensor:
        if x.shape[axis] != all_heads:
            raise ValueError(f"x: {x.shape[axis]} heads along axis {axis}: all {all_heads} of the model are needed")
        return x.narrow(axis, heads.start, len(heads))

    def _dealt(self, kv_heads: int, rank: int) -> range:
        """The K/V heads of a rank: a run of them, or one where there are fewer heads than ranks."""
        if kv_heads >= self.ranks:
            return range(rank * kv_heads // self.ranks, (rank + 1) * kv_heads // self.ranks)
        head = ((rank + 1) * kv_heads - 1) // self.ranks
        return range(head, head + 1)

    def _context_of_head(self, arguments: dict[str, Any]) -> Optional[ContextParallel]:
        """Over the ranks that have this rank's one K/V head; None where it is alone."""
        members = [rank for rank in range(self.ranks) if self._dealt(self._all_kv_heads, rank) == self.kv_heads]
        if len(members) == 1:
            return None
        world = dist.get_process_group_ranks(self.group)
        group = dist.new_group(
            [world[rank] for rank in members], timeout=self._agreement.timeout, backend=dist.get_backend(self.group),
            use_local_synchronization=True,
        )  # fmt: skip
        return ContextParallel(group, **arguments)

    def _check_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> None:
        axes = Form.of(q, arguments).head_axis, kv_head_axis(k, arguments)
        for name, x, axis, heads in (("q", q, axes[0], self.q_heads), ("k", k, axes[1], self.kv_heads), ("v", v, axes[1], self.kv_heads)):
            if x.shape[axis] != len(heads):
                raise ValueError(f"{name}: {x.shape[axis]} heads: {self._says_heads(heads)}")

    def _says_heads(self, heads: range) -> str:
        return f"rank {self.rank} has the model's {heads.start} to {heads.stop - 1}"
