"""Weight routes: one worker gets them, several do not."""

from __future__ import annotations

import asyncio

from segue.messages.weight_operations import OPERATIONS
from tests.router.fake_engine_routes import ControlledWorker
from tests.router.fake_servers import Exchange, FakeWorker, routed, run, until
from tests.router.workers import report

PATH = "/update_weight_version"


def test_the_only_worker_gets_an_operation_as_it_is_and_answers_it() -> None:
    async def test() -> None:
        worker = ControlledWorker({PATH: (400, {"success": False, "message": "no"})})
        async with routed(worker, worker_admin_key="secret") as router:
            reply = await router.http.post(f"{PATH}?a=1", content=b'{"new_version": "2"}')
            assert (reply.status_code, reply.json()) == (400, {"success": False, "message": "no"})
            assert reply.headers["content-type"] == "application/json"
            assert worker.seen == [("POST", f"{PATH}?a=1", b'{"new_version": "2"}')]
            assert worker.exchanges[0].headers["authorization"] == "Bearer secret"

    run(test())


def test_several_workers_refuse_each_operation_and_point_to_their_list() -> None:
    async def test() -> None:
        workers = [FakeWorker(), FakeWorker()]
        async with routed(*workers) as router:
            named = {name: kind.methods[0] for name, kind in OPERATIONS.items()}
            vllms = ("start_weight_update", "update_weights", "finish_weight_update")
            for name, method in (named | dict.fromkeys(vllms, "POST")).items():
                reply = await router.http.request(method, f"/{name}", content=b"{}")
                assert reply.status_code == 400 and reply.json()["success"] is False, name
                assert "GET /workers" in reply.json()["message"]
            assert not any(worker.exchanges for worker in workers)

    run(test())


def test_a_worker_that_is_gone_is_named() -> None:
    async def test() -> None:
        worker = ControlledWorker()
        async with routed(worker) as router:
            await worker.die()
            reply = await router.http.post(PATH, json={"new_version": "2"})
            assert reply.status_code == 503
            assert f"failed at worker {worker.id}: no connection" in reply.json()["message"]

    run(test())


def test_a_client_that_leaves_ends_the_wait() -> None:
    async def test() -> None:
        async def never(exchange: Exchange) -> None:
            await exchange.gone.wait()

        worker = FakeWorker(never)
        async with routed(worker) as router:
            asked = asyncio.ensure_future(router.http.post(PATH, json={"new_version": "2"}))
            await until(lambda: worker.exchanges, "the worker has it")
            asked.cancel()
            await until(lambda: worker.exchanges[0].gone.is_set(), "the connection is closed")

    run(test())


def test_an_operation_whose_engine_is_lost_may_be_sent_again() -> None:
    async def test() -> None:
        engine = ControlledWorker(cohort="c", epoch=1)
        engine.report = report(epoch=1)
        async with routed(engine) as router:
            await engine.die()
            reply = await router.http.post(PATH, json={"new_version": "2"})
            assert reply.status_code == 503 and reply.headers["retry-after"]
            assert reply.json()["success"] is False
            assert "Another engine takes its place" in reply.json()["message"]

    run(test())


def test_an_operation_goes_to_the_engine_with_the_highest_epoch() -> None:
    async def test() -> None:
        old, new = (
            ControlledWorker(cohort="c", epoch=1),
            ControlledWorker({PATH: (200, {})}, cohort="c", epoch=2),
        )
        old.report, new.report = report(epoch=1), report(epoch=2)
        async with routed(old, waits=False) as router:
            await new.start()
            router.router.add(new.url)
            await until(lambda: router.serves(new), "the new one serves")
            assert (await router.http.post(PATH, json={"new_version": "2"})).status_code == 200
            assert new.seen and not old.seen
        await new.die()

    run(test())
