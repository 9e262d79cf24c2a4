"""The HTTP routes of the training server."""

from __future__ import annotations

import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec
import uvicorn
from msgspec import Struct
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from segue.api.schema import body_schema, openapi, swagger_page
from segue.api.validation import parse
from segue.errors import InvalidRequestError, SegueError
from segue.http_guard import HttpGuard, install
from segue.logs import logger
from segue.trainer.trainer import EndpointBody, SaveBody, SyncBody, TrainBody, Trainer

GRACE_S = 1  # for replies in progress at a shutdown
MAX_BODY_MIB = 64
TITLE = "Segue trainer"
RequestHandler = Callable[[Request], Awaitable[Response]]


def create_app(trainer: Trainer, guard: HttpGuard) -> Starlette:
    """Returns the application; a reply has status 200 or mostly 400, ``success`` and ``message``."""
    handlers: Any = {HTTPException: _on_http_error}
    app = Starlette(exception_handlers=handlers)
    described: list[tuple[str, str, dict[str, Any]]] = []

    def add(path: str, act: Callable[..., Any], kind: type[Struct] | None = None) -> None:
        method = "POST" if kind else "GET"
        schema = body_schema(kind, required=False) if kind else {}
        described.append((path, method, {"summary": act.__doc__ or path} | schema))
        app.add_route(path, _route(path, act, kind), methods=[method])

    add("/add_inference_endpoint", trainer.add, EndpointBody)
    add("/remove_inference_endpoint", trainer.remove, EndpointBody)
    add("/sync_inference_weights", trainer.sync, SyncBody)
    add("/train_step", trainer.train_step, TrainBody)
    add("/save_checkpoint", trainer.save, SaveBody)
    add("/inference_endpoints", lambda: {"endpoints": trainer.endpoints()})
    add("/sync_status", trainer.sync_status)
    add("/health", trainer.health)
    app.add_route("/openapi.json", lambda _: _json(openapi(TITLE, described)), methods=["GET"])
    app.add_route("/docs", lambda _: HTMLResponse(swagger_page(TITLE)), methods=["GET"])
    install(app, guard, lambda error, path: _failure(error.message, error.status), checks_all=True)
    return app


def make_server(trainer: Trainer, guard: HttpGuard) -> uvicorn.Server:
    """Returns the HTTP server, without starting it."""
    return _TrainingServer(
        uvicorn.Config(
            create_app(trainer, guard),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE_S,
            server_header=False,
        )
    )


def run(trainer: Trainer, listener: socket.socket, guard: HttpGuard) -> None:
    """Serve until a signal, then leave the engines' group; a second Ctrl-C ends the process at once."""
    server = make_server(trainer, guard)

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        server.handle_exit(number, frame)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, end)
    try:
        server.run(sockets=[listener])
    finally:
        trainer.close()


class _TrainingServer(uvicorn.Server):
    """A server without signal handlers: `run` installs its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _route(path: str, act: Callable[..., Any], kind: type[Struct] | None) -> RequestHandler:
    """Returns the route that answers with what ``act`` returns: at once, or for a body of this kind."""

    async def route(request: Request) -> Response:
        if kind is None:
            return _json(act())
        try:
            answer = await run_in_threadpool(act, parse(kind, await _read_json(request)))
        except SegueError as error:
            return _failure(error.message)
        except Exception as error:  # of torch or transformers; a global handler would close the connection
            logger.exception("%s failed", path)
            return _failure(f"{type(error).__name__}: {error}")
        return _json(answer, 200 if answer["success"] else 400)

    return route


async def _read_json(request: Request) -> Any:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_MIB << 20:
            raise InvalidRequestError(f"the body has more than {MAX_BODY_MIB} MiB; send several smaller ones")
    try:
        return msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _failure(message: str, status: int = 400) -> Response:
    return _json({"success": False, "message": message}, status)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    return _failure(f"{request.url.path}: {error.detail}", error.status_code)
