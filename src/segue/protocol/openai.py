"""Bodies of the OpenAI API, strict: an unknown field or a wrong type is an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from segue.errors import InvalidRequestError, UnsupportedFieldError
from segue.protocol.validation import FastList, LogitBias, StrictBody

# Accepted because they cannot change the output.
HARMLESS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})

# Fields of the contract that are not implemented, with the values that ask for nothing.
_NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "regex": (),
    "ebnf": (),
    "choice": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
CHAT_NOT_YET: Mapping[str, tuple[Any, ...]] = {
    **_NOT_YET,
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": (),
    "function_call": ("none",),
    "chat_template_kwargs": ({},),
    "reasoning_effort": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "logprob_token_ids": (),
}
COMPLETION_NOT_YET: Mapping[str, tuple[Any, ...]] = {**_NOT_YET, "echo": (False,), "suffix": ("",)}

# What fields of several types may be, for errors.
RULES = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "content": 'a string or a list of {"type": "text", "text": …} parts',
}


class _Body(StrictBody):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Body):
    """``stream_options``."""

    include_usage: bool | None = None


class _Sampling(_Body):
    """What chat and completions have in common; None is the default."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | FastList[str] | None = None
    stop_token_ids: FastList[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class TextPart(_Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One message. The last four fields are empty in replies that clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | FastList[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatCompletionRequest(_Sampling):
    """``POST /v1/chat/completions``."""

    messages: Annotated[FastList[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class CompletionRequest(_Sampling):
    """``POST /v1/completions``."""

    prompt: str | FastList[str] | FastList[int] | FastList[FastList[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


def without_extras(body: Any, not_yet: Mapping[str, tuple[Any, ...]]) -> Any:
    """The body without its harmless fields, and without the unimplemented ones that ask for nothing.

    Raises:
        UnsupportedFieldError: an unimplemented field that asks for something.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    for name, values in not_yet.items():
        value = body.get(name)
        if value is not None and not any(type(value) is type(other) and value == other for other in values):
            only = f"; only {values[0]!r} is" if values else ""
            raise UnsupportedFieldError(f"{name} is not supported{only}; leave it out", param=name)
    return {name: value for name, value in body.items() if name not in HARMLESS and name not in not_yet}
