"""The OpenAI API: chat completions, completions, models."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from segue.api.generation import Generation
from segue.api.openai import bodies
from segue.api.openai.replies import ChatDialect, Chunks, CompletionDialect, Dialect, choice, usage
from segue.api.openai.requests import Wanted, chat_call, check_model, completion_call
from segue.api.schema import body_schema
from segue.api.validation import parse
from segue.frontend.request import Output
from segue.frontend.tokenizer_manager import TokenizerManager
from segue.launch.runtime import Runtime
from segue.server import large_body
from segue.server.access import Access, Routes
from segue.server.body import read_json
from segue.server.responses import json_response, openai_body, reply_response
from segue.server.service import service_of
from segue.server.sse import DONE, EventStream, unless_gone

routes = Routes(Access.USER, "OpenAI")


@routes.post("/v1/chat/completions", schema=body_schema(bodies.ChatCompletionRequest))
async def chat_completions(request: Request) -> ASGIApp:
    """Continue a conversation."""
    runtime = service_of(request).running
    call = await read_json(request, _parse_chat, large_body.chat)
    dialect = ChatDialect(runtime.manager.table)
    return await _answer(request, runtime, dialect, await chat_call(call, runtime, _new_id(dialect)))


@routes.post("/v1/completions", schema=body_schema(bodies.CompletionRequest))
async def completions(request: Request) -> ASGIApp:
    """Continue a text, or several."""
    runtime = service_of(request).running
    call = await read_json(request, _parse_completion, large_body.completion)
    dialect = CompletionDialect(runtime.manager.table)
    return await _answer(request, runtime, dialect, completion_call(call, runtime, _new_id(dialect)))


@routes.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model served."""
    return json_response({"object": "list", "data": [_model_card(request)]})


@routes.get("/v1/models/{name:path}")
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


async def _answer(request: Request, runtime: Runtime, dialect: Dialect, wanted: Wanted) -> ASGIApp:
    created = int(time.time())
    manager, batch_id = runtime.manager, wanted.id if wanted.is_batch else None
    if wanted.stream:
        start = Generation.start(manager, wanted.requests, batch_id, is_streamed=True)
        generation = await unless_gone(request, start)
        chunks = Chunks(
            dialect,
            id=wanted.id,
            created=created,
            model=runtime.name,
            logprobs=wanted.logprobs >= 0,
            usage_in_stream=wanted.usage_in_stream,
        )
        return EventStream(_events(chunks, generation), openai_body, generation.close)
    generation, outputs = await unless_gone(request, _outputs(manager, wanted, batch_id))
    ends = [output.end for output in outputs if output.end is not None]
    num_entries = len(outputs) + sum(1 + len(entry.top) for output in outputs for entry in output.logprobs)

    def choices() -> list[dict[str, Any]]:
        return [choice(dialect, index, output, wanted.logprobs >= 0) for index, output in enumerate(outputs)]

    reply = {
        "id": wanted.id,
        "object": dialect.object,
        "created": created,
        "model": runtime.name,
        "choices": await generation.build(choices, num_entries),
        "usage": usage(ends),
    }
    return await reply_response(reply, num_entries, manager.thread_pool)


async def _outputs(
    manager: TokenizerManager, wanted: Wanted, batch_id: str | None
) -> tuple[Generation, list[Output]]:
    with await Generation.start(manager, wanted.requests, batch_id) as generation:
        return generation, await generation.outputs()


async def _events(chunks: Chunks, generation: Generation) -> AsyncGenerator[bytes, None]:
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


def _new_id(dialect: Dialect) -> str:
    return f"{dialect.prefix}{uuid.uuid4().hex}"
