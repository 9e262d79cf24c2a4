"""The fields of a chat about tools, reasoning and the template, and what they ask of prompt and reply."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from segue.api.parsers.message import MessageFormat
from segue.api.parsers.reasoning import CLOSE as THINK_END
from segue.api.parsers.reasoning import OPEN as THINK
from segue.errors import InvalidRequestError, UnsupportedFieldError, short_repr
from segue.frontend.chat_template import ChatForm
from segue.frontend.thread_pool import turn
from segue.frontend.tokenizer import ServedModel

if TYPE_CHECKING:
    from segue.api.openai.requests import ChatCompletionRequest, ChatMessage

MAX_TOOLS = 512
MAX_ARGUMENTS_CHARS = 1 << 18  # of one call in the history: decoding takes at most 40 ms
MAX_ALL_ARGUMENTS_CHARS = 1 << 21  # of all its calls
# Opening brackets in the arguments of one call, and of all: each may be a list or an object, and a garbage
# collection that looks at a million of them stops the event loop for a tenth of a second.
MAX_ARGUMENTS_BRACKETS = 1 << 16
MAX_ALL_ARGUMENTS_BRACKETS = 1 << 17
_INLINE_CHARS = 1 << 14  # of arguments, behind which other requests get their turn
_CALL_CHARS = 64  # that are rendered in the time that a call without arguments takes
# Arguments of a chat template that decide how it is used, and not what it says.
RESERVED = frozenset(
    {
        *("tokenize", "chat_template", "conversation", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("processor_kwargs", "add_generation_prompt", "continue_final_message", "tools", "other_chars"),
    }
)
RULES = {  # what fields of several types may be, for errors
    "tool_choice": '"none", "auto", "required" or {"type": "function", "function": {"name": …}}',
}
# Floats of many digits take msgspec 10 µs each, and Python a tenth of that.
_decode_object = msgspec.json.Decoder(dict[str, Any], float_hook=float).decode
_BLOCK_CHARS = 40  # of an empty block of reasoning
_NUM_LAST_TOKENS = 8  # of given token ids, in which a mark that ends the prompt is looked for

FunctionName = Annotated[str, Meta(min_length=1, max_length=256)]


class ToolFunction(Struct, frozen=True):
    """A function that the model may call. Further fields are ignored."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # arguments follow the schema wherever they are guided, whatever this says


class Tool(Struct, frozen=True):
    """A tool: a function."""

    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(Struct, frozen=True):
    """The function of :class:`NamedTool`."""

    name: FunctionName


class NamedTool(Struct, frozen=True):
    """The function that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


class CalledFunction(Struct, frozen=True, gc=False):
    """The function of a call, and its arguments. There may be tens of thousands, without cycles."""

    name: FunctionName
    arguments: str | None = None  # the JSON of an object


class ToolCall(Struct, frozen=True, gc=False):
    """A call that the model has made. Further fields are ignored."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyForm:
    """How the text of a reply is understood, and what is shown of it."""

    text: MessageFormat
    has_reasoning: bool = True  # whether reasoning is shown
    streams_reasoning: bool = True  # whether it comes as it is generated
    one_call: bool = False  # whether the reply ends with its first call


def check_tools(body: ChatCompletionRequest, chat: ChatForm, *, is_rendered: bool) -> None:
    """Check the tools, and how they are to be used.

    ``is_rendered``: whether the template makes the prompt.

    Raises:
        InvalidRequestError: two tools have one name, or the choice names none of them.
        UnsupportedFieldError: the model, or this server, cannot do that.
    """
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            where = f"tools[{index}].function.name"
            text = f"{where}={short_repr(name)}: another tool has this name; give each its own"
            raise InvalidRequestError(text, param=where)
    if not tools:
        if choice == "required" or isinstance(choice, NamedTool):
            text = f"tool_choice={_choice_text(choice)} needs tools; give some, or leave it out"
            raise InvalidRequestError(text, param="tool_choice")
        return
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        text = f"tool_choice={_choice_text(choice)}: there is no such tool; name one of tools"
        raise InvalidRequestError(text, param="tool_choice")
    if choice == "none":
        return
    if is_rendered and not chat.template.uses("tools"):
        text = "the chat template of this model has no place for tools; leave them out"
        raise UnsupportedFieldError(f"tools: {text}, or send tool_choice none", param="tools")
    if chat.tools is None:
        text = "it is not known how this model writes tool calls; start the server with --tool-call-parser"
        raise UnsupportedFieldError(f"tools: {text}, or send tool_choice none", param="tools")


def forced_tools(body: ChatCompletionRequest) -> list[Tool]:
    """Return the tools of which the reply has to call one; empty: it need not call any."""
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, NamedTool):
        return [tool for tool in tools if tool.function.name == choice.function.name]
    return tools if choice == "required" else []


def _choice_text(choice: str | NamedTool) -> str:
    return short_repr(choice.function.name if isinstance(choice, NamedTool) else choice)


def check_continued(body: ChatCompletionRequest, last: ChatMessage) -> None:
    """Raise InvalidRequestError if the last message cannot be continued, although the body asks for it."""
    if not body.continue_final_message:
        return
    name = "continue_final_message"
    if body.add_generation_prompt:
        text = f"add_generation_prompt and {name} exclude each other; give one"
        raise InvalidRequestError(text, param=name)
    if last.role != "assistant" or last.tool_calls:
        what = "has tool calls" if last.tool_calls else f"is of role {last.role!r}"
        text = f"{name}: the last message {what}; only the text of an assistant is continued"
        raise InvalidRequestError(text, param=name)


def check_template_arguments(given: dict[str, Any] | None) -> None:
    """Raise InvalidRequestError for ``chat_template_kwargs`` that are no arguments of the template."""
    for name in given or ():
        if name in RESERVED:
            text = f"chat_template_kwargs: {name} is no argument for the template; leave it out"
            raise InvalidRequestError(text, param="chat_template_kwargs")


def template_arguments(body: ChatCompletionRequest, chat: ChatForm) -> dict[str, Any]:
    """Return what the template gets beside the messages; what is not given is left out.

    Raises:
        InvalidRequestError: an argument is reserved.
        UnsupportedFieldError: ``reasoning_effort``, of which the template knows nothing.
    """
    check_template_arguments(body.chat_template_kwargs)
    found = dict(body.chat_template_kwargs or {})
    if (effort := body.reasoning_effort) is not None:
        if chat.template.uses("reasoning_effort"):
            found.setdefault("reasoning_effort", effort)
        elif effort == "none" and chat.template.uses("enable_thinking"):
            found.setdefault("enable_thinking", False)
        elif effort != "none" or chat.thinks:
            text = (
                f"reasoning_effort={effort!r}: the chat template of this model does not use it; leave it out"
            )
            raise UnsupportedFieldError(text, param="reasoning_effort")
    if body.tools:
        found |= rendered_tools(body.tools)
    if body.continue_final_message:
        found |= {"continue_final_message": True, "add_generation_prompt": False}
    elif body.add_generation_prompt is False:
        found["add_generation_prompt"] = False
    return found


def rendered_tools(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return what a template gets of tools, and how much of it there is."""
    rendered = [_rendered(tool) for tool in tools]
    return {"tools": rendered, "other_chars": len(msgspec.json.encode(rendered))}


def _rendered(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates take it."""
    function = tool.function
    given = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {
        "type": "function",
        "function": {name: value for name, value in given.items() if value is not None},
    }


class History:
    """Makes the calls in a conversation what templates take: their arguments become objects."""

    def __init__(self) -> None:
        self._num_argument_chars = 0
        self._num_argument_brackets = 0
        self.num_chars = 0  # of arguments and reasoning: what the template gets beside the contents

    async def calls_of(self, calls: Sequence[ToolCall], where: str) -> list[dict[str, Any]]:
        """Return the calls of the message ``where``. Yields to the event loop behind many, or large ones.

        Raises:
            InvalidRequestError: arguments are not the JSON of an object, or too large.
        """
        found = []
        for index, call in enumerate(calls):
            await turn(index)
            given = call.function.arguments or "{}"
            arguments = self._decoded(given, f"{where}.tool_calls[{index}].function.arguments")
            function = {"name": call.function.name, "arguments": arguments}
            ids = {} if call.id is None else {"id": call.id}
            found.append({**ids, "type": "function", "function": function})
            if len(given) > _INLINE_CHARS:
                await asyncio.sleep(0)
        return found

    def _decoded(self, given: str, where: str) -> dict[str, Any]:
        num_brackets = given.count("[") + given.count("{")
        self._num_argument_chars += len(given)
        self._num_argument_brackets += num_brackets
        self.num_chars += len(given) + _CALL_CHARS
        alone, together = "it has", "with those of the calls before, it has"
        for count, most, which, unit in (
            (len(given), MAX_ARGUMENTS_CHARS, alone, "characters"),
            (self._num_argument_chars, MAX_ALL_ARGUMENTS_CHARS, together, "characters"),
            (num_brackets, MAX_ARGUMENTS_BRACKETS, alone, "opening brackets"),
            (self._num_argument_brackets, MAX_ALL_ARGUMENTS_BRACKETS, together, "opening brackets"),
        ):
            if count > most:
                text = f"{where}: {which} {count} {unit}; at most {most} are allowed"
                raise InvalidRequestError(text, param=where)
        return _object(given, where)


def _object(given: str, where: str) -> dict[str, Any]:
    try:
        return _decode_object(given)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        text = f"{where}={short_repr(given)}: it must be the JSON of an object"
        raise InvalidRequestError(text, param=where) from None


def reply_form(
    body: ChatCompletionRequest, chat: ChatForm, *, thinking: bool, is_guided: bool
) -> ReplyForm | None:
    """Return how the reply to a chat is understood; None: its text is shown as it is.

    Args:
        body: what is asked for.
        chat: how the model's texts are understood.
        thinking: whether the prompt has begun the reasoning.
        is_guided: whether the client has given a grammar, which has no place for reasoning.
    """
    has_tools = bool(body.tools) and body.tool_choice != "none"
    may_think = chat.thinks and not is_guided
    thinks = may_think and body.separate_reasoning is not False
    if not (thinks or has_tools):
        return None
    return ReplyForm(
        text=MessageFormat(
            tools=chat.tools if has_tools else None,
            names=frozenset(tool.function.name for tool in body.tools or ()),
            thinks=thinks,
            shows_marks=may_think and not thinks,
            thinking=may_think and thinking,
        ),
        has_reasoning=body.include_reasoning is not False,
        streams_reasoning=body.stream_reasoning is not False,
        one_call=body.parallel_tool_calls is False,
    )


def is_thinking(model: ServedModel, prompt: str | Sequence[int], continued: str | None) -> bool:
    """Whether a prompt has begun the reasoning that the reply goes on with.

    ``continued`` is the text of the message that the reply continues; None: it continues none.
    """
    if not model.chat.thinks:
        return False
    if not isinstance(prompt, str):
        last = list(prompt[-_NUM_LAST_TOKENS:])
        prompt = model.encoder.tokenizer_for("tokens").decode(last, skip_special_tokens=False)
    if continued is not None:  # the template may have put a block before it
        end = prompt[-len(continued) - _BLOCK_CHARS :]
        return end.rfind(THINK) > end.rfind(THINK_END)
    return prompt.rstrip().endswith(THINK)
