"""One task for all who look, and none while nobody does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from segue.frontend.control_log import ControlLog
from segue.server import webpage_feed
from segue.server.webpage_feed import Feed


class Source:
    """What a test says it is."""

    def __init__(self) -> None:
        self.log = ControlLog()
        self.is_over = False
        self.state = "active"
        self.num_samples = 0

    def status(self) -> dict[str, Any]:
        return {"state": self.state}

    def sample(self, seconds: float) -> dict[str, Any]:
        self.num_samples += 1
        return {"seconds": seconds}

    def detail(self) -> dict[str, Any]:
        return {}


@pytest.fixture(autouse=True)
def it_looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webpage_feed, "TICK_S", 0.002)
    monkeypatch.setattr(webpage_feed, "SAMPLE_S", 0.01)
    monkeypatch.setattr(webpage_feed, "MOST_WAITING", 12)


async def next_with(stream: AsyncGenerator[bytes, None], name: str) -> Any:
    """The next message that has something of this name."""
    async with asyncio.timeout(60):
        async for data in stream:
            message = json.loads(data.removeprefix(b"data: "))
            if message.get(name):
                return message[name]
    raise AssertionError("the stream has ended")


def test_two_clients_share_the_samples_and_the_last_one_ends_the_task() -> None:
    async def test() -> None:
        source = Source()
        feed = Feed(source)
        one, two = feed._events(), feed._events()
        assert await next_with(one, "status") == {"state": "active"}
        first = await next_with(one, "samples")
        assert await next_with(two, "samples") == first, "what is known already comes at once"
        source.state = "dead"
        source.log.add("life", "it died")
        for stream in (one, two):
            assert await next_with(stream, "status") == {"state": "dead"}
            assert [entry["text"] for entry in await next_with(stream, "log")] == ["it died"]
        await one.aclose()
        assert await next_with(two, "samples")
        await two.aclose()
        async with asyncio.timeout(60):
            while feed._task is not None:
                await asyncio.sleep(0.001)
        taken = source.num_samples
        await asyncio.sleep(0.03)  # three samples, if there were a task
        assert source.num_samples == taken

    asyncio.run(test())


def test_a_client_that_does_not_read_is_dropped_and_the_others_go_on() -> None:
    async def test() -> None:
        source = Source()
        feed = Feed(source)
        slow, quick = feed._events(), feed._events()
        await anext(slow)
        for _ in range(25):
            await next_with(quick, "samples")
        async with asyncio.timeout(60):
            assert len([data async for data in slow]) <= 12
        await quick.aclose()

    asyncio.run(test())


@pytest.mark.parametrize("is_over_before", [False, True])
def test_it_ends_with_its_source(is_over_before: bool) -> None:
    async def test() -> None:
        source = Source()
        source.is_over = is_over_before
        feed = Feed(source)
        stream = feed._events()
        assert await next_with(stream, "status") == {"state": "active"}
        source.is_over, source.state = True, "dead"
        async with asyncio.timeout(60):
            last = [data async for data in stream][-1]
        assert is_over_before or b'"status":{"state":"dead"}' in last
        assert feed._task is None

    asyncio.run(test())
