"""Requests as bytes on a socket, such as no HTTP client library would send."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any

from tests.server.live import LiveServer


def ask(server: LiveServer, method: str, target: str, *headers: str, version: str = "1.1") -> tuple[int, str]:
    """Sends a request without a body on a new connection; returns status and body of the answer."""
    host, port = server.url.removeprefix("http://").split(":")
    lines = [f"{method} {target} HTTP/{version}", *headers, "content-length: 0", "connection: close"]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1"))
        response = HTTPResponse(connection, method=method)
        response.begin()
        return response.status, response.read().decode()


@contextmanager
def posted(server: LiveServer, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request of which nobody reads the answer; the connection is closed at the end."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        yield connection
