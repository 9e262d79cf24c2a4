"""Finds where the members of a large JSON object, or the items of an array, begin and end.

The search uses numpy, slice by slice, because numpy lets other threads run while it works. It takes longer
than a parser's scan, but such a scan would hold up all other work: for 55 ms with 16 MiB of brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

SLICE = 1 << 18  # bytes
GROUP = 1 << 18  # bytes of neighbouring items that are decoded together
_NO_BACKSLASH = re.compile(rb"\\*[^\\]")
_NESTING = np.zeros(256, np.int8)
_NESTING[list(b"[{")], _NESTING[list(b"]}")] = 1, -1

Range = tuple[int, int]


class MisfitError(Exception):
    """A value has another type than its field takes, or is not JSON."""


class TooManyItemsError(Exception):
    """There are more items than are allowed: ``args[0]`` or more."""


def cut(data: bytes, most: int) -> list[Range]:
    """Returns the begin and end of each item between the outer brackets; items may be of any type.

    Args:
        data: an object or an array, with nothing before it or behind it.
        most: number of items that are allowed.

    Raises:
        TooManyItemsError: there are more than ``most`` items.
        MisfitError: the brackets or the quotes do not match.
    """
    commas: list[int] = []
    level = inside = start = 0
    while start < len(data):
        last = _NO_BACKSLASH.match(data, min(start + SLICE, len(data)) - 1)
        if last is None:
            raise MisfitError
        text = np.frombuffer(data, np.uint8, last.end() - start, start)
        strings = (np.cumsum(_quotes(text), dtype=np.int32) + inside) & 1
        levels = np.cumsum(np.where(strings, 0, _NESTING[text]), dtype=np.int32) + level
        commas += (np.flatnonzero((text == ord(",")) & (strings == 0) & (levels == 1)) + start).tolist()
        if len(commas) >= most:
            raise TooManyItemsError(len(commas) + 1)
        closed = np.flatnonzero(levels < 1)
        if closed.size and closed[0] + start != len(data) - 1:
            raise MisfitError
        level, inside, start = int(levels[-1]), int(strings[-1]), last.end()
    if level or inside or not data:
        raise MisfitError
    if not commas and not data[1:-1].strip():
        return []
    return list(zip([1, *(comma + 1 for comma in commas)], [*commas, len(data) - 1], strict=True))


def groups(data: bytes, ranges: list[Range]) -> Iterator[tuple[int, bytes]]:
    """Yields JSON arrays of neighbouring items of an array, each with the index of its first item."""
    first = 0
    for index, (_, end) in enumerate(ranges):
        begin = ranges[first][0]
        if end - begin > GROUP or index == len(ranges) - 1:
            yield first, b"[%b]" % data[begin:end]
            first = index + 1


def _quotes(text: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a mask of the quotes that delimit strings: none is behind an odd number of backslashes."""
    quotes: np.ndarray[Any, Any] = text == ord('"')
    backslashes = text == ord("\\")
    if backslashes.any():
        others = np.where(backslashes, np.int32(-1), np.arange(len(text), dtype=np.int32))
        others = np.concatenate([np.array([-1], np.int32), np.maximum.accumulate(others)])
        at = np.flatnonzero(quotes)
        quotes[at[(at - 1 - others[at]) % 2 == 1]] = False
    return quotes
