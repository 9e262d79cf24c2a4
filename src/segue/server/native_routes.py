"""The native API: SGLang's ``/generate``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from segue.api.generation import Generation
from segue.api.native.bodies import NativeGenerate
from segue.api.native.calls import NativeCall, parse_call
from segue.api.schema import body_schema
from segue.frontend.stream import accepted
from segue.frontend.tokenizer_manager import TokenizerManager
from segue.server import large_body
from segue.server.access import Access, Routes
from segue.server.body import read_json
from segue.server.errors import native_body
from segue.server.large_reply import reply_response
from segue.server.openai_routes import ACCEPT_S
from segue.server.service import service_of
from segue.server.sse import DONE, EventStream, event, unless_gone

routes = Routes(Access.USER, "Native")


@routes.post("/generate", schema=body_schema(NativeGenerate))
async def generate(request: Request) -> Response:
    """Continue a prompt, or a batch of prompts."""
    service = service_of(request)
    manager = service.manager
    most = service.config.max_queued_requests
    call = await read_json(request, lambda body: parse_call(body, most), large_body.generate)
    if call.stream:
        generation = await unless_gone(request, _begun(manager, call))
        return EventStream(_events(generation), native_body, generation.close)
    reply, num_entries = await unless_gone(request, _result(manager, call))
    return await reply_response(reply, num_entries, manager.thread_pool)


async def _begun(manager: TokenizerManager, call: NativeCall) -> Generation:
    generation = await Generation.start(manager, call)
    try:
        await accepted(generation.streams, ACCEPT_S)
    except BaseException:
        generation.close()
        raise
    return generation


async def _result(manager: TokenizerManager, call: NativeCall) -> tuple[Any, int]:
    with await Generation.start(manager, call) as generation:
        return await generation.result(), generation.num_entries


async def _events(generation: Generation) -> AsyncGenerator[bytes, None]:
    async for update in generation.updates():
        yield event(update)
    yield DONE
