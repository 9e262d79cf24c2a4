"""The OpenAI API's bodies, and the requests that they ask for.

The bodies are strict: an unknown field or a wrong type is an error that names it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from segue.api.asks_nothing import Place, without_nothing
from segue.api.bootstrap import BOOTSTRAP_RULES, bootstraps
from segue.api.choices import NumChoices, in_choices, num_choices
from segue.api.guided import RULES as GUIDED_RULES
from segue.api.guided import GuidedFields, guided_options
from segue.api.openai import chat_fields
from segue.api.openai.call_grammar import with_forced_call
from segue.api.openai.chat_fields import Effort, ReplyForm, ToolCall, ToolChoice, Tools
from segue.api.openai.token_fields import NOTHING, Shown, prompt_options, shown
from segue.api.request_fields import check_fields, check_rid, given_rid
from segue.api.validation import NOT_EMPTY, TokenId, parse, prompts_of
from segue.errors import InvalidRequestError, ModelNotFoundError, UnsupportedFieldError, short_repr
from segue.frontend.request import GenerateRequest
from segue.frontend.sampling_options import SamplingOptions, bounds_of, check_num_entries, num_entries
from segue.frontend.thread_pool import turn
from segue.frontend.tokenizer import ServedModel

MAX_BIASES = 300  # entries of ``logit_bias``: the limit of OpenAI's own API

# What a router writes as the model of a client that names none (sglang-router and smg), and what SGLang calls
# it itself: the served model.
ANY_MODEL = frozenset({"unknown", "default"})

# What fields of several types may be, for errors.
RULES = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "content": 'a string or a list of {"type": "text", "text": …} parts',
    **chat_fields.RULES,
    **GUIDED_RULES,
    **BOOTSTRAP_RULES,
}


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # there are no random characters in events
    continuous_usage_stats: bool | None = None  # not supported


class SamplingBody(GuidedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions have in common; None is the default."""

    model: str | None = None  # None: the served one
    rid: str | None = None  # the reply's id too
    request_id: str | None = None  # another name of ``rid``
    n: NumChoices | None = None  # choices per prompt
    best_of: int | None = None  # as many
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, bounds_of("top_p")] | None = None
    top_k: Annotated[int, bounds_of("top_k")] | None = None
    min_p: Annotated[float, bounds_of("min_p")] | None = None
    seed: Annotated[int, bounds_of("seed")] | None = None
    sampling_seed: Annotated[int, bounds_of("seed")] | None = None  # another name of ``seed``
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: Annotated[int, bounds_of("max_tokens")] | None = None
    min_tokens: Annotated[int, bounds_of("min_tokens")] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # another name of it
    presence_penalty: Annotated[float, bounds_of("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounds_of("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, bounds_of("repetition_penalty")] | None = None
    logit_bias: dict[TokenId, float] | None = None  # at most MAX_BIASES
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
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
    """One message. The last four fields are empty in replies that clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # another name of it
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: _Nothing | None = None


class ChatCompletionRequest(SamplingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], NOT_EMPTY]
    max_completion_tokens: Annotated[int, bounds_of("max_tokens")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None  # at most --max-logprobs
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: at most one call
    separate_reasoning: bool | None = None  # false: reasoning is part of the content
    stream_reasoning: bool | None = None  # false: reasoning comes in one event, when it has ended
    include_reasoning: bool | None = None  # false: reasoning is left out
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None  # None: true, unless the last message is continued
    continue_final_message: bool | None = None


class CompletionRequest(SamplingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``."""

    # All items of one type.
    prompt: str | Annotated[list[str | int | Annotated[list[int], NOT_EMPTY]], NOT_EMPTY]
    logprobs: Annotated[int, Meta(ge=0)] | None = None  # at most --max-logprobs
    echo: bool | None = None


class ChatTokensRequest(ChatCompletionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions/tokens``: the messages are not rendered, their token ids come with them."""

    tokens: Annotated[list[TokenId], NOT_EMPTY]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a checked call wants: its requests, one per choice, and the form of the answer."""

    id: str
    created: int  # seconds since the epoch
    model: str  # its name
    requests: list[GenerateRequest]  # the choices of one prompt are neighbours
    batch_id: str | None  # None: a single request
    stream: bool
    usage_in_stream: bool
    shown: Shown = NOTHING
    form: ReplyForm | None = None  # of a chat whose texts have parts; None: they are shown as they are
    n: int = 1  # choices per prompt

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
    rid = _checked(body, model, reply_id or f"chatcmpl-{uuid.uuid4().hex}")
    check_rid(rid)
    priority, salt = check_fields(body)
    if not body.messages:
        raise InvalidRequestError("messages: must have at least one message", param="messages")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    max_tokens, limit_name = _max_tokens(body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    names = {"max_tokens": limit_name, "logprobs": "top_logprobs", "num_prompt_top": "prompt_logprobs"}
    wishes = shown(body, stream=bool(body.stream))
    given = body.tokens if isinstance(body, ChatTokensRequest) else None
    chat_fields.check_tools(body, model.chat, is_rendered=given is None)
    prompt: str | Sequence[int]
    continued: str | None = None
    if given is None:
        chat_fields.check_continued(body, body.messages[-1])
        history = chat_fields.History()
        messages = await messages_of(body.messages, history)
        if body.continue_final_message:
            continued = messages[-1]["content"]
        template = chat_fields.template_arguments(body, model.chat)
        if history.num_chars:
            template["other_chars"] = template.get("other_chars", 0) + history.num_chars
        prompt = await model.encoder.render(messages, **template)
    else:
        prompt = given
    options = _options(
        body, model, max_tokens=max_tokens, logprobs=logprobs, names=names, **prompt_options(wishes, logprobs)
    )
    check_num_entries(num_entries(options), num_choices(body.n, body.best_of))
    thinking = chat_fields.is_thinking(model, prompt, continued)
    form = chat_fields.reply_form(body, model.chat, thinking=thinking, is_guided=options.grammar is not None)
    request = GenerateRequest(
        rid=rid,
        prompt=prompt,
        options=with_forced_call(options, body, model.chat, thinking),
        priority=priority,
        cache_salt=salt,
        add_special_tokens=bool(body.add_special_tokens),
        param="messages" if given is None else "tokens",
        bootstrap=bootstraps(body, 1)[0],
        keeps_marks=form is not None or model.chat.thinks,
    )
    return replace(_wanted(body, model, rid, [request], wishes), form=form)


def completion_call(body: CompletionRequest, model: ServedModel, reply_id: str | None = None) -> Wanted:
    """Make one request per prompt, and check what the types of the fields cannot say.

    ``reply_id`` takes the place of a random id.
    """
    rid = _checked(body, model, reply_id or f"cmpl-{uuid.uuid4().hex}")
    priority, salt = check_fields(body)
    wishes = shown(body, stream=bool(body.stream), echo=bool(body.echo))
    of_prompt = prompt_options(wishes, -1 if body.logprobs is None else body.logprobs)
    options = _options(body, model, names={"num_prompt_top": "prompt_logprobs"}, **of_prompt)
    prompts, _ = prompts_of(body.prompt, "prompt", RULES, model.max_prompts)
    check_num_entries(num_entries(options), len(prompts) * num_choices(body.n, body.best_of))
    rids = [rid] if len(prompts) == 1 else [f"{rid}-{index}" for index in range(len(prompts))]
    for each in rids:
        check_rid(each)
    requests = [
        GenerateRequest(
            rid=each,
            prompt=prompt,
            options=options,
            priority=priority,
            cache_salt=salt,
            add_special_tokens=body.add_special_tokens is not False,
            bootstrap=bootstrap,
        )
        for each, prompt, bootstrap in zip(rids, prompts, bootstraps(body, len(prompts)), strict=True)
    ]
    return _wanted(body, model, rid, requests, wishes)


def _checked(body: SamplingBody, model: ServedModel, reply_id: str) -> str:
    """Check what chat and completions have in common; return the reply's id, which may be the client's."""
    check_given_model(body.model, model)
    check_num_biases(len(body.logit_bias or ()))
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        name = "stream_options.continuous_usage_stats"
        raise UnsupportedFieldError(f"{name} is not supported; leave it out, or send false", param=name)
    return given_rid(body.rid, body.request_id) or reply_id


def _options(body: SamplingBody, model: ServedModel, **others: Any) -> SamplingOptions:
    """Return the sampling options of a body; ``others`` replace what it has."""
    if body.seed is None:
        others["names"] = {"seed": "sampling_seed", **others["names"]}
    if body.seed is not None and body.sampling_seed is not None and body.seed != body.sampling_seed:
        both = f"seed={short_repr(body.seed)} and sampling_seed={short_repr(body.sampling_seed)}"
        raise InvalidRequestError(f"{both} contradict each other; give one", param="sampling_seed")
    names = others.pop("names")
    return SamplingOptions.of(
        body,
        model.sampling_defaults,
        seed=body.sampling_seed if body.seed is None else body.seed,
        keep_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
        **guided_options(body, names),
        **others,
    )


def check_given_model(name: str | None, model: ServedModel) -> None:
    """Raise ModelNotFoundError for a body that names another model than the served one."""
    if name is not None and name not in ANY_MODEL:
        check_model(name, model)


def check_model(name: str, model: ServedModel) -> None:
    """Raise ModelNotFoundError unless the model has this name."""
    if name not in model.names:
        raise ModelNotFoundError(
            f"The model {short_repr(name)} does not exist; this server serves {model.names[0]!r}.",
            param="model",
        )


def parse_chat(body: Any) -> ChatCompletionRequest:
    """Check the body of ``POST /v1/chat/completions``. Raises as :func:`segue.api.validation.parse` does."""
    return parse(ChatCompletionRequest, _without_nothing(body, "chat"), rules=RULES)


def parse_chat_tokens(body: Any) -> ChatTokensRequest:
    """Check the body of ``POST /v1/chat/completions/tokens``, as :func:`parse_chat` does."""
    return parse(ChatTokensRequest, _without_nothing(body, "chat"), rules=RULES)


def parse_completion(body: Any) -> CompletionRequest:
    """Check the body of ``POST /v1/completions``. Raises as :func:`segue.api.validation.parse` does."""
    return parse(CompletionRequest, _without_nothing(body, "completions"), rules=RULES)


def check_num_biases(count: int) -> None:
    """Raise InvalidRequestError for more entries of ``logit_bias`` than OpenAI's API allows."""
    if count > MAX_BIASES:
        text = f"logit_bias: it has {count} entries; at most {MAX_BIASES} are allowed"
        raise InvalidRequestError(text, param="logit_bias")


def _without_nothing(body: Any, place: Place) -> dict[str, Any]:
    """The body without the fields that are not implemented; see :mod:`segue.api.asks_nothing`."""
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return without_nothing(body, place)


def _wanted(
    body: ChatCompletionRequest | CompletionRequest,
    model: ServedModel,
    rid: str,
    requests: list[GenerateRequest],
    wishes: Shown,
) -> Wanted:
    """Return the call of checked requests, one per prompt, which share the id ``rid``.

    Checks the number of choices, and the options of streams.
    """
    n = num_choices(body.n, body.best_of)
    requests = in_choices(requests, n, model.max_prompts)
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
        n=n,
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


async def messages_of(
    messages: Sequence[ChatMessage], history: chat_fields.History | None = None
) -> list[dict[str, Any]]:
    """Return messages as chat templates take them.

    Text parts are joined by newlines, ``developer`` becomes ``system``, which templates know, fields that are
    not set are left out, and arguments of tool calls become objects. Yields to the event loop now and then,
    as there may be many. ``history`` counts what there is beside the contents.
    """
    rendered, history = [], history or chat_fields.History()
    for index, message in enumerate(messages):
        await turn(index)
        content = message.content
        reasoning = message.reasoning_content or message.reasoning
        if content is None and (message.tool_calls or reasoning):
            content = ""
        if content is None:
            name = f"messages[{index}].content"
            raise InvalidRequestError(f"{name}: this field is required", param=name)
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        optional = {"name": message.name, "tool_call_id": message.tool_call_id}
        given: dict[str, Any] = {name: value for name, value in optional.items() if value is not None}
        if message.tool_calls:
            given["tool_calls"] = await history.calls_of(message.tool_calls, f"messages[{index}]")
        if reasoning is not None:
            history.num_chars += len(reasoning)
            given |= dict.fromkeys(("reasoning_content", "reasoning"), reasoning)
        rendered.append({"role": role, "content": content, **given})
    return rendered
