"""Large JSON values, decoded in pieces.

A call into C keeps the interpreter to itself. Decoding an array of millions of numbers in one call holds up
every other request, from whichever thread it is made. Here each call works on a bounded amount: the values of
``PIECE`` bytes, or a number of strings that was counted before. The functions raise ``MisfitError`` or
``msgspec.DecodeError`` for values of other types, and for what is no JSON.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from segue.server.json_slices import SLICE, MisfitError, TooManyItemsError, cut, groups

PIECE = 1 << 14  # bytes; the slowest, of floats that need exact arithmetic, take 25 ms
AT_ONCE = 1 << 20  # bytes that are scanned in one call
MAX_ITEMS = 1 << 18  # of an array of strings
_OPEN = re.compile(rb"[\[{]\s*")
_CLOSE = re.compile(rb"\s*[\]}]")
_BETWEEN = re.compile(rb"\s*,?\s*")

_ids = msgspec.json.Decoder(list[int])
_strings = msgspec.json.Decoder(list[str])

TooMany = Callable[[int], None]  # raises an error if a count is above its bound


def count_strings(data: bytes) -> int:
    """At least half as many as there are strings in a JSON value, and never more than there are.

    Every string has two quotes. A backslash before a quote makes it a part of the string, or it is the end of
    an escaped backslash, once per string at most.
    """
    return (count(data, b'"') - count(data, b'\\"')) // 2


def count(data: bytes, item: bytes) -> int:
    """``data.count(item)`` for one byte, or two that differ, a slice at a time."""
    return sum(data.count(item, start, start + SLICE + len(item) - 1) for start in range(0, len(data), SLICE))


def strings(data: bytes, check: TooMany) -> list[str]:
    """An array of strings; ``check`` is given their number, or less, before they are decoded."""
    check(count_strings(data))
    if len(data) <= AT_ONCE:
        return _strings.decode(data)
    if not data.startswith(b"["):
        raise MisfitError
    try:
        ranges = cut(data, MAX_ITEMS)
    except TooManyItemsError:  # they are not all strings
        raise MisfitError from None
    return [text for _, group in groups(data, ranges) for text in _strings.decode(group)]


def token_ids(data: bytes, check: TooMany) -> array[int]:
    """An array of integers; ``check`` is given their number before they are decoded.

    Raises:
        OverflowError: one that needs more than 32 bits.
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
    """An array of arrays of integers, as :func:`token_ids`; ``check`` is given the number of arrays."""
    check(count(data, b"[") - 1)
    return [token_ids(data[start:end], check_each) for start, end in _arrays(data)]


def small_arrays(data: bytes, decoder: msgspec.json.Decoder[list[Any]], check: TooMany) -> list[Any]:
    """An array of arrays of at most ``PIECE`` bytes each; ``decoder`` takes several of them."""
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
    """An object of small values whose names have neither commas nor colons.

    ``check`` is given the number of members before they are decoded, those of equal names included.
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
    """The first byte of the first item of an array, or that of its end."""
    opening = _OPEN.match(data)
    if opening is None or not data.startswith(b"["):
        raise MisfitError
    return data[opening.end() : opening.end() + 1]


def _inner(data: bytes) -> bytes:
    """What is between the brackets."""
    opening = _OPEN.match(data)
    if opening is None or data[:1] + data[-1:] not in (b"[]", b"{}"):
        raise MisfitError
    return data[opening.end() : -1].rstrip()


def _split(inner: bytes) -> Iterator[bytes]:
    """Cut behind a comma about every ``PIECE`` bytes; an item that is longer is no number."""
    start = 0
    while start < len(inner):
        end = inner.find(b",", start + PIECE)
        end = len(inner) if end < 0 else end
        if end - start > 2 * PIECE:
            raise MisfitError
        yield inner[start:end]
        start = end + 1


def _arrays(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each inner array begins and ends."""
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
