from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from segue.config import EngineConfig
from segue.launch.channel import Channel
from segue.launch.processes import EmbeddedScheduler, WorkerProcesses
from segue.launch.run_dir import RunDir
from segue.messages.control import FrontendMessage, Heartbeat, SchedulerMessage, StartFailed, State
from segue.messages.requests import Abort


@pytest.fixture
def addresses() -> Iterator[tuple[str, str]]:
    """Addresses in a directory whose path is short enough for sockets, wherever temporary files are."""
    run_dir = RunDir()
    yield WorkerProcesses(EngineConfig(), run_dir).addresses
    run_dir.remove()


def no_call(*_: object) -> None:
    raise AssertionError("not to be called")


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def test_messages_sent_before_the_scheduler_listens_arrive_in_order(addresses: tuple[str, str]) -> None:
    async def work() -> None:
        context: zmq.Context[Any] = zmq.Context()
        channel = Channel(context, *addresses, no_call, no_call)
        for number in range(20):
            channel.send(Abort(rid=str(number)))
        inbox = context.socket(zmq.PULL)
        inbox.bind(addresses[0])
        decoder = msgspec.msgpack.Decoder(FrontendMessage)
        frames = [await asyncio.to_thread(inbox.recv) for _ in range(20)]
        assert [decoder.decode(frame) for frame in frames] == [Abort(rid=str(number)) for number in range(20)]
        channel.close()
        inbox.close()
        context.term()

    asyncio.run(work())


def test_every_message_of_a_burst_is_received(addresses: tuple[str, str]) -> None:
    async def work() -> None:
        context: zmq.Context[Any] = zmq.Context()
        got: list[SchedulerMessage] = []
        channel = Channel(context, *addresses, no_call, no_call)
        channel.on_output = got.append
        outbox = context.socket(zmq.PUSH)
        outbox.set_hwm(0)
        outbox.connect(addresses[1])
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


def test_messages_are_handed_on_by_kind_and_an_error_stops_none(
    addresses: tuple[str, str],
) -> None:
    async def work() -> None:
        context: zmq.Context[Any] = zmq.Context()
        of_worker: list[SchedulerMessage] = []
        errors: list[Exception] = []
        channel = Channel(context, *addresses, of_worker.append, errors.append)
        channel.on_output = no_call
        outbox = context.socket(zmq.PUSH)
        outbox.connect(addresses[1])
        failed, beat = StartFailed("ConfigError", "no"), Heartbeat(0, 0.0)
        for frame in (msgspec.msgpack.encode(failed), b"?", msgspec.msgpack.encode(State(1, {}, []))):
            outbox.send(frame)
        outbox.send(msgspec.msgpack.encode(beat))
        await until(lambda: len(of_worker) == 2)
        assert of_worker == [failed, beat]
        assert [type(error) for error in errors] == [msgspec.ValidationError, AssertionError]
        channel.close()
        outbox.close()
        context.term()

    asyncio.run(work())


def test_messages_to_an_embedded_scheduler_that_has_ended_are_dropped() -> None:
    async def work() -> None:
        context: zmq.Context[Any] = zmq.Context()
        channel = Channel(context, *EmbeddedScheduler.addresses, no_call, no_call)
        inbox = context.socket(zmq.PULL)
        inbox.bind(EmbeddedScheduler.addresses[0])
        channel.send(Abort())
        assert inbox.recv()
        inbox.close()
        for _ in range(20):
            channel.send(Abort())
            await asyncio.sleep(0.005)
        channel.close()
        context.term()

    asyncio.run(work())


def test_a_closed_channel_drops_messages(addresses: tuple[str, str]) -> None:
    async def work() -> None:
        context: zmq.Context[Any] = zmq.Context()
        channel = Channel(context, *addresses, no_call, no_call)
        channel.close()
        channel.send(Abort())
        channel.close()
        context.term()

    asyncio.run(work())
