"""Workers that join a router whose workers are paused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.router.fake_engine_routes import CONTINUED, PAUSED, ControlledWorker, refusal
from tests.router.fake_servers import Exchange, FakeWorker, RunningRouter, routed, run, until

PAUSE = ("POST", "/pause_generation", b'{"mode":"retract"}')


async def join(router: RunningRouter, worker: FakeWorker) -> None:
    await worker.start()
    assert (await router.http.post("/workers", json={"url": worker.url})).status_code == 201


@pytest.mark.parametrize("path", ["/pause_generation", "/pause?mode=keep"])
def test_a_worker_that_joins_paused_workers_is_paused_before_it_gets_requests(path: str) -> None:
    async def test() -> None:
        first, second = ControlledWorker(), ControlledWorker()
        async with routed(first) as router:
            await router.http.post(path)
            await join(router, second)
            await until(lambda: router.serves(second), "it serves")
            assert second.seen == first.seen
        await second.die()

    run(test())


def test_a_process_that_takes_a_paused_ones_place_is_paused() -> None:
    async def test() -> None:
        worker = ControlledWorker()
        async with routed(worker) as router:
            await router.http.post("/pause_generation", json={"mode": "retract"})
            worker.record = ControlledWorker(incarnation="second").record
            worker.watchers[0].cut()
            await until(lambda: worker.seen == [PAUSE] * 2, "the new process is paused")
            worker.watchers[1].cut()  # the same process comes back
            await until(lambda: len(worker.watchers) == 3 and router.serves(worker), "it is back")
            assert worker.seen == [PAUSE] * 2

    run(test())


@pytest.mark.parametrize("then", ["/continue_generation", "/resume"])
def test_a_worker_that_joins_workers_that_go_on_again_is_not_paused(then: str) -> None:
    async def test() -> None:
        first, second = ControlledWorker(), ControlledWorker()
        async with routed(first) as router:
            await router.http.post("/pause_generation")
            await router.http.post(then)
            await join(router, second)
            await until(lambda: router.serves(second), "it serves")
            assert second.seen == []
        await second.die()

    run(test())


def test_a_pause_that_no_worker_has_done_is_not_for_those_that_join() -> None:
    async def test() -> None:
        bad = ControlledWorker({"/pause_generation": refusal(400, "mode='nap'")})
        good = ControlledWorker()
        async with routed(bad) as router:
            assert (await router.http.post("/pause_generation", json={"mode": "nap"})).status_code == 400
            await join(router, good)
            await until(lambda: router.serves(good), "it serves")
            assert good.seen == []
        await good.die()

    run(test())


def test_a_worker_whose_pause_ends_while_it_joins_goes_on() -> None:
    async def test() -> None:
        may_pause, answers = asyncio.Event(), {"/pause_generation": PAUSED, "/continue_generation": CONTINUED}

        async def answer(exchange: Exchange) -> None:
            if exchange.path == "/pause_generation":
                await may_pause.wait()
            content: dict[str, Any] = answers[exchange.path]
            await exchange.whole(json.dumps(content).encode())

        first, second = ControlledWorker(), FakeWorker(answer)
        async with routed(first) as router:
            await router.http.post("/pause_generation")
            await join(router, second)
            await until(lambda: bool(second.exchanges), "it is asked to pause")
            assert router.reason(second) == "it is being drained"
            await router.http.post("/continue_generation")
            may_pause.set()
            await until(lambda: router.serves(second), "it serves")
            paths = [each.path for each in second.exchanges]
            assert paths == ["/pause_generation", "/continue_generation", "/continue_generation"]
        await second.die()

    run(test())


def test_a_worker_that_cannot_be_paused_serves_and_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        first = ControlledWorker()
        second = ControlledWorker({"/pause_generation": refusal(503, "the engine is dead")})
        async with routed(first) as router:
            await router.http.post("/pause_generation")
            await join(router, second)
            await until(lambda: router.serves(second), "it serves")
            assert "joins paused workers, and is not paused: the engine is dead" in caplog.text
        await second.die()

    run(test())
