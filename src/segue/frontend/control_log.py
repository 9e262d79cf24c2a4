"""What happened to an engine or a router besides requests: the last of it, with times, for people to read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from segue.errors import SegueError
from segue.messages.control import PauseMode
from segue.messages.weight_update import WeightNotice

MOST_ENTRIES = 300  # older ones are dropped
MOST_CHARS = 300  # of an entry's text: errors may quote what a client sent
LogKind = Literal["life", "pause", "weights", "flush", "abort", "memory", "role", "worker", "control"]


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened."""

    number: int  # in the order of the ends, from 1
    at: float  # when it ended, in seconds since 1970
    kind: LogKind
    text: str
    seconds: float | None = None  # that it took, or that what it ended had lasted; None: that is not known
    failed: bool = False


@dataclass(slots=True)
class Happening:
    """Something that is under way; whoever does it may add to the ``text`` of its entry."""

    text: str


@dataclass(slots=True)
class ControlLog:
    """The last ``MOST_ENTRIES`` entries, oldest first."""

    entries: deque[LogEntry] = field(default_factory=lambda: deque(maxlen=MOST_ENTRIES))
    num_entries: int = 0  # of all, those included that were dropped

    def add(self, kind: LogKind, text: str, seconds: float | None = None, *, failed: bool = False) -> None:
        """Note what has just happened."""
        self.num_entries += 1
        if len(text) > MOST_CHARS:
            text = text[: MOST_CHARS - 1] + "…"
        entry = LogEntry(
            number=self.num_entries, at=time.time(), kind=kind, text=text, seconds=seconds, failed=failed
        )
        self.entries.append(entry)

    @contextmanager
    def timed(self, kind: LogKind, text: str) -> Iterator[Happening]:
        """Note what the block does once it has ended, with its seconds; a SegueError is noted and raised."""
        began, happening = time.monotonic(), Happening(text)
        try:
            yield happening
        except SegueError as error:
            self.add(kind, f"{text}: {error.message}", time.monotonic() - began, failed=True)
            raise
        self.add(kind, happening.text, time.monotonic() - began)

    def since(self, number: int) -> list[LogEntry]:
        """Returns the entries with higher numbers, as far as they are kept."""
        missing = min(self.num_entries - number, len(self.entries))
        return [self.entries[index] for index in range(len(self.entries) - missing, len(self.entries))]


@dataclass(slots=True)
class EngineLog(ControlLog):
    """The log of an engine, whose scheduler tells of pauses and weights. Times are monotonic, in seconds."""

    _paused_at: float = 0.0  # when the present pause began; 0: there is none

    def note_pause(self, mode: PauseMode | None, now: float) -> None:
        """Take that the mode of the pause is another one; log its end, whoever or whatever ended it."""
        if mode is not None:
            self._paused_at = self._paused_at or now
            return
        self.add("pause", "generation continues", now - self._paused_at)
        self._paused_at = 0.0

    def note_weights(self, before: WeightNotice, notice: WeightNotice) -> None:
        """Log what has happened to the weights between two notices."""
        if notice.num_committed != before.num_committed:
            timings = notice.last.get("timings", {})
            stopped = f"; generation stopped for {timings['write_s'] * 1e3:.1f} ms" if timings else ""
            self.add("weights", f"version {notice.version} is served{stopped}", timings.get("total_s"))
        elif notice.version != before.version:
            self.add("weights", f"the weights are called version {notice.version}")
        if notice.num_failed != before.num_failed:
            self.add("weights", "an update failed", failed=True)
        if notice.poisoned is not None and before.poisoned is None:
            self.add("weights", f"the weights are poisoned: {notice.poisoned}", failed=True)
