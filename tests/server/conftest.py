"""One server for most tests; after each, nothing may be left in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.leg_fleet import MODEL, Fleet
from tests.server.live import LiveServer
from tests.support.tool_model import write_tool_model


@pytest.fixture(scope="session")
def shared_server(tiny_model: Path) -> Iterator[LiveServer]:
    with LiveServer(tiny_model) as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    yield shared_server
    shared_server.assert_nothing_left()


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of a model that knows tools and reasoning, which says what a request tells it to say."""
    model = write_tool_model(tmp_path_factory.mktemp("tools") / "tool-model")
    with LiveServer(model, max_model_len=2048) as server:
        yield server
        server.assert_nothing_left()


@pytest.fixture(scope="session")
def shared_fleet(tiny_model: Path) -> Iterator[Fleet]:
    fleet = Fleet(tiny_model)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Iterator[Fleet]:
    yield shared_fleet
    for server in (shared_fleet.prefill, shared_fleet.one, shared_fleet.two):
        server.assert_nothing_left()


@pytest.fixture
def slow_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While this file exists, the steps of a server take ten times as long: no request ends meanwhile."""
    file = tmp_path / "slow"
    file.touch()
    monkeypatch.setenv("FAKE_SLOW_WHILE", str(file))
    return file


class Api:
    """Short ways to ask."""

    def __init__(self, client: httpx.Client) -> None:
        self.http = client

    def chat(self, content: Any = "Hello", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 20}
        return self.http.post("/v1/chat/completions", json=body | fields)

    def complete(self, prompt: Any = "Hello", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 20}
        return self.http.post("/v1/completions", json=body | fields)

    def generate(self, text: Any = "Hello", **fields: Any) -> httpx.Response:
        return self.http.post("/generate", json={"text": text} | fields)


@pytest.fixture
def api(server: LiveServer) -> Api:
    return Api(server.client)
