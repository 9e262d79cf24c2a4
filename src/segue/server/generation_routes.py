"""The routes that generate: OpenAI's chat completions, completions and models, and SGLang's ``/generate``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from segue.api.native import NativeCall, NativeGenerate, NativeReplies, parse_call
from segue.api.openai.replies import ChatDialect, Chunks, CompletionDialect, Dialect, choice, usage
from segue.api.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    Wanted,
    chat_call,
    check_model,
    completion_call,
    parse_chat,
    parse_completion,
)
from segue.api.schema import body_schema
from segue.errors import SegueError
from segue.frontend.request import Generation
from segue.frontend.tokenizer_manager import TokenizerManager
from segue.server import large_body
from segue.server.access import Access, Routes
from segue.server.body import read_json
from segue.server.responses import (
    DONE,
    EventStream,
    event,
    json_response,
    native_body,
    openai_body,
    reply_response,
    unless_gone,
)
from segue.server.running import runtime_of

# Gives the reply, and its number of entries, such as tokens, which says how long encoding takes.
Whole = Callable[[Generation], Awaitable[tuple[Any, int]]]
Events = Callable[[Generation], AsyncGenerator[bytes, None]]

openai = Routes(Access.USER, "OpenAI")
native = Routes(Access.USER, "Native")


async def _answer(
    request: Request,
    call: Wanted | NativeCall,
    whole: Whole,
    events: Events,
    error_body: Callable[[SegueError], dict[str, Any]],
) -> ASGIApp:
    """Generate, and answer with a whole reply or, if the call asks for one, with a stream of events.

    Both OpenAI's routes and the native one use it. ``whole`` and ``events`` make the one and the other of the
    running requests, and ``error_body`` the last event of a stream that fails.
    """
    manager = runtime_of(request).manager
    start = manager.submit(call.requests, call.batch_id, is_streamed=call.stream)
    if call.stream:
        generation = await unless_gone(request, start)
        return EventStream(events(generation), error_body, generation.close)

    async def reply() -> tuple[Any, int]:
        with await start as generation:
            return await whole(generation)

    return await reply_response(*await unless_gone(request, reply()), manager.thread_pool)


# --- OpenAI ---


@openai.post("/v1/chat/completions", schema=body_schema(ChatCompletionRequest))
async def chat_completions(request: Request) -> ASGIApp:
    """Continue a conversation."""
    runtime = runtime_of(request)
    body = await read_json(request, parse_chat, large_body.chat)
    wanted = await chat_call(body, runtime.served_model)
    return await _openai_answer(request, wanted, ChatDialect(runtime.manager.table))


@openai.post("/v1/completions", schema=body_schema(CompletionRequest))
async def completions(request: Request) -> ASGIApp:
    """Continue a text, or several."""
    runtime = runtime_of(request)
    body = await read_json(request, parse_completion, large_body.completion)
    wanted = completion_call(body, runtime.served_model)
    return await _openai_answer(request, wanted, CompletionDialect(runtime.manager.table))


@openai.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model served."""
    return json_response({"object": "list", "data": [_model_card(request)]})


@openai.get("/v1/models/{name:path}")
async def model(request: Request) -> Response:
    """The model by name."""
    check_model(request.path_params["name"], runtime_of(request).served_model)
    return json_response(_model_card(request))


def _model_card(request: Request) -> dict[str, Any]:
    """Returns the served model's entry in OpenAI's list; ``max_model_len`` is vLLM's addition."""
    runtime = runtime_of(request)
    return {
        "id": runtime.name,
        "object": "model",
        "created": runtime.started_at,
        "owned_by": "segue",
        "root": runtime.config.model or runtime.source.name,
        "max_model_len": runtime.manager.encoder.limits.max_seq_len,
    }


async def _openai_answer(request: Request, wanted: Wanted, dialect: Dialect) -> ASGIApp:
    """Generate what a checked OpenAI call asks for; ``dialect`` writes its choices, chat or completion."""
    whole = partial(_completion, runtime_of(request).manager, dialect, wanted)
    events = partial(_chunks, dialect, wanted)
    return await _answer(request, wanted, whole, events, openai_body)


async def _completion(
    manager: TokenizerManager, dialect: Dialect, wanted: Wanted, generation: Generation
) -> tuple[Any, int]:
    """Returns the whole reply of an OpenAI call, and its number of entries: choices and log-probabilities.

    The reply is built in a thread if it has many entries.
    """
    outputs = await generation.outputs()
    num_entries = len(outputs) + sum(1 + len(entry.top) for output in outputs for entry in output.logprobs)

    def choices() -> list[dict[str, Any]]:
        return [choice(dialect, index, output, wanted.has_logprobs) for index, output in enumerate(outputs)]

    return wanted.envelope(dialect.object) | {
        "choices": await manager.thread_pool.build(choices, num_entries),
        "usage": usage([output.end for output in outputs if output.end is not None]),
    }, num_entries


async def _chunks(dialect: Dialect, wanted: Wanted, generation: Generation) -> AsyncGenerator[bytes, None]:
    """Yields the events of an OpenAI stream. The last one has the usage, if asked for, and the end mark."""
    chunks, ends = Chunks(dialect, wanted), []
    async for index, output in generation.updates():
        data = chunks.of(index, output)
        if output.end is not None:
            ends.append(output.end)
        if len(ends) == len(generation.states):
            data += chunks.usage(ends) + DONE
        if data:
            yield data


# --- native ---


@native.post("/generate", schema=body_schema(NativeGenerate))
async def generate(request: Request) -> ASGIApp:
    """Continue a prompt, or a batch of prompts."""
    runtime = runtime_of(request)
    most = runtime.config.max_queued_requests
    call = await read_json(request, lambda body: parse_call(body, most), large_body.generate)
    replies = partial(NativeReplies, runtime.manager, call)

    async def events(generation: Generation) -> AsyncGenerator[bytes, None]:
        async for update in replies(generation).updates():
            yield event(update)
        yield DONE

    return await _answer(request, call, lambda each: replies(each).result(), events, native_body)


routes = [*openai, *native]
