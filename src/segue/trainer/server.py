"""The training server: an HTTP route for each step of training a model and sending its weights to engines."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import uvicorn
from msgspec import Meta, Struct
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from tqdm import tqdm

from segue.api.schema import body_schema, openapi, swagger_page
from segue.api.validation import parse
from segue.errors import InvalidRequestError, SegueError
from segue.http_guard import HttpGuard, install
from segue.logs import logger
from segue.trainer.endpoint import Endpoint
from segue.trainer.model import TrainedModel
from segue.trainer.sender import Progress, SendReport, WeightSender, WeightSendError, world_sizes
from segue.weight_update.transport.rendezvous import bracketed

GRACE_S = 1  # for replies in progress at a shutdown
MAX_BODY_MIB = 64
TITLE = "Segue trainer"
TURN_S = 0.1  # between two tries to get the turn in `Trainer.close`
RequestHandler = Callable[[Request], Awaitable[Response]]
Port = Annotated[int, Meta(ge=1, le=65535)]


class EndpointBody(Struct, frozen=True):
    """The body of ``POST /add_inference_endpoint`` and ``/remove_inference_endpoint``."""

    host: Annotated[str, Meta(min_length=1)]
    port: Port
    world_size: Annotated[int, Meta(ge=1)] | None = None
    api_key: str | None = None

    @property
    def url(self) -> str:
        """The URL at which the engine listens."""
        return f"http://{bracketed(self.host)}:{self.port}"


class SyncBody(Struct, frozen=True):
    """The body of ``POST /sync_inference_weights``."""

    master_port: Port | None = None
    buffer_size_mb: Annotated[int, Meta(ge=1)] = 1024


class TrainBody(Struct, frozen=True):
    """The body of ``POST /train_step``."""

    texts: Annotated[list[str], Meta(min_length=1)]


class SaveBody(Struct, frozen=True):
    """The body of ``POST /save_checkpoint``."""

    path: Annotated[str, Meta(min_length=1)]


class Trainer:
    """Implements the routes; training, saving and sending take turns.

    Each public method that has a route takes its body and returns its reply; the docstring is the summary in
    the OpenAPI description. An error that a client can mend is raised as a `SegueError`.
    """

    def __init__(self, model: TrainedModel) -> None:
        self.model = model
        self._endpoints: dict[str, Endpoint] = {}  # by URL, in the order of their ranks
        self._sender: WeightSender | None = None
        self._sends_to: object = None  # the endpoints and the body that `_sender` was made for
        self._turn = threading.Lock()
        self._adding = threading.Lock()  # `_endpoints` is replaced, never changed: readers take no lock
        self._closed = False
        self._bar: Any = None
        self._progress: Progress | None = None  # of the running sync
        self._last: dict[str, Any] | None = None

    def add(self, body: EndpointBody) -> dict[str, Any]:
        """Register an engine, with the number of ranks that it reports."""
        endpoint = Endpoint(url=body.url, api_key=body.api_key, world_size=body.world_size)
        (size,) = world_sizes([endpoint])
        with self._adding:
            self._endpoints = self._endpoints | {body.url: replace(endpoint, world_size=size)}
            offset = next(each["rank_offset"] for each in self.endpoints() if each["url"] == body.url)
        message = f"{body.url} added"
        if body.world_size not in (None, size):
            message += f"; its world_size is {size}, as it reports, and not {body.world_size}"
        return {"success": True, "message": message, "rank_offset": offset}

    def remove(self, body: EndpointBody) -> dict[str, Any]:
        """Forget an engine; the next sync joins a group without it."""
        with self._adding:
            if body.url not in self._endpoints:
                known = ", ".join(self._endpoints) or "none"
                raise InvalidRequestError(f"{body.url} is not one of the inference endpoints: {known}")
            self._endpoints = {url: each for url, each in self._endpoints.items() if url != body.url}
        return {"success": True, "message": f"{body.url} removed"}

    def endpoints(self) -> list[dict[str, Any]]:
        """Returns the engines with their ranks."""
        offset, found = 1, []
        for endpoint in self._endpoints.values():
            size = endpoint.world_size or 1
            found.append({"url": endpoint.url, "world_size": size, "rank_offset": offset})
            offset += size
        return found

    def sync(self, body: SyncBody) -> dict[str, Any]:
        """Send the weights to all engines; all commit them, or none does."""
        if not self._endpoints:
            raise InvalidRequestError("there is no inference endpoint; add one: POST /add_inference_endpoint")
        with self._turn:
            if self._closed:
                raise InvalidRequestError("the training server is shutting down; retry after its restart")
            try:
                sent = self._send(body)
                report, answers = asdict(sent), sent.endpoints
                report |= {"success": True, "message": "all engines have the new weights"}
            except WeightSendError as error:
                report, answers = {"success": False, "message": error.message}, error.answers
                report |= {"num_buckets": 0, "bytes": 0, "seconds": 0.0, "gb_per_s": 0.0}
            shown = [{"url": a.url, "success": a.success, "message": a.message} for a in answers]
            self._last = report | {"endpoints": shown}
            return self._last

    def _send(self, body: SyncBody) -> SendReport:
        """Send with the sender of the last sync, which keeps its group; with a new one after any change."""
        wanted = (tuple(self._endpoints.values()), body)
        if self._sender is None or self._sends_to != wanted:
            self._leave()
            self._sends_to = wanted
            self._sender = WeightSender(
                wanted[0],
                self.model.module,
                master_port=body.master_port,
                buffer_size_mb=body.buffer_size_mb,
                on_progress=self._show,
            )
        # `disable=None`: there is no bar where standard error is not a terminal.
        with tqdm(unit="B", unit_scale=True, desc="Sending weights", disable=None) as self._bar:
            try:
                return self._sender.send()
            finally:
                self._progress = None

    def _show(self, progress: Progress) -> None:
        """Take the progress of the running sync, for the bar and for `sync_status`."""
        self._bar.total = progress.total_bytes
        self._bar.update(progress.num_bytes - self._bar.n)  # tqdm takes the increase
        self._progress = progress

    def sync_status(self) -> dict[str, Any]:
        """Returns the progress of the running sync and the result of the last one."""
        progress = self._progress
        if progress is None:
            return {"syncing": self._turn.locked(), "progress": None, "gb_per_s": 0.0, "last": self._last}
        speed = progress.num_bytes / progress.seconds / 1e9
        return {"syncing": True, "progress": asdict(progress), "gb_per_s": speed, "last": self._last}

    def train_step(self, body: TrainBody) -> dict[str, Any]:
        """Run one optimizer step."""
        with self._turn:
            loss = self.model.train_step(body.texts)
            return {"success": True, "loss": loss, "num_steps": self.model.num_steps}

    def save(self, body: SaveBody) -> dict[str, Any]:
        """Write a checkpoint."""
        with self._turn:
            self.model.save(Path(body.path))
        return {"success": True, "message": f"saved to {body.path}"}

    def health(self) -> dict[str, Any]:
        """Returns the server's health: it answers, so it is "ok"."""
        return {"status": "ok", "model": self.model.name, "num_steps": self.model.num_steps}

    def close(self) -> None:
        """Leave the engines' group for good: end a running sync, or wait for a running step or save."""
        self._closed = True
        while not self._turn.acquire(timeout=TURN_S):  # again and again: a sync may make its sender only now
            if (sender := self._sender) is not None:
                sender.close()
        self._leave()
        self._turn.release()

    def _leave(self) -> None:
        """Close the sender, if there is one, and with it the engines' group."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None


def create_app(trainer: Trainer, guard: HttpGuard) -> Starlette:
    """Returns the application; a reply has status 200 or mostly 400, ``success`` and ``message``."""
    handlers: Any = {HTTPException: _on_http_error}
    app = Starlette(exception_handlers=handlers)
    described: list[tuple[str, str, dict[str, Any]]] = []

    def add(path: str, act: Callable[..., Any], kind: type[Struct] | None = None) -> None:
        """Add a route for ``act``: a POST with a body of type ``kind``, or a GET if that is None."""
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
        """Shut down gracefully; the next Ctrl-C has its default effect again."""
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
    """Returns the decoded JSON body, an empty object if there is none.

    Raises:
        InvalidRequestError: the body is too large, or not JSON.
    """
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
