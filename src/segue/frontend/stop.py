"""Stop strings in a stream of text."""

from __future__ import annotations


class StopMatcher:
    """Finds the stop string that ends first, and holds back text that may be the beginning of one.

    Text is read as if character by character, so the result does not depend on how it was cut into tokens.
    """

    __slots__ = ("_held", "_keep", "_stops")

    def __init__(self, stops: tuple[str, ...], *, keep: bool = False) -> None:
        self._stops = stops
        self._keep = keep  # whether the stop string stays in the text
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; returns what may be shown, and the stop string that was completed."""
        buffer = self._held + text
        found: str | None = None
        start, end = 0, len(buffer) + 1
        for stop in self._stops:
            at = buffer.find(stop)
            if at >= 0 and (at + len(stop), at) < (end, start):
                found, start, end = stop, at, at + len(stop)
        if found is not None:
            self._held = ""
            return buffer[: end if self._keep else start], found
        first = self._first_partial(buffer)
        self._held = buffer[first:]
        return buffer[:first], None

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _first_partial(self, buffer: str) -> int:
        """Where the longest suffix begins that a stop string could continue."""
        first = len(buffer)
        for stop in self._stops:
            at = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1), first)
            while at >= 0:
                if stop.startswith(buffer[at:]):
                    first = at
                    break
                at = buffer.find(stop[0], at + 1, first)
        return first
