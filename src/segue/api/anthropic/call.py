"""The call that a body of the Messages API makes: a chat, with the names of this API in its errors."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from typing import Any

from segue.api.anthropic.conversation import ChatTurn, num_pieces, turns_of
from segue.api.anthropic.requests import CountTokensRequest, InputTool, InputToolChoice, MessagesRequest
from segue.api.guided import JSONSchemaFormat, ResponseFormat
from segue.api.openai.chat_fields import ChosenFunction, NamedTool, Tool, ToolChoice, ToolFunction
from segue.api.openai.requests import ChatCompletionRequest, Wanted, chat_call
from segue.api.request_fields import RequestFields
from segue.errors import InvalidRequestError, UnsupportedFieldError, invalid_value
from segue.frontend.chat_template import ChatForm
from segue.frontend.tokenizer import ServedModel

INLINE_PIECES = 1024  # messages and blocks that are taken on the event loop; more are in a thread
_CALL = re.compile(r"\Amessages\[(\d+)\]\.tool_calls\[(\d+)\]\.function\.arguments")
# Names of a chat's fields in errors, and what they are here.
_NAMES = (
    (re.compile(r"\btools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "output_config.format"),
    (re.compile(r"\breasoning_effort\b"), "output_config.effort"),
)
_CHOICES: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}


async def messages_call(body: CountTokensRequest, model: ServedModel, reply_id: str | None = None) -> Wanted:
    """Make the request of a body, as :func:`~segue.api.openai.requests.chat_call` makes that of a chat.

    A ``max_tokens`` that does not fit the context behind the prompt is clamped: the API requires the field,
    and its clients write a number that suits a large context. ``reply_id`` takes the place of a random id.
    """

    def work() -> tuple[list[ChatTurn], ChatCompletionRequest]:
        turns = turns_of(body)
        return turns, _chat(body, turns, model.chat)

    is_large = num_pieces(body) > INLINE_PIECES
    turns, chat = await model.encoder.thread_pool.run(work) if is_large else work()
    try:
        wanted = await chat_call(chat, model, reply_id or f"msg_{uuid.uuid4().hex}")
    except InvalidRequestError as error:
        raise _renamed(error, turns) from None
    (request,) = wanted.requests
    names = {option: _renamed_text(name, turns) for option, name in request.options.names.items()}
    options = replace(request.options, must_fit=False, names=names | {"stop": "stop_sequences"})
    return replace(wanted, requests=[replace(request, options=options)])


def _chat(body: CountTokensRequest, turns: list[ChatTurn], form: ChatForm) -> ChatCompletionRequest:
    """Return the body of a chat with the same meaning."""
    shared = {name: getattr(body, name) for name in RequestFields.__struct_fields__}
    generates: dict[str, Any] = {}
    if isinstance(body, MessagesRequest):
        generates = {
            name: getattr(body, name)
            for name in ("max_tokens", "temperature", "top_p", "top_k", "stream", "seed", "rid")
        } | {"stop": body.stop_sequences}
    choice, config = body.tool_choice, body.output_config
    wanted = None if config is None or config.format is None else config.format.schema
    return ChatCompletionRequest(
        messages=[turn.message() for turn in turns],
        model=body.model,
        tools=None if body.tools is None else [_tool(tool, n) for n, tool in enumerate(body.tools)],
        tool_choice=None if choice is None else _tool_choice(choice, has_tools=bool(body.tools)),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=None
        if wanted is None
        else ResponseFormat(type="json_schema", json_schema=JSONSchemaFormat(schema=wanted)),
        reasoning_effort=None if config is None else config.effort,
        continue_final_message=_continues(turns, body) or None,
        **_thinking(body, form),
        **shared,
        **generates,
    )


def _tool(tool: InputTool, index: int) -> Tool:
    if tool.defer_loading:
        name = f"tools[{index}].defer_loading"
        text = f"{name} is not supported, and true asks for it; leave it out, or send false"
        raise UnsupportedFieldError(text, param=name)
    function = ToolFunction(tool.name, tool.description, tool.input_schema, tool.strict)
    return Tool("function", function)


def _tool_choice(choice: InputToolChoice, *, has_tools: bool) -> ToolChoice:
    """Return OpenAI's name of a choice.

    Raises:
        InvalidRequestError: a call is forced, and there is no tool, or none is named.
    """
    if choice.type in ("any", "tool") and not has_tools:
        text = f"tool_choice.type={choice.type!r} needs tools; give some, or leave tool_choice out"
        raise InvalidRequestError(text, param="tool_choice.type")
    if (choice.type == "tool") != (choice.name is not None):
        text = "is the name of a tool with type tool, and is left out with any other type"
        raise InvalidRequestError(f"tool_choice.name: it {text}", param="tool_choice.name")
    if choice.name is not None:
        return NamedTool("function", ChosenFunction(choice.name))
    return _CHOICES[choice.type]


def _thinking(body: CountTokensRequest, form: ChatForm) -> dict[str, Any]:
    """Return the fields of a chat about reasoning.

    Without ``thinking`` the model is to answer at once, as with type disabled. If its template cannot tell it
    so, it may reason all the same, and that is not shown. With adaptive, the template decides.

    Raises:
        InvalidRequestError: ``budget_tokens`` is missing, or not below ``max_tokens``.
        UnsupportedFieldError: the model is to reason, and cannot.
    """
    wanted, name = body.thinking, "thinking.budget_tokens"
    kind = "disabled" if wanted is None else wanted.type
    budget = None if wanted is None else wanted.budget_tokens
    if (kind == "enabled") != (budget is not None):
        text = "this field is required with type enabled" if budget is None else "it needs type enabled"
        raise InvalidRequestError(f"{name}: {text}", param=name)
    if budget is not None and isinstance(body, MessagesRequest) and budget >= body.max_tokens:
        raise invalid_value(name, budget, f"must be below max_tokens={body.max_tokens}")
    if kind == "enabled" and not form.thinks:
        text = "this model does not reason; leave it out, or send type disabled or adaptive"
        raise UnsupportedFieldError(f"thinking.type='enabled': {text}", param="thinking.type")
    arguments = {}
    if kind != "adaptive" and form.template.uses("enable_thinking"):
        arguments["enable_thinking"] = kind == "enabled"
    return {
        "include_reasoning": kind != "disabled",
        "chat_template_kwargs": arguments | (body.chat_template_kwargs or {}),
    }


def _continues(turns: list[ChatTurn], body: CountTokensRequest) -> bool:
    """Whether the reply goes on with the last message, which is so if the assistant has begun it.

    Raises:
        InvalidRequestError: that message has no text to go on with.
    """
    last = turns[-1]
    if last.role != "assistant":
        return False
    where = f"messages[{len(body.messages) - 1}]"
    if last.calls:
        text = "the last message has blocks of type tool_use; send their tool_result blocks behind it"
        raise InvalidRequestError(f"{where}: {text}", param=where)
    if not any(part.text for part in last.parts):
        text = "the last message is the assistant's, and has no text that the reply could go on with"
        raise InvalidRequestError(f"{where}: {text}; leave it out", param=where)
    return True


def _renamed(error: InvalidRequestError, turns: list[ChatTurn]) -> InvalidRequestError:
    """Return a chat's error with the names of this API."""
    param = None if error.param is None else _renamed_text(error.param, turns)
    return type(error)(_renamed_text(error.message, turns), param=param)


def _renamed_text(text: str, turns: list[ChatTurn]) -> str:
    text = _CALL.sub(lambda found: turns[int(found[1])].places[int(found[2])], text)
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text
