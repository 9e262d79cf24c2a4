"""The parsers of one assistant's message: reasoning first, then content and tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from segue.api.parsers.events import Content, Event, Parser, Reasoning
from segue.api.parsers.hermes import HermesParser
from segue.api.parsers.llama3_json import Llama3JsonParser
from segue.api.parsers.reasoning import MarkedThinkParser, ThinkParser
from segue.frontend.chat_template import ToolFormat

_TOOL_PARSERS: dict[ToolFormat, type[HermesParser] | type[Llama3JsonParser]] = {
    "hermes": HermesParser,
    "llama3-json": Llama3JsonParser,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """How a text is parsed."""

    tools: ToolFormat | None = None  # None: there are no calls in it
    names: frozenset[str] = frozenset()  # of the functions that were given
    thinks: bool = False  # whether reasoning is separated from the content
    shows_marks: bool = False  # else: whether it is content, with its marks, in which no calls are looked for
    thinking: bool = False  # whether the prompt has begun the reasoning


class MessageParser:
    """Makes events of one message. Marks of tool calls within the reasoning are reasoning."""

    def __init__(self, form: MessageFormat) -> None:
        self._reasoning = ThinkParser(form.thinking) if form.thinks else None
        self._marked = MarkedThinkParser(form.thinking) if form.shows_marks and not form.thinks else None
        self._tools: Parser | None = None
        if form.tools is not None:
            self._tools = _TOOL_PARSERS[form.tools](form.names)

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def has_reasoned(self) -> bool:
        """Whether there is reasoning in the text so far, be it empty."""
        return self._reasoning is not None and self._reasoning.has_block

    def push(self, text: str) -> list[Event]:
        """Take more text; returns what is certain now."""
        events: list[Event] = [Content(text)] if text else []
        if (first := self._reasoning or self._marked) is not None:
            events = first.push(text)
        return self._with_calls(events)

    def finish(self) -> list[Event]:
        """Returns what the text ends with; nothing may be pushed afterwards."""
        first = self._reasoning or self._marked
        events = self._with_calls([] if first is None else first.finish())
        return events if self._tools is None else events + self._tools.finish()

    def _with_calls(self, events: list[Event]) -> list[Event]:
        """Returns events with those that the tool parser makes of their content."""
        found: list[Event] = []
        for event in events:
            if isinstance(event, Content) and self._tools is not None:
                found += self._tools.push(event.text)
            elif isinstance(event, Reasoning) and self._marked is not None:
                found.append(Content(event.text))
            else:
                found.append(event)
        return found
