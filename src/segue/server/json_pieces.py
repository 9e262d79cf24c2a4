"""Decodes large JSON values in pieces.

A call into C keeps the interpreter lock. Decoding an array of millions of numbers in one call would hold up
every other request, even from another thread. So each call here decodes a bounded amount: ``PIECE`` bytes of
values, or a number of strings that was counted before. The functions raise ``MisfitError`` or
``msgspec.DecodeError`` for values of other types and for bytes that are not JSON.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from segue.server.json_slices import SLICE, MisfitError, TooManyItemsError, cut, groups

PIECE = 1 << 14  # bytes; the slowest pieces, floats that need exact arithmetic, take 25 ms
AT_ONCE = 1 << 20  # bytes that may be scanned in one call
MAX_ITEMS = 1 << 18  # in an array of strings
_OPEN = re.compile(rb"[\[{]\s*")
_CLOSE = re.compile(rb"\s*[\]}]")
_BETWEEN = re.compile(rb"\s*,?\s*")

_ids = msgspec.json.Decoder(list[int])
_strings = msgspec.json.Decoder(list[str])

TooMany = Callable[[int], None]  # raises an error if the given count is above its bound


def count_strings(data: bytes) -> int:
    """Returns a lower bound of the number of strings in a JSON value: at least half of the number.

    Every string has two quotes. A quote behind a backslash either is escaped and part of the string, or it
    ends a string whose last character is an escaped backslash; the latter occurs at most once per string.
    """
    return (count(data, b'"') - count(data, b'\\"')) // 2


def count(data: bytes, item: bytes) -> int:
    """Returns ``data.count(item)``, counted slice by slice; ``item`` is one byte, or two that differ."""
    return sum(data.count(item, start, start + SLICE + len(item) - 1) for start in range(0, len(data), SLICE))


def strings(data: bytes, check: TooMany) -> list[str]:
    """Decodes an array of strings; ``check`` is first called with a lower bound of their number."""
    check(count_strings(data))
    if len(data) <= AT_ONCE:
        return _strings.decode(data)
    if not data.startswith(b"["):
        raise MisfitError
    try:
        ranges = cut(data, MAX_ITEMS)
    except TooManyItemsError:  # `check` allowed the strings, so other items are among them
        raise MisfitError from None
    return [text for _, group in groups(data, ranges) for text in _strings.decode(group)]


def token_ids(data: bytes, check: TooMany) -> array[int]:
    """Decodes an array of integers; ``check`` is first called with their number.

    Raises:
        OverflowError: an integer needs more than 32 bits.
    """
    ids = array("i")
    if not data.startswith(b"["):
        raise MisfitError
    inner = _inner(data)
    if inner:
        if inner[:1] not in b"-0123456789":
            raise MisfitError
        check(count(inner, b",") + 1)
        for piece in _split(inner):
            ids += array("i", _ids.decode(b"[%b]" % piece))
    return ids


def id_lists(data: bytes, check: TooMany, check_each: TooMany) -> list[array[int]]:
    """Decodes an array of arrays as :func:`token_ids` does; ``check`` is called with the number of arrays."""
    check(count(data, b"[") - 1)
    return [token_ids(data[start:end], check_each) for start, end in _arrays(data)]


def small_arrays(data: bytes, decoder: msgspec.json.Decoder[list[Any]], check: TooMany) -> list[Any]:
    """Decodes an array of arrays of at most ``PIECE`` bytes each; ``decoder`` decodes lists of them."""
    check(count(data, b"[") - 1)
    found: list[Any] = []
    first = last = -1
    for start, end in _arrays(data):
        if end - start > PIECE:
            raise MisfitError
        if first >= 0 and end - first > PIECE:
            found += decoder.decode(b"[%b]" % data[first:last])
            first = -1
        first, last = (start if first < 0 else first), end
    return found + decoder.decode(b"[%b]" % data[first:last]) if first >= 0 else found


def members(data: bytes, decoder: msgspec.json.Decoder[dict[str, Any]], check: TooMany) -> dict[str, Any]:
    """Decodes an object of small values whose names contain neither commas nor colons.

    ``check`` is first called with the number of members, repeated names included.
    """
    if not data.startswith(b"{"):
        raise MisfitError
    check(count(data, b":"))
    found: dict[str, Any] = {}
    inner = _inner(data)
    for piece in _split(inner) if inner else ():
        found |= decoder.decode(b"{%b}" % piece)
    return found


def first_byte(data: bytes) -> bytes:
    """Returns the first byte of an array's first item, or its closing bracket if the array is empty."""
    opening = _OPEN.match(data)
    if opening is None or not data.startswith(b"["):
        raise MisfitError
    return data[opening.end() : opening.end() + 1]


def _inner(data: bytes) -> bytes:
    """Returns the bytes between the outer brackets, without white space around them."""
    opening = _OPEN.match(data)
    if opening is None or data[:1] + data[-1:] not in (b"[]", b"{}"):
        raise MisfitError
    return data[opening.end() : -1].rstrip()


def _split(inner: bytes) -> Iterator[bytes]:
    """Yields parts cut at a comma after about ``PIECE`` bytes; an item that is longer is not a number."""
    start = 0
    while start < len(inner):
        end = inner.find(b",", start + PIECE)
        end = len(inner) if end < 0 else end
        if end - start > 2 * PIECE:
            raise MisfitError
        yield inner[start:end]
        start = end + 1


def _arrays(data: bytes) -> Iterator[tuple[int, int]]:
    """Yields the begin and end of each inner array."""
    opening = _OPEN.match(data)
    if opening is None or not data.startswith(b"["):
        raise MisfitError
    position, number = opening.end(), 0
    while True:
        between = _BETWEEN.match(data, position)
        assert between is not None
        if (data[position : between.end()].strip() == b",") != (number > 0):
            break
        start = between.end()
        first = data[start : start + 1]
        if first == b"]" and number == 0:
            break
        if first != b"[":
            raise MisfitError
        end = data.find(b"]", start) + 1
        yield start, end
        position, number = end, number + 1
    if not _CLOSE.fullmatch(data, position):
        raise MisfitError
