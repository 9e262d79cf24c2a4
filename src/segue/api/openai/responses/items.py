"""The output of a response: its items, and the events by which a stream tells of them. Pure.

Which events some text gives depends on the pieces in which it comes, as each piece gives events of its own.
The pieces are those of the tokens, one by one, so whoever goes on with a stream elsewhere finds the same
events again, and counts them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from segue.api.parsers.events import Arguments, CallBegin, CallBroken, CallEnd, Content, Event, Reasoning

ItemKind = Literal["message", "reasoning", "function_call"]
StreamEvent = tuple[str, dict[str, Any]]  # its type, and its fields without the type and the number
_PREFIXES: dict[ItemKind, str] = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


@dataclass(slots=True)
class _Open:
    """The item that text is added to."""

    kind: ItemKind
    index: int  # in the output
    id: str
    name: str = ""  # of a function
    call_id: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        """The fields of events that say which text they are about."""
        place = {"item_id": self.id, "output_index": self.index}
        return place if self.kind == "function_call" else place | {"content_index": 0}

    def part(self, text: str) -> dict[str, Any]:
        """Return the only part of the item's content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def shown(self, status: str, text: str | None) -> dict[str, Any]:
        """Return the item; without a ``text`` as it begins."""
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return head | {"call_id": self.call_id, "name": self.name, "arguments": text or ""}
        own: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return head | own | {"content": [] if text is None else [self.part(text)]}


class OutputItems:
    """Makes items, and the events about them, of what the parser of a model's text finds."""

    def __init__(self, key: str, *, one_call: bool = False) -> None:
        """Begin an output.

        ``key`` is the response's own: the ids of items and calls are made of it, so that they are the same
        wherever they are made. ``one_call``: the output ends with its first call.
        """
        self._key = key
        self._one_call = one_call
        self._has_call = False  # whether one is complete
        self._open: _Open | None = None
        self._items: list[dict[str, Any]] = []  # that have ended

    def take(self, found: Iterable[Event]) -> list[StreamEvent]:
        """Take what is certain of the text now; returns the events that tell of it."""
        events: list[StreamEvent] = []
        for event in _joined(found):
            if self._one_call and self._has_call:
                break
            match event:
                case Content(text):
                    self._add("message", text, events)
                case Reasoning(text):
                    self._add("reasoning", text, events)
                case CallBegin(name):
                    self._begin("function_call", events, name)
                case Arguments(text):
                    self._add("function_call", text, events)
                case CallEnd():
                    self._end("completed", events)
                    self._has_call = True
                case CallBroken(rest=text):
                    if self._open is not None and self._open.kind == "function_call":
                        self._end("incomplete", events)
                    self._add("message", text, events)
        return events

    def finish(self, *, is_complete: bool) -> list[StreamEvent]:
        """End the item that is open, if there is one; returns the events that tell of it."""
        events: list[StreamEvent] = []
        self._end("completed" if is_complete else "incomplete", events)
        return events

    def shown(self) -> list[dict[str, Any]]:
        """Return the items so far, the open one as not complete."""
        if self._open is None:
            return self._items
        return [*self._items, self._open.shown("incomplete", "".join(self._open.parts))]

    def _add(self, kind: ItemKind, text: str, events: list[StreamEvent]) -> None:
        """Add text to the open item, or to a new one if that is of another kind."""
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            self._begin(kind, events)
        assert self._open is not None
        self._open.parts.append(text)
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        events.append((f"{_DELTAS[kind]}.delta", {**self._open.place, "delta": text, **logprobs}))

    def _begin(self, kind: ItemKind, events: list[StreamEvent], name: str = "") -> None:
        self._end("completed", events)
        index = len(self._items)
        digest = hashlib.sha256(f"{self._key}:{index}".encode("utf-8", "surrogatepass")).hexdigest()
        item = _Open(kind, index, f"{_PREFIXES[kind]}{digest[:32]}", name, f"call_{digest[32:56]}")
        self._open = item
        shown = item.shown("in_progress", None)
        events.append(("response.output_item.added", {"output_index": index, "item": shown}))
        if kind != "function_call":
            events.append(("response.content_part.added", {**item.place, "part": item.part("")}))

    def _end(self, status: str, events: list[StreamEvent]) -> None:
        """End the open item, if there is one."""
        if (item := self._open) is None:
            return
        self._open = None
        text, place = "".join(item.parts), item.place
        done = f"{_DELTAS[item.kind]}.done"
        match item.kind:
            case "function_call":
                events.append((done, {**place, "name": item.name, "arguments": text}))
            case "message":
                events.append((done, {**place, "text": text, "logprobs": []}))
            case "reasoning":
                events.append((done, {**place, "text": text}))
        if item.kind != "function_call":
            events.append(("response.content_part.done", {**place, "part": item.part(text)}))
        shown = item.shown(status, text)
        self._items.append(shown)
        events.append(("response.output_item.done", {"output_index": item.index, "item": shown}))


def settled(found: Sequence[Event]) -> list[Event]:
    """Return the events of a whole text with calls that are not complete as content, with their marks."""
    events: list[Event] = []
    begun: int | None = None  # where the call that is open began
    for event in found:
        if isinstance(event, CallBroken):
            if begun is not None:
                del events[begun:]
            event = Content(event.raw)
        begun = len(events) if isinstance(event, CallBegin) else begun
        if isinstance(event, CallEnd | Content):
            begun = None
        events.append(event)
    return events


def _joined(found: Iterable[Event]) -> list[Event]:
    """Return events with those joined that follow each other and say the same of more text."""
    events: list[Event] = []
    for event in found:
        match (events[-1] if events else None, event):
            case (Content(before), Content(text)):
                events[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                events[-1] = Reasoning(before + text)
            case (Arguments(before), Arguments(text)):
                events[-1] = Arguments(before + text)
            case _:
                events.append(event)
    return events
