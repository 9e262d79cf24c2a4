from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from segue.launch.channel import Addresses, Channel
from segue.launch.processes import make_run_dir
from segue.messages.control import FrontendMessage, SchedulerMessage, State
from segue.messages.requests import Abort


@pytest.fixture
def addresses() -> Iterator[Addresses]:
    """Addresses in a directory whose path is short enough for sockets, wherever temporary files are."""
    run_dir = make_run_dir()
    yield Addresses.of(run_dir)
    shutil.rmtree(run_dir)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def test_messages_sent_before_the_scheduler_connects_arrive_in_order(addresses: Addresses) -> None:
    async def work() -> None:
        context: zmq.Context[Any] = zmq.Context()
        channel = Channel(context, addresses, lambda _: None)
        for number in range(20):
            channel.send(Abort(rid=str(number)))
        inbox = context.socket(zmq.PULL)
        inbox.connect(addresses.to_scheduler)
        decoder = msgspec.msgpack.Decoder(FrontendMessage)
        frames = [await asyncio.to_thread(inbox.recv) for _ in range(20)]
        assert [decoder.decode(frame) for frame in frames] == [Abort(rid=str(number)) for number in range(20)]
        channel.close()
        inbox.close()
        context.term()

    asyncio.run(work())


def test_every_message_of_a_burst_is_received(addresses: Addresses) -> None:
    async def work() -> None:
        context: zmq.Context[Any] = zmq.Context()
        got: list[SchedulerMessage] = []
        channel = Channel(context, addresses, got.append)
        outbox = context.socket(zmq.PUSH)
        outbox.set_hwm(0)
        outbox.connect(addresses.to_frontend)
        for burst in (1, 5000, 1):
            del got[:]
            for call in range(burst):
                outbox.send(msgspec.msgpack.encode(State(call, {}, [])))
            await until(lambda burst=burst: len(got) == burst)
            assert got == [State(call, {}, []) for call in range(burst)]
        channel.close()
        outbox.close()
        context.term()

    asyncio.run(work())


def test_a_closed_channel_drops_messages(addresses: Addresses) -> None:
    async def work() -> None:
        context: zmq.Context[Any] = zmq.Context()
        channel = Channel(context, addresses, lambda _: None)
        channel.close()
        channel.send(Abort())
        channel.close()
        context.term()

    asyncio.run(work())
