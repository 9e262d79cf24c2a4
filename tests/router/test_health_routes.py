"""``/health_generate``: the workers that serve are asked for a token."""

from __future__ import annotations

import asyncio

import pytest

from segue.messages.fleet import Role
from tests.router.fake_engine_routes import ControlledWorker, refusal
from tests.router.fake_servers import Exchange, FakeWorker, routed, run, until
from tests.router.workers import report


def test_one_worker_that_generates_is_enough_and_the_others_are_named() -> None:
    async def test() -> None:
        good, hung = ControlledWorker(), ControlledWorker({"/health_generate": refusal(503, "no step ended")})
        async with routed(good, hung) as router:
            reply = await router.http.get("/health_generate")
            assert reply.status_code == 200
            found = {"status": "ok", "workers": 2, "serving": 2, "well": 1}
            assert reply.json() == found | {"failed": {hung.id: "no step ended"}}

    run(test())


def test_if_no_worker_generates_it_is_503_with_the_reasons() -> None:
    async def test() -> None:
        hung = ControlledWorker({"/health_generate": refusal(503, "no step ended")})
        async with routed(hung) as router:
            reply = await router.http.get("/health_generate")
            assert reply.status_code == 503 and f"{hung.id}: no step ended" in reply.json()["message"]

    run(test())


def test_a_router_whose_workers_are_all_paused_is_well() -> None:
    async def test() -> None:
        paused, lost = ControlledWorker(), ControlledWorker()
        async with routed(paused, lost) as router:
            await lost.die()
            paused.report = report(paused=True)
            await until(lambda: router.reason(paused) == "its generation is paused", "it is paused")
            await until(lambda: not router.serves(lost), "the other one is lost")
            found = {"status": "paused", "workers": 2, "serving": 0, "paused": 1}
            assert (await router.http.get("/health")).json() == found
            reply = await router.http.get("/health_generate")
            assert reply.json() == found | {"well": 1, "failed": {}}

    run(test())


@pytest.mark.parametrize(("role", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_one_half_of_a_pair_serves_no_request(role: Role, other: Role) -> None:
    async def test() -> None:
        half, other_half = ControlledWorker(role=role), ControlledWorker(role=other)
        async with routed(half, other_half) as router:
            assert (await router.http.get("/ready")).json() == {"status": "ok", "workers": 2, "serving": 2}
            await other_half.die()
            await until(lambda: not router.serves(other_half), "the other half is lost")
            reply = await router.http.get("/ready")
            assert reply.status_code == 503
            assert f"no {other} worker takes requests ({other_half.id}: " in reply.json()["message"]

    run(test())


def test_calls_at_the_same_time_share_one_check() -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def wait(exchange: Exchange) -> None:
            await go.wait()
            await exchange.whole(b"{}")

        worker = FakeWorker(wait)
        async with routed(worker) as router:
            calls = [asyncio.ensure_future(router.http.get("/health_generate")) for _ in range(5)]
            await until(lambda: worker.exchanges, "the worker is asked")
            await router.http.get("/health")
            go.set()
            assert {reply.status_code for reply in await asyncio.gather(*calls)} == {200}
            assert len(worker.exchanges) == 1

    run(test())


def test_a_router_is_alive_without_workers_and_while_it_drains() -> None:
    async def test() -> None:
        worker = ControlledWorker()
        async with routed(worker) as router:
            await worker.die()
            await until(lambda: not router.serves(worker), "the worker is lost")
            router.router.is_draining = True
            assert (await router.http.get("/ready")).status_code == 503
            assert (await router.http.get("/live")).json() == {"status": "live"}

    run(test())
