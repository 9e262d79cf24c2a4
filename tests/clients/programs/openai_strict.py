"""OpenAI's own client against a server, with every reply checked against the client's types.

    python openai_strict.py URL MODEL KEY

The server wants KEY.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI

URL, MODEL, KEY = sys.argv[1:4]
OPTIONS: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0, "timeout": 60}
MESSAGES: Any = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
]
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}

client = OpenAI(**OPTIONS, _strict_response_validation=True)
# The client's own type of a completion has no place for the `finish_reason: null` that OpenAI's API sends in
# all but the last event of a stream, so streams of completions cannot be checked strictly.
lax = OpenAI(**OPTIONS)


def models() -> None:
    (card,) = client.models.list().data
    assert card.id == MODEL and client.models.retrieve(MODEL) == card


def put_together(body: dict[str, Any]) -> Any:
    """The choice that the client's own helper makes of a stream's events."""
    with client.chat.completions.stream(**body) as stream:
        return stream.get_final_completion().choices[0]


def chat() -> None:
    whole = client.chat.completions.create(**CHAT)
    (choice,) = whole.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length") and choice.logprobs is None
    chunks = list(client.chat.completions.create(**CHAT, **USAGE))
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    reasons = [each.finish_reason for chunk in chunks for each in chunk.choices if each.finish_reason]
    assert (text, reasons) == (choice.message.content, [choice.finish_reason])
    ours, theirs = chunks[-1].usage, whole.usage
    assert ours is not None and theirs is not None and not chunks[-1].choices
    assert (ours.prompt_tokens, ours.completion_tokens) == (theirs.prompt_tokens, theirs.completion_tokens)
    assert ours.total_tokens == ours.prompt_tokens + ours.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    stop = text.split()[-1]
    final = put_together(CHAT | {"stop": [stop]})
    assert (final.finish_reason, final.message.content) == ("stop", text[: text.index(stop)])
    try:
        put_together(CHAT | {"max_completion_tokens": 1})
    except openai.LengthFinishReasonError as error:  # by which it tells that the reply is not complete
        assert text.startswith(error.completion.choices[0].message.content or "?")
    else:
        raise AssertionError("no LengthFinishReasonError")
    again = client.chat.completions.create(
        **{**CHAT, "messages": [*MESSAGES, choice.message, {"role": "user", "content": "Why?"}]}
    )
    assert again.choices[0].message.content is not None


def chat_logprobs() -> None:
    asked = {**CHAT, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked)
    found = whole.choices[0].logprobs
    assert found is not None and found.content and whole.usage is not None
    assert len(found.content) == whole.usage.completion_tokens
    for entry in found.content:
        assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in found.content]


def completions() -> None:
    whole = client.completions.create(**TEXT)
    assert whole.choices[0].text and whole.choices[0].finish_reason == "length" and whole.usage is not None
    chunks = list(lax.completions.create(**TEXT, **USAGE))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    several = client.completions.create(**{**TEXT, "prompt": ["One two three", "The capital of"]}, logprobs=2)
    assert [choice.index for choice in several.choices] == [0, 1]
    for choice in several.choices:
        found = choice.logprobs
        assert found is not None and found.tokens is not None and found.token_logprobs is not None
        assert len(found.tokens) == len(found.token_logprobs) == 12
        assert "".join(found.tokens) == choice.text
    ids = client.completions.create(**{**TEXT, "prompt": [5, 6, 7, 8]})
    assert ids.usage is not None and ids.usage.prompt_tokens == 4


def responses() -> None:
    asked: dict[str, Any] = {
        **{"model": MODEL, "instructions": "Answer in one word.", "temperature": 0, "max_output_tokens": 16},
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "The capital of France?"}]}],
    }
    whole = client.responses.create(**asked, metadata={"who": "me"})
    assert whole.output_text and whole.usage is not None and whole.metadata == {"who": "me"}
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert whole.status in ("completed", "incomplete")
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == f"response.{whole.status}"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    with client.responses.stream(**asked) as stream:
        *_, last = stream
    assert last.type == events[-1].type and last.response.output_text == whole.output_text
    items: Any = [*asked["input"], *whole.output, {"role": "user", "content": "Why?"}]
    assert client.responses.create(**{**asked, "input": items}).output_text
    create: Any = client.responses.create
    fails(openai.BadRequestError, "invalid_value", lambda: create(**{**asked, "temperature": 3}))
    fails(openai.NotFoundError, "model_not_found", lambda: create(**{**asked, "model": "another"}))
    stored = {**asked, "previous_response_id": whole.id}
    fails(openai.BadRequestError, "unsupported_parameter", lambda: create(**stored))
    fails(openai.NotFoundError, "not_found", lambda: client.responses.retrieve(whole.id))


def sampling() -> None:
    seeded = {**CHAT, "temperature": 0.9, "top_p": 0.95, "seed": 7, "stop": ["\n\n"], "user": "somebody"}
    penalties = {"presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"17": -100}}
    first, second = (
        client.chat.completions.create(**seeded, **penalties, extra_body={"top_k": 20, "min_p": 0.01})
        for _ in range(2)
    )
    assert first.choices[0].message.content == second.choices[0].message.content


async def asynchronous() -> None:
    async with AsyncOpenAI(**OPTIONS, _strict_response_validation=True) as both:
        whole, stream = await asyncio.gather(
            both.chat.completions.create(**CHAT), both.chat.completions.create(**CHAT, **USAGE)
        )
        text = "".join([c.delta.content or "" async for chunk in stream for c in chunk.choices])
        assert text == whole.choices[0].message.content
        assert [card.id async for card in both.models.list()] == [MODEL]


def fails(kind: type[openai.APIStatusError], code: str | None, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert type(error) is kind and error.code == code and error.body, error
        assert isinstance(error.message, str) and error.message
    else:
        raise AssertionError(f"no {kind.__name__}")


def errors() -> None:
    create: Any = client.chat.completions.create
    wrong = client.with_options(api_key="another")
    fails(openai.AuthenticationError, "invalid_api_key", lambda: wrong.models.list())
    fails(openai.AuthenticationError, "invalid_api_key", lambda: wrong.chat.completions.create(**CHAT))
    fails(openai.NotFoundError, "model_not_found", lambda: create(**{**CHAT, "model": "another"}))
    fails(openai.NotFoundError, "model_not_found", lambda: client.models.retrieve("another"))
    fails(openai.BadRequestError, "invalid_value", lambda: create(**{**CHAT, "temperature": 3}))
    fails(openai.BadRequestError, "invalid_value", lambda: create(**{**CHAT, "messages": []}))
    fails(openai.BadRequestError, "invalid_value", lambda: create(**{**CHAT, "stream": True, "top_p": 2}))
    fails(openai.BadRequestError, "unsupported_parameter", lambda: create(**CHAT, extra_body={"odd": 1}))
    long = {**TEXT, "prompt": [5] * 100_000}
    fails(openai.BadRequestError, "context_length_exceeded", lambda: client.completions.create(**long))
    fails(openai.NotFoundError, "not_found", lambda: client.embeddings.create(model=MODEL, input="text"))


def leaving() -> None:
    """Leave a stream early; the next request is answered as ever."""
    with client.chat.completions.create(**{**CHAT, "max_completion_tokens": 400}, stream=True) as stream:
        next(iter(stream))
    assert client.chat.completions.create(**CHAT).choices


for check in (models, chat, chat_logprobs, completions, responses, sampling, errors, leaving):
    check()
asyncio.run(asynchronous())
print("all done")
