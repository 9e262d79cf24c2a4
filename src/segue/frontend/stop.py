"""Stop strings in a stream of text."""

from __future__ import annotations


class _Beginning:
    """How much of a stop string's beginning the text ends with.

    However often a long beginning turns out to be none, the time is proportional to the text (Knuth, Morris
    and Pratt).
    """

    __slots__ = ("_borders", "_stop", "size")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0]  # of its first 1, 2, … characters: how many of them they also end with
        self.size = 0

    def push(self, text: str) -> None:
        """Take more text, which does not complete the stop string."""
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
    """Finds the stop string that ends first, and holds back text that may be the beginning of one.

    Text is read as if character by character, so the result does not depend on how it was cut into tokens.
    """

    __slots__ = ("_beginnings", "_held", "_keep", "_stops")

    def __init__(self, stops: tuple[str, ...], *, keep: bool = False) -> None:
        self._stops = stops
        self._beginnings = [_Beginning(stop) for stop in stops]
        self._keep = keep  # whether the stop string stays in the text
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; returns what may be shown, and the stop string that was completed."""
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
        for beginning in self._beginnings:
            beginning.push(text)
        first = len(buffer) - max((beginning.size for beginning in self._beginnings), default=0)
        self._held = buffer[first:]
        return buffer[:first], None

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held
