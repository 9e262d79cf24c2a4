"""Reads server-sent events as a client does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx


def parse_events(lines: Iterator[str]) -> Iterator[Any]:
    """Yields the decoded JSON of each event; the last is the string "[DONE]"."""
    for line in lines:
        if not line or line.startswith(":"):  # a line that begins with a colon is a comment
            continue
        name, _, data = line.partition(": ")
        assert name == "data", line
        yield data if data == "[DONE]" else json.loads(data)


def read_stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """Returns all events of a streamed answer."""
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(parse_events(response.iter_lines()))
