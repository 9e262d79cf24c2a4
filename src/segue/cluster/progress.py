"""What a person sees while the children start, and the lines of their logs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

_CLEAR_LINE = "\r\x1b[K"  # cursor to the first column, and the rest of the line erased


class StartProgress:
    """Shows which children are ready: a terminal has one line, which is redrawn, else each change has one.

    After :meth:`finish` it only writes the children's lines.
    """

    def __init__(
        self, names: Sequence[str], stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take the children's names, and where to write."""
        self._names = names
        self._stream = stream
        self._clock = clock
        self._began = clock()
        self._ready: set[str] = set()
        self._is_finished = False
        self._is_terminal = stream.isatty()
        self._width = max(map(len, names))

    def ready(self, name: str) -> None:
        """Note that a child is ready."""
        if self._is_finished or name in self._ready:
            return
        self._ready.add(name)
        if not self._is_terminal:
            self._write(f"{name} is ready, {self._count()}\n")
        self.redraw()

    def redraw(self) -> None:
        """Write the line of a terminal again, with the seconds until now."""
        if self._is_terminal and not self._is_finished:
            missing = ", ".join(name for name in self._names if name not in self._ready)
            self._write(f"{_CLEAR_LINE}Starting {missing}: {self._count()}")

    def line(self, name: str, text: str) -> None:
        """Write a line of a child's log behind the child's name."""
        shows = self._is_terminal and not self._is_finished
        self._write(f"{_CLEAR_LINE if shows else ''}{name:<{self._width}} | {text}\n")
        self.redraw()

    def finish(self) -> None:
        """Remove the line of a terminal."""
        if self._is_terminal and not self._is_finished:
            self._write(_CLEAR_LINE)
        self._is_finished = True

    def _count(self) -> str:
        return f"{len(self._ready)} of {len(self._names)} after {self._clock() - self._began:.0f} s"

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # nobody reads it any more
            return


def count_roles(roles: Iterable[str]) -> str:
    """Return how many there are of each role, like "1 prefill worker, 2 decode workers"."""
    counts = Counter(roles).items()
    return ", ".join(f"{count} {role}{'' if count == 1 else 's'}" for role, count in counts)
