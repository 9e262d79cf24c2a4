"""What a person sees while the children start, and the lines of their logs."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TextIO

from segue.logs import logger

_CLEAR_LINE = "\r\x1b[K"  # cursor to the first column, and the rest of the line erased


class StartProgress:
    """Shows which children are ready: a terminal has one line, which is redrawn, else each change has one.

    After :meth:`finish` it only writes the children's lines. With ``as_json`` each line is a JSON object.
    """

    def __init__(
        self,
        names: Sequence[str],
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        *,
        as_json: bool = False,
    ) -> None:
        """Take the children's names, and where to write."""
        self._names = names
        self._stream = stream
        self._clock = clock
        self._began = clock()
        self._ready: set[str] = set()
        self._is_finished = False
        self._as_json = as_json
        self._is_terminal = stream.isatty() and not as_json
        self._width = max(map(len, names))

    def ready(self, name: str) -> None:
        """Note that a child is ready."""
        if self._is_finished or name in self._ready:
            return
        self._ready.add(name)
        if self._as_json:
            logger.info("%s is ready, %s", name, self._count())
        elif not self._is_terminal:
            self._write(f"{name} is ready, {self._count()}\n")
        self.redraw()

    def redraw(self) -> None:
        """Write the line of a terminal again, with the seconds until now."""
        if self._is_terminal and not self._is_finished:
            missing = ", ".join(name for name in self._names if name not in self._ready)
            self._write(f"{_CLEAR_LINE}Starting {missing}: {self._count()}")

    def line(self, name: str, text: str) -> None:
        """Write a line of a child's log behind the child's name, or with the name in the line's object."""
        if self._as_json:
            self._write(f"{_with_process(name, text)}\n")
            return
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


def _with_process(name: str, text: str) -> str:
    """Return a child's line as a JSON object that names the child; a line that is none is its message."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        found = {"time": now, "level": "info", "logger": "stderr", "message": text}
    return json.dumps(found | {"process": name}, ensure_ascii=False)


def count_roles(roles: Iterable[str]) -> str:
    """Return how many there are of each role, like "1 prefill worker, 2 decode workers"."""
    counts = Counter(roles).items()
    return ", ".join(f"{count} {role}{'' if count == 1 else 's'}" for role, count in counts)
