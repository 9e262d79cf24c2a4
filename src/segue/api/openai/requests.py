"""The OpenAI API's bodies, and the requests that they ask for.

The bodies are strict: an unknown field or a wrong type is an error that names it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from segue.api.bootstrap import BOOTSTRAP_RULES, bootstraps
from segue.api.openai.token_fields import NOTHING, Shown, TokenFields, prompt_options, shown
from segue.api.validation import TokenId, parse, prompts_of
from segue.errors import InvalidRequestError, ModelNotFoundError, UnsupportedFieldError, short_repr
from segue.frontend.request import GenerateRequest
from segue.frontend.sampling_options import SamplingOptions, check_num_entries, num_entries
from segue.frontend.thread_pool import turn
from segue.frontend.tokenizer import ServedModel

MAX_BIASES = 300  # entries of ``logit_bias``: the limit of OpenAI's own API

# Accepted because they cannot change the output.
HARMLESS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})

# Fields of the contract that are not implemented, with the values that ask for nothing.
_NOT_YET: Mapping[str, tuple[Any, ...]] = {
    **{name: () for name in ("regex", "ebnf", "choice", "structured_outputs")},
    **{f"guided_{kind}": () for kind in ("json", "regex", "choice", "grammar")},
    **{name: (1,) for name in ("n", "best_of")},
    "include_stop_str_in_output": (False,),
    "response_format": ({"type": "text"},),
}
CHAT_NOT_YET: Mapping[str, tuple[Any, ...]] = {
    **_NOT_YET,
    **{name: () for name in ("functions", "reasoning_effort", "audio", "prediction", "verbosity")},
    **{name: () for name in ("web_search_options", "logprob_token_ids")},
    **{name: ("none",) for name in ("tool_choice", "function_call")},
    "tools": ([],),
    "parallel_tool_calls": (True, False),
    "chat_template_kwargs": ({},),
    "modalities": (["text"],),
}
COMPLETION_NOT_YET: Mapping[str, tuple[Any, ...]] = {**_NOT_YET, "suffix": ("",)}

# What fields of several types may be, for errors.
RULES = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "content": 'a string or a list of {"type": "text", "text": …} parts',
    **BOOTSTRAP_RULES,
}


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """``stream_options``."""

    include_usage: bool | None = None


class SamplingBody(TokenFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None  # at most --max-logprobs


class CompletionRequest(SamplingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]  # all items of one type
    logprobs: Annotated[int, Meta(ge=0)] | None = None  # at most --max-logprobs
    echo: bool | None = None


class ChatTokensRequest(ChatCompletionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions/tokens``: the messages are not rendered, their token ids come with them."""

    tokens: list[TokenId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a checked call wants: its requests, one per choice, and the form of the answer."""

    id: str
    created: int  # seconds since the epoch
    model: str  # its name
    requests: list[GenerateRequest]
    batch_id: str | None  # None: a single request
    stream: bool
    usage_in_stream: bool
    shown: Shown = NOTHING

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities were asked for."""
        return self.requests[0].options.logprobs >= 0

    def envelope(self, kind: str) -> dict[str, Any]:
        """Return the first fields of the answer, or of each of its chunks; ``kind`` is its ``object``."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


async def chat_call(body: ChatCompletionRequest, model: ServedModel, reply_id: str | None = None) -> Wanted:
    """Render the chat template, and check what the types of the fields cannot say.

    ``reply_id`` takes the place of a random id.
    """
    check_model(body.model, model)
    check_num_biases(len(body.logit_bias or ()))
    rid = reply_id or f"chatcmpl-{uuid.uuid4().hex}"
    if not body.messages:
        raise InvalidRequestError("messages: must have at least one message", param="messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    max_tokens, limit_name = _max_tokens(body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    names = {"max_tokens": limit_name, "logprobs": "top_logprobs", "num_prompt_top": "prompt_logprobs"}
    wishes = shown(body, stream=bool(body.stream))
    given = body.tokens if isinstance(body, ChatTokensRequest) else None
    request = GenerateRequest(
        rid=rid,
        prompt=await model.encoder.render(await messages_of(body.messages)) if given is None else given,
        options=SamplingOptions.of(
            body, max_tokens=max_tokens, logprobs=logprobs, names=names, **prompt_options(wishes, logprobs)
        ),
        add_special_tokens=bool(body.add_special_tokens),
        param="messages" if given is None else "tokens",
        bootstrap=bootstraps(body, 1)[0],
    )
    return _wanted(body, model, rid, [request], wishes)


def completion_call(body: CompletionRequest, model: ServedModel, reply_id: str | None = None) -> Wanted:
    """Make one request per prompt, and check what the types of the fields cannot say.

    ``reply_id`` takes the place of a random id.
    """
    check_model(body.model, model)
    check_num_biases(len(body.logit_bias or ()))
    rid = reply_id or f"cmpl-{uuid.uuid4().hex}"
    wishes = shown(body, stream=bool(body.stream), echo=bool(body.echo))
    of_prompt = prompt_options(wishes, -1 if body.logprobs is None else body.logprobs)
    options = SamplingOptions.of(body, names={"num_prompt_top": "prompt_logprobs"}, **of_prompt)
    special = body.add_special_tokens is not False
    prompts, _ = prompts_of(body.prompt, "prompt", RULES, model.max_prompts)
    check_num_entries(num_entries(options), len(prompts))
    rids = [rid] if len(prompts) == 1 else [f"{rid}-{index}" for index in range(len(prompts))]
    requests = [
        GenerateRequest(
            rid=each, prompt=prompt, options=options, add_special_tokens=special, bootstrap=bootstrap
        )
        for each, prompt, bootstrap in zip(rids, prompts, bootstraps(body, len(prompts)), strict=True)
    ]
    return _wanted(body, model, rid, requests, wishes)


def check_model(name: str, model: ServedModel) -> None:
    """Raise ModelNotFoundError unless the model has this name."""
    if name not in model.names:
        raise ModelNotFoundError(
            f"The model {short_repr(name)} does not exist; this server serves {model.names[0]!r}.",
            param="model",
        )


def parse_chat(body: Any) -> ChatCompletionRequest:
    """Check the body of ``POST /v1/chat/completions``. Raises as :func:`segue.api.validation.parse` does."""
    return parse(ChatCompletionRequest, _without_extras(body, CHAT_NOT_YET), rules=RULES)


def parse_chat_tokens(body: Any) -> ChatTokensRequest:
    """Check the body of ``POST /v1/chat/completions/tokens``, as :func:`parse_chat` does."""
    return parse(ChatTokensRequest, _without_extras(body, CHAT_NOT_YET), rules=RULES)


def parse_completion(body: Any) -> CompletionRequest:
    """Check the body of ``POST /v1/completions``. Raises as :func:`segue.api.validation.parse` does."""
    return parse(CompletionRequest, _without_extras(body, COMPLETION_NOT_YET), rules=RULES)


def check_num_biases(count: int) -> None:
    """Raise InvalidRequestError for more entries of ``logit_bias`` than OpenAI's API allows."""
    if count > MAX_BIASES:
        text = f"logit_bias: it has {count} entries; at most {MAX_BIASES} are allowed"
        raise InvalidRequestError(text, param="logit_bias")


def _without_extras(body: Any, not_yet: Mapping[str, tuple[Any, ...]]) -> Any:
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


def _wanted(
    body: ChatCompletionRequest | CompletionRequest,
    model: ServedModel,
    rid: str,
    requests: list[GenerateRequest],
    wishes: Shown,
) -> Wanted:
    """Return the call of checked requests, which share the id ``rid``; checks the options of streams."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream=true", param="stream_options")
    return Wanted(
        id=rid,
        created=int(time.time()),
        model=model.names[0],
        requests=requests,
        batch_id=rid if len(requests) > 1 else None,
        stream=bool(body.stream),
        usage_in_stream=body.stream_options is not None and bool(body.stream_options.include_usage),
        shown=wishes,
    )


def _max_tokens(body: ChatCompletionRequest) -> tuple[int | None, str]:
    """Return the limit of output tokens, or None, and the name of the field that it came from, for errors.

    ``max_completion_tokens`` is OpenAI's newer name. Both may be given if they are equal.
    """
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        both = f"max_completion_tokens={short_repr(new)} and max_tokens={short_repr(old)}"
        raise InvalidRequestError(f"{both} contradict each other; give one", param="max_tokens")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


async def messages_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them.

    Text parts are joined by newlines, ``developer`` becomes ``system``, which templates know, and fields
    that are not set are left out. Yields to the event loop now and then, as there may be many.
    """
    rendered = []
    for index, message in enumerate(messages):
        await turn(index)
        content = message.content
        if content is None:
            name = f"messages[{index}].content"
            raise InvalidRequestError(f"{name}: this field is required", param=name)
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        optional = {"name": message.name, "tool_call_id": message.tool_call_id}
        given = {name: value for name, value in optional.items() if value is not None}
        rendered.append({"role": role, "content": content, **given})
    return rendered
