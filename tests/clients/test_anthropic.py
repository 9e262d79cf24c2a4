"""Anthropic's client, as it is published, against a live engine, and against a router before it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.server.live import LiveServer
from tests.support.child import start_child
from tests.support.tool_model import write_tool_model

PROGRAM = Path(__file__).with_name("programs") / "anthropic_client.py"
MODEL, KEY = "small", "a-key"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = write_tool_model(tmp_path_factory.mktemp("model") / MODEL)
    with LiveServer(model, max_model_len=2048, api_key=KEY) as server:
        yield server
        server.assert_nothing_left()


@contextmanager
def routed(engine: LiveServer) -> Iterator[str]:
    """Runs a router before the engine, and yields its URL."""
    words = ["--port", "0", "--worker", engine.url, "--worker-api-key", KEY, "--api-key", KEY]
    command = [sys.executable, "-m", "segue", "router", "--log-level", "error", *words]
    process = start_child(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(word for word in process.stdout.readline().split() if word.startswith("http://"))
        deadline = time.monotonic() + 20
        while httpx.get(f"{url}/health").json().get("serving") != 1:
            assert time.monotonic() < deadline, "the router has not found the engine"
        yield url
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def run(python: Path, url: str) -> None:
    command = [str(python), str(PROGRAM), url, MODEL, KEY]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert result.stdout.endswith("all done\n")


def test_the_client_gets_what_it_expects(engine: LiveServer, client_python: Callable[[str], Path]) -> None:
    run(client_python("anthropic"), engine.url)


def test_the_client_gets_the_same_from_a_router(
    engine: LiveServer, client_python: Callable[[str], Path]
) -> None:
    with routed(engine) as url:
        run(client_python("anthropic"), url)
