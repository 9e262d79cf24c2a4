"""Reads one tool call: a JSON object with the function's name, and its arguments as an object in it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import InitVar, dataclass, field
from typing import Literal

import msgspec

from segue.api.parsers.events import Arguments, CallBegin, CallBroken, CallEnd, Event
from segue.api.parsers.json_object import MalformedError, ObjectScanner

_ARGUMENTS = ("arguments", "parameters")  # both names are in use for the same
_OTHERS = ("id", "type")  # members that models add, and that say nothing


@dataclass(slots=True)
class CallReader:
    """Makes events of a call's text. The arguments are given as they come, as soon as the name is known.

    Arguments that stand before the name wait for it, and so do those that are written as a string of JSON.
    """

    before: InitVar[str]  # the text before the object: the mark, and the space before it
    names: Collection[str] | None = None  # of the functions that may be called; None: of any
    any_member: bool = True  # whether members that are not known are passed over
    state: Literal["open", "done", "broken"] = "open"
    _scanner: ObjectScanner = field(default_factory=ObjectScanner)
    _raw: list[str] = field(default_factory=list)  # the text so far, in pieces
    _num_given: int = 0  # pieces up to the last one that was given as arguments
    _value: list[str] = field(default_factory=list)  # pieces of the current member that are not given at once
    _name: str | None = None
    _has_begun: bool = False
    _giving: bool = False  # whether the arguments are given as they come
    _has_arguments: bool = False
    _arguments: str = "{}"  # those that were not given as they came

    def __post_init__(self, before: str) -> None:
        self._raw.append(before)

    def push(self, text: str) -> tuple[list[Event], int]:
        """Take more text; returns the events, and how much of it belongs to the call.

        That is all of it while the state is open.
        """
        events: list[Event] = []
        scanner, at = self._scanner, 0
        while at < len(text) and self.state == "open":
            try:
                end = scanner.step(text, at)
                if scanner.in_value:
                    self._in_value(text[at:end], events)
                if scanner.state == "end":
                    self._end(events)
            except MalformedError:
                self._break(events)
                break
            self._raw.append(text[at:end])
            if self._giving:
                self._num_given = len(self._raw)
                self._giving = not scanner.value_ended
            at = end
        return events, at

    def finish(self) -> list[Event]:
        """End the call with the text."""
        events: list[Event] = []
        if self.state == "open":
            self._break(events)
        return events

    def _in_value(self, piece: str, events: list[Event]) -> None:
        """Take a piece of a member's value; raises MalformedError if it makes the object no call."""
        key = self._scanner.key
        if key in _ARGUMENTS:
            self._in_arguments(piece, events)
        elif key == "name":
            self._in_name(piece)
        elif not self.any_member and key not in _OTHERS:
            raise MalformedError

    def _in_name(self, piece: str) -> None:
        if not self._value and (piece != '"' or self._name is not None):
            raise MalformedError
        self._value.append(piece)
        if self._scanner.value_ended:
            self._name = _text(self._take_value())
            if not self._name or (self.names is not None and self._name not in self.names):
                raise MalformedError

    def _in_arguments(self, piece: str, events: list[Event]) -> None:
        if not self._value and not self._giving:
            if self._has_arguments or piece not in ("{", '"', "n"):
                raise MalformedError
            self._has_arguments = True
            if piece == "{" and self._name is not None:
                self._begin(self._name, events)
                self._giving = True
        if self._giving:
            if piece:
                events.append(Arguments(piece))
            return
        self._value.append(piece)
        if self._scanner.value_ended:
            self._arguments = _object(self._take_value())

    def _take_value(self) -> str:
        value = "".join(self._value)
        self._value.clear()
        return value

    def _begin(self, name: str, events: list[Event]) -> None:
        events.append(CallBegin(name))
        self._has_begun = True

    def _end(self, events: list[Event]) -> None:
        """End the call with its object; raises MalformedError if that has no name."""
        if self._name is None:
            raise MalformedError
        if not self._has_begun:
            self._begin(self._name, events)
            events.append(Arguments(self._arguments))
        events.append(CallEnd())
        self.state = "done"

    def _break(self, events: list[Event]) -> None:
        """End the call before its object has ended.

        It is complete all the same if only the closing bracket behind the arguments is missing.
        """
        rest = "".join(self._raw[self._num_given :])
        if self._has_begun and not self._giving and not rest.strip():
            events.append(CallEnd())
            self.state = "done"
        else:
            events.append(CallBroken("".join(self._raw), rest))
            self.state = "broken"


def _text(value: str) -> str:
    """Returns a string of JSON; raises MalformedError if it is no Unicode."""
    try:
        return msgspec.json.decode(value.encode(), type=str)
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise MalformedError from None


def _object(value: str) -> str:
    """Returns arguments that have come whole as a JSON object: they may be null, or a string that has one."""
    if value == "null":
        return "{}"
    if value.startswith("{"):
        return value
    text = _text(value)
    try:
        msgspec.json.decode(text.encode(), type=dict[str, object])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        raise MalformedError from None
    return text
