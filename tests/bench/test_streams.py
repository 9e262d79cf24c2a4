"""Streams of a server, and requests to it, as the benchmarks of weight updates and pauses make them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from bench import weight_sync
from bench.streams import Streams
from tests.server.live import LiveServer
from tests.support.tiny_model import write_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(write_model(tmp_path_factory.mktemp("streams") / "tiny-model")) as live:
        yield live


def test_streams_run_until_they_are_stopped(server: LiveServer) -> None:
    began = time.monotonic()
    with Streams(server.url, 2) as streams:
        pass
    assert streams.rate([(began, time.monotonic())]) > 0


def test_a_body_is_sent_as_json_and_an_error_has_the_text_of_the_answer(server: LiveServer) -> None:
    assert weight_sync.ask(f"{server.url}/pause_generation", {"mode": "in_place"})["status"] == "ok"
    weight_sync.ask(f"{server.url}/continue_generation", {})
    with pytest.raises(RuntimeError, match="mode"):
        weight_sync.ask(f"{server.url}/pause_generation", {"mode": "never"})
