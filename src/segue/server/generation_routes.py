"""The routes that generate: the OpenAI API, and the native API, SGLang's ``/generate``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from segue.api.generation import Generation
from segue.api.native.bodies import NativeGenerate
from segue.api.native.calls import NativeCall, NativeReplies, parse_call
from segue.api.openai import bodies
from segue.api.openai.replies import ChatDialect, Chunks, CompletionDialect, Dialect, choice, usage
from segue.api.openai.requests import Wanted, chat_call, check_model, completion_call
from segue.api.schema import body_schema
from segue.api.validation import parse
from segue.errors import SegueError
from segue.launch.runtime import Runtime
from segue.server import large_body
from segue.server.access import Access, Routes
from segue.server.body import read_json
from segue.server.responses import json_response, native_body, openai_body, reply_response
from segue.server.service import service_of
from segue.server.sse import DONE, EventStream, event, unless_gone

openai_routes = Routes(Access.USER, "OpenAI")
native_routes = Routes(Access.USER, "Native")

# --- the OpenAI API ---


@openai_routes.post("/v1/chat/completions", schema=body_schema(bodies.ChatCompletionRequest))
async def chat_completions(request: Request) -> ASGIApp:
    """Continue a conversation."""
    runtime = service_of(request).running
    call = await read_json(request, _parse_chat, large_body.chat)
    dialect = ChatDialect(runtime.manager.table)
    return await _answer_openai(request, runtime, dialect, await chat_call(call, runtime, _new_id(dialect)))


@openai_routes.post("/v1/completions", schema=body_schema(bodies.CompletionRequest))
async def completions(request: Request) -> ASGIApp:
    """Continue a text, or several."""
    runtime = service_of(request).running
    call = await read_json(request, _parse_completion, large_body.completion)
    dialect = CompletionDialect(runtime.manager.table)
    return await _answer_openai(request, runtime, dialect, completion_call(call, runtime, _new_id(dialect)))


@openai_routes.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model served."""
    return json_response({"object": "list", "data": [_model_card(request)]})


@openai_routes.get("/v1/models/{name:path}")
async def model(request: Request) -> Response:
    """The model by name."""
    check_model(request.path_params["name"], service_of(request).running)
    return json_response(_model_card(request))


def _parse_chat(body: Any) -> bodies.ChatCompletionRequest:
    body = bodies.without_extras(body, bodies.CHAT_NOT_YET)
    return parse(bodies.ChatCompletionRequest, body, rules=bodies.RULES)


def _parse_completion(body: Any) -> bodies.CompletionRequest:
    body = bodies.without_extras(body, bodies.COMPLETION_NOT_YET)
    return parse(bodies.CompletionRequest, body, rules=bodies.RULES)


def _model_card(request: Request) -> dict[str, Any]:
    service = service_of(request)
    runtime = service.running
    return {
        "id": runtime.name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "segue",
        "root": runtime.config.model or runtime.source.name,
        "max_model_len": runtime.manager.limits.max_seq_len,
    }


def _new_id(dialect: Dialect) -> str:
    return f"{dialect.prefix}{uuid.uuid4().hex}"


async def _answer_openai(request: Request, runtime: Runtime, dialect: Dialect, wanted: Wanted) -> ASGIApp:
    created, has_logprobs = int(time.time()), wanted.logprobs >= 0

    async def events(generation: Generation) -> AsyncGenerator[bytes, None]:
        chunks = Chunks(
            dialect,
            id=wanted.id,
            created=created,
            model=runtime.name,
            logprobs=has_logprobs,
            usage_in_stream=wanted.usage_in_stream,
        )
        ends = []
        begun: set[int] = set()
        async for index, output in generation.updates():
            data = chunks.of(index, output)
            if index not in begun:
                begun.add(index)
                data = chunks.first(index) + data
            if output.end is not None:
                ends.append(output.end)
            if len(ends) == len(generation.streams):
                data += chunks.usage(ends) + DONE
            if data:
                yield data

    async def reply(generation: Generation) -> tuple[dict[str, Any], int]:
        outputs = await generation.outputs()
        num_entries = len(outputs) + sum(
            1 + len(entry.top) for output in outputs for entry in output.logprobs
        )

        def choices() -> list[dict[str, Any]]:
            return [choice(dialect, index, output, has_logprobs) for index, output in enumerate(outputs)]

        content = {
            "id": wanted.id,
            "object": dialect.object,
            "created": created,
            "model": runtime.name,
            "choices": await generation.build(choices, num_entries),
            "usage": usage([output.end for output in outputs if output.end is not None]),
        }
        return content, num_entries

    batch_id = wanted.id if wanted.is_batch else None
    return await _answer(request, wanted, batch_id, events, reply, openai_body)


# --- the native API ---


@native_routes.post("/generate", schema=body_schema(NativeGenerate))
async def generate(request: Request) -> ASGIApp:
    """Continue a prompt, or a batch of prompts."""
    most = service_of(request).config.max_queued_requests
    call = await read_json(request, lambda body: parse_call(body, most), large_body.generate)

    async def events(generation: Generation) -> AsyncGenerator[bytes, None]:
        async for update in NativeReplies(call, generation).updates():
            yield event(update)
        yield DONE

    async def reply(generation: Generation) -> tuple[Any, int]:
        return await NativeReplies(call, generation).result()

    return await _answer(request, call, call.batch_id, events, reply, native_body)


# --- every API ---


async def _answer(
    request: Request,
    call: NativeCall | Wanted,
    batch_id: str | None,
    events: Callable[[Generation], AsyncGenerator[bytes, None]],
    reply: Callable[[Generation], Awaitable[tuple[Any, int]]],
    error_body: Callable[[SegueError], dict[str, Any]],
) -> ASGIApp:
    """Generate; answer with a stream of ``events``, or with one ``reply`` of a number of entries."""
    manager = service_of(request).manager
    if call.stream:
        start = Generation.start(manager, call.requests, batch_id, is_streamed=True)
        generation = await unless_gone(request, start)
        return EventStream(events(generation), error_body, generation.close)

    async def whole() -> tuple[Any, int]:
        with await Generation.start(manager, call.requests, batch_id) as generation:
            return await reply(generation)

    content, num_entries = await unless_gone(request, whole())
    return await reply_response(content, num_entries, manager.thread_pool)
