"""Measures how long ``/health`` takes while a server works on one of the worst bodies.

``python -m tests.attack.stalls URL`` prints a table of all bodies.
"""

from __future__ import annotations

import gc
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import urlsplit

from tests.attack.bodies import BODIES, Body, ServerSizes
from tests.attack.target import Finding, Target

POLL_S = 0.002
PATIENCE_S = 100.0
ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of one request, and of ``/health`` meanwhile."""

    status: int
    seconds: float  # from the first byte sent to the last received
    longest: float  # seconds of the slowest answer of /health
    answers: int  # number of answers of /health
    refused: int  # number of those with another status than 200


class Poller:
    """Requests ``/health`` repeatedly, on one connection of its own, until the ``with`` block is left."""

    def __init__(self, url: str) -> None:
        self._socket = socket.create_connection(address_of(url), timeout=PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self.longest = 0.0
        self.answers = 0
        self.refused = 0  # answers with another status than 200

    def __enter__(self) -> Poller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()

    def _poll(self) -> None:
        while not self._over.wait(POLL_S):
            begin = time.perf_counter()
            self._socket.sendall(ASK)
            head, _, content = self._socket.recv(65536).partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            while len(content) < length:
                content += self._socket.recv(65536)
            self.longest = max(self.longest, time.perf_counter() - begin)
            self.answers += 1
            if not head.startswith(b"HTTP/1.1 200"):
                self.refused += 1


def measure(url: str, body: Body, headers: Mapping[str, str] | None = None) -> Measured:
    """Send a body and read the whole answer, while another thread polls ``/health``."""
    path, content = body
    connection = http.client.HTTPConnection(*address_of(url), timeout=PATIENCE_S)
    connection.connect()
    gc.collect()
    gc.disable()
    try:
        with Poller(url) as poller:
            begin = time.perf_counter()
            connection.request("POST", path, content, {"content-type": "application/json", **(headers or {})})
            with connection.getresponse() as response:
                while response.read(1 << 20):
                    pass
                status = response.status
            seconds = time.perf_counter() - begin
        return Measured(
            status=status,
            seconds=seconds,
            longest=poller.longest,
            answers=poller.answers,
            refused=poller.refused,
        )
    finally:
        gc.enable()
        connection.close()


def run(target: Target, budget_s: float, rng: Random) -> list[Finding]:
    """Send the worst bodies in a random order, one at a time, until the budget is spent."""
    findings = []
    sizes = sizes_of(target.url, target.headers)
    until = time.monotonic() + budget_s
    for name in rng.sample(sorted(BODIES), len(BODIES)):
        if time.monotonic() > until:
            break
        target.tried[f"bodies: {name}"] += 1
        try:
            status = measure(target.url, BODIES[name](sizes), target.headers).status
        except (OSError, http.client.HTTPException) as error:
            findings.append(Finding(what=name, seen=f"no answer: {error!r}; each body has to get an answer"))
            continue
        if status not in (200, 400):
            findings.append(Finding(what=name, seen=f"status {status}; it may be 200 or 400"))
    return findings


def sizes_of(url: str, headers: Mapping[str, str] | None = None) -> ServerSizes:
    """Returns the sizes that ``/server_info`` reports."""
    info = ask(url, "/server_info", headers)
    return ServerSizes(
        model=info["served_model_name"],
        context=info["decided"]["max_seq_len"],
        vocabulary=info["decided"]["vocab_size"],
        max_prompts=info["max_queued_requests"],
    )


def ask(url: str, path: str, headers: Mapping[str, str] | None = None) -> Any:
    connection = http.client.HTTPConnection(*address_of(url), timeout=PATIENCE_S)
    connection.request("GET", path, headers=headers or {})
    with connection.getresponse() as response:
        content = json.loads(response.read())
    connection.close()
    return content


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def main(url: str) -> None:
    """Print a table of all bodies."""
    sizes = sizes_of(url)
    print(f"{'body':55} {'MiB':>5} {'status':>6} {'s':>7} {'longest /health, ms':>20}", flush=True)
    for name, build in BODIES.items():
        body = build(sizes)
        try:
            found = measure(url, body)
        except OSError as error:
            print(f"{name:55} {len(body[1]) / 2**20:5.1f} {error}", flush=True)
            continue
        row = f"{found.status:6} {found.seconds:7.2f} {found.longest * 1e3:20.0f}"
        print(f"{name:55} {len(body[1]) / 2**20:5.1f} {row}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
