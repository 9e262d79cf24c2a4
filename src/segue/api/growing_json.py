"""JSON of lists and texts that only grow, for streams whose events repeat all that came before.

Encoding all of it anew for every token takes time in proportion to the square of the output's length. Here
each item, and each piece of a text, is encoded once, when it is added: an event costs what is new, and a copy
of the bytes before it.

The JSON is always complete: what is added takes the place of the closing bracket or quote. So it has the same
bytes as the JSON of the whole. For a text that is true because every character is encoded by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import json

_encode = json.Encoder().encode


class GrowingList:
    """The JSON of a list to which items are added; ``json`` must not be changed from outside."""

    __slots__ = ("json", "num_items")

    def __init__(self) -> None:
        """Begin with an empty list."""
        self.json = bytearray(b"[]")
        self.num_items = 0

    def extend(self, items: Sequence[Any]) -> None:
        """Add items, which msgspec must be able to encode."""
        if not items:
            return
        added = _encode(items)
        if self.num_items:
            self.json[-1:] = b","
            self.json += added[1:]
        else:
            self.json[:] = added
        self.num_items += len(items)


class GrowingText:
    """The JSON of a text to which pieces are added; ``json`` must not be changed from outside."""

    __slots__ = ("json",)

    def __init__(self) -> None:
        """Begin with an empty text."""
        self.json = bytearray(b'""')

    def extend(self, piece: str) -> None:
        """Add a piece, which has no lone surrogates: JSON in UTF-8 cannot write them."""
        if piece:
            self.json[-1:] = _encode(piece)[1:]
