"""The messages of a body of the Messages API as the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from segue.api.anthropic.requests import (
    Block,
    CountTokensRequest,
    OnlyTextBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UndecodedToolUse,
)
from segue.api.openai.chat_fields import MAX_ARGUMENTS_CHARS, CalledFunction, ToolCall
from segue.api.openai.requests import ChatMessage, TextPart
from segue.errors import InvalidRequestError

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A message of the chat, or a part of one."""

    role: Literal["system", "user", "assistant", "tool"]
    parts: Sequence[TextPart] = ()
    reasoning: Sequence[str] = ()
    calls: Sequence[ToolCall] = ()
    places: Sequence[str] = ()  # of the inputs of the calls, in the body
    tool_use_id: str | None = None  # of the call that a result belongs to

    @classmethod
    def joined(cls, turns: Sequence[ChatTurn]) -> ChatTurn:
        """Return what neighbours of one role say together."""
        if len(turns) == 1:
            return turns[0]
        return cls(
            turns[0].role,
            [part for turn in turns for part in turn.parts],
            [text for turn in turns for text in turn.reasoning],
            [call for turn in turns for call in turn.calls],
            [place for turn in turns for place in turn.places],
        )

    def message(self) -> ChatMessage:
        """Return the message."""
        return ChatMessage(
            role=self.role,
            content=list(self.parts),
            tool_call_id=self.tool_use_id,
            tool_calls=list(self.calls) or None,
            reasoning="\n".join(self.reasoning) if self.reasoning else None,
        )


def num_pieces(body: CountTokensRequest) -> int:
    """Return how many messages and blocks there are, which says how long :func:`turns_of` takes."""
    return sum(1 if isinstance(each.content, str) else 1 + len(each.content) for each in body.messages)


def turns_of(body: CountTokensRequest) -> list[ChatTurn]:
    """Return the messages of the chat, the system prompt first.

    Neighbours of one role become one message, as in Anthropic's API; each result of a tool is a message.

    Raises:
        InvalidRequestError: there is no message, or one has a block that its role cannot have.
    """
    if not body.messages:
        raise InvalidRequestError("messages: must have at least one message", param="messages")
    found: list[ChatTurn] = []
    neighbours: list[ChatTurn] = []
    for turn in _pieces(body):
        if neighbours and not neighbours[-1].role == turn.role != "tool":
            found.append(ChatTurn.joined(neighbours))
            neighbours = []
        neighbours.append(turn)
    return [*found, ChatTurn.joined(neighbours)]


def _pieces(body: CountTokensRequest) -> Iterator[ChatTurn]:
    """Yield the system prompt and each message; one with results of tools comes in several parts."""
    if body.system:
        yield ChatTurn("system", _parts(body.system))
    for index, message in enumerate(body.messages):
        if isinstance(message.content, str):
            yield ChatTurn(message.role, _parts(message.content))
        else:
            yield from _of_blocks(message.role, message.content, f"messages[{index}].content")


def _of_blocks(
    role: Literal["system", "user", "assistant"], blocks: Sequence[Block], where: str
) -> Iterator[ChatTurn]:
    """Yield the parts of a message; one without blocks is empty."""
    parts: list[TextPart] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    places: list[str] = []
    has_results = False
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        match block:
            case TextBlock():
                parts.append(TextPart("text", block.text))
            case ThinkingBlock():
                _check_role(role, "assistant", "thinking", place)
                reasoning.append(block.thinking)
            case ToolUseBlock() | UndecodedToolUse():
                _check_role(role, "assistant", "tool_use", place)
                places.append(f"{place}.input")
                calls.append(ToolCall(CalledFunction(block.name, _arguments(block, places[-1])), block.id))
            case ToolResultBlock():
                _check_role(role, "user", "tool_result", place)
                if parts:
                    yield ChatTurn(role, parts)
                parts, has_results = [], True
                yield ChatTurn("tool", _result(block), tool_use_id=block.tool_use_id)
    if parts or reasoning or calls or not has_results:
        yield ChatTurn(role, parts, reasoning, calls, places)


def _check_role(role: str, owner: str, kind: str, where: str) -> None:
    """Raise InvalidRequestError for a block of a type that messages of this role cannot have."""
    if role != owner:
        text = f"{where}: messages of role {role} cannot have a block of type {kind}, only {owner}'s can"
        raise InvalidRequestError(text, param=where)


def _parts(content: str | list[OnlyTextBlock]) -> list[TextPart]:
    if isinstance(content, str):
        return [TextPart("text", content)]
    return [TextPart("text", block.text) for block in content]


def _arguments(block: ToolUseBlock | UndecodedToolUse, where: str) -> str:
    """Return the input of a call as JSON. The chat checks its size; what is far too large is not decoded."""
    if isinstance(block, ToolUseBlock):
        return _encode(block.input).decode()
    given = bytes(block.input)
    if len(given) > (most := 4 * MAX_ARGUMENTS_CHARS):
        text = f"{where}: it has {len(given)} bytes of JSON; at most {most} are allowed"
        raise InvalidRequestError(text, param=where)
    try:
        return given.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{where}: it must be valid UTF-8", param=where) from None


def _result(block: ToolResultBlock) -> list[TextPart]:
    """Return what a tool has answered.

    Templates have no place for ``is_error``, so the text says it, unless it begins with that word itself.
    """
    parts = [] if block.content is None else _parts(block.content)
    if block.is_error and not (parts and parts[0].text.lstrip()[:5].lower() == "error"):
        first = parts[0].text if parts else ""
        parts[:1] = [TextPart("text", f"Error: {first}".rstrip())]
    return parts
