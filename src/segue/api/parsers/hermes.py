"""Tool calls as Hermes and Qwen write them: each is an object within ``<tool_call>`` and ``</tool_call>``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from segue.api.parsers.call import CallReader
from segue.api.parsers.events import Content, Event, SteppingParser, num_held, split_certain, strip_end

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(slots=True)
class HermesParser(SteppingParser):
    """Content, and calls anywhere in it. White space before a call and behind it is no content.

    A name that is none of ``names`` is a call all the same: whoever executes it can tell the model.
    """

    names: Collection[str] = ()
    _state: Literal["content", "call", "close"] = "content"
    _is_behind_call: bool = False  # only white space has come since a call
    _call: CallReader | None = None

    def finish(self) -> list[Event]:
        """Returns what the text ends with."""
        events: list[Event] = []
        if self._call is not None:
            events += self._call.finish()
        if self._held.strip() or not self._is_behind_call:
            _add(events, self._held)
        self._held = ""
        return events

    def _step(self, events: list[Event]) -> bool:
        """Take the next part of the text that is held; returns whether there is more to do."""
        match self._state:
            case "content":
                return self._in_content(events)
            case "call":
                return self._in_call(events)
            case "close":
                return self._behind_object()

    def _in_content(self, events: list[Event]) -> bool:
        if self._is_behind_call:
            self._held = self._held.lstrip()
            if not self._held:
                return False
        before, mark, behind = self._held.partition(OPEN)
        if not mark:
            certain, self._held = split_certain(self._held, OPEN)
            if certain:
                _add(events, certain)
                self._is_behind_call = False
            return False
        certain = strip_end(before)
        _add(events, certain)
        self._is_behind_call = False
        self._call = CallReader(before[len(certain) :] + OPEN)
        self._state, self._held = "call", behind
        return True

    def _in_call(self, events: list[Event]) -> bool:
        assert self._call is not None
        found, used = self._call.push(self._held)
        events += found
        self._held = self._held[used:]
        if self._call.state == "open":
            return False
        is_done = self._call.state == "done"
        self._state, self._is_behind_call, self._call = "close" if is_done else "content", is_done, None
        return True

    def _behind_object(self) -> bool:
        """Look for the closing mark, without which the call is complete, too."""
        self._held = self._held.lstrip()
        if num_held(self._held, CLOSE) == len(self._held):
            return False
        self._held = self._held.removeprefix(CLOSE)
        self._state = "content"
        return True


def _add(events: list[Event], text: str) -> None:
    if text:
        events.append(Content(text))
