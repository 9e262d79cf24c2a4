"""Finds stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class _PrefixMatch:
    """Tracks the longest prefix of a stop string that the text ends with. ``size`` is its length.

    The time is proportional to the text, however often a long prefix fails to match (Knuth-Morris-Pratt).
    """

    __slots__ = ("_borders", "_stop", "size")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0]  # for each prefix of the stop string: the length of its longest border
        self.size = 0

    def push(self, text: str) -> None:
        """Take more text. It must not complete the stop string."""
        stop, size, at = self._stop, self.size, 0
        while at < len(text):
            if size == 0 and (at := text.find(stop[0], at)) < 0:
                break
            if text[at] == stop[size]:
                size, at = size + 1, at + 1
                if size > len(self._borders):
                    self._add_border()
            else:
                size = self._borders[size - 1]
        self.size = size

    def _add_border(self) -> None:
        stop, borders = self._stop, self._borders
        size, last = borders[-1], stop[len(borders)]
        while size and stop[size] != last:
            size = borders[size - 1]
        borders.append(size + (stop[size] == last))


class StopMatcher:
    """Finds the stop string that ends first, and holds back text that may be the beginning of a stop string.

    The result is as if text came character by character, so it does not depend on the cuts between tokens.
    """

    __slots__ = ("_held", "_keep", "_prefixes", "_stops")

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = stops
        self._prefixes = [_PrefixMatch(stop) for stop in stops]
        self._keep = keep  # whether the stop string stays in the text
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text. Return the text that may be shown, and the stop string that is complete, if any."""
        buffer = self._held + text
        found: str | None = None
        start, end = 0, len(buffer) + 1
        for stop in self._stops:
            at = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            if at >= 0 and (at + len(stop), at) < (end, start):
                found, start, end = stop, at, at + len(stop)
        if found is not None:
            self._held = ""
            return buffer[: end if self._keep else start], found
        for prefix in self._prefixes:
            prefix.push(text)
        first = len(buffer) - max((prefix.size for prefix in self._prefixes), default=0)
        self._held = buffer[first:]
        return buffer[:first], None

    def flush(self) -> str:
        """Return the text that was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held
