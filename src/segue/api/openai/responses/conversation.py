"""The input of a response as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from segue.api.openai.chat_fields import CalledFunction, ToolCall
from segue.api.openai.requests import ChatMessage, TextPart
from segue.api.openai.responses.fields import InputItem, InputPart, ResponsesRequest
from segue.errors import InvalidRequestError, UnsupportedFieldError, short_repr
from segue.frontend.thread_pool import turn

Role = Literal["system", "developer", "user", "tool"]
_NEEDED = {  # fields, by the type of an item
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_TEXTS = ("input_text", "output_text", "refusal")
_REASONING = ("reasoning_text", "summary_text")


@dataclass(slots=True)
class InputConversation:
    """The messages, and which items their calls are, for errors."""

    messages: list[ChatMessage] = field(default_factory=list)
    calls: dict[int, list[int]] = field(default_factory=dict)  # the items of a message's calls, by its index


async def conversation_of(body: ResponsesRequest) -> InputConversation:
    """Return the conversation of a body. Yields to the event loop now and then, as there may be many items.

    What the model wrote in one turn becomes one message: its reasoning, its text and its calls.

    Raises:
        InvalidRequestError: an item lacks a field, or there is none.
        UnsupportedFieldError: an item, or a part of one, is of a type that is not supported.
    """
    builder = _Builder()
    if body.instructions is not None:
        builder.add("system", body.instructions)
    if isinstance(body.input, str):
        builder.add("user", body.input)
    elif not body.input:
        raise InvalidRequestError("input: must have at least one item", param="input")
    else:
        for index, item in enumerate(body.input):
            await turn(index)
            builder.take(item, index)
    builder.end_turn()
    return builder.found


def check_type(given: str | None, where: str) -> str:
    """Return the type of an item; raises UnsupportedFieldError for one that is not supported."""
    if given is None:
        return "message"
    if given not in _NEEDED:
        name = f"{where}.type"
        text = f"{name}={short_repr(given)} is not supported; the types are {', '.join(_NEEDED)}"
        raise UnsupportedFieldError(text, param=name)
    return given


@dataclass(slots=True)
class _Builder:
    """Makes messages of items. The assistant's message stays open until an item does not belong to it."""

    found: InputConversation = field(default_factory=InputConversation)
    _is_open: bool = False
    _reasoning: str | None = None
    _content: str | list[TextPart] | None = None
    _calls: list[ToolCall] = field(default_factory=list)

    def add(self, role: Role, content: str | list[TextPart], call_id: str | None = None) -> None:
        """Add a message that is not the assistant's."""
        self.end_turn()
        self.found.messages.append(ChatMessage(role=role, content=content, tool_call_id=call_id))

    def take(self, item: InputItem, index: int) -> None:
        """Add item number ``index`` of the input."""
        where = f"input[{index}]"
        kind = check_type(item.type, where)
        for name in _NEEDED[kind]:
            if getattr(item, name) is None:
                raise InvalidRequestError(f"{where}.{name}: this field is required", param=f"{where}.{name}")
        match kind:
            case "message":
                assert item.role is not None and item.content is not None
                content = _texts(item.content, f"{where}.content")
                if item.role == "assistant":
                    self._begin(fits=self._content is None and not self._calls)
                    self._content = content
                else:
                    self.add(item.role, content)
            case "function_call":
                assert item.name is not None and item.arguments is not None
                self._begin(fits=True)
                self.found.calls.setdefault(len(self.found.messages), []).append(index)
                function = CalledFunction(name=item.name, arguments=item.arguments)
                self._calls.append(ToolCall(function=function, id=item.call_id))
            case "function_call_output":
                assert item.output is not None
                self.add("tool", _texts(item.output, f"{where}.output"), item.call_id)
            case _:
                self._begin(fits=self._content is None and not self._calls and self._reasoning is None)
                self._reasoning = _reasoning(item, where)

    def _begin(self, *, fits: bool) -> None:
        """Open a message of the assistant, unless one is open that the item fits into."""
        if not fits:
            self.end_turn()
        self._is_open = True

    def end_turn(self) -> None:
        """End the assistant's message, if one is open and says anything."""
        if self._is_open and (self._reasoning or self._content is not None or self._calls):
            self.found.messages.append(
                ChatMessage(
                    role="assistant",
                    content=self._content,
                    reasoning=self._reasoning,
                    tool_calls=self._calls or None,
                )
            )
        self._is_open, self._reasoning, self._content, self._calls = False, None, None, []


def _texts(content: str | Sequence[InputPart], where: str) -> str | list[TextPart]:
    """Return a content as the parts of a chat's message. There may be tens of thousands of parts."""
    if isinstance(content, str):
        return content
    found = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in _TEXTS or text is None:
            raise _wrong_part(part, f"{where}[{index}]")
        found.append(TextPart("text", text))
    return found


def _wrong_part(part: InputPart, where: str) -> InvalidRequestError:
    """Return the error for a part that is not a text."""
    if part.type not in _TEXTS:
        name = f"{where}.type"
        text = f"{name}={short_repr(part.type)} is not supported; this model reads text only (input_text)"
        return UnsupportedFieldError(text, param=name)
    name = f"{where}.refusal" if part.type == "refusal" else f"{where}.text"
    return InvalidRequestError(f"{name}: this field is required", param=name)


def _reasoning(item: InputItem, where: str) -> str | None:
    """Return the text of a reasoning item: its content or, without one, its summary; None: it has none."""
    if item.encrypted_content:
        name = f"{where}.encrypted_content"
        text = f"{name} is not supported: only the server that has made it can read it; leave the item out"
        raise UnsupportedFieldError(text, param=name)
    if isinstance(item.content, str):
        return item.content or None
    texts = []
    for name, parts in (("content", item.content), ("summary", item.summary)):
        for index, part in enumerate(parts or ()):
            if part.type not in _REASONING or part.text is None:
                place = f"{where}.{name}[{index}]"
                rule = "a part of reasoning has the type reasoning_text or summary_text, and a text"
                raise InvalidRequestError(f"{place}: {rule}", param=place)
            texts.append(part.text)
        if texts:
            break
    return "\n".join(texts) or None
