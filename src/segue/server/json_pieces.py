"""Decodes large JSON values in pieces.

A call into C keeps the interpreter lock. Decoding an array of millions of numbers in one call would hold up
every other request, even from another thread. So each call here decodes a bounded amount: ``PIECE`` bytes of
values, or a number of strings that was counted before. The functions raise ``MisfitError`` or
``msgspec.DecodeError`` for values of other types and for bytes that are not JSON.

Where the items of a value above ``AT_ONCE`` bytes begin and end is searched for with numpy, slice by slice,
because numpy lets other threads run while it works. It takes longer than a parser's scan, but such a scan
would hold up all other work: for 55 ms with 16 MiB of brackets.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")
PIECE = 1 << 14  # bytes; the slowest pieces, floats that need exact arithmetic, take 25 ms
AT_ONCE = 1 << 20  # bytes that may be scanned in one call
SLICE = 1 << 18  # bytes that numpy scans in one call
GROUP = 1 << 18  # bytes of neighbouring items that are decoded together
MAX_ITEMS = 1 << 18  # in an array of strings

_FIRST = re.compile(rb"\[\s*(.)", re.DOTALL)
_AFTER_ARRAY = re.compile(rb"\s*(?:,\s*(?=\[)|\Z)")
_NO_BACKSLASH = re.compile(rb"\\*[^\\]")
_NESTING = np.zeros(256, np.int8)
_NESTING[list(b"[{")], _NESTING[list(b"]}")] = 1, -1

_ids = msgspec.json.Decoder(list[int])
_strings = msgspec.json.Decoder(list[str])

TooMany = Callable[[int], None]  # raises an error if the given count is above its bound


class MisfitError(Exception):
    """A value has another type than its field takes, or is not JSON."""


class TooManyItemsError(Exception):
    """There are more items than are allowed; ``args``: a lower bound of them, the most allowed, the word."""


def count_strings(data: bytes) -> int:
    """Returns a lower bound of the number of strings in a JSON value: at least half of the number.

    Every string has two quotes. A quote behind a backslash either is escaped and part of the string, or it
    ends a string whose last character is an escaped backslash; the latter occurs at most once per string.
    """
    return (count(data, b'"') - count(data, b'\\"')) // 2


def count(data: bytes, item: bytes) -> int:
    """Returns ``data.count(item)``, counted slice by slice; ``item`` is one byte, or two that differ."""
    # Slices overlap by one byte less than the item has, so that an item across a cut is counted once.
    return sum(data.count(item, start, start + SLICE + len(item) - 1) for start in range(0, len(data), SLICE))


def strings(data: bytes, check: TooMany) -> list[str]:
    """Decodes an array of strings; ``check`` is first called with a lower bound of their number."""
    check(count_strings(data))
    try:
        return [text for _, group in groups(data, MAX_ITEMS) for text in _strings.decode(group)]
    except TooManyItemsError:  # `check` allowed the strings, so other items are among them
        raise MisfitError from None


def token_ids(data: bytes, check: TooMany) -> array[int]:
    """Decodes an array of integers; ``check`` is first called with their number.

    Raises:
        OverflowError: an integer needs more than 32 bits.
    """
    ids = array("i")
    if inner := _inner(data, b"[]"):
        if inner[:1] not in b"-0123456789":
            raise MisfitError
        check(count(inner, b",") + 1)
        for piece in _split(inner):
            ids += array("i", _ids.decode(b"[%b]" % piece))
    return ids


def arrays(data: bytes, decode: Callable[[bytes], T], check: TooMany) -> list[T]:
    """Decodes an array of arrays without brackets in them; ``check`` is first called with their number.

    Each inner array is given to ``decode`` as bytes, with its brackets.
    """
    check(count(data, b"[") - 1)
    found: list[T] = []
    inner, start = _inner(data, b"[]"), 0
    if inner and not inner.startswith(b"["):
        raise MisfitError
    while start < len(inner):
        end = inner.find(b"]", start) + 1
        after = _AFTER_ARRAY.match(inner, end)
        if after is None:
            raise MisfitError
        found.append(decode(inner[start:end]))
        start = after.end()
    return found


def members(data: bytes, decoder: msgspec.json.Decoder[dict[str, Any]], check: TooMany) -> dict[str, Any]:
    """Decodes an object of small values whose names contain neither commas nor colons.

    ``check`` is first called with the number of members, repeated names included.
    """
    inner = _inner(data, b"{}")
    check(count(inner, b":"))
    found: dict[str, Any] = {}
    for piece in _split(inner):
        found |= decoder.decode(b"{%b}" % piece)
    return found


def first_byte(data: bytes) -> bytes:
    """Returns the first byte of an array's first item, or its closing bracket if the array is empty."""
    found = _FIRST.match(data)
    if found is None:
        raise MisfitError
    return found[1]


def _inner(data: bytes, brackets: bytes) -> bytes:
    """Returns the bytes between the outer brackets, without white space around them."""
    if data[:1] + data[-1:] != brackets:
        raise MisfitError
    return data[1:-1].strip()


def _split(inner: bytes) -> Iterator[bytes]:
    """Yields parts cut at a comma after about ``PIECE`` bytes; an item that is longer is not a number."""
    if inner.endswith(b","):  # no decoder would see it at the end of a piece
        raise MisfitError
    start = 0
    while start < len(inner):
        end = inner.find(b",", start + PIECE)
        end = len(inner) if end < 0 else end
        if end - start > 2 * PIECE:
            raise MisfitError
        yield inner[start:end]
        start = end + 1


def cut(data: bytes, most: int, what: str = "items") -> list[tuple[int, int]]:
    """Returns the begin and end of each item between the outer brackets; items may be of any type.

    Args:
        data: an object or an array, with nothing before it or behind it.
        most: number of items that are allowed.
        what: what the items are called in an error.

    Raises:
        TooManyItemsError: there are more than ``most`` items.
        MisfitError: the brackets or the quotes do not match.
    """
    commas: list[int] = []
    level = inside = start = 0
    while start < len(data):
        # The slice goes on up to a byte that is no backslash, so that no escape is cut in two.
        last = _NO_BACKSLASH.match(data, min(start + SLICE, len(data)) - 1)
        if last is None:
            raise MisfitError
        text = np.frombuffer(data, np.uint8, last.end() - start, start)
        # Of each byte: whether it is in a string, and how many brackets are open. `inside` and `level` carry
        # both over from the slice before. A comma at level 1 separates items.
        in_string = (np.cumsum(_quotes(text), dtype=np.int32) + inside) & 1
        levels = np.cumsum(np.where(in_string, 0, _NESTING[text]), dtype=np.int32) + level
        commas += (np.flatnonzero((text == ord(",")) & (in_string == 0) & (levels == 1)) + start).tolist()
        if len(commas) >= most:
            raise TooManyItemsError(len(commas) + 1, most, what)
        closed = np.flatnonzero(levels < 1)  # only the last byte of all may close the outer bracket
        if closed.size and closed[0] + start != len(data) - 1:
            raise MisfitError
        level, inside, start = int(levels[-1]), int(in_string[-1]), last.end()
    if level or inside or not data:
        raise MisfitError
    if not commas and not data[1:-1].strip():
        return []
    return list(zip([1, *(comma + 1 for comma in commas)], [*commas, len(data) - 1], strict=True))


def groups(data: bytes, most: int, what: str = "items") -> Iterator[tuple[int, bytes]]:
    """Yields JSON arrays of neighbouring items of an array, each with the index of its first item.

    An array of at most ``AT_ONCE`` bytes is yielded whole; a longer one is cut as :func:`cut` does.
    """
    if len(data) <= AT_ONCE:
        yield 0, data
        return
    if not data.startswith(b"["):
        raise MisfitError
    ranges, first = cut(data, most, what), 0
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
        # Of each byte: where the last byte before it is that is no backslash; -1: there is none.
        others = np.where(backslashes, np.int32(-1), np.arange(len(text), dtype=np.int32))
        others = np.concatenate([np.array([-1], np.int32), np.maximum.accumulate(others)])
        at = np.flatnonzero(quotes)
        quotes[at[(at - 1 - others[at]) % 2 == 1]] = False
    return quotes
