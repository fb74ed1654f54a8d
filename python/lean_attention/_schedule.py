"""schedule(): who computes what, for any batch and number of workers, without computing it."""

from __future__ import annotations

import json
from typing import Any, Optional, Sequence

import numpy as np

from lean_attention import _core
from lean_attention._options import Options, flag

_TEXT, _JSON, _SVG = range(3)


class Schedule:
    """The tile map of one call: prints as text, converts to JSON, draws itself.

    Attributes:
        shares: one entry a worker: its tiles, its cost, its segments (sequence, kv_head, row_block, tile_begin,
            tile_end, contributor of contributors), in the order of the work.
        summary: totals and balance (mean / max over the workers).
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self._arguments = arguments
        self._map: dict[str, Any] = json.loads(self.to_json())

    def to_json(self) -> str:
        """The tile map as JSON: plan, summary, and the segments of each worker."""
        return _core.schedule(_JSON, *self._arguments)

    def to_dict(self) -> dict[str, Any]:
        """What to_json() writes, as a dict."""
        return self._map

    def to_svg(self) -> str:
        """A drawing: a row is a worker, a bar is its work."""
        return _core.schedule(_SVG, *self._arguments)

    @property
    def shares(self) -> list[dict[str, Any]]:
        return self._map["shares"]

    @property
    def summary(self) -> dict[str, Any]:
        return self._map["summary"]

    def __str__(self) -> str:
        return _core.schedule(_TEXT, *self._arguments)

    def __repr__(self) -> str:
        return f"<Schedule {self._map['policy']}: {self.summary['tiles']} tiles on {self._map['workers']} workers>"

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def plot(self, axes: Any = None) -> Any:
        """Draws with matplotlib: a row is a worker, a bar a segment in tiles, coloured by sequence. Returns the axes."""
        import matplotlib.pyplot as pyplot

        if axes is None:
            _, axes = pyplot.subplots(figsize=(10, 0.5 + 0.22 * len(self.shares)))
        colours = pyplot.get_cmap("tab20")
        for worker, share in enumerate(self.shares):
            begin = 0
            for segment in share["segments"]:
                tiles = segment["tile_end"] - segment["tile_begin"]
                axes.barh(worker, tiles, left=begin, color=colours(segment["sequence"] % colours.N), edgecolor="white")
                begin += tiles
        axes.invert_yaxis()
        axes.set_xlabel("LeanTiles")
        axes.set_ylabel("worker")
        axes.set_title(repr(self)[1:-1])
        return axes


def schedule(
    seqlens: Sequence[int],
    *,
    q_heads: int,
    kv_heads: Optional[int] = None,
    head_dim: int = 128,
    value_dim: Optional[int] = None,
    q_tokens: int = 1,
    dtype: str = "float16",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    leftpad: Optional[Sequence[int]] = None,
    options: Optional[Options] = None,
) -> Schedule:
    """The schedule decode() would follow on the CPU for a batch of these lengths.

    Args:
        seqlens: tokens of each sequence.
        q_heads, kv_heads: kv_heads defaults to q_heads.
        head_dim, value_dim: value_dim defaults to head_dim.
        q_tokens: query tokens of each sequence.
        dtype: "float32", "float16" or "bfloat16".
        causal, window, leftpad: as decode() takes them.
        options: policy, fix-up and workers; ``Options(workers=132)`` explains 132 workers on any machine.

    Raises:
        ValueError, NotImplementedError: as decode() would.
    """
    if dtype not in _core.QUERY_DTYPES:
        raise ValueError(f"dtype = {dtype!r}: allowed {', '.join(_core.QUERY_DTYPES)}")
    lengths = _whole("seqlens", seqlens)
    pads = None if leftpad is None else _whole("leftpad", leftpad)
    for name, array in (("seqlens", lengths), ("leftpad", pads)):
        if array is not None and array.shape != (lengths.size,):
            raise ValueError(f"{name}: shape {array.shape}: expected one number for each sequence")
    if pads is not None and (pads > lengths).any():
        raise ValueError(f"leftpad = {leftpad!r}: allowed 0 to each sequence's length, {lengths.tolist()}")
    if not isinstance(window, (tuple, list)) or len(window) != 2 or any(isinstance(side, bool) for side in window):
        raise TypeError(f"window: {window!r}: a pair (left, right) is needed, -1 for all")
    sizes = (
        lengths.size, q_heads, q_heads if kv_heads is None else kv_heads, head_dim, value_dim or head_dim, q_tokens,
        int(lengths.max(initial=0)), _core.QUERY_DTYPES.index(dtype), int(flag("causal", causal)), *window,
    )  # fmt: skip
    return Schedule((sizes, lengths, pads, options))


def _whole(name: str, values: Any) -> np.ndarray:
    """Lengths as int32; what is none is refused."""
    given = np.asarray(values)
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"{name} = {values!r}: integers are needed")
    if given.size and not 0 <= given.min() <= given.max() < 2**31:
        raise ValueError(f"{name} = {values!r}: allowed 0 to 2147483647")
    return given.astype(np.int32)
