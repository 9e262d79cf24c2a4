"""An engine becomes known only while it wakes, and under the epoch that it has claimed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from segue.config import EngineConfig
from segue.discovery.record import EngineRecord
from segue.failover.life import LifeState
from segue.failover.system_health import SystemHealth
from segue.launch.runtime import Runtime
from segue.listener import bind
from segue.server.cohort import CohortMember
from segue.server.endpoint import EngineEndpoint
from tests.support.fake_engine import FAKE_WORKER

PATHS = {
    LifeState.STANDBY: (),
    LifeState.ACTIVE: (LifeState.WAKING, LifeState.ACTIVE),
    LifeState.DRAINED: (LifeState.WAKING, LifeState.ACTIVE, LifeState.DRAINED),
    LifeState.DRAINING: (LifeState.WAKING, LifeState.ACTIVE, LifeState.DRAINING),
}


class Door:
    """An endpoint whose engine stands by."""

    def __init__(self, runtime: Runtime, endpoint: EngineEndpoint, member: CohortMember) -> None:
        self.runtime = runtime
        self.endpoint = endpoint
        self.member = member
        self.health = endpoint._health

    async def records(self) -> list[EngineRecord]:
        return list(await self.member._discovery.list())

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(self.endpoint.url.rpartition(":")[2]))) == 0


def run(model: Path, directory: Path, work: Callable[[Door], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        given = {"model": str(model), "load_format": "dummy", "port": 0, "log_level": "error"}
        cohort = {"shadow_mode": True, "failover_dir": str(directory / "cohort"), "engine_id": "a"}
        config = EngineConfig(**given | cohort | options)
        member, health = CohortMember(config), SystemHealth(listed=["generate"])
        with closing(bind(config.host, 0)) as listener:
            endpoint = EngineEndpoint(config, listener, health, member, "http://system")
            runtime = await Runtime.start(config, command=FAKE_WORKER)
            try:
                await work(Door(runtime, endpoint, member))
            finally:
                await runtime.shutdown()
                await endpoint.close()
                await member.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_an_engine_that_is_not_waking_cannot_become_known(tiny_model: Path, tmp_path: Path) -> None:
    async def work(door: Door) -> None:
        for state, path in PATHS.items():
            door.runtime.life.state = LifeState.STANDBY
            for each in path:
                door.runtime.life.advance(each)
            with pytest.raises(
                ValueError, match=f"an engine that is {state.name}, with epoch 0, cannot serve"
            ):
                await door.endpoint.serve(door.runtime, 0)
            assert not door.listens() and await door.records() == []
            assert door.health.get_health_status() == (False, {})

    run(tiny_model, tmp_path, work)


def test_an_engine_serves_only_with_its_own_epoch(tiny_model: Path, tmp_path: Path) -> None:
    async def work(door: Door) -> None:
        door.runtime.begin_wake(10.0)
        assert door.member.lock.try_acquire()
        epoch = await door.member.claim(door.endpoint.own_url)
        await door.runtime.wake_ranks(epoch)
        with pytest.raises(ValueError, match="with epoch 1, cannot serve with epoch 0"):
            await door.endpoint.serve(door.runtime, 0)
        assert not door.listens() and await door.records() == []
        await door.endpoint.serve(door.runtime, epoch)
        assert door.listens() and door.health.get_health_status()[0]
        (record,) = await door.records()
        assert (record.engine, record.cohort, record.epoch) == ("a", "default", 1)
        assert (record.url, record.system_url) == (door.endpoint.url, "http://system")
        await door.endpoint.withdraw()
        assert await door.records() == [] and not door.health.get_health_status()[0]
        assert door.listens(), "clients that know the engine are still answered"

    run(tiny_model, tmp_path, work)


def test_the_url_of_the_record_can_be_given(tiny_model: Path, tmp_path: Path) -> None:
    async def work(door: Door) -> None:
        door.runtime.begin_wake()
        assert door.member.lock.try_acquire()
        await door.runtime.wake_ranks(await door.member.claim(door.endpoint.own_url))
        await door.endpoint.serve(door.runtime, 1)
        assert [record.url for record in await door.records()] == ["http://gpu-1:80"]
        note = door.member.lock.note()
        assert note is not None and note.url == "http://gpu-1:80"

    run(tiny_model, tmp_path, work, register_url="http://gpu-1:80")
