"""Bodies of the OpenAI API, strict: an unknown field or a wrong type is an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from segue.api.validation import TokenId
from segue.errors import InvalidRequestError, UnsupportedFieldError

MAX_BIASES = 300  # entries of ``logit_bias``: the limit of OpenAI's own API

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


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """``stream_options``."""

    include_usage: bool | None = None


def too_many_biases(count: int) -> str:
    """The rule that so many entries of ``logit_bias`` break."""
    return f"it has {count} entries; at most {MAX_BIASES} are allowed"


class SamplingBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions have in common; None is the default."""

    model: str
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None  # at most MAX_BIASES
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class _MessagePart(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Without the collector's bookkeeping: a body may have tens of thousands of these, and no cycles."""


class TextPart(_MessagePart, frozen=True, gc=False):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


_Nothing = Annotated[list[None], Meta(max_length=0)]


class ChatMessage(_MessagePart, frozen=True, gc=False):
    """One message. The last five fields are empty in replies that clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: _Nothing | None = None
    annotations: _Nothing | None = None


class ChatCompletionRequest(SamplingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class CompletionRequest(SamplingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]  # all items of one type
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


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
