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
from segue.errors import ConfigError
from segue.failover.life import LifeState
from segue.failover.system_health import SystemHealth
from segue.launch.runtime import Runtime
from segue.listener import bind
from segue.server.cohort import CohortMember
from segue.server.endpoint import EngineEndpoint, _check_record_url
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


def cohort_config(model: Path, directory: Path, **options: Any) -> EngineConfig:
    given = {"model": str(model), "load_format": "dummy", "port": 0, "log_level": "error"}
    cohort = {"shadow_mode": True, "failover_dir": str(directory / "cohort"), "engine_id": "a"}
    return EngineConfig(**given | cohort | options)


def run(model: Path, directory: Path, work: Callable[[Door], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        config = cohort_config(model, directory, **options)
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


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [
        ({}, True),
        ({"discovery": "none"}, False),
        ({"register_url": "http://gpu-1:80"}, False),
    ],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_the_address_of_a_record_must_be_one_that_routers_can_reach(
    tiny_model: Path, tmp_path: Path, host: str, options: dict[str, Any], is_refused: bool
) -> None:
    config = cohort_config(tiny_model, tmp_path, host=host, **options)
    try:
        listener = bind(host, 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    health, member = SystemHealth(listed=["generate"]), CohortMember(config)

    async def make() -> EngineEndpoint:
        with closing(listener):
            return EngineEndpoint(config, listener, health, member, "http://0.0.0.0:9090")

    if is_refused:
        with pytest.raises(ConfigError, match=f"host='{host}': .* all addresses, .* --register-url"):
            asyncio.run(make())
    elif "register_url" in options:
        assert asyncio.run(make())._system_url == "http://gpu-1:9090", "the record's other URL too"
    else:
        asyncio.run(make())


def test_a_record_elsewhere_with_an_address_of_this_host_alone_is_a_warning(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = cohort_config(
        tiny_model, tmp_path, discovery="file,etcd", discovery_target=",http://127.0.0.1:9"
    )
    for own, num_warnings in (("http://127.0.0.1:80", 1), ("http://gpu-1:80", 1)):
        _check_record_url(config, own)
        assert sum("routers on other hosts cannot reach" in text for text in caplog.messages) == num_warnings
