"""The calls of the routes that generate: a body becomes requests, and what they generate becomes a reply.

:mod:`segue.server.generation_routes` answers clients with it, and :mod:`segue.server.leg_routes` routers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

from segue.api.anthropic.call import messages_call
from segue.api.anthropic.errors import error_body
from segue.api.anthropic.replies import MessageReplies, event_bytes
from segue.api.anthropic.requests import explained, parse_messages
from segue.api.native import NativeCall, NativeReplies, parse_call
from segue.api.openai.chat_text import PIECE_CHARS
from segue.api.openai.replies import (
    PARSED_CHARS,
    ChatDialect,
    Chunks,
    CompletionDialect,
    ReplyChoices,
    usage,
)
from segue.api.openai.requests import (
    Wanted,
    chat_call,
    completion_call,
    parse_chat,
    parse_chat_tokens,
    parse_completion,
)
from segue.api.token_generate import TokenReplies, parse_token_call
from segue.errors import InvalidRequestError, SegueError
from segue.frontend.request import Generation, Output
from segue.launch.runtime import Runtime
from segue.server import large_generation, large_messages
from segue.server.body import decode_json
from segue.server.response_calls import ResponsesReply, parse_response
from segue.server.responses import DONE, event, native_body, openai_body


class Reply(Protocol):
    """The reply to a call while its requests run."""

    def preparation(self, index: int) -> Awaitable[None] | None:
        """Returns long work that must be done before the next event of request ``index``; mostly None."""
        ...

    def event(self, index: int, output: Output) -> bytes:
        """Returns what a stream adds for new output of request ``index``; it may be empty."""
        ...

    def last_event(self) -> bytes:
        """Returns how a stream ends once all requests have: the usage, if asked for, and the end mark."""
        ...

    def failure(self, error: SegueError) -> bytes:
        """Returns what ends a stream that an error breaks off."""
        ...

    async def whole(self) -> tuple[Any, int]:
        """Waits for the end; returns the whole reply, and its number of entries, such as tokens.

        That number says how long encoding takes.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """What is different between the routes that generate."""

    # Makes a call of a body; the id takes the place of a random one.
    parse: Callable[[Runtime, bytes, str | None], Awaitable[Wanted | NativeCall]]
    reply: Callable[[Runtime, Any, Generation], Reply]  # for a call that `parse` has made
    error_body: Callable[[SegueError], dict[str, Any]]


# --- OpenAI ---


async def _chat(runtime: Runtime, data: bytes, reply_id: str | None) -> Wanted:
    body = await decode_json(runtime, data, parse_chat, large_generation.chat)
    return await chat_call(body, runtime.served_model, reply_id)


async def _chat_tokens(runtime: Runtime, data: bytes, reply_id: str | None) -> Wanted:
    body = await decode_json(runtime, data, parse_chat_tokens, large_generation.chat_tokens)
    return await chat_call(body, runtime.served_model, reply_id)


async def _completion(runtime: Runtime, data: bytes, reply_id: str | None) -> Wanted:
    body = await decode_json(runtime, data, parse_completion, large_generation.completion)
    return completion_call(body, runtime.served_model, reply_id)


class OpenAIReply:
    """The reply to a call of OpenAI's API; ``dialect`` writes its choices, chat or completion."""

    def __init__(
        self,
        dialect: type[ChatDialect] | type[CompletionDialect],
        runtime: Runtime,
        wanted: Wanted,
        generation: Generation,
    ) -> None:
        self._choices = ReplyChoices(dialect, wanted, generation.states, runtime.manager.table)
        self._thread_pool = runtime.manager.thread_pool
        self._wanted = wanted
        self._generation = generation
        self._chunks = Chunks(self._choices, wanted)

    def event(self, index: int, output: Output) -> bytes:
        """Returns the chunks for new output of a choice."""
        return self._chunks.of(index, output)

    def preparation(self, index: int) -> Awaitable[None] | None:
        """Makes the beginning of a choice in a thread if that takes long."""
        return self._thread_pool.run(lambda: self._chunks.open(index)) if self._chunks.is_due(index) else None

    def last_event(self) -> bytes:
        """Returns the chunk with the usage, if asked for, and the end mark."""
        return self._chunks.usage(self._generation.ends) + DONE

    def failure(self, error: SegueError) -> bytes:
        """Returns an event with the error."""
        return event(openai_body(error))

    async def whole(self) -> tuple[Any, int]:
        """Returns the whole reply, which a thread builds if it has many entries: choices and logprobs."""
        outputs = await self._generation.outputs()
        choices = self._choices
        num_entries = sum(map(choices.num_entries, count(), outputs))

        def build() -> dict[str, Any]:
            return {"choices": list(map(choices.whole, count(), outputs)), **choices.common()}

        return (
            self._wanted.envelope(choices.dialect.object)
            | await self._thread_pool.build(build, num_entries)
            | {"usage": usage(self._generation.ends, self._wanted.n) | choices.usage_details()}
        ), num_entries


# --- vLLM's token ids in, token ids out ---


async def _tokens(runtime: Runtime, data: bytes, reply_id: str | None) -> Wanted:
    model = runtime.served_model
    return await decode_json(
        runtime, data, lambda body: parse_token_call(body, model, reply_id), large_generation.token_generate
    )


class TokenReply:
    """The reply to a call of ``/inference/v1/generate``."""

    def __init__(self, runtime: Runtime, wanted: Wanted, generation: Generation) -> None:
        self._replies = TokenReplies(runtime.manager.table, wanted, generation)
        self._thread_pool = runtime.manager.thread_pool

    def preparation(self, index: int) -> None:
        """Returns None: no event begins with long work."""

    def event(self, index: int, output: Output) -> bytes:
        """Returns an event with new output."""
        return event(self._replies.chunk(index, output))

    def last_event(self) -> bytes:
        """Returns the event with the usage, if asked for, and the end mark."""
        last = self._replies.last_chunk()
        return DONE if last is None else event(last) + DONE

    def failure(self, error: SegueError) -> bytes:
        """Returns an event with the error."""
        return event(openai_body(error))

    async def whole(self) -> tuple[Any, int]:
        """Returns the whole reply, which a thread builds if it has many entries."""
        outputs, num_entries = await self._replies.outputs()
        return await self._thread_pool.build(lambda: self._replies.whole(outputs), num_entries), num_entries


# --- Anthropic ---


async def _messages(runtime: Runtime, data: bytes, reply_id: str | None) -> Wanted:
    try:
        body = await decode_json(runtime, data, parse_messages, large_messages.messages)
    except InvalidRequestError as error:
        raise explained(error) from None
    return await messages_call(body, runtime.served_model, reply_id)


class MessagesReply:
    """The reply to a call of ``/v1/messages``."""

    def __init__(self, runtime: Runtime, wanted: Wanted, generation: Generation) -> None:
        context = runtime.manager.encoder.limits.max_seq_len
        (state,) = generation.states
        self._replies = MessageReplies(wanted, state, runtime.manager.table, context)
        self._thread_pool = runtime.manager.thread_pool
        self._generation = generation

    def preparation(self, index: int) -> Awaitable[None] | None:
        """Parses what the client has already, in a thread if that is long."""
        if self._replies.num_before <= PIECE_CHARS:
            return None
        return self._thread_pool.run(self._replies.catch_up)

    def event(self, index: int, output: Output) -> bytes:
        """Returns the events for new output."""
        return self._replies.events(output)

    def last_event(self) -> bytes:
        """Returns the event that ends the stream."""
        return self._replies.last_event()

    def failure(self, error: SegueError) -> bytes:
        """Returns an event with the error."""
        return event_bytes(error_body(error))

    async def whole(self) -> tuple[Any, int]:
        """Returns the whole reply, which a thread builds if its text is long."""
        (output,) = await self._generation.outputs()
        num_entries = 1 + len(output.text) // PARSED_CHARS
        return await self._thread_pool.build(lambda: self._replies.whole(output), num_entries), num_entries


# --- native ---


async def _native(runtime: Runtime, data: bytes, reply_id: str | None) -> NativeCall:
    model = runtime.served_model
    return await decode_json(
        runtime,
        data,
        lambda body: parse_call(body, model.max_prompts, reply_id, defaults=model.sampling_defaults),
        large_generation.generate,
    )


class NativeReply:
    """The reply to a call of ``/generate``."""

    def __init__(self, runtime: Runtime, call: NativeCall, generation: Generation) -> None:
        self._replies = NativeReplies(runtime.manager, call, generation)

    def preparation(self, index: int) -> None:
        """Returns None: no event begins with long work."""

    def event(self, index: int, output: Output) -> bytes:
        """Returns an event with the reply to a request so far."""
        return self._replies.event(index, output)

    def last_event(self) -> bytes:
        """Returns the end mark."""
        return DONE

    def failure(self, error: SegueError) -> bytes:
        """Returns an event with the error."""
        return event(native_body(error))

    async def whole(self) -> tuple[Any, int]:
        """Returns the whole reply."""
        return await self._replies.result()


CHAT = CallKind(parse=_chat, reply=partial(OpenAIReply, ChatDialect), error_body=openai_body)
COMPLETION = CallKind(
    parse=_completion, reply=partial(OpenAIReply, CompletionDialect), error_body=openai_body
)
CHAT_TOKENS = CallKind(parse=_chat_tokens, reply=partial(OpenAIReply, ChatDialect), error_body=openai_body)
TOKENS = CallKind(parse=_tokens, reply=TokenReply, error_body=openai_body)
RESPONSES = CallKind(parse=parse_response, reply=ResponsesReply, error_body=openai_body)
MESSAGES = CallKind(parse=_messages, reply=MessagesReply, error_body=error_body)
NATIVE = CallKind(parse=_native, reply=NativeReply, error_body=native_body)
CALL_KINDS: Mapping[str, CallKind] = {  # by the path of the route
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/tokens": CHAT_TOKENS,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSES,
    "/inference/v1/generate": TOKENS,
    "/v1/messages": MESSAGES,
    "/generate": NATIVE,
}
