"""The HTTP application."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import segue
from segue.config import EngineConfig
from segue.errors import SegueError
from segue.server import control_routes, health, metrics, native_routes, openai_routes, weight_routes
from segue.server.auth import KeyMiddleware
from segue.server.errors import InternalError, RouteError, error_response
from segue.server.service import Service
from segue.server.sse import ClientGoneError


def create_app(config: EngineConfig) -> FastAPI:
    """The application. It answers 503 until ``app.state.service.runtime`` is set."""
    app = FastAPI(
        title="Segue",
        version=segue.__version__,
        description="An LLM inference engine.",
        exception_handlers={
            SegueError: _on_segue_error,
            HTTPException: _on_http_error,
            ClientGoneError: _on_client_gone,
            ClientDisconnect: _on_client_gone,  # while it sent its body
            Exception: _on_bug,
        },
    )
    app.state.service = Service(config)
    app.add_middleware(KeyMiddleware, config=config)
    for rooms in (openai_routes, native_routes, control_routes, weight_routes, health, metrics):
        app.include_router(rooms.router)
    return app


async def _on_segue_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SegueError)
    return error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(RouteError(error.status_code, request), request.url.path)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_bug(request: Request, error: Exception) -> Response:
    return error_response(InternalError("internal error; the server's log has the details"), request.url.path)
