"""The routes that generate: OpenAI's, SGLang's ``/generate``, and vLLM's for token ids; and the models."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from segue.api.native import NativeGenerate
from segue.api.openai.requests import (
    ChatCompletionRequest,
    ChatTokensRequest,
    CompletionRequest,
    check_model,
)
from segue.api.openai.responses.fields import ResponsesRequest
from segue.api.reply_shapes import (
    ChatReplyShape,
    CompletionReplyShape,
    GenerateReply,
    ModelCard,
    ModelList,
    ResponseShape,
    TokenGenerateReply,
)
from segue.api.schema import body_schema, reply_schema
from segue.api.token_generate import TokenGenerate
from segue.frontend.call_trace import failing
from segue.frontend.request import Generation
from segue.server.access import Access, Routes
from segue.server.calls import CHAT, CHAT_TOKENS, COMPLETION, NATIVE, RESPONSES, TOKENS, CallKind, Reply
from segue.server.raw_body import read_bytes
from segue.server.request_ids import id_of
from segue.server.responses import EventStream, json_response, reply_response, unless_gone
from segue.server.running import call_trace, runtime_of

openai = Routes(Access.USER, "OpenAI")
native = Routes(Access.USER, "Native")
tokens = Routes(Access.USER, "Tokens")


async def answer(request: Request, kind: CallKind) -> ASGIApp:
    """Generate, and answer with a whole reply or, if the call asks for one, with a stream of events."""
    runtime = runtime_of(request)
    trace = call_trace(runtime, request, request.scope["path"])
    with failing(trace):
        call = await kind.parse(runtime, await read_bytes(request, runtime.config.max_body_mib), None)
        alias = id_of(request.scope)
        start = runtime.manager.submit(
            call.requests, call.batch_id, is_streamed=call.stream, alias=alias, trace=trace
        )
        if call.stream:
            generation = await unless_gone(request, start)
            reply = kind.reply(runtime, call, generation)
            return EventStream(_events(generation, reply), reply.failure, generation.close)

        async def whole() -> tuple[Any, int]:
            with await start as generation:
                return await kind.reply(runtime, call, generation).whole()

        return await reply_response(*await unless_gone(request, whole()), runtime.manager.thread_pool)


async def _events(generation: Generation, reply: Reply) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream; the last one has the end mark, too."""
    num_running = len(generation.states)
    async for index, output in generation.updates():
        if (work := reply.preparation(index)) is not None:
            await work
        data = reply.event(index, output)
        if output.end is not None:
            num_running -= 1
            if not num_running:
                data += reply.last_event()
        if data:
            yield data


_CHAT = body_schema(ChatCompletionRequest) | reply_schema(ChatReplyShape, has_stream=True)
_COMPLETION = body_schema(CompletionRequest) | reply_schema(CompletionReplyShape, has_stream=True)
_RESPONSES = body_schema(ResponsesRequest) | reply_schema(ResponseShape, has_stream=True)
_CHAT_TOKENS = body_schema(ChatTokensRequest) | reply_schema(ChatReplyShape, has_stream=True)
_TOKENS = body_schema(TokenGenerate) | reply_schema(TokenGenerateReply, has_stream=True)
_GENERATE = body_schema(NativeGenerate) | reply_schema(GenerateReply | list[GenerateReply], has_stream=True)


@openai.post("/v1/chat/completions", schema=_CHAT)
async def chat_completions(request: Request) -> ASGIApp:
    """Continue a conversation."""
    return await answer(request, CHAT)


@openai.post("/v1/chat/completions/tokens", schema=_CHAT_TOKENS)
async def chat_completions_of_tokens(request: Request) -> ASGIApp:
    """Continue a conversation whose token ids are given."""
    return await answer(request, CHAT_TOKENS)


@openai.post("/v1/completions", schema=_COMPLETION)
async def completions(request: Request) -> ASGIApp:
    """Continue a text, or several."""
    return await answer(request, COMPLETION)


@openai.post("/v1/responses", schema=_RESPONSES)
async def responses(request: Request) -> ASGIApp:
    """Continue a conversation of items. Nothing is kept of it."""
    return await answer(request, RESPONSES)


@tokens.post("/inference/v1/generate", schema=_TOKENS)
async def generate_tokens(request: Request) -> ASGIApp:
    """Continue token ids by token ids, in vLLM's form."""
    return await answer(request, TOKENS)


@native.post("/generate", schema=_GENERATE)
async def generate(request: Request) -> ASGIApp:
    """Continue a prompt, or a batch of prompts."""
    return await answer(request, NATIVE)


@openai.get("/v1/models", schema=reply_schema(ModelList))
async def models(request: Request) -> Response:
    """The one model served, under each of its names."""
    cards = [_model_card(request, name) for name in runtime_of(request).names]
    return json_response({"object": "list", "data": cards})


@openai.get("/v1/models/{name:path}", schema=reply_schema(ModelCard))
async def model(request: Request) -> Response:
    """The model by name."""
    runtime, name = runtime_of(request), request.path_params["name"]
    check_model(name, runtime.served_model)
    return json_response(_model_card(request, name if name in runtime.names else runtime.name))


def _model_card(request: Request, name: str) -> dict[str, Any]:
    """Returns the entry in OpenAI's list of a name of the model; ``max_model_len`` is vLLM's addition."""
    runtime = runtime_of(request)
    return {
        "id": name,
        "object": "model",
        "created": runtime.started_at,
        "owned_by": "segue" if runtime.config.compat == "none" else runtime.config.compat,
        "root": runtime.config.model or runtime.source.name,
        "max_model_len": runtime.manager.encoder.limits.max_seq_len,
    }


routes = [*openai, *native, *tokens]
