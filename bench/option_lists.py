"""Lists that options take, with commas between the items: argparse's `type`."""

from __future__ import annotations

import argparse
from typing import Any, Callable, Collection


def list_of(read: Callable[[str], Any] = str, *, known: Collection[str] = ()) -> Callable[[str], list]:
    """Reads each item. An empty one is a slip, and so is one that is not `known`, where that says what there is."""

    def read_all(text: str) -> list:
        found = []
        for item in text.split(","):
            if not item:
                raise argparse.ArgumentTypeError(f"{text!r} has an empty item: words with one comma between them")
            if known and item not in known:
                raise argparse.ArgumentTypeError(f"{item!r}: there are {', '.join(known)}")
            try:
                found.append(read(item))
            except ValueError as error:
                raise argparse.ArgumentTypeError(f"{item!r}: {error}") from None
        return found

    return read_all
