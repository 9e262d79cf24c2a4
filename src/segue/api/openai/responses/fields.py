"""The body of ``POST /v1/responses``.

It is strict, as those of the other OpenAI routes. What decides by a ``type`` whether it is supported (items,
parts of contents, tools) is one struct per list, so that an error can name that type.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from segue.api.bootstrap import BOOTSTRAP_RULES
from segue.api.openai.chat_fields import MAX_TOOLS, Effort, FunctionName
from segue.api.request_fields import RequestFields
from segue.frontend.sampling_options import bounds_of

MAX_METADATA = 16  # entries of ``metadata``, as OpenAI allows

# What fields of several types may be, for errors.
RULES = {
    "stop": "a string or a list of strings",
    "tool_choice": '"none", "auto", "required" or {"type": "function", "name": …}',
    **BOOTSTRAP_RULES,
}


class _InputPart(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Without the collector's bookkeeping: a body may have tens of thousands of these, and no cycles."""


class InputPart(_InputPart, frozen=True, gc=False):
    """A part of a content, an output or a reasoning. The last fields are those of kinds that are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # of replies that clients send back, and so are logprobs
    logprobs: list[Any] | None = None
    image_url: Any = None
    detail: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    input_audio: Any = None


class InputItem(_InputPart, frozen=True, gc=False):
    """An item of ``input``; which fields it needs depends on its type."""

    type: str | None = None  # None: a message
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: FunctionName | None = None
    arguments: str | None = None  # the JSON of an object
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    namespace: None = None
    caller: None = None


class ResponsesTool(Struct, frozen=True):
    """A function that the model may call. Further fields are ignored."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # arguments follow the schema wherever they are guided, whatever this says


class ChosenTool(Struct, frozen=True):
    """The function that has to be called."""

    type: str
    name: FunctionName | None = None


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """``text.format``; the output always keeps to the schema, whatever ``strict`` says."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """``text``."""

    format: TextFormat | None = None


class ReasoningConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """``reasoning``."""

    effort: Effort | None = None


class ResponsesStreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """``stream_options``."""

    include_obfuscation: bool | None = None  # there are no random characters in events


class ResponsesRequest(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/responses``; None is the default. Fields that a chat has by the same name mean the same."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, bounds_of("max_tokens")] | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, bounds_of("top_p")] | None = None
    # What OpenAI's API does not have.
    rid: str | None = None
    request_id: str | None = None
    top_k: Annotated[int, bounds_of("top_k")] | None = None
    min_p: Annotated[float, bounds_of("min_p")] | None = None
    seed: Annotated[int, bounds_of("seed")] | None = None
    stop: str | list[str] | None = None
    min_tokens: Annotated[int, bounds_of("min_tokens")] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, bounds_of("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounds_of("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, bounds_of("repetition_penalty")] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
