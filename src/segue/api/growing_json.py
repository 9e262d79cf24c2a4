"""JSON of lists and texts that only grow, for streams whose events repeat all that came before.

Encoding all of it anew for every token takes time in proportion to the square of the output's length. Here
each item, and each piece of a text, is encoded once, when it is added: an event costs what is new, and a copy
of the bytes before it.

What is kept lacks only its closing bracket or quote, and is otherwise the JSON of the whole, to the byte.
For a text that is true because every character is encoded by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import json

_encode = json.Encoder().encode


class GrowingList:
    """The JSON of a list to which items are added: ``unclosed``, and a bracket."""

    __slots__ = ("num_items", "unclosed")

    def __init__(self) -> None:
        """Begin with an empty list."""
        self.unclosed = bytearray(b"[")
        self.num_items = 0

    def extend(self, items: Sequence[Any]) -> None:
        """Add items, which msgspec must be able to encode."""
        if items:
            added = _encode(items)[1:-1]
            if self.num_items:
                self.unclosed += b","
            self.unclosed += added
            self.num_items += len(items)

    @property
    def json(self) -> bytes:
        """The list so far."""
        return b"".join((self.unclosed, b"]"))


class GrowingText:
    """The JSON of a text to which pieces are added: ``unclosed``, and a quote."""

    __slots__ = ("unclosed",)

    def __init__(self) -> None:
        """Begin with an empty text."""
        self.unclosed = bytearray(b'"')

    def extend(self, piece: str) -> None:
        """Add a piece, which has no lone surrogates: JSON in UTF-8 cannot write them."""
        if piece:
            self.unclosed += _encode(piece)[1:-1]

    @property
    def json(self) -> bytes:
        """The text so far."""
        return b"".join((self.unclosed, b'"'))
