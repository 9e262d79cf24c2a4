"""The messages of a body of the Messages API as the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from segue.api.anthropic.requests import (
    Block,
    CountTokensRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UndecodedToolUse,
)
from segue.api.openai.chat_fields import CalledFunction, ToolCall
from segue.api.openai.requests import ChatMessage, TextPart
from segue.errors import InvalidRequestError

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class ChatTurn:
    """A message of the chat, while it is put together."""

    role: Literal["system", "user", "assistant", "tool"]
    parts: list[TextPart] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    places: list[str] = field(default_factory=list)  # of the inputs of the calls, in the body
    tool_use_id: str | None = None  # of the call that a result belongs to

    def add(self, more: ChatTurn) -> None:
        """Take what another message of the same role has."""
        self.parts += more.parts
        self.reasoning += more.reasoning
        self.calls += more.calls
        self.places += more.places

    def message(self) -> ChatMessage:
        """Return the message."""
        return ChatMessage(
            role=self.role,
            content=self.parts,
            tool_call_id=self.tool_use_id,
            tool_calls=self.calls or None,
            reasoning="\n".join(self.reasoning) if self.reasoning else None,
        )


def turns_of(body: CountTokensRequest) -> list[ChatTurn]:
    """Return the messages of the chat, the system prompt first.

    Neighbours of one role become one message, as in Anthropic's API; each result of a tool is a message.

    Raises:
        InvalidRequestError: there is no message, or one has a block that its role cannot have.
    """
    if not body.messages:
        raise InvalidRequestError("messages: must have at least one message", param="messages")
    found: list[ChatTurn] = []
    for turn in _pieces(body):
        if found and found[-1].role == turn.role != "tool":
            found[-1].add(turn)
        else:
            found.append(turn)
    return found


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
    turn, has_results = ChatTurn(role), False
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        match block:
            case TextBlock():
                turn.parts.append(TextPart("text", block.text))
            case ThinkingBlock():
                _check_role(role, "assistant", "thinking", place)
                turn.reasoning.append(block.thinking)
            case ToolUseBlock() | UndecodedToolUse():
                _check_role(role, "assistant", "tool_use", place)
                function = CalledFunction(block.name, _arguments(block))
                turn.calls.append(ToolCall(function, block.id))
                turn.places.append(f"{place}.input")
            case ToolResultBlock():
                _check_role(role, "user", "tool_result", place)
                if turn.parts:
                    yield turn
                turn, has_results = ChatTurn(role), True
                yield ChatTurn("tool", _result(block), tool_use_id=block.tool_use_id)
    if turn.parts or turn.reasoning or turn.calls or not has_results:
        yield turn


def _check_role(role: str, owner: str, kind: str, where: str) -> None:
    """Raise InvalidRequestError for a block of a type that messages of this role cannot have."""
    if role != owner:
        text = f"{where}: messages of role {role} cannot have a block of type {kind}, only {owner}'s can"
        raise InvalidRequestError(text, param=where)


def _parts(content: str | list[TextBlock]) -> list[TextPart]:
    if isinstance(content, str):
        return [TextPart("text", content)]
    return [TextPart("text", block.text) for block in content]


def _arguments(block: ToolUseBlock | UndecodedToolUse) -> str:
    """Return the input of a call as JSON."""
    if isinstance(block, UndecodedToolUse):
        return bytes(block.input).decode()
    return _encode(block.input).decode()


def _result(block: ToolResultBlock) -> list[TextPart]:
    """Return what a tool has answered.

    Templates have no place for ``is_error``, so the text says it, unless it begins with that word itself.
    """
    parts = [] if block.content is None else _parts(block.content)
    if block.is_error and not (parts and parts[0].text.lstrip()[:5].lower() == "error"):
        first = parts[0].text if parts else ""
        parts[:1] = [TextPart("text", f"Error: {first}".rstrip())]
    return parts
