"""Tool calls as Llama 3.1 and 3.2 write them: the answer is an object with ``name`` and ``parameters``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from segue.api.parsers.call import CallReader
from segue.api.parsers.events import (
    MOST_SPACE,
    Content,
    Event,
    SteppingParser,
    num_held,
    split_certain,
    strip_end,
)

MARK = "<|python_tag|>"
_SEPARATORS = (";", ",")


@dataclass(slots=True)
class Llama3JsonParser(SteppingParser):
    """The text begins with a call, or a mark comes before one; calls may be separated by a semicolon.

    As an answer may be JSON without being a call, only objects that name one of the functions are calls.
    """

    names: Collection[str] = ()
    _state: Literal["start", "content", "call", "behind"] = "start"
    _call: CallReader | None = None

    def finish(self) -> list[Event]:
        """Returns what the text ends with."""
        events: list[Event] = []
        if self._call is not None:
            events += self._call.finish()
        if self._held and not (self._state == "behind" and not self._held.strip()):
            events.append(Content(self._held))
        self._held = ""
        return events

    def _step(self, events: list[Event]) -> bool:
        """Take the next part of the text that is held; returns whether there is more to do."""
        match self._state:
            case "start":
                return self._find_call(self._held.lstrip())
            case "behind":
                text = self._held = self._held.lstrip()
                has_separator = text.startswith(_SEPARATORS)
                return self._find_call(text[has_separator:].lstrip())
            case "content":
                return self._in_content(events)
            case "call":
                return self._in_call(events)

    def _find_call(self, text: str) -> bool:
        """Begin a call, or content, by what the text is that is held, without the space before it."""
        before = self._held[: len(self._held) - len(text)]
        if len(before) > MOST_SPACE:
            self._state = "content"
        elif text.startswith("{"):
            self._begin_call(before, text)
        elif text.startswith(MARK):
            self._begin_call(before + MARK, text[len(MARK) :])
        elif num_held(text, MARK) == len(text):  # also if it is empty
            return False
        else:
            self._state = "content"
        return True

    def _begin_call(self, before: str, text: str) -> None:
        self._call = CallReader(before, names=self.names, any_member=False)
        self._state, self._held = "call", text

    def _in_content(self, events: list[Event]) -> bool:
        before, mark, behind = self._held.partition(MARK)
        if not mark:
            certain, self._held = split_certain(self._held, MARK)
        else:
            certain = strip_end(before)
            self._begin_call(before[len(certain) :] + MARK, behind)
        if certain:
            events.append(Content(certain))
        return bool(mark)

    def _in_call(self, events: list[Event]) -> bool:
        assert self._call is not None
        found, used = self._call.push(self._held)
        events += found
        self._held = self._held[used:]
        if self._call.state == "open":
            return False
        self._state = "behind" if self._call.state == "done" else "content"
        self._call = None
        return True
