"""What a call over a whole sequence is over one rank's shard of its tokens, in arguments that decode() has.

Shards keep the order of tokens, but not their distances. So what depends on order alone is a length of the shard: tokens there
are, padding, the window of one query. What several queries see of the newest keys is a tree mask over the shard's last n_q keys,
whatever the length. Distances of single keys (a window of several queries, ALiBi) need a mask over the shard.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Optional

import torch

from lean_attention import _core
from lean_attention._arguments import DEFAULTS, lse_shape, refuse_unknown
from lean_attention._decode import supports
from lean_attention.distributed._placement import Placement

_WORD = 32  # bits
_ROTARY = "positions of a shard are not those of the sequence: rotate q and append_k before the call"
_SEVERAL = "with cu_seqlens_q and several queries: pad q to [B, Hq, n_q, d], or give max_seqlen_q=1"
_REFUSED = {
    "rotary_cos": _ROTARY,
    "rotary_sin": _ROTARY,
    "stream": "the exchange runs on torch's current stream: call under torch.cuda.stream()",
}
#: What the functions below say of a shard, and what means the same there as in the whole. A new argument of decode() is refused
#: until it stands here.
SAID = frozenset(
    ("q", "k", "v", "seqlens", "leftpad", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "block_table")
    + ("page_indptr", "page_indices", "scale", "causal", "window", "softcap", "alibi_slopes", "sinks", "mask", "tree_mask")
    + ("append_k", "append_v", "rotary_interleaved", "rotary_absolute", "k_scale", "v_scale", "layout", "out", "lse")
    + ("return_lse", "options")
)


@dataclasses.dataclass(frozen=True)
class Shard:
    """One rank's part of every sequence."""

    placement: Placement
    rank: int

    def tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """How many of the first `tokens` (int32) of each sequence it holds. On a GPU by one kernel, where torch takes six."""
        if tokens.device.type != "cuda" or tokens.dtype != torch.int32 or not tokens.is_contiguous():
            return self.placement.local_tokens(tokens, self.rank)
        held = torch.empty_like(tokens)
        place, stream = self.placement, torch.cuda.current_stream(tokens.device).cuda_stream
        at = (tokens.data_ptr(), held.data_ptr(), tokens.numel())
        _core.shard_lengths(*at, self.rank, place.ranks, place.block_tokens, tokens.device.index, stream)
        return held


@dataclasses.dataclass(frozen=True)
class StepLengths:
    """Lengths of a step, int32 [B], worked out once for all its layers: what ContextParallel.step_lengths() returns.

    Attributes:
        seqlens: tokens of each whole sequence.
        held: how many of them the shard holds.
        shard: whose, which decode() must be of, too.
    """

    seqlens: torch.Tensor
    held: torch.Tensor
    shard: Shard

    def need_shard(self, shard: Shard) -> None:
        """Raises ValueError where these are of another shard: another ContextParallel's."""
        if self.shard != shard:
            raise ValueError(f"seqlens: of {self.shard}: this call is of {shard}: take its own step_lengths()")


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Of whole sequences, int32 [B]: tokens there are, and the first that counts; of the former, where the caller knows it, what
    this rank's shard holds."""

    ends: torch.Tensor
    starts: Optional[torch.Tensor]
    given_starts: Optional[torch.Tensor]
    held: Optional[torch.Tensor] = None


@dataclasses.dataclass(frozen=True)
class Form:
    """What of a call its shapes say."""

    batch: int
    q_heads: int
    q_tokens: int
    head_axis: int  # of q
    packed: bool
    bshd: bool

    @property
    def lse_head_axis(self) -> int:
        """Log-sum-exps have heads before tokens in every layout."""
        return 0 if self.packed else 1

    @classmethod
    def of(cls, q: torch.Tensor, arguments: dict[str, Any]) -> Form:
        layout, packed = arguments.get("layout", "bhsd"), arguments.get("cu_seqlens_q") is not None
        if layout not in ("bhsd", "bshd"):
            raise ValueError(f"layout = {layout!r}: allowed bhsd, bshd")
        if q.dim() not in ((3,) if packed else (3, 4)):
            raise ValueError(f"q: {q.dim()} axes: {'3 with cu_seqlens_q' if packed else '3 or 4'} are needed")
        bshd = layout == "bshd"
        if packed and not hasattr(arguments["cu_seqlens_q"], "__len__"):
            raise TypeError(f"cu_seqlens_q: {type(arguments['cu_seqlens_q'])}: a tensor or a list is needed")
        if packed:
            tokens = arguments.get("max_seqlen_q")
            tokens = q.shape[0 if bshd else 1] if tokens is None else tokens
            return cls(len(arguments["cu_seqlens_q"]) - 1, q.shape[int(bshd)], tokens, int(bshd), packed, bshd)
        head_axis = 2 if bshd and q.dim() == 4 else 1
        return cls(q.shape[0], q.shape[head_axis], 1 if q.dim() == 3 else q.shape[3 - head_axis], head_axis, packed, bshd)


def check_arguments(arguments: dict[str, Any], form: Form, k: torch.Tensor, placement: Placement) -> None:
    """Refuses, by name, what cannot be said of a shard. Looks at nothing that may differ between ranks."""
    for name, value in arguments.items():
        if name not in DEFAULTS:
            refuse_unknown(name)
        if name in _REFUSED and value is not None:
            raise NotImplementedError(f"{name}: {_REFUSED[name]}")
        if name not in SAID and value is not None and name not in _REFUSED:
            raise NotImplementedError(f"{name}: what it is of a shard is not known")
    if arguments.get("seqlens") is None and arguments.get("cu_seqlens_k") is None:
        raise ValueError("seqlens: needed: a shard of k does not say how many tokens its sequence has")
    page = page_tokens(k, arguments, form)
    if page is not None:
        placement.need_whole_pages(page)
    several = form.packed and form.q_tokens != 1
    for name in ("tree_mask", "alibi_slopes", "mask"):
        if several and arguments.get(name) is not None:
            raise NotImplementedError(f"{name}: {_SEVERAL}")
    if several and arguments.get("causal"):
        raise NotImplementedError(f"causal: {_SEVERAL}")
    if several and max(_window_of(arguments)) >= 0:
        raise NotImplementedError(f"window: {_SEVERAL}")
    appends = [arguments.get(name) is not None for name in ("append_k", "append_v")]
    if appends[0] != appends[1]:
        raise ValueError("append_k, append_v: both or none are needed")
    for name in ("cu_seqlens_q", "cu_seqlens_k", "page_indptr"):
        if any(appends) and arguments.get(name) is not None:
            raise NotImplementedError(f"append_k: with {name}: tokens are appended to dense k, or to pages by block_table")


#: What decode() would be asked in other shapes or types, or not at all: a mask is over whole sequences, new tokens are of the cache's type.
_NOT_OF_RULES = ("mask", "out", "lse", "return_lse", "max_seqlen_k", "append_k", "append_v", "rotary_interleaved", "rotary_absolute")


def check_rules(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> None:
    """Refuses what decode() refuses of these arguments, in its words. Reads no contents."""
    mask = arguments.get("mask")
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise TypeError(f"mask: {type(mask)}: a torch tensor is needed")
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"mask: {mask.dtype}: boolean (True: seen) or additive is needed")
    asked = supports(q, k, v, **{name: value for name, value in arguments.items() if name not in _NOT_OF_RULES})
    if not asked:
        raise (NotImplementedError if asked.code == "unsupported" else ValueError)(asked.reason)


def check_results(q: torch.Tensor, v: torch.Tensor, form: Form, arguments: dict[str, Any]) -> None:
    """Refuses an `out` or an `lse` into which the result would be broadcast or cast."""
    shapes = {
        "out": ((*q.shape[:-1], v.shape[-1]), q.dtype),
        "lse": (lse_shape(q.shape, form.packed, arguments.get("layout", "bhsd")), torch.float32),
    }
    for name, (shape, dtype) in shapes.items():
        given = arguments.get(name)
        if given is None:
            continue
        if not isinstance(given, torch.Tensor):
            raise TypeError(f"{name}: {type(given)}: a torch tensor is needed")
        if given.shape != shape:
            raise ValueError(f"{name}: shape {tuple(given.shape)}: expected {tuple(shape)}")
        if given.dtype != dtype:
            raise TypeError(f"{name}: {given.dtype}: expected {dtype}")
        if given.device != q.device:
            raise ValueError(f"{name}: on {given.device}: expected {q.device}, where q is")


def _window_of(arguments: dict[str, Any]) -> tuple[int, int]:
    """(left, right), -1 for all."""
    window = arguments.get("window")
    if window is None:
        return -1, -1
    try:
        left, right = window
        return operator.index(left), operator.index(right)
    except (TypeError, ValueError):
        raise TypeError(f"window: {window!r}: a pair (left, right) of integers is needed, -1 for all") from None


def page_tokens(k: torch.Tensor, arguments: dict[str, Any], form: Form) -> Optional[int]:
    """Tokens of a page; None where K/V is not paged."""
    if arguments.get("block_table") is None and arguments.get("page_indptr") is None:
        return None
    return 1 if k.dim() == 3 else k.shape[1 if form.bshd else 2]


def kv_head_axis(k: torch.Tensor, arguments: dict[str, Any]) -> int:
    bshd = arguments.get("layout") == "bshd"
    if arguments.get("cu_seqlens_k") is not None:
        return int(bshd)
    return 2 if bshd and k.dim() == 4 else 1


def global_lengths(arguments: dict[str, Any], form: Form, device: torch.device) -> Lengths:
    """Of whole sequences, on q's device; the window of a single query moves the first token."""
    ends = as_lengths("seqlens", arguments.get("seqlens"), form.batch, device)
    if ends is None:
        ends = as_lengths("cu_seqlens_k", arguments["cu_seqlens_k"], form.batch + 1, device).diff()
    given = starts = as_lengths("leftpad", arguments.get("leftpad"), form.batch, device)
    left = _window_of(arguments)[0]
    if form.q_tokens == 1 and left >= 0:
        first = (ends - 1 - left).clamp(min=0)
        starts = first if given is None else torch.maximum(first, given)
    return Lengths(ends, starts, given)


def local_call(shard: Shard, form: Form, lengths: Lengths, k: torch.Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
    """decode()'s arguments for this rank's shard, from those of the whole; new tokens are appended already."""
    left_out = ("append_k", "append_v", "causal", "window", "alibi_slopes", "mask", "tree_mask", "out", "lse", "return_lse")
    call = {name: value for name, value in arguments.items() if value is not None and name not in left_out}
    if "seqlens" in call:
        call["seqlens"] = shard.tokens(lengths.ends) if lengths.held is None else lengths.held
        _check_room(shard.placement, lengths, room_of(k, arguments, form, shard.placement))
    if "cu_seqlens_k" in call:
        whole = as_lengths("cu_seqlens_k", call["cu_seqlens_k"], form.batch + 1, lengths.ends.device)
        call["cu_seqlens_k"] = shard.placement.local_cu_seqlens(whole, shard.rank)
    if lengths.starts is not None:
        call["leftpad"] = shard.tokens(lengths.starts)
    if "max_seqlen_k" in call:
        call["max_seqlen_k"] = shard.placement.capacity(call["max_seqlen_k"])
    if shard.rank != 0:
        call.pop("sinks", None)  # they count once
    window = _window_of(arguments)
    windowed = form.q_tokens > 1 and max(window) >= 0
    causal = bool(arguments.get("causal")) and form.q_tokens > 1
    tree = arguments.get("tree_mask")
    if tree is not None or (causal and not windowed):
        call["tree_mask"] = tree_mask(shard, form, lengths, causal, tree)
    if windowed or any(arguments.get(name) is not None for name in ("alibi_slopes", "mask")):
        call["mask"] = _Masks(shard, form, lengths, k, arguments).mask(causal, window if windowed else (-1, -1))
    return call


def tree_mask(shard: Shard, form: Form, lengths: Lengths, causal: bool, tree: Optional[torch.Tensor]) -> torch.Tensor:
    """What n_q queries see of the shard's last n_q keys, int32 [B, n_q, words]: all keys before the sequence's last n_q, of
    those what `tree` (bits over the sequence's last n_q keys) and the causal limit allow. Earlier keys are seen anyway."""
    n_q, device = form.q_tokens, lengths.ends.device
    slots = torch.arange(n_q, device=device)
    kept = (shard.tokens(lengths.ends)[:, None] - n_q + slots).clamp(min=0)  # below 0 there is no key
    draft = shard.placement.token_at(kept, shard.rank) - (lengths.ends[:, None] - n_q)  # [B, slot]
    seen = torch.ones((form.batch, n_q, n_q), dtype=torch.bool, device=device)
    if causal:
        seen &= draft[:, None, :] <= slots[:, None]
    if tree is not None:
        bits = (tree.view(torch.int32)[..., None] >> torch.arange(_WORD, device=device)) & 1
        place = draft.clamp(0, n_q - 1).long()[:, None, :].expand(-1, n_q, -1)
        seen &= bits.flatten(-2).gather(-1, place).bool()
    seen |= (draft < 0)[:, None, :]
    words = -(-n_q // _WORD)
    bits = torch.nn.functional.pad(seen.long(), (0, words * _WORD - n_q)).unflatten(-1, (words, _WORD))
    packed = (bits << torch.arange(_WORD, device=device)).sum(-1)
    return torch.where(packed < 2**31, packed, packed - 2**32).int()


class _Masks:
    """Masks over the tokens of a shard, by their places in the sequence."""

    def __init__(self, shard: Shard, form: Form, lengths: Lengths, k: torch.Tensor, arguments: dict[str, Any]) -> None:
        self._shard, self._form, self._ends, self._arguments = shard, form, lengths.ends, arguments
        kept = torch.arange(self._room(k), device=lengths.ends.device)
        self._tokens = shard.placement.token_at(kept, shard.rank)
        queries = torch.arange(form.q_tokens, device=kept.device)
        positions = lengths.ends[:, None] - form.q_tokens + queries
        self._ahead = (self._tokens - positions[..., None])[:, None]  # of the query, [B, 1, n_q, capacity]

    def mask(self, causal: bool, window: tuple[int, int]) -> torch.Tensor:
        seen = self._seen(causal, window)
        given, slopes = self._arguments.get("mask"), self._arguments.get("alibi_slopes")
        bias = None if slopes is None else slopes[..., None, None] * -self._ahead.abs()
        if given is not None:
            given = self._columns(given)
            if given.dtype == torch.bool:
                seen = given if seen is None else seen & given
            else:
                bias = given if bias is None else bias + given
        if bias is None or seen is None:
            return seen if bias is None else bias
        return torch.where(seen, bias, -torch.inf)

    def _seen(self, causal: bool, window: tuple[int, int]) -> Optional[torch.Tensor]:
        left, right = window
        right = 0 if causal else right
        if left < 0 and right < 0:
            return None
        seen = torch.ones_like(self._ahead, dtype=torch.bool)
        if left >= 0:
            seen &= self._ahead >= -left
        if right >= 0:
            seen &= self._ahead <= right
        return seen

    def _columns(self, mask: torch.Tensor) -> torch.Tensor:
        """The shard's columns of a mask over the sequence."""
        width, capacity = mask.shape[-1], len(self._tokens)
        if width == 1:
            return mask
        longest = int(self._ends.max()) if self._ends.device.type == "cpu" and len(self._ends) > 0 else 0
        if width < longest:
            raise ValueError(f"mask: {width} tokens: a sequence has {longest}")
        if self._shard.placement.capacity(width) != capacity:
            kept = self._shard.placement.capacity(width)
            raise ValueError(f"mask: {width} tokens are {kept} of a shard, which has room for {capacity}")
        return mask.index_select(-1, self._tokens.clamp(max=width - 1))

    def _room(self, k: torch.Tensor) -> int:
        room = room_of(k, self._arguments, self._form, self._shard.placement)
        if room is None:
            raise ValueError(
                "max_seqlen_k: needed for a mask, ALiBi or a window of several queries over packed keys or page_indptr"
            )
        return room


def room_of(k: torch.Tensor, arguments: dict[str, Any], form: Form, placement: Placement) -> Optional[int]:
    """Tokens a shard has room for, the last axis of its masks; None where k does not say."""
    longest, table = arguments.get("max_seqlen_k"), arguments.get("block_table")
    if longest is not None:
        return placement.capacity(longest)
    if table is not None:
        return table.shape[1] * page_tokens(k, arguments, form)
    if arguments.get("cu_seqlens_k") is not None or arguments.get("page_indptr") is not None:
        return None
    return k.shape[1 if form.bshd else 2]


def _check_room(placement: Placement, lengths: Lengths, room: Optional[int]) -> None:
    """Where the host has the lengths: said of the whole sequence. Elsewhere they are clamped, as in decode()."""
    if room is None or lengths.ends.device.type != "cpu" or len(lengths.ends) == 0:
        return
    longest = int(lengths.ends.max())
    if placement.capacity(longest) > room:
        raise ValueError(f"seqlens: {longest} tokens are {placement.capacity(longest)} of a shard, which has room for {room}")


def as_lengths(name: str, value: Any, count: int, device: torch.device) -> Optional[torch.Tensor]:
    """int32 on `device`, from a tensor, a list, or one number for all."""
    if value is None:
        return None
    if isinstance(value, int):
        value = [value] * count
    if isinstance(value, (list, tuple)) and any(isinstance(number, bool) for number in value):
        raise ValueError(f"{name} = {value}: {count} integers are needed")
    value = torch.as_tensor(value)
    if value.dtype not in (torch.int32, torch.int64) or tuple(value.shape) != (count,):
        raise ValueError(f"{name}: {value.dtype} {list(value.shape)}: {count} integers are needed")
    if value.dtype == torch.int64:  # what does not fit must not become what does
        value = value.clamp(-(2**31), 2**31 - 1)
    return value.to(device=device, dtype=torch.int32)
