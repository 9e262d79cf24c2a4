"""The blocks of a reply: of a text that is complete, and as the events of a text that comes in pieces."""

from __future__ import annotations

import uuid
from typing import Any, Literal

from msgspec import Raw

from segue.api.openai.chat_fields import ReplyForm
from segue.api.openai.chat_text import PIECE_CHARS
from segue.api.parsers.events import Arguments, CallBegin, CallBroken, CallEnd, Content, Event, Reasoning
from segue.api.parsers.message import MessageFormat, MessageParser

PLAIN = ReplyForm(text=MessageFormat())  # of a text that has no parts
Kind = Literal["text", "thinking", "tool_use"]
Events = list[dict[str, Any]]


def _tool_use(name: str) -> dict[str, Any]:
    """Return a call without input."""
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name, "input": {}}


class WholeBlocks:
    """The blocks of a text that is complete. A call that is not complete is text, with its marks."""

    def __init__(self, form: ReplyForm, text: str) -> None:
        self._form = form
        self._texts: list[str] = []  # of the last block, if it is one of text or reasoning
        self._arguments: list[str] = []  # of the call that has begun
        self._call: dict[str, Any] = {}
        self.content: list[dict[str, Any]] = []
        self.has_call = False  # whether a call is complete
        parser = MessageParser(form.text)
        for at in range(0, len(text), PIECE_CHARS):
            self._take(parser.push(text[at : at + PIECE_CHARS]))
        self._take(parser.finish())
        self._close()
        self.has_reasoned = parser.has_reasoned

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if self._form.one_call and self.has_call:
                return
            match event:
                case Content(text) | CallBroken(text):
                    self._add("text", text)
                case Reasoning(text):
                    if self._form.has_reasoning:
                        self._add("thinking", text)
                case CallBegin(name):
                    self._call, self._arguments = _tool_use(name), []
                case Arguments(text):
                    self._arguments.append(text)
                case CallEnd():
                    self._close()
                    self._call["input"] = Raw("".join(self._arguments).encode())
                    self.content.append(self._call)
                    self.has_call = True

    def _add(self, kind: Kind, text: str) -> None:
        if not text:
            return
        if not (self._texts and self.content[-1]["type"] == kind):
            self._close()
            self.content.append({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._texts.append(text)

    def _close(self) -> None:
        """Give the last block its text."""
        if self._texts:
            last = self.content[-1]
            last[last["type"]] = "".join(self._texts)
            self._texts = []


class BlockStream:
    """The events of a reply's blocks, while its text comes in pieces.

    A call that turns out not to be complete is given as far as it was certain, and the rest of its text is a
    block of text.
    """

    def __init__(self, form: ReplyForm, before: str = "") -> None:
        """Begin behind the text ``before``, of which the client has the events already."""
        self._form = form
        self._parser = MessageParser(form.text)
        self._num_blocks = 0  # that have begun
        self._open: Kind | None = None  # the type of the last one, if it has not ended
        self.has_call = False  # whether a call is complete
        for at in range(0, len(before), PIECE_CHARS):
            self.push(before[at : at + PIECE_CHARS])

    @property
    def has_reasoned(self) -> bool:
        """Whether there is reasoning in the text so far."""
        return self._parser.has_reasoned

    def push(self, text: str, *, is_last: bool = False) -> Events:
        """Return what more text adds; empty: nothing that is certain."""
        given = self._parser.push(text)
        if is_last:
            given += self._parser.finish()
        found: Events = []
        for event in given:
            if self._form.one_call and self.has_call:
                break
            self._take(event, found)
        if is_last:
            self._close(found)
        return found

    def _take(self, event: Event, found: Events) -> None:
        match event:
            case Content(text):
                self._add("text", text, found)
            case CallBroken(rest=text):
                if self._open == "tool_use":
                    self._close(found)
                self._add("text", text, found)
            case Reasoning(text):
                if self._form.has_reasoning:
                    self._add("thinking", text, found)
            case CallBegin(name):
                self._begin("tool_use", _tool_use(name), found)
            case Arguments(text):
                self._delta("input_json_delta", "partial_json", text, found)
            case CallEnd():
                self._close(found)
                self.has_call = True

    def _add(self, kind: Literal["text", "thinking"], text: str, found: Events) -> None:
        if not text:
            return
        if self._open != kind:
            begun = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            self._begin(kind, begun, found)
        self._delta(f"{kind}_delta", kind, text, found)

    def _begin(self, kind: Kind, block: dict[str, Any], found: Events) -> None:
        self._close(found)
        found.append({"type": "content_block_start", "index": self._num_blocks, "content_block": block})
        self._num_blocks += 1
        self._open = kind

    def _delta(self, kind: str, name: str, text: str, found: Events) -> None:
        """Add to the last block; neighbours become one event."""
        if found and found[-1].get("delta", {}).get("type") == kind:
            found[-1]["delta"][name] += text
        else:
            delta = {"type": kind, name: text}
            found.append({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta})

    def _close(self, found: Events) -> None:
        """End the last block, unless it has ended."""
        if self._open is None:
            return
        if self._open == "thinking":
            self._delta("signature_delta", "signature", "", found)
        found.append({"type": "content_block_stop", "index": self._num_blocks - 1})
        self._open = None
