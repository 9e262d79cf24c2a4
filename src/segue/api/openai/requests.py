"""From an OpenAI body to requests for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from segue.api.openai.bodies import (
    MAX_BIASES,
    RULES,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    too_many_biases,
)
from segue.api.validation import check_one_kind
from segue.errors import InvalidRequestError, ModelNotFoundError, short_repr
from segue.frontend.request import GenerateRequest
from segue.frontend.sampling_options import SamplingOptions, check_batch, check_num_entries, num_entries
from segue.frontend.thread_pool import turn
from segue.launch.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A checked call: its requests, one a choice, and the form of the answer."""

    id: str
    requests: list[GenerateRequest]
    is_batch: bool
    stream: bool
    usage_in_stream: bool
    logprobs: int  # -1: none; n: with the n likeliest


async def chat_call(body: ChatCompletionRequest, runtime: Runtime, rid: str) -> Wanted:
    """Render the chat template, and check what the types of the fields cannot say."""
    check_model(body.model, runtime)
    if not body.messages:
        raise InvalidRequestError("messages: must have at least one message", param="messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    max_tokens, limit_name = _max_tokens(body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    request = GenerateRequest(
        rid=rid,
        prompt=await runtime.manager.render(await _messages(body.messages)),
        options=_options(body, max_tokens, logprobs),
        add_special_tokens=False,
        param="messages",
        names={"max_tokens": limit_name, "logprobs": "top_logprobs"},
    )
    return _wanted(body, rid, [request], False, logprobs)


def completion_call(body: CompletionRequest, runtime: Runtime, rid: str) -> Wanted:
    """One request a prompt."""
    check_model(body.model, runtime)
    logprobs = -1 if body.logprobs is None else body.logprobs
    options = _options(body, body.max_tokens, logprobs)
    prompts = _prompts(body.prompt)
    check_batch(len(prompts), runtime.config.max_queued_requests, "prompt")
    check_num_entries(num_entries(options), len(prompts))
    is_batch = len(prompts) > 1
    requests = [
        GenerateRequest(rid=f"{rid}-{index}" if is_batch else rid, prompt=prompt, options=options)
        for index, prompt in enumerate(prompts)
    ]
    return _wanted(body, rid, requests, is_batch, logprobs)


def check_model(name: str, runtime: Runtime) -> None:
    """Raise ModelNotFoundError unless this server serves ``name``."""
    if name not in (runtime.name, runtime.config.model):
        raise ModelNotFoundError(
            f"The model {short_repr(name)} does not exist; this server serves {runtime.name!r}.",
            param="model",
        )


def _wanted(
    body: ChatCompletionRequest | CompletionRequest,
    rid: str,
    requests: list[GenerateRequest],
    is_batch: bool,
    logprobs: int,
) -> Wanted:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream=true", param="stream_options")
    return Wanted(
        id=rid,
        requests=requests,
        is_batch=is_batch,
        stream=bool(body.stream),
        usage_in_stream=body.stream_options is not None and bool(body.stream_options.include_usage),
        logprobs=logprobs,
    )


def _options(
    body: ChatCompletionRequest | CompletionRequest, max_tokens: int | None, logprobs: int
) -> SamplingOptions:
    given: dict[str, Any] = {
        name: value
        for name in (
            "min_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "ignore_eos",
        )
        if (value := getattr(body, name)) is not None
    }
    if len(body.logit_bias or ()) > MAX_BIASES:
        text = f"logit_bias: {too_many_biases(len(body.logit_bias or ()))}"
        raise InvalidRequestError(text, param="logit_bias")
    stop = body.stop
    return SamplingOptions(
        **given,
        max_tokens=max_tokens,
        logit_bias=body.logit_bias or {},
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
    )


def _max_tokens(body: ChatCompletionRequest) -> tuple[int | None, str]:
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        both = f"max_completion_tokens={short_repr(new)} and max_tokens={short_repr(old)}"
        raise InvalidRequestError(f"{both} contradict each other; give one", param="max_tokens")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


async def _messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """As chat templates take them: text parts joined by newlines, ``developer`` is ``system``."""
    rendered = []
    for index, message in enumerate(messages):
        await turn(index)
        content = message.content
        if content is None:
            name = f"messages[{index}].content"
            raise InvalidRequestError(f"{name}: this field is required", param=name)
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        one = {"role": "system" if message.role == "developer" else message.role, "content": content}
        if message.name is not None:
            one["name"] = message.name
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        rendered.append(one)
    return rendered


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    check_one_kind(prompt, "prompt", RULES)
    if not prompt:
        raise InvalidRequestError("prompt is empty; it must have at least one token", param="prompt")
    if isinstance(prompt[0], int):
        return [cast(list[int], prompt)]
    return cast(list[str | list[int]], list(prompt))
