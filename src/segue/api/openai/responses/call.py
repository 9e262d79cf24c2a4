"""From the body of ``POST /v1/responses`` to the chat that answers it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from segue.api.asks_nothing import Place, without_nothing
from segue.api.guided import JSONSchemaFormat, ResponseFormat
from segue.api.openai.chat_fields import ChosenFunction, NamedTool, Tool, ToolChoice, ToolFunction
from segue.api.openai.requests import ChatCompletionRequest, StreamOptions, Wanted, chat_call
from segue.api.openai.responses.conversation import InputConversation, check_type, conversation_of
from segue.api.openai.responses.fields import RULES, ChosenTool, ResponsesRequest, TextFormat
from segue.api.validation import parse
from segue.errors import InvalidRequestError, UnsupportedFieldError, short_repr
from segue.frontend.sampling_options import SamplingOptions
from segue.frontend.thread_pool import ThreadPool
from segue.frontend.tokenizer import ServedModel

# Of a chat, as its errors name them, and the fields of this body that they come from.
_NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
_NAME = re.compile(rf"\b({'|'.join(map(re.escape, _NAMES))})\b")
_TOOL = re.compile(r"tools\[(\d+)\]\.function\.")
_CALL = re.compile(r"\Amessages\[(\d+)\]\.tool_calls\[(\d+)\]\.function\.arguments")
_ITEM = re.compile(r"input\[(\d+)\]")
# Fields that have the same name and meaning in a chat.
_SHARED = (
    frozenset(ResponsesRequest.__struct_fields__) & frozenset(ChatCompletionRequest.__struct_fields__)
) - {"tools", "tool_choice", "stream_options"}
_OBJECTS: dict[str, Place] = {"reasoning": "responses_reasoning", "text": "responses_text"}
_TOOL_ENTRIES, _ENTRY_CHARS = 64, 1 << 10  # by which encoding the body's own fields is estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedResponse(Wanted):
    """What a checked body wants."""

    echo: bytes  # the fields of the reply that repeat the body's, as a JSON object


def parse_responses(body: Any) -> ResponsesRequest:
    """Check the body of ``POST /v1/responses``. Raises as :func:`segue.api.validation.parse` does."""
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    rest = without_nothing(body, "responses")
    for name, place in _OBJECTS.items():
        if isinstance(value := rest.get(name), dict):
            rest[name] = _object_without_nothing(value, name, place)
    try:
        return parse(ResponsesRequest, rest, rules=RULES)
    except InvalidRequestError as error:
        _check_item_types(rest.get("input"), error)
        raise


def _object_without_nothing(value: dict[str, Any], name: str, place: Place) -> dict[str, Any]:
    try:
        return without_nothing(value, place)
    except UnsupportedFieldError as error:
        raise UnsupportedFieldError(f"{name}.{error.message}", param=f"{name}.{error.param}") from None


def _check_item_types(given: Any, error: InvalidRequestError) -> None:
    """Raise an error that names the type of the item that ``error`` is about, if the type is what is wrong.

    Items of other types have fields of their own, of which ``error`` would name one.
    """
    if isinstance(given, list) and (found := _ITEM.match(error.param or "")):
        item = given[int(found[1])]
        if isinstance(item, dict) and isinstance(kind := item.get("type"), str):
            check_type(kind, found[0])


async def responses_call(
    body: ResponsesRequest, model: ServedModel, reply_id: str | None = None
) -> WantedResponse:
    """Make a chat of a body, and check it as the chat route does; errors have the names of this body.

    ``reply_id`` takes the place of a random id.
    """
    conversation = await conversation_of(body)
    given = {name: getattr(body, name) for name in _SHARED}
    chat = ChatCompletionRequest(
        **given,
        messages=conversation.messages,
        max_completion_tokens=body.max_output_tokens,
        tools=_tools(body),
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_response_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        stream_options=None if body.stream_options is None else StreamOptions(),
    )
    with _own_names(conversation):
        wanted = await chat_call(chat, model, reply_id or f"resp_{uuid.uuid4().hex}")
    (request,) = wanted.requests
    names = {name: _NAMES.get(other, other) for name, other in request.options.names.items()}
    names.setdefault("max_tokens", "max_output_tokens")
    request = replace(request, options=replace(request.options, names=names), param="input")
    echo = await _echo(body, request.options, model.encoder.thread_pool)
    common = {each.name: getattr(wanted, each.name) for each in fields(Wanted)}
    return WantedResponse(**common | {"requests": [request]}, echo=echo)


@contextmanager
def _own_names(conversation: InputConversation) -> Iterator[None]:
    """Gives errors of the chat the names that their fields have in the response's body."""

    def rename(text: str) -> str:
        text = _CALL.sub(
            lambda found: f"input[{conversation.calls[int(found[1])][int(found[2])]}].arguments", text
        )
        return _NAME.sub(lambda found: _NAMES[found[1]], _TOOL.sub(r"tools[\1].", text))

    try:
        yield
    except InvalidRequestError as error:
        message, param = rename(error.message), rename(error.param or "")
        if param == "messages":
            message, param = re.sub(r"^messages\b", "input", message), "input"
        error.message, error.param, error.args = message, param or None, (message,)
        raise


def _tools(body: ResponsesRequest) -> list[Tool] | None:
    """Return the functions that may be called, as a chat has them."""
    if body.tools is None:
        return None
    found = []
    for index, tool in enumerate(body.tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            name = f"{where}.type"
            text = "is not supported: the server runs no tools; give some of type function, which you run"
            raise UnsupportedFieldError(f"{name}={short_repr(tool.type)} {text}", param=name)
        if tool.name is None:
            raise InvalidRequestError(f"{where}.name: this field is required", param=f"{where}.name")
        found.append(Tool(type="function", function=_function(tool.name, tool)))
    return found


def _function(name: str, tool: Any) -> ToolFunction:
    return ToolFunction(
        name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )


def _tool_choice(choice: str | ChosenTool | None) -> ToolChoice | None:
    if not isinstance(choice, ChosenTool):
        return choice  # type: ignore[return-value]
    name = "tool_choice"
    if choice.type != "function":
        text = f"{name}.type={short_repr(choice.type)} is not supported; name a function, or send required"
        raise UnsupportedFieldError(text, param=f"{name}.type")
    if choice.name is None:
        raise InvalidRequestError(f"{name}.name: this field is required", param=f"{name}.name")
    return NamedTool(type="function", function=ChosenFunction(name=choice.name))


def _format(body: ResponsesRequest) -> TextFormat:
    given = None if body.text is None else body.text.format
    return TextFormat(type="text") if given is None else given


def _response_format(body: ResponsesRequest) -> ResponseFormat:
    """Return the format of the text, as a chat has it."""
    given = _format(body)
    if given.type != "json_schema" and given.schema is None:
        return ResponseFormat(type=given.type)
    schema = JSONSchemaFormat(
        name=given.name, description=given.description, schema=given.schema, strict=given.strict
    )
    return ResponseFormat(type=given.type, json_schema=schema)


async def _echo(body: ResponsesRequest, options: SamplingOptions, pool: ThreadPool) -> bytes:
    """Return what a reply repeats of its body, with the values in use where the body has none."""
    text_format = _format(body)
    schema = {
        "name": text_format.name or "schema",
        "description": text_format.description,
        "schema": text_format.schema,
        "strict": text_format.strict,
    }
    shown = {"type": text_format.type} | (schema if text_format.type == "json_schema" else {})
    choice = body.tool_choice
    if isinstance(choice, ChosenTool):
        choice = msgspec.to_builtins(choice)
    echo = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "temperature": options.temperature,
        "top_p": options.top_p,
        "tools": body.tools or [],
        "tool_choice": choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": shown},
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        # What there is none of, or only one kind.
        "previous_response_id": None,
        "max_tool_calls": None,
        "background": False,
        "store": False,
        "service_tier": "default",
        "top_logprobs": 0,
        "truncation": "disabled",
    }
    num_entries = len(body.tools or ()) * _TOOL_ENTRIES + len(body.instructions or "") // _ENTRY_CHARS
    return await pool.build(lambda: msgspec.json.encode(echo), num_entries)
