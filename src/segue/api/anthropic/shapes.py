"""The replies of Anthropic's routes, for their description."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class TextShape(Struct, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str


class ThinkingShape(Struct, tag_field="type", tag="thinking"):
    """Reasoning before the answer; its signature is empty."""

    thinking: str
    signature: str


class ToolUseShape(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class OutputDetails(Struct):
    """What output tokens are, of a model that reasons."""

    thinking_tokens: int


class MessageUsage(Struct):
    """The number of tokens; those of the prompt are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails | UnsetType = UNSET


class MessageShape(Struct):
    """``POST /v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextShape | ThinkingShape | ToolUseShape]
    stop_reason: str
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Struct):
    """``POST /v1/messages/count_tokens``."""

    input_tokens: int
