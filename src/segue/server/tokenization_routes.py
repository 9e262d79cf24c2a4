"""The routes between text and token ids, which generate nothing: vLLM's ``/tokenize`` and the like."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from segue.api.openai.requests import ChatCompletionRequest, CompletionRequest, Wanted
from segue.api.reply_shapes import DetokenizeReply, RenderedPrompt, TokenizeReply
from segue.api.schema import body_schema, reply_schema
from segue.api.tokenization import (
    DetokenizeBody,
    TokenizeBody,
    detokenize,
    parse_detokenize,
    parse_tokenize,
    render,
    tokenize,
)
from segue.server import large_generation
from segue.server.access import Access, Routes
from segue.server.body import read_json
from segue.server.calls import CHAT, COMPLETION, CallKind
from segue.server.raw_body import read_bytes
from segue.server.responses import json_response, reply_response
from segue.server.running import runtime_of

routes = Routes(Access.USER, "Tokens")
_CHAT = body_schema(ChatCompletionRequest) | reply_schema(RenderedPrompt)
_COMPLETION = body_schema(CompletionRequest) | reply_schema(list[RenderedPrompt])


@routes.post("/tokenize", schema=body_schema(TokenizeBody) | reply_schema(TokenizeReply))
async def tokenize_text(request: Request) -> Response:
    """The token ids of a text, or of messages."""
    body = await read_json(request, parse_tokenize, large_generation.tokenize)
    runtime = runtime_of(request)
    reply = await tokenize(body, runtime.served_model)
    num_entries = reply["count"] * (2 if body.return_token_strs else 1)
    return await reply_response(reply, num_entries, runtime.manager.thread_pool)


@routes.post("/detokenize", schema=body_schema(DetokenizeBody) | reply_schema(DetokenizeReply))
async def detokenize_ids(request: Request) -> Response:
    """The text of token ids."""
    body = await read_json(request, parse_detokenize, large_generation.detokenize)
    return json_response(await detokenize(body, runtime_of(request).served_model))


@routes.post("/v1/chat/completions/render", schema=_CHAT)
async def render_chat(request: Request) -> Response:
    """What a conversation is generated from: token ids and sampling parameters."""
    (reply,) = rendered = await _render(request, CHAT)
    return await _reply(request, reply, rendered)


@routes.post("/v1/completions/render", schema=_COMPLETION)
async def render_completion(request: Request) -> Response:
    """What a text, or several, are generated from: token ids and sampling parameters."""
    rendered = await _render(request, COMPLETION)
    return await _reply(request, rendered, rendered)


async def _render(request: Request, kind: CallKind) -> list[dict[str, Any]]:
    runtime = runtime_of(request)
    call = await kind.parse(runtime, await read_bytes(request, runtime.config.max_body_mib), None)
    assert isinstance(call, Wanted)
    return await render(call, runtime.served_model)


async def _reply(request: Request, content: Any, rendered: list[dict[str, Any]]) -> Response:
    num_entries = sum(len(each["token_ids"]) for each in rendered)
    return await reply_response(content, num_entries, runtime_of(request).manager.thread_pool)
