"""The native API: SGLang's ``/generate``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from segue.api.native import NativeCall, NativeGenerate, NativeReplies, parse_call
from segue.api.schema import body_schema
from segue.frontend.tokenizer_manager import TokenizerManager
from segue.server import large_body
from segue.server.access import Access, Routes
from segue.server.body import read_json
from segue.server.responses import native_body, reply_response
from segue.server.service import service_of
from segue.server.sse import DONE, EventStream, event, unless_gone

routes = Routes(Access.USER, "Native")


@routes.post("/generate", schema=body_schema(NativeGenerate))
async def generate(request: Request) -> ASGIApp:
    """Continue a prompt, or a batch of prompts."""
    service = service_of(request)
    manager = service.manager
    most = service.config.max_queued_requests
    call = await read_json(request, lambda body: parse_call(body, most), large_body.generate)
    if call.stream:
        start = manager.submit(call.requests, call.batch_id, is_streamed=True)
        generation = await unless_gone(request, start)
        return EventStream(_events(NativeReplies(manager, call, generation)), native_body, generation.close)
    reply, num_entries = await unless_gone(request, _result(manager, call))
    return await reply_response(reply, num_entries, manager.thread_pool)


async def _result(manager: TokenizerManager, call: NativeCall) -> tuple[Any, int]:
    with await manager.submit(call.requests, call.batch_id) as generation:
        return await NativeReplies(manager, call, generation).result()


async def _events(replies: NativeReplies) -> AsyncGenerator[bytes, None]:
    async for update in replies.updates():
        yield event(update)
    yield DONE
