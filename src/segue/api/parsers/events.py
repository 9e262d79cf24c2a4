"""The events that parsers make of a model's text, and what all parsers share.

A parser is fed text and gives events. What it has given after some text depends on that text alone, and not
on the pieces in which it came: whoever goes on with a reply elsewhere is fed what the client has already, and
is then in the same state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

MOST_SPACE = 64  # characters of white space that wait for what comes behind them


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that comes before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call, whose arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the JSON object that has the arguments of the call that has begun."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete: its arguments are one JSON object."""


@dataclass(frozen=True, slots=True)
class CallBroken:
    """What looked like a call is none, or is not complete. It may have begun."""

    raw: str  # all of its text, with the mark before it
    rest: str  # the end of that text which no `Arguments` have given; `raw`, if the call has not begun


Event = Content | Reasoning | CallBegin | Arguments | CallEnd | CallBroken


class Parser(Protocol):
    """Makes events of one text."""

    def push(self, text: str) -> list[Event]:
        """Take more text; returns what is certain now."""
        ...

    def finish(self) -> list[Event]:
        """Returns what the text ends with; nothing may be pushed afterwards."""
        ...


@dataclass(slots=True)
class SteppingParser(ABC):
    """A parser that decides, one step after the other, on the text that it holds."""

    _held: str = field(default="", init=False)  # text that was not decided on yet

    def push(self, text: str) -> list[Event]:
        """Take more text; returns what is certain now."""
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    @abstractmethod
    def finish(self) -> list[Event]:
        """Returns what the text ends with; nothing may be pushed afterwards."""

    @abstractmethod
    def _step(self, events: list[Event]) -> bool:
        """Take the next part of the text that is held; returns whether there is more to do."""


def num_held(text: str, mark: str) -> int:
    """Returns how many characters at the end of a text may begin ``mark``, which is not in it."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
    return 0


def strip_end(text: str) -> str:
    """Returns a text without the white space at its end, of which at most ``MOST_SPACE`` characters go."""
    stripped = text.rstrip()
    return text[: max(len(stripped), len(text) - MOST_SPACE)]


def split_certain(text: str, mark: str) -> tuple[str, str]:
    """Returns a text without ``mark`` in two parts: what is certain, and what waits for the text behind it.

    The beginning of a mark waits, and so does white space, which is left out before a mark.
    """
    certain = strip_end(text[: len(text) - num_held(text, mark)])
    return certain, text[len(certain) :]
