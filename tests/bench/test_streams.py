"""Streams of a server, and requests to it, as benchmarks make them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from random import Random

import pytest

from bench import leaving_clients, weight_sync
from bench.disconnects import Crowd
from bench.leaving_clients import LEAVES, Leave, StreamRequest
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


def address_of(server: LiveServer) -> leaving_clients.Address:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return host, int(port)


@pytest.mark.parametrize("how", LEAVES)
def test_clients_that_leave_in_any_way_leave_nothing_behind(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, how: Leave
) -> None:
    monkeypatch.setattr(leaving_clients, "MOST_SILENT_S", 0.2)
    long = StreamRequest(
        path="/v1/completions", body={"model": "tiny-model", "prompt": "a", "max_tokens": 400}
    )
    left = leaving_clients.leave(address_of(server), long, how, 1, Random(2))
    assert asyncio.run(left) == (how in ("closes", "resets", "half-closes"))
    server.assert_nothing_left()


def test_a_reply_that_differs_from_the_one_alone_is_a_fault(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.disconnects.LEAVES", ["in its request"])
    params = {"max_new_tokens": 5, "ignore_eos": True}
    short = StreamRequest(path="/generate", body={"text": "Hello", "sampling_params": params})
    alone = asyncio.run(leaving_clients.stay(address_of(server), short))
    assert len(alone[0]["output_ids"]) == 5
    for expected in (alone, [{**alone[0], "text": "other"}]):
        crowd = Crowd(address_of(server), [(short, expected)], time.monotonic() + 0.2)
        asyncio.run(crowd.run(4, seed=1))
        right, read = crowd.counts["complete and correct"], crowd.counts["read to the end"]
        assert read and (right, len(crowd.faults)) == ((read, 0) if expected is alone else (0, read))
