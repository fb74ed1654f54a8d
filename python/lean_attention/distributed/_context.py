"""ContextParallel: attention over sequences whose K/V lies on several ranks."""

from __future__ import annotations

import dataclasses
import datetime
import warnings
import zlib
from typing import Any, Optional

import torch

from lean_attention._decode import check_lengths, decode
from lean_attention.distributed._agreement import Agreement, WeakGroup, described, failure, membership, remember, timeout_of
from lean_attention.distributed._append import append
from lean_attention.distributed._exchange import EXCHANGES, Disagreement, Message, Rows, State
from lean_attention.distributed._local_call import (
    Form,
    Lengths,
    Shard,
    StepLengths,
    as_lengths,
    check_arguments,
    check_results,
    check_rules,
    global_lengths,
    kv_head_axis,
    local_call,
)
from lean_attention.distributed._peer_memory import PeerExchange
from lean_attention.distributed._placement import Placement
from lean_attention.torch_ops import refuse_gradients

FUSED = "fused"
_OF_A_RANK = ("block_table", "page_indices")  # their sizes, and those of k and v but heads and dims, are a rank's own


class ContextParallel:
    """The tokens of every sequence dealt out over the ranks of a process group; a call computes all query heads on each.

    Every rank attends to the keys it holds and gets (O, log-sum-exp); these alone are exchanged, and merged in rank order. All
    ranks return the same bits, those of one process that computes the same shards and merges them in that order.

    Args:
        group: a process group of torch.distributed, of any backend that moves the tensors. Default: all processes.
        block_tokens: see Placement. A multiple of the page size where K/V is paged.
        exchange: "all_gather" (one exchange, every rank merges all heads), "all_to_all" (two exchanges, each rank merges its
            part of the heads; the ranks must divide Hq), or "fused" (GPUs of one host that reach each other's memory: one kernel
            sends, waits and merges; no collective). The results are the same bits where steps have as many workers: of many
            (sequence, K/V head) pairs "fused" may have half of the others', if Options.workers is left at 0. Where
            "fused" cannot be, the first call says why in a RuntimeWarning, and it is "all_gather" from there on: the attribute
            `exchange` tells.
        compare_every_call: for debugging: what ranks are asked for is compared in every call, which costs an exchange between
            hosts. Otherwise where this rank sees a kind of call (shapes, types, which arguments, their numbers) for the first
            time; ranks that come to differ later get an error when the timeout is over.
        timeout: how long ranks wait for each other where calls are compared. Default: the group's own timeout, which holds for
            the exchange in any case, but "fused".
        fused_limit: how long a call of the exchange "fused" waits on the device for the other ranks. Default: 1 s.

    All ranks of the group make it together, and call it in the same order.

    Attributes:
        rank, ranks: this process's number in the group, and how many there are.
        placement: which rank holds which token.
        exchange: the exchange that is used, which need not be the one that was asked for: see `exchange` above.
    """

    group = WeakGroup()

    def __init__(
        self,
        group: Any = None,
        *,
        block_tokens: int = Placement.block_tokens,
        exchange: str = "all_gather",
        compare_every_call: bool = False,
        timeout: Optional[datetime.timedelta] = None,
        fused_limit: datetime.timedelta = datetime.timedelta(seconds=1),
    ) -> None:
        self.group, self.rank, self.ranks = membership(group)
        self._agreement = Agreement(self.group, timeout, compare_every_call)
        asked = {"block_tokens": block_tokens, "exchange": exchange, "compare_every_call": compare_every_call}
        self._agreement.reach({**asked, "fused_limit": fused_limit})
        if exchange not in (*EXCHANGES, FUSED):
            raise ValueError(f"exchange = {exchange!r}: allowed {', '.join((*EXCHANGES, FUSED))}")
        if not isinstance(fused_limit, datetime.timedelta):
            raise TypeError(f"fused_limit: {type(fused_limit)}: a datetime.timedelta is needed")
        if fused_limit < datetime.timedelta(0):
            raise ValueError(f"fused_limit = {fused_limit}: allowed 0 or more")
        self._peers = PeerExchange(self._agreement, self.rank, fused_limit)
        self.placement = Placement(self.ranks, block_tokens)
        self.exchange = exchange
        self._accepted: set = set()  # kinds of call whose rules decode() takes
        self._last_message: Any = None  # shapes and type of what was exchanged last in host memory

    def shard(self, x: torch.Tensor, axis: int = 2) -> torch.Tensor:
        """This rank's tokens of a tensor `x` that has whole sequences along `axis`: Placement.shard()."""
        return self.placement.shard(x, self.rank, axis)

    def local_block_table(self, block_table: torch.Tensor, page_tokens: int) -> torch.Tensor:
        """This rank's columns of `block_table`, a table over whole sequences in pages of `page_tokens` tokens:
        Placement.local_block_table().
        """
        return self.placement.local_block_table(block_table, page_tokens, self.rank)

    def step_lengths(self, seqlens: Any, device: Any = None) -> StepLengths:
        """What decode() takes as `seqlens` in every layer of a step, so that what this rank holds of sequences is worked out once.

        Args:
            seqlens: tokens of each whole sequence, [B]: a tensor of int32 or int64, or a list.
            device: of q. Default: where `seqlens` is.

        In a CUDA graph it is called within the capture, since `seqlens` may change from one replay to the next.
        """
        tensor = torch.as_tensor(seqlens)
        whole = as_lengths("seqlens", tensor, tensor.numel(), tensor.device if device is None else torch.device(device))
        shard = Shard(self.placement, self.rank)
        return StepLengths(whole, shard.tokens(whole), shard)

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        """lean_attention.decode() over whole sequences, of which k and v are this rank's shards.

        Args:
            q: all query heads, the same on every rank.
            k, v, block_table, page_indptr, page_indices: this rank's, as Placement deals them out; page ids are of its own pool.
            seqlens, leftpad, cu_seqlens_k, max_seqlen_k: of the whole sequences. seqlens or cu_seqlens_k are needed; seqlens may be
                what step_lengths() returns.
            mask, tree_mask: over the tokens of whole sequences.
            append_k, append_v: the same on every rank: each token is written by the rank that holds it.
            sinks and all others: as decode() takes them, the same on every rank.

        Not taken, refused by name: rotary_cos, rotary_sin, stream; append_k with packed queries, packed keys or page_indptr; rules
        about positions where cu_seqlens_q gives several queries to a sequence.

        Returns:
            out, or (out, lse) with return_lse: the same on every rank.

        Raises:
            ValueError: also where ranks are asked for different things; the message names argument and ranks.
            RuntimeError: a rank ended or did not come within the group's timeout; or, where the exchange is in host memory, the
                call was refused on another rank, or lengths differ between ranks. With the exchange "fused": an earlier call met
                that, whose rows then are NaN (check_exchange()).
            NotImplementedError, TypeError: as decode().
        """
        step = arguments.get("seqlens")
        if isinstance(step, StepLengths):
            arguments["seqlens"] = step.seqlens
        asked = self._asked(q, k, v, arguments)
        self._agreement.reach(asked, again=self._has_another_message(q, v))
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name}: {type(x)}: a torch tensor is needed")
        form = Form.of(q, arguments)
        check_arguments(arguments, form, k, self.placement)
        check_results(q, v, form, arguments)
        if self.exchange == "all_to_all" and form.q_heads % self.ranks != 0:
            raise ValueError(
                f"exchange = 'all_to_all': {self.ranks} ranks do not divide {form.q_heads} heads: use 'all_gather'"
            )
        if self.exchange == FUSED:
            self._peers.check()
            self._prepare_peers(q, v)
        lengths = global_lengths(arguments, form, q.device)
        refusal, state = None, None
        try:
            if isinstance(step, StepLengths):
                step.need_shard(Shard(self.placement, self.rank))
                lengths = dataclasses.replace(lengths, held=step.held)
            self._check_rules(asked, q, k, v, arguments)
            call = self._own_call(form, lengths, q, k, v, arguments)
            if self.exchange == FUSED:
                whole = self._peers.decode(q, k, v, call, self._wants_lse(arguments))
                if whole is not None:
                    return self._returned(whole, arguments)
            state = self._own_state(form, q, k, v, call)
        except Exception as error:  # the others wait for this rank's message: they are told first
            refusal = error
        try:
            return self._returned(self._merged(form, lengths, q, v, state, refusal), arguments)
        finally:
            if refusal is not None:
                raise refusal from None

    def check_exchange(self) -> None:
        """Waits for the device, then raises RuntimeError where a call of the exchange "fused" has met a rank that did not come, or
        came with another call. decode() does so too, of calls that have ended when it is called.
        """
        if self.exchange == FUSED:
            torch.cuda.synchronize()
            self._peers.check()

    def reset_exchange(self) -> None:
        """Begins anew after check_exchange() or decode() has raised that. All ranks call it, and none has a call in flight; graphs
        that were captured stay good.
        """
        self._peers.reset()

    def _prepare_peers(self, q: torch.Tensor, v: torch.Tensor) -> None:
        missing = self._peers.prepare(q.device, q.shape[:-1].numel(), v.shape[-1], q.dtype)
        if missing is not None:
            self.exchange = "all_gather"
            warnings.warn(
                f"exchange = 'fused': {missing}: states are exchanged by 'all_gather'", RuntimeWarning, stacklevel=3
            )

    def _check_rules(self, asked: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> None:
        """Once for each kind of call; whether a tensor needs a gradient is not of its kind."""
        refuse_gradients(q, k, v, arguments)
        if (kind := tuple(asked.items())) not in self._accepted:
            check_rules(q, k, v, arguments)
            remember(kind, self._accepted)

    def _own_call(
        self, form: Form, lengths: Lengths, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """decode()'s arguments for this rank's shard, to which new tokens are appended."""
        shard = Shard(self.placement, self.rank)
        call = local_call(shard, form, lengths, k, arguments)
        if arguments.get("append_k") is not None:
            if q.device.type == "cpu":  # what is refused is refused before the cache is written
                check_lengths(q, k, v, **call)
            append(shard, form, lengths, (k, v), (arguments["append_k"], arguments["append_v"]), arguments)
        return call

    def _own_state(self, form: Form, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: dict[str, Any]) -> State:
        """O and lse of this rank's shard, heads first."""
        out, lse = decode(q, k, v, **call, return_lse=True)
        return out.movedim(form.head_axis, 0), lse.movedim(form.lse_head_axis, 0)

    def _merged(
        self,
        form: Form,
        lengths: Lengths,
        q: torch.Tensor,
        v: torch.Tensor,
        state: Optional[State],
        refusal: Optional[Exception],
    ) -> State:
        """The state of all keys, in q's layout."""
        if self.exchange == FUSED:
            return self._merged_by_peers(form, q, v, state)
        outer = list(q.shape[:-1])
        heads = outer.pop(form.head_axis)
        rows = Rows(heads, q.shape[:-1].numel() // heads, v.shape[-1], q.dtype)
        digest = (
            zlib.crc32(repr((lengths.ends.tolist(), _listed(lengths.given_starts))).encode()) if q.device.type == "cpu" else 0
        )
        message = Message.of(rows, state, (int(refusal is not None), digest), q.device)
        try:
            out, lse = EXCHANGES[self.exchange](message, self.group)
        except Disagreement:
            raise
        except RuntimeError as error:
            raise RuntimeError(failure("the exchange", self._agreement.ranks, timeout_of(self.group), error)) from error
        out = out.reshape(heads, *outer, rows.value_dim).movedim(0, form.head_axis)
        return out.contiguous(), lse.reshape(heads, *outer).movedim(0, form.lse_head_axis).contiguous()

    def _merged_by_peers(self, form: Form, q: torch.Tensor, v: torch.Tensor, state: Optional[State]) -> State:
        if state is None:  # the others wait for this rank's rows, and see by them that there is no result
            out = q.new_full((*q.shape[:-1], v.shape[-1]), torch.nan)
            lse = q.new_zeros(q.shape[:-1], dtype=torch.float32)
        else:
            out, lse = (x.movedim(0, form.head_axis).contiguous() for x in state)
        out, lse = self._peers(out, lse)
        return out, lse.movedim(form.head_axis, form.lse_head_axis).contiguous()

    def _wants_lse(self, arguments: dict[str, Any]) -> bool:
        return bool(arguments.get("return_lse")) or arguments.get("lse") is not None

    def _returned(self, state: State, arguments: dict[str, Any]) -> Any:
        out, lse = state
        if arguments.get("out") is not None:
            out = arguments["out"].copy_(out)
        if arguments.get("lse") is not None:
            lse = arguments["lse"].copy_(lse)
        return (out, lse) if arguments.get("return_lse") else out

    def _has_another_message(self, q: Any, v: Any) -> bool:
        """Whether this call's message in host memory is of another size than the last one's: gloo ends a process that gets more
        bytes than it expects, so that ranks compare such calls each time.
        """
        if not all(isinstance(x, torch.Tensor) and x.dim() > 0 for x in (q, v)) or q.device.type != "cpu":
            return False
        message = (q.shape[:-1], v.shape[-1], q.dtype)
        last, self._last_message = self._last_message, message
        return message != last

    def _asked(self, q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """What must be the same on all ranks, by name. Lengths that are lists are compared with every call instead."""
        asked = {"q": described(q), "k": _kind_of_cache(k, arguments), "v": _kind_of_cache(v, arguments)}
        for name, value in sorted(arguments.items()):
            if value is None:
                continue
            if name in _OF_A_RANK or (name in ("seqlens", "leftpad") and not isinstance(value, torch.Tensor)):
                asked[name] = str(getattr(value, "dtype", "numbers"))
            else:
                asked[name] = described(value)
        return asked


def _kind_of_cache(x: Any, arguments: dict[str, Any]) -> Any:
    if not isinstance(x, torch.Tensor) or x.dim() < 3:
        return described(x)
    return str(x.dtype), (x.shape[kv_head_axis(x, arguments)], x.shape[-1]), x.device.type


def _listed(lengths: Optional[torch.Tensor]) -> Optional[list]:
    return None if lengths is None else lengths.tolist()
