"""A router finds engines by their records, and takes of each cohort the highest epoch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from segue.discovery.file import FileDiscovery
from segue.errors import ConfigError
from segue.messages.fleet import Registration
from segue.router.config import RouterConfig
from segue.router.discovery import DiscoveredWorkers
from tests.discovery.contract import record
from tests.router.fake_servers import STREAM, routed, run, until
from tests.router.router_process import process, until_answered
from tests.router.successors import CohortEngine, discovering
from tests.router.test_relay_resume import WHOLE_STREAM, dies_behind, finish


def test_the_highest_epoch_of_each_cohort_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        engines = [FileDiscovery(tmp_path) for _ in range(3)]
        told: list[list[Registration]] = []
        source = DiscoveredWorkers(FileDiscovery(tmp_path))
        watching = asyncio.ensure_future(source.watch(lambda workers: told.append(list(workers))))
        await engines[0].put(record("a", 1, "x"))
        await engines[1].put(record("b", 2, "x"))
        await engines[2].put(record("c", 1, "y"))
        urls = [("http://127.0.0.1:8002", "x", 2), ("http://127.0.0.1:8001", "y", 1)]
        expected = [Registration(url=url, cohort=cohort, epoch=epoch) for url, cohort, epoch in urls]
        await until(lambda: told and told[-1] == expected, "all are told")
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        for engine in engines:
            await engine.close()

    run(test())


def test_an_engine_that_dies_is_forgotten_and_the_next_one_is_found(tmp_path: Path) -> None:
    async def test() -> None:
        first, second = (CohortEngine(tmp_path / "f", epoch, finish) for epoch in (1, 2))
        async with discovering(tmp_path / "f", first) as router:
            await first.die()
            await second.serve()
            await until(lambda: router.registry.get(first.id) is None, "the first one is forgotten")
            await until(lambda: router.serves(second), "the second one serves")
        await second.die()

    run(test())


def test_an_engine_that_starts_again_at_the_same_url_while_the_last_one_leaves_is_found(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        first, second = (CohortEngine(tmp_path / "f", epoch, finish) for epoch in (1, 2))
        async with discovering(tmp_path / "f", first) as router:
            router.router.is_settled = lambda: False  # so that the first one stays for a while
            await first.die()
            await until(lambda: router.registry.at(first.url).is_leaving, "the first one leaves")
            await second.start(int(first.url.rpartition(":")[2]))
            await second.put()
            await until(lambda: router.registry.at(first.url).has_returned, "the second one is known")
            router.router.is_settled = lambda: True
            router.router.forget(router.registry.at(first.url))
            await until(lambda: router.serves(second), "the second one serves")
        await second.die()

    run(test())


def test_a_router_of_several_processes_lets_requests_wait_for_the_successor(tmp_path: Path) -> None:
    async def test() -> None:
        directory = tmp_path / "f"
        first, second = CohortEngine(directory, 1, dies_behind(3)), CohortEngine(directory, 2, finish)
        options = {"discovery": "file", "discovery_target": str(directory), "processes": "2"}
        async with process(**options) as router:
            await first.serve()
            await until_answered(router.http, "/health", lambda reply: reply.json().get("serving") == 1)
            begun = asyncio.create_task(router.http.post("/generate", json=STREAM))
            await until(lambda: first.exchanges and first.exchanges[0].gone.is_set(), "it was lost")
            await first.die()
            await until_answered(router.http, "/health", lambda reply: "serving" not in reply.json())
            late = asyncio.create_task(router.http.post("/generate", json=STREAM))
            await second.serve()
            assert [(await each).content for each in (begun, late)] == [WHOLE_STREAM] * 2
            assert sorted(len(each.given) for each in second.exchanges if each.is_leg) == [0, 3]
        await second.die()

    asyncio.run(asyncio.wait_for(test(), 90))  # three processes start


def test_a_source_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        async def watch(self, on_change: object) -> None:
            raise ValueError("a defect")

        def nudge(self) -> None:
            pass

    async def test() -> None:
        async with routed(waits=False) as router:
            router.router.discover(Broken())
            await until(lambda: "a source of workers has failed" in caplog.text, "it is logged")

    run(test())


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"discovery": "files"}, "expected none, or some of file, etcd, kubernetes"),
        ({"discovery": "file"}, "it is the --failover-dir of the engines"),
        ({"discovery": "file,etcd", "discovery_target": "/tmp"}, "expected one per backend"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        RouterConfig(**options)  # type: ignore[arg-type]
