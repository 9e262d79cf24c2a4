"""The bodies of Anthropic's Messages API.

They are strict, as those of the OpenAI dialect: an unknown field or a wrong type is an error that names it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from segue.api.asks_nothing import without_nothing
from segue.api.openai.chat_fields import MAX_TOOLS, FunctionName
from segue.api.request_fields import RequestFields
from segue.api.validation import NOT_EMPTY, parse
from segue.errors import InvalidRequestError, UnsupportedFieldError
from segue.frontend.sampling_options import bounds_of

MIN_BUDGET = 1024  # tokens of reasoning: the least that Anthropic's own API takes
BLOCKS = "text, tool_use, tool_result and thinking"

_Nothing = Annotated[list[None], Meta(max_length=0)]
_BLOCK_TYPE = re.compile(r"(?:messages\[\d+\]\.content|system)\[\d+\](?:\.content\[\d+\])?\.type")
_TOOL_TYPE = re.compile(r"tools\[\d+\]\.type")
_INVALID = re.compile(r"nvalid (?:enum )?value ('.{0,80}')")


class CacheControl(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """``cache_control``: it asks for nothing, as every prompt is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Caller(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """Who has called a tool: the model is not told."""

    type: str
    tool_id: str | None = None


class _Block(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True, tag_field="type"):
    """Without the collector's bookkeeping: a body may have tens of thousands of these, and no cycles."""

    cache_control: CacheControl | None = None


class TextBlock(_Block, frozen=True, kw_only=True, gc=False, tag="text"):
    """Text of a message."""

    text: str
    citations: _Nothing | None = None


class OnlyTextBlock(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """Text of the system prompt or of a tool's result.

    Blocks of other types cannot be there, so the type is a field: a tag could be left out.
    """

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: _Nothing | None = None


class _ToolUse(_Block, frozen=True, kw_only=True, gc=False, tag="tool_use"):
    id: str
    name: FunctionName
    caller: Caller | None = None
    toolset_name: None = None


class ToolUseBlock(_ToolUse, frozen=True, kw_only=True, gc=False, tag="tool_use"):
    """A call that the assistant has made."""

    input: dict[str, Any]


class UndecodedToolUse(_ToolUse, frozen=True, kw_only=True, gc=False, tag="tool_use"):
    """The same in a large body: its arguments are decoded once it is known that they are not too large."""

    input: Raw


class ToolResultBlock(_Block, frozen=True, kw_only=True, gc=False, tag="tool_result"):
    """What a tool has answered."""

    tool_use_id: str
    content: str | list[OnlyTextBlock] | None = None
    is_error: bool | None = None
    toolset_name: None = None


class ThinkingBlock(_Block, frozen=True, kw_only=True, gc=False, tag="thinking"):
    """Reasoning of the assistant. Nobody checks its signature."""

    thinking: str
    signature: str | None = None


class InputMessage(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock]


class UndecodedMessage(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The same in a large body."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | UndecodedToolUse | ToolResultBlock | ThinkingBlock]


Block = TextBlock | ToolUseBlock | UndecodedToolUse | ToolResultBlock | ThinkingBlock


class InputTool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs."""

    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None  # the input follows the schema wherever it is guided, whatever this says
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # inputs are always streamed as they are generated
    defer_loading: bool | None = None  # true is not supported
    input_examples: _Nothing | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class InputToolChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None  # of the tool, with type tool
    disable_parallel_tool_use: bool | None = None  # true: at most one call


class Thinking(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``thinking``."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=MIN_BUDGET)] | None = None  # required with type enabled; no limit


class OutputFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema that the text of the reply follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``output_config``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages/count_tokens``: what a prompt is made of."""

    messages: Annotated[list[InputMessage], NOT_EMPTY]
    model: str | None = None  # None: the served one
    system: str | list[OnlyTextBlock] | None = None
    tools: Annotated[list[InputTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: InputToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Segue's own, as the fields about ids and priority


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, bounds_of("max_tokens")]
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, bounds_of("top_p")] | None = None
    top_k: Annotated[int, bounds_of("top_k")] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    seed: Annotated[int, bounds_of("seed")] | None = None
    rid: str | None = None


def parse_messages(body: Any) -> MessagesRequest:
    """Check the body of ``POST /v1/messages``. Raises as :func:`segue.api.validation.parse` does."""
    return parse(MessagesRequest, _without_nothing(body))


def parse_count_tokens(body: Any) -> CountTokensRequest:
    """Check the body of ``POST /v1/messages/count_tokens``, as :func:`parse_messages` does."""
    return parse(CountTokensRequest, _without_nothing(body))


def explained(error: InvalidRequestError) -> InvalidRequestError:
    """Return an error about a body; one about the type of a block or of a tool says which there are."""
    where, found = error.param or "", _INVALID.search(error.message)
    if found is None:
        return error
    if _BLOCK_TYPE.fullmatch(where):
        text = f"{where}={found[1]}: such blocks are not supported here; send blocks of type {BLOCKS}"
    elif _TOOL_TYPE.fullmatch(where):
        text = f"{where}={found[1]}: such tools are not supported; send custom ones, with input_schema"
    else:
        return error
    return UnsupportedFieldError(text, param=where)


def _without_nothing(body: Any) -> dict[str, Any]:
    """Return the body without the fields that are not implemented; see :mod:`segue.api.asks_nothing`."""
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return without_nothing(body, "messages")
