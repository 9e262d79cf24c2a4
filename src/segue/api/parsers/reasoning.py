"""Reasoning that stands before the answer, within ``<think>`` and ``</think>``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from segue.api.parsers.events import (
    MOST_SPACE,
    Content,
    Event,
    Reasoning,
    SteppingParser,
    num_held,
    split_certain,
    strip_end,
)

OPEN, CLOSE = "<think>", "</think>"


@dataclass(slots=True)
class ThinkParser(SteppingParser):
    """One block of reasoning at the beginning, then the answer. Space around the block's marks is neither.

    A block that is not closed is reasoning up to the end of the text.
    """

    is_open: bool = False  # whether the prompt has begun the block
    # Before a block that the text or the prompt has to begin; behind its mark, and in it; behind it.
    _state: Literal["start", "begun", "opened", "reasoning", "closed", "content"] = "start"
    has_block: bool = False  # whether there is such a block

    def __post_init__(self) -> None:
        if self.is_open:
            self._state, self.has_block = "begun", True

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the block."""
        return self._state in ("begun", "opened", "reasoning")

    def finish(self) -> list[Event]:
        """Returns what the text ends with."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [Reasoning(held) if self.is_reasoning else Content(held)]

    def _step(self, events: list[Event]) -> bool:
        """Take the next part of the text that is held; returns whether there is more to do."""
        match self._state:
            case "start":
                return self._find_block(self._held.lstrip())
            case "begun":  # some models write the mark that the prompt has written already
                self._held = self._held.lstrip()
                if num_held(self._held, OPEN) == len(self._held):
                    return False
                self._state, self._held = "opened", self._held.removeprefix(OPEN)
            case "opened" | "closed":
                self._held = self._held.lstrip()
                if not self._held:
                    return False
                self._state = "reasoning" if self._state == "opened" else "content"
            case "reasoning":
                return self._in_reasoning(events)
            case "content":
                if self._held:
                    events.append(Content(self._held))
                    self._held = ""
                return False
        return True

    def _find_block(self, text: str) -> bool:
        """Begin the block or the answer by what the text is that is held, without the space before it."""
        if len(self._held) - len(text) <= MOST_SPACE and num_held(text, OPEN) == len(text):
            return False
        if len(self._held) - len(text) <= MOST_SPACE and text.startswith(OPEN):
            self._state, self._held, self.has_block = "opened", text[len(OPEN) :], True
        else:
            self._state = "content"
        return True

    def _in_reasoning(self, events: list[Event]) -> bool:
        before, mark, behind = self._held.partition(CLOSE)
        if mark:
            certain = strip_end(before)
            self._state, self._held = "closed", behind
        else:
            certain, self._held = split_certain(self._held, CLOSE)
        if certain:
            events.append(Reasoning(certain))
        return bool(mark)


@dataclass(slots=True)
class MarkedThinkParser(SteppingParser):
    """The same block with its marks and the space around it, as `Reasoning`; then the answer."""

    is_open: bool = False  # whether the prompt has begun the block
    _state: Literal["start", "block", "content"] = "start"

    def __post_init__(self) -> None:
        if self.is_open:
            self._state = "block"

    def finish(self) -> list[Event]:
        """Returns what the text ends with."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [Reasoning(held) if self._state == "block" else Content(held)]

    def _step(self, events: list[Event]) -> bool:
        """Take the next part of the text that is held; returns whether there is more to do."""
        match self._state:
            case "start":
                text = self._held.lstrip()
                is_near = len(self._held) - len(text) <= MOST_SPACE
                if is_near and num_held(text, OPEN) == len(text):
                    return False
                self._state = "block" if is_near and text.startswith(OPEN) else "content"
                return True
            case "block":
                before, mark, behind = self._held.partition(CLOSE)
                if mark:
                    certain, self._state, self._held = before + mark, "content", behind
                else:
                    end = len(before) - num_held(before, CLOSE)
                    certain, self._held = before[:end], before[end:]
                if certain:
                    events.append(Reasoning(certain))
                return bool(mark)
            case "content":
                if self._held:
                    events.append(Content(self._held))
                    self._held = ""
                return False
