"""A small balancer for a prefill and a decode engine, of the kind that SGLang ships: a client for tests.

It sends one body with bootstrap fields to both engines, and relays what the decode engine replies.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

import httpx

from tests.support.shared_client import shared_client

WARM_UP_HOST = "2.2.2.2"
MAX_ROOM = 2**63 - 1
WAIT_S = 60.0  # for a reply


class PDBalancer:
    """Sends requests to one pair of engines."""

    def __init__(self, prefill: str, decode: str, host: str, port: int | None) -> None:
        """Take the engines' URLs, and where the prefill engine hands KV over."""
        self._urls = prefill, decode
        self._host, self._port = host, port
        self._random = Random(1)
        self._http = shared_client(timeout=WAIT_S)
        self._threads = ThreadPoolExecutor(64)
        self.prefills: list[Future[httpx.Response]] = []  # the prefill engine's replies, which nobody reads

    def split(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the body with bootstrap fields; a batch has lists of them."""
        prompts = body.get("input_ids") or body.get("text") or body.get("prompt")
        if not isinstance(prompts, list) or isinstance(prompts[0], int):
            where: tuple[Any, ...] = self._host, self._port, self._random.randint(0, MAX_ROOM)
        else:
            count = len(prompts)
            rooms = [self._random.randint(0, MAX_ROOM) for _ in range(count)]
            where = [self._host] * count, [self._port] * count, rooms
        return body | dict(zip(("bootstrap_host", "bootstrap_port", "bootstrap_room"), where, strict=True))

    def warm_up(self) -> list[httpx.Response]:
        """Send each engine the request by which a balancer finds out that it works."""
        body = {"input_ids": [10, 11, 12, 13], "sampling_params": {"temperature": 0.0, "max_new_tokens": 8}}
        body |= {"bootstrap_host": WARM_UP_HOST, "bootstrap_room": 0}
        return [self._http.post(url + "/generate", json=body) for url in self._urls]

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Relay a request."""
        split = self._begin(path, body)
        return self._http.post(self._urls[1] + path, json=split)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        """Relay the lines of a streamed reply."""
        split = self._begin(path, body | {"stream": True})
        with self._http.stream("POST", self._urls[1] + path, json=split) as response:
            yield from response.iter_lines()

    def _begin(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send the prefill engine its half; returns the body of both halves."""
        split = self.split(body)
        self.prefills.append(self._threads.submit(self._http.post, self._urls[0] + path, json=split))
        return split

    def close(self) -> None:
        """Wait for the prefill engine's replies, and close all connections."""
        self._threads.shutdown()
        self._http.close()
