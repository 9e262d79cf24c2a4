"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from segue.api.anthropic.call import messages_call
from segue.api.anthropic.errors import MessagesError
from segue.api.anthropic.requests import CountTokensRequest, MessagesRequest, explained, parse_count_tokens
from segue.api.anthropic.shapes import MessageShape, TokenCount
from segue.api.schema import body_schema, reply_schema
from segue.api.tokenization import num_tokens
from segue.errors import InvalidRequestError
from segue.server import large_messages
from segue.server.access import Access, Routes
from segue.server.body import read_json
from segue.server.calls import MESSAGES
from segue.server.generation_routes import answer
from segue.server.responses import json_response
from segue.server.running import runtime_of

routes = Routes(Access.USER, "Anthropic", error_form=MessagesError)
_MESSAGES = body_schema(MessagesRequest) | reply_schema(MessageShape, has_stream=True)
_COUNT = body_schema(CountTokensRequest) | reply_schema(TokenCount)


@routes.post("/v1/messages", schema=_MESSAGES)
async def messages(request: Request) -> ASGIApp:
    """Continue a conversation."""
    return await answer(request, MESSAGES)


@routes.post("/v1/messages/count_tokens", schema=_COUNT)
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation, without generating."""
    try:
        body = await read_json(request, parse_count_tokens, large_messages.count_tokens)
    except InvalidRequestError as error:
        raise explained(error) from None
    model = runtime_of(request).served_model
    (prompt,) = (await messages_call(body, model)).requests
    return json_response({"input_tokens": await num_tokens(prompt, model)})
