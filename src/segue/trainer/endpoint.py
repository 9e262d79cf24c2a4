"""HTTP requests to the engines that weights are sent to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException, IncompleteRead
from typing import Any

import msgspec

from segue.http_client import open_url
from segue.messages.weight_operations import Operation

STOP_S = 0.1  # between two checks whether to stop

_BODY_S = 10.0  # to read the body of an answer, which an engine sends in one piece
_MAX_BODY = 16 << 20  # bytes
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The HTTP server of one engine."""

    url: str
    api_key: str | None = field(default=None, repr=False)  # the engine's admin key, or its API key
    world_size: int | None = None  # its number of ranks, for engines whose /server_info lacks it
    worker_api_key: str | None = field(default=None, repr=False)  # of a router's engines; None: as `api_key`

    def post(self, operation: Operation, timeout_s: float, *, tries: int = 1) -> Answer:
        """Returns the engine's answer to an operation; ``timeout_s``: the longest silence, in seconds.

        ``tries``: how often it is sent if answers are lost; engines repeat their answers for a session.
        """
        body = msgspec.json.encode(msgspec.structs.asdict(operation))
        for _ in range(tries):
            answer = self._request(operation.route, body, timeout_s)
            if answer.status is not None or answer.gone:
                break
        return answer

    def get(self, route: str, timeout_s: float) -> Answer:
        """Returns the engine's answer to a GET; ``timeout_s``: as for :meth:`post`."""
        return self._request(route, None, timeout_s)

    def engines(self, timeout_s: float) -> list[Endpoint]:
        """Returns the engines that a router at this URL has; for any other server, this endpoint itself.

        An engine that the router is about to forget, or that a newer one has replaced, is none of them.
        """
        workers = self.get("workers", timeout_s).fields.get("workers")
        if not isinstance(workers, list):
            return [self]
        key = self.worker_api_key or self.api_key
        return [
            replace(self, url=worker["url"], api_key=key) for worker in workers if worker["takes_weights"]
        ]

    def _request(self, route: str, body: bytes | None, timeout_s: float) -> Answer:
        """Returns the engine's answer to a POST of ``body``, or to a GET if that is None.

        Raises nothing: a request that fails is an answer without a status.
        """
        url = self.url.rstrip("/")
        try:
            with open_url(f"{url}/{route}", body, api_key=self.api_key, timeout_s=timeout_s) as response:
                return _parse_answer(url, response.status, _read(response))
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            gone = isinstance(reason, ConnectionError)
            return Answer(url=url, success=False, message=f"cannot reach the engine: {reason}", gone=gone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An engine's answer to one request."""

    url: str
    success: bool
    message: str = ""
    status: int | None = None  # HTTP status; None: there was no answer
    gone: bool = False  # the connection was refused or lost
    fields: dict[str, Any] = field(default_factory=dict)  # of the JSON body


def _read(response: Any) -> bytes:
    """Returns the body of a response; raises if it is larger than `_MAX_BODY`, or takes over `_BODY_S`."""
    body, deadline = bytearray(), time.monotonic() + _BODY_S
    while piece := response.read1(_PIECE):
        body += piece
        if len(body) > _MAX_BODY:
            raise ValueError(f"its answer has more than {_MAX_BODY} bytes")
        if time.monotonic() >= deadline:
            raise TimeoutError(f"its answer was not complete after {_BODY_S:g} s")
    if response.length:  # bytes that the header announced, and that did not come
        raise IncompleteRead(bytes(body), response.length)
    return bytes(body)


def _parse_answer(url: str, status: int, text: bytes) -> Answer:
    """Returns an answer with the fields of a JSON body; a success needs the status, and no contrary field."""
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        message = f"HTTP {status} with a body that is not a JSON object, so check the URL: {text[:80]!r}"
        return Answer(url=url, success=False, message=message, status=status)
    success = status < 300 and fields.get("success", True) is True and fields.get("status") != "error"
    message = str(fields.get("message", ""))
    return Answer(url=url, success=success, message=message, status=status, fields=fields)


def everywhere(
    endpoints: Sequence[Endpoint],
    ask: Callable[[int, Endpoint], Answer],
    on_failure: Callable[[], object] = lambda: None,
    stop: threading.Event | None = None,
) -> list[Answer]:
    """Send a request to all endpoints at once, and return their answers.

    Args:
        endpoints: of the engines.
        ask: sends the request, by index and endpoint.
        on_failure: called after each failed answer, as soon as it arrives.
        stop: once it is set, no answer is waited for; a missing answer is a failure.
    """
    missing = "it had not answered when the sender was closed"
    answers = [Answer(url=each.url, success=False, message=missing) for each in endpoints]

    def run(index: int) -> None:
        try:
            answers[index] = ask(index, endpoints[index])
        except Exception as error:
            answers[index] = replace(answers[index], message=f"the request failed: {error!r}")
        if not answers[index].success:
            on_failure()

    # Daemon threads, so that a trainer that stops does not wait for an engine that never answers.
    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(endpoints))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not (stop is not None and stop.is_set()):
            thread.join(None if stop is None else STOP_S)
    return list(answers)
