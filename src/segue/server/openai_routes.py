"""The OpenAI API: chat completions, completions, models."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

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
from segue.frontend.request import Generation, Output
from segue.frontend.tokenizer_manager import TokenizerManager
from segue.server import large_body
from segue.server.access import Access, Routes
from segue.server.body import read_json
from segue.server.responses import json_response, openai_body, reply_response
from segue.server.service import service_of
from segue.server.sse import DONE, EventStream, unless_gone

routes = Routes(Access.USER, "OpenAI")


@routes.post("/v1/chat/completions", schema=body_schema(ChatCompletionRequest))
async def chat_completions(request: Request) -> ASGIApp:
    """Continue a conversation."""
    runtime = service_of(request).running
    body = await read_json(request, parse_chat, large_body.chat)
    wanted = await chat_call(body, runtime.served_model)
    return await _answer(request, runtime.manager, ChatDialect(runtime.manager.table), wanted)


@routes.post("/v1/completions", schema=body_schema(CompletionRequest))
async def completions(request: Request) -> ASGIApp:
    """Continue a text, or several."""
    runtime = service_of(request).running
    body = await read_json(request, parse_completion, large_body.completion)
    wanted = completion_call(body, runtime.served_model)
    return await _answer(request, runtime.manager, CompletionDialect(runtime.manager.table), wanted)


@routes.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model served."""
    return json_response({"object": "list", "data": [_model_card(request)]})


@routes.get("/v1/models/{name:path}")
async def model(request: Request) -> Response:
    """The model by name."""
    check_model(request.path_params["name"], service_of(request).running.served_model)
    return json_response(_model_card(request))


def _model_card(request: Request) -> dict[str, Any]:
    service = service_of(request)
    runtime = service.running
    return {
        "id": runtime.name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "segue",
        "root": runtime.config.model or runtime.source.name,
        "max_model_len": runtime.manager.encoder.limits.max_seq_len,
    }


async def _answer(request: Request, manager: TokenizerManager, dialect: Dialect, wanted: Wanted) -> ASGIApp:
    if wanted.stream:
        start = manager.submit(wanted.requests, wanted.batch_id, is_streamed=True)
        generation = await unless_gone(request, start)
        return EventStream(_events(Chunks(dialect, wanted), generation), openai_body, generation.close)
    generation, outputs = await unless_gone(request, _outputs(manager, wanted))
    ends = [output.end for output in outputs if output.end is not None]
    num_entries = len(outputs) + sum(1 + len(entry.top) for output in outputs for entry in output.logprobs)

    def choices() -> list[dict[str, Any]]:
        return [choice(dialect, index, output, wanted.has_logprobs) for index, output in enumerate(outputs)]

    reply = wanted.envelope(dialect.object) | {
        "choices": await manager.thread_pool.build(choices, num_entries),
        "usage": usage(ends),
    }
    return await reply_response(reply, num_entries, manager.thread_pool)


async def _outputs(manager: TokenizerManager, wanted: Wanted) -> tuple[Generation, list[Output]]:
    with await manager.submit(wanted.requests, wanted.batch_id) as generation:
        return generation, await generation.outputs()


async def _events(chunks: Chunks, generation: Generation) -> AsyncGenerator[bytes, None]:
    ends = []
    async for index, output in generation.updates():
        data = chunks.of(index, output)
        if output.end is not None:
            ends.append(output.end)
        if len(ends) == len(generation.states):
            data += chunks.usage(ends) + DONE
        if data:
            yield data
