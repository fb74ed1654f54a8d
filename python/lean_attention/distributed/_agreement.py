"""That all ranks of a group are asked for the same: compared where a kind of call is new, on the hosts, with a time limit."""

from __future__ import annotations

import datetime
import weakref
from typing import Any, Mapping, Optional, Sequence

import torch
import torch.distributed as dist


_MOST_SEEN = 1 << 14


def timeout_of(group: Any) -> datetime.timedelta:
    """How long collectives of a group wait for a rank: what init_process_group() or new_group() was given."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):  # the group has no backend for this device, or one without a timeout
            continue
    return dist.default_pg_timeout


def membership(group: Any) -> tuple[Any, int, int]:
    """A group, by default that of all processes, this process's rank in it, and how many there are."""
    group = dist.group.WORLD if group is None else group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("group: this process is not in it")
    return group, rank, ranks


class WeakGroup:
    """An attribute with a process group that torch.distributed keeps until destroy_process_group(), and its owner does not.

    A group ends its threads when nobody holds it. Those of gloo drop the tensors of the last collective for the
    interpreter's lock: a group that outlives destroy_process_group() may want it while the interpreter ends, which ends the
    process by std::terminate().
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, owner: Any, group: Any) -> None:
        owner.__dict__[self._name] = weakref.ref(group)

    def __get__(self, owner: Any, kind: Optional[type] = None) -> Any:
        if owner is None:
            return self
        group = owner.__dict__[self._name]()
        if group is None:
            raise RuntimeError("lean_attention.distributed: the process group has been destroyed")
        return group


class Agreement:
    """Compares descriptions over a gloo group of its own, so that it neither meets the group's traffic nor waits for a device.

    All ranks of `group` make one at the same time. A description that this rank has seen agreed on costs a look-up.
    """

    _group = WeakGroup()

    def __init__(self, group: Any, timeout: Optional[datetime.timedelta] = None, every_time: bool = False) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.timeout = timeout_of(group) if timeout is None else timeout
        self._every_time = every_time
        self._seen: set = set()
        self._group = self._within_timeout(
            "a group for checks",
            lambda: dist.new_group(self.ranks, timeout=self.timeout, backend="gloo", use_local_synchronization=True),
        )

    def reach(self, asked: Mapping[str, Any], again: bool = False) -> None:
        """Returns when all ranks ask for this. `again`: compared even if it has been agreed on before.

        Raises:
            ValueError: on every rank, naming the first argument that differs, and the ranks.
            RuntimeError: a rank did not come within the timeout.
        """
        key = tuple(asked.items())
        if key in self._seen and not (again or self._every_time):
            return
        answers = self.gather("agreement on the arguments", asked)
        names = list(dict.fromkeys(name for answer in answers for name in answer))
        for name in names:
            self._compare(name, [answer.get(name) for answer in answers])
        remember(key, self._seen)

    def gather(self, what: str, value: Any) -> list:
        """Every rank's value, by rank, on every rank; `what` it is for.

        Raises:
            RuntimeError: a rank did not come within the timeout.
        """
        answers: list = [None] * len(self.ranks)
        self._within_timeout(what, lambda: dist.all_gather_object(answers, value, group=self._group))
        return answers

    def _compare(self, name: str, values: list) -> None:
        differ = [rank for rank, value in zip(self.ranks, values) if value != values[0]]
        if differ:
            other = values[self.ranks.index(differ[0])]
            raise ValueError(
                f"{name}: rank {listed(differ)} has {_in_words(other)}, rank {self.ranks[0]} has {_in_words(values[0])}: "
                "all ranks of a group must be asked for the same"
            )

    def _within_timeout(self, what: str, call: Any) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise RuntimeError(failure(what, self.ranks, self.timeout, error)) from error


def remember(kind: tuple, seen: set) -> None:
    """Adds a kind of call. A caller whose numbers never repeat must not fill the memory; all ranks forget in the same call."""
    if len(seen) >= _MOST_SEEN:
        seen.clear()
    seen.add(kind)


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def failure(what: str, ranks: list[int], timeout: datetime.timedelta, error: RuntimeError) -> str:
    return (
        f"lean_attention.distributed: {what} among ranks {listed(ranks)} failed: a rank ended, or did not come within "
        f"{timeout.total_seconds():g} s, or did something else: {str(error).strip().partition(chr(10))[0]}"
    )


def described(value: Any) -> Any:
    """What of an argument must be the same on all ranks, as plain values: a tensor's type and shape, a number itself."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.device.type
    if isinstance(value, float) and value != value:
        return "nan"  # which equals itself, as the number does not
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(each, (bool, int, float)) for each in value):
        return tuple(value)
    if hasattr(value, "__dlpack__") or hasattr(value, "__array__"):  # whose repr shows numbers
        return str(type(value))
    return repr(value)


def _in_words(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], str):
        return f"{value[0]} {list(value[1])} on {value[2]}"
    return "none" if value is None else repr(value)
