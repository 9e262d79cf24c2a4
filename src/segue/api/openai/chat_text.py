"""The text of a chat's reply as the fields of its message, whole and as the deltas of a stream."""

from __future__ import annotations

import uuid
from typing import Any

from segue.api.openai.chat_fields import ReplyForm
from segue.api.parsers.events import Arguments, CallBegin, CallBroken, CallEnd, Content, Event, Reasoning
from segue.api.parsers.message import MessageParser
from segue.api.parsers.reasoning import CLOSE as THINK_END
from segue.frontend.detokenizer import TokenTable

PIECE_CHARS = 1 << 12  # of a whole text that the parser is given at once


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning under both names that are in use."""
    return {"reasoning": text, "reasoning_content": text}


def _call(name: str) -> dict[str, Any]:
    """Return a call without arguments."""
    call_id = f"call_{uuid.uuid4().hex[:24]}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


class WholeMessage:
    """The message of a text that is complete. Calls that are not complete are content, with their marks."""

    def __init__(self, form: ReplyForm, text: str) -> None:
        self._form = form
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self._call: dict[str, Any] = {}  # the one that has begun
        parser = MessageParser(form.text)
        for at in range(0, len(text), PIECE_CHARS):
            self._take(parser.push(text[at : at + PIECE_CHARS]))
        self._take(parser.finish())
        self.has_reasoned = parser.has_reasoned

    def fields(self) -> dict[str, Any]:
        """Return the message; its content is null if there are calls and no text."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        return {
            "role": "assistant",
            "content": content if content or not self.calls else None,
            **(_reasoning(reasoning) if reasoning and self._form.has_reasoning else {}),
            **({"tool_calls": self.calls} if self.calls else {}),
        }

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if self._form.one_call and self.calls:
                return
            match event:
                case Content(text) | CallBroken(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallBegin(name):
                    self._call, self._arguments = _call(name), []
                case Arguments(text):
                    self._arguments.append(text)
                case CallEnd():
                    self._call["function"]["arguments"] = "".join(self._arguments)
                    self.calls.append(self._call)


class MessageStream:
    """The deltas of a message whose text comes in pieces.

    A call that turns out not to be complete is given as far as it was certain, and the rest of its text as
    content.
    """

    def __init__(self, form: ReplyForm, before: str = "") -> None:
        """Begin behind the text ``before``, of which the client has the deltas already."""
        self._form = form
        self._parser = MessageParser(form.text)
        self._num_calls = 0  # that have begun
        self.has_call = False  # whether one is complete
        self._reasoning: list[str] = []  # that waits for its end
        for at in range(0, len(before), PIECE_CHARS):
            self.delta(before[at : at + PIECE_CHARS])

    @property
    def has_reasoned(self) -> bool:
        """Whether there is reasoning in the text so far."""
        return self._parser.has_reasoned

    def delta(self, text: str, *, is_last: bool = False) -> dict[str, Any]:
        """Return what more text adds to the message; empty: nothing that is certain."""
        events = self._parser.push(text)
        if is_last:
            events += self._parser.finish()
        content: list[str] = []
        reasoning: list[str] = []
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if self._form.one_call and self.has_call:
                break
            match event:
                case Content(text) | CallBroken(rest=text):
                    content += [text] if text else []
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallBegin(name):
                    calls[self._num_calls] = {"index": self._num_calls, **_call(name)}
                    self._num_calls += 1
                case Arguments(text):
                    index = self._num_calls - 1
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
                case CallEnd():
                    self.has_call = True
        if self._reasoning and (self._form.streams_reasoning or is_last or not self._parser.is_reasoning):
            reasoning, self._reasoning = self._reasoning, []
        return {
            **(_reasoning("".join(reasoning)) if reasoning and self._form.has_reasoning else {}),
            **({"content": "".join(content)} if content else {}),
            **({"tool_calls": list(calls.values())} if calls else {}),
        }


def num_reasoning_tokens(ids: list[int], has_reasoned: bool, table: TokenTable) -> int | None:
    """Return how many output tokens are reasoning, with its marks; None: it is not known.

    The mark at its end has to be one token.
    """
    if not has_reasoned:
        return 0
    if (end := table.marks.get(THINK_END)) is None:
        return None
    return ids.index(end) + 1 if end in ids else len(ids)
