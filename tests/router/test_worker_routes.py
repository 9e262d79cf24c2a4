"""Routes about workers: registrations that lapse, drains, roles and epochs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from msgspec import structs

from segue.messages.fleet import Registration
from segue.router import watch
from segue.router.discovery import FixedWorkers
from segue.trainer.endpoint import Endpoint
from tests.router.fake_engine_routes import ControlledWorker, refusal
from tests.router.fake_servers import REPLY, STREAM, Exchange, FakeWorker, RunningRouter, routed, run, until
from tests.router.test_relay import begin_only
from tests.router.workers import report


async def register(router: RunningRouter, worker: FakeWorker, **fields: Any) -> int:
    reply = await router.http.post("/workers", json={"url": worker.url} | fields)
    return reply.status_code


# --- registrations that lapse ---


def test_a_registration_is_renewed_by_the_same_request() -> None:
    async def test() -> None:
        worker = FakeWorker()
        await worker.start()
        async with routed() as router:
            assert await register(router, worker, ttl_s=60) == 201
            assert await register(router, worker, ttl_s=60) == 200
            assert len(list(router.registry)) == 1
        await worker.die()

    run(test())


def test_a_second_worker_at_the_same_host_and_port_is_refused() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            reply = await router.http.post("/workers", json={"url": f"https://{worker.id}"})
            assert reply.status_code == 400
            text = f"{worker.url} is registered at the same host and port; remove it first"
            assert text in reply.json()["message"]
            assert [entry.url for entry in router.registry] == [worker.url]

    run(test())


def test_a_worker_is_forgotten_once_its_registration_has_lapsed_and_its_reports_have_ended() -> None:
    async def test() -> None:
        worker = FakeWorker()
        await worker.start()
        async with routed() as router:
            router.router.discover()
            await register(router, worker, ttl_s=0.2)
            await until(lambda: router.serves(worker), "it serves")
            entry = router.registry.get(worker.id)
            assert entry is not None
            await until(lambda: entry.has_lapsed, "it has lapsed")
            assert router.serves(worker)  # its reports show that it lives
            await worker.die()
            await until(lambda: not list(router.registry), "it is forgotten")

    run(test())


def test_a_lost_worker_stays_while_its_registration_holds() -> None:
    async def test() -> None:
        worker = FakeWorker()
        await worker.start()
        async with routed() as router:
            router.router.discover()
            await register(router, worker, ttl_s=60)
            await until(lambda: router.serves(worker), "it serves")
            await worker.die()
            await until(lambda: not router.serves(worker), "it is lost")
            assert len(list(router.registry)) == 1
            await register(router, worker, ttl_s=0)
            await until(lambda: not list(router.registry), "it is forgotten")

    run(test())


def test_a_lapsed_worker_that_is_lost_ends_its_requests_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        worker = FakeWorker(begin_only)
        await worker.start()
        async with routed() as router:
            router.router.discover()
            await register(router, worker, ttl_s=60)
            await until(lambda: router.serves(worker), "it serves")
            await register(router, worker, ttl_s=0)
            async with router.http.stream("POST", "/generate", json=STREAM) as reply:
                parts = reply.aiter_raw()  # the reply is closed with it
                await anext(parts)
                worker.watch_status = 503
                worker.watchers[0].cut()
                entry = router.registry.get(worker.id)
                assert entry is not None
                await until(lambda: entry.is_leaving, "it leaves")
                assert not worker.exchanges[0].gone.is_set()
                assert list(router.registry) == [entry]
            await until(lambda: not list(router.registry), "it is forgotten")
        await worker.die()

    monkeypatch.setattr(watch, "RETRY_S", 0.01)
    run(test())


def test_a_worker_that_is_gone_before_it_was_reached_is_forgotten_at_once() -> None:
    async def test() -> None:
        async with routed() as router:
            assert (
                await router.http.post("/workers", json={"url": "http://127.0.0.1:9", "ttl_s": 0})
            ).is_success
            await until(lambda: not list(router.registry), "it is forgotten")

    run(test())


def test_a_worker_of_the_options_never_lapses() -> None:
    async def test() -> None:
        worker = FakeWorker()
        await worker.start()
        async with routed() as router:
            router.router.discover(FixedWorkers([Registration(url=worker.url)]))
            await until(lambda: router.registry.at(worker.url) is not None, "it is known")
            await register(router, worker, ttl_s=0)
            await until(lambda: router.serves(worker), "it serves")
            await worker.die()
            await until(lambda: not router.serves(worker), "it is lost")
            assert len(list(router.registry)) == 1

    run(test())


# --- drains and roles ---


def test_a_drained_worker_gets_no_new_requests_until_the_drain_is_undone() -> None:
    async def test() -> None:
        drained, other = FakeWorker(), FakeWorker()
        async with routed(drained, other, policy="round_robin") as router:
            reply = await router.http.post(f"/workers/{drained.id}/drain")
            assert (reply.status_code, reply.json()["reason"]) == (200, "it is being drained")
            for _ in range(4):
                assert (await router.generate()).status_code == 200
            assert (len(drained.exchanges), len(other.exchanges)) == (0, 4)
            reply = await router.http.post(f"/workers/{drained.id}/drain", json={"drain": False})
            assert reply.json()["serves"] is True
            for _ in range(4):
                await router.generate()
            assert drained.exchanges

    run(test())


def test_a_drain_ends_no_request_and_outlives_a_new_connection() -> None:
    async def test() -> None:
        worker = FakeWorker(begin_only)
        async with routed(worker) as router:
            async with router.http.stream("POST", "/generate", json=STREAM) as reply:
                parts = reply.aiter_raw()  # the reply is closed with it
                await anext(parts)
                drained = (await router.http.post(f"/workers/{worker.id}/drain")).json()
                assert drained["in_flight"] == 1
                worker.watchers[0].cut()
                await until(lambda: len(worker.watchers) == 2, "it is watched again")
                await until(lambda: router.reason(worker) == "it is being drained", "it is still drained")
                assert not worker.exchanges[0].gone.is_set()
            assert list(router.registry)

    run(test())


def test_a_change_of_the_role_is_the_workers_to_answer() -> None:
    async def test() -> None:
        worker = ControlledWorker({"/role": (409, {"message": "2 offers are left"})})
        async with routed(worker, worker_admin_key="secret") as router:
            body = {"role": "decode", "timeout": 3}
            reply = await router.http.post(f"/workers/{worker.id}/role", json=body)
            assert (reply.status_code, reply.json()) == (409, {"message": "2 offers are left"})
            ((method, path, sent),) = worker.seen
            assert (method, path, json.loads(sent)) == ("POST", "/role", body)
            assert worker.exchanges[0].headers["authorization"] == "Bearer secret"

    run(test())


def role_of(router: RunningRouter, worker: FakeWorker) -> str | None:
    entry = router.registry.get(worker.id)
    return None if entry is None or entry.view is None else entry.view.record.role


@pytest.mark.parametrize("named", [None, "decode"])
def test_a_worker_gets_no_requests_while_its_role_changes_and_then_has_the_new_one(named: Any) -> None:
    async def test() -> None:
        may_answer = asyncio.Event()

        async def change(exchange: Exchange) -> None:
            await may_answer.wait()
            answer = {"role": "prefill", "kv_address": "0.0.0.0:8998"}
            await exchange.whole(json.dumps(answer).encode())

        worker = FakeWorker(change, role="decode")
        worker.named = named
        async with routed(worker) as router:
            path = f"/workers/{worker.id}/role"
            asked = asyncio.ensure_future(router.http.post(path, json={"role": "prefill"}))
            await until(lambda: router.reason(worker) == "it is being drained", "the change has begun")
            worker.watchers[0].cut()  # whatever its record says now is not wrong
            worker.record = structs.replace(worker.record, role="prefill")
            await until(lambda: len(worker.watchers) == 2, "it is watched again")
            await until(lambda: role_of(router, worker) == "prefill", "its new record has come")
            may_answer.set()
            assert (await asked).json()["role"] == "prefill"
            await until(lambda: router.serves(worker), "it serves")
            (entry,) = router.registry
            assert entry.view is not None and entry.role == (named and "prefill")
            record = entry.view.record
            assert (record.role, record.kv_address) == ("prefill", "127.0.0.1:8998")

    run(test())


def test_the_answer_of_a_worker_that_is_no_engine_is_an_error() -> None:
    async def test() -> None:
        worker = ControlledWorker({"/role": (200, {"role": "queen"})})
        async with routed(worker) as router:
            reply = await router.http.post(f"/workers/{worker.id}/role", json={"role": "decode"})
            assert reply.status_code == 502 and "is not that of an engine" in reply.json()["message"]
            assert router.serves(worker)

    run(test())


@pytest.mark.parametrize("body", [{"role": "train"}, {}, {"role": "decode", "timeout": -1}])
def test_a_wrong_role_is_refused_by_the_router(body: dict[str, Any]) -> None:
    async def test() -> None:
        worker = ControlledWorker()
        async with routed(worker) as router:
            reply = await router.http.post(f"/workers/{worker.id}/role", json=body)
            assert reply.status_code == 400 and not worker.exchanges

    run(test())


@pytest.mark.parametrize("path", ["/workers/x:1/drain", "/workers/x:1/role"])
def test_an_unknown_worker_is_404(path: str) -> None:
    async def test() -> None:
        async with routed() as router:
            reply = await router.http.post(path, json={"role": "both"})
            assert reply.status_code == 404 and "there is no worker 'x:1'" in reply.json()["message"]

    run(test())


# --- epochs ---


def test_a_lower_epoch_of_a_cohort_is_refused() -> None:
    async def test() -> None:
        old, new = FakeWorker(), FakeWorker()
        for worker in (old, new):
            await worker.start()
        async with routed() as router:
            assert await register(router, new, cohort="a", epoch=2) == 201
            reply = await router.http.post("/workers", json={"url": old.url, "cohort": "a", "epoch": 1})
            assert reply.status_code == 503
            assert "epoch 1 of cohort 'a' was replaced by epoch 2" in reply.json()["message"]
            assert await register(router, old, cohort="b", epoch=1) == 201
        for worker in (old, new):
            await worker.die()

    run(test())


def test_a_lower_epoch_is_refused_even_when_the_higher_one_has_left() -> None:
    async def test() -> None:
        worker = FakeWorker()
        await worker.start()
        async with routed() as router:
            await register(router, worker, cohort="a", epoch=2)
            await router.http.delete(f"/workers/{worker.id}")
            assert await register(router, worker, cohort="a", epoch=1) == 503
        await worker.die()

    run(test())


def test_a_higher_epoch_takes_over_at_once_and_closes_the_connections_of_the_lower_one() -> None:
    async def test() -> None:
        old = FakeWorker(begin_only, cohort="a", epoch=1)
        new = FakeWorker(cohort="a", epoch=2)
        old.report, new.report = report(epoch=1), report(epoch=2)
        await new.start()
        async with routed(old) as router:
            async with router.http.stream("POST", "/generate", json=STREAM) as reply:
                parts = reply.aiter_raw()
                await anext(parts)
                router.router.add(new.url)
                await until(lambda: old.exchanges[0].gone.is_set(), "its request is cut")
                assert b"".join([part async for part in parts]) == REPLY  # of the new one
                assert new.exchanges[0].given == [1]
            await until(lambda: router.serves(new), "the new one serves")
            await until(
                lambda: router.reason(old) == "its epoch 1 was replaced by epoch 2", "the old one does not"
            )
            listed = (await router.http.get("/workers")).json()["workers"]
            assert [each["takes_weights"] for each in listed] == [False, True]
        await new.die()

    run(test())


# --- what a trainer reads ---


def test_a_trainer_finds_the_engines_behind_a_router() -> None:
    async def test() -> None:
        kept, leaving = FakeWorker(), FakeWorker()
        await kept.start()
        async with routed(leaving, api_key="user", admin_api_key="admin") as router:
            router.router.add(kept.url)
            entry = router.registry.get(leaving.id)
            assert entry is not None
            entry.leave()
            endpoint = Endpoint(url=router.url, api_key="admin", worker_api_key="engines")
            found = await asyncio.to_thread(endpoint.engines, 5.0)
            assert found == [Endpoint(url=kept.url, api_key="engines", worker_api_key="engines")]
        await kept.die()

    run(test())


def test_an_engine_is_its_own_only_engine() -> None:
    async def test() -> None:
        async def not_found(exchange: Exchange) -> None:
            await exchange.whole(json.dumps(refusal(404, "no such route")[1]).encode(), 404)

        engine = FakeWorker(not_found)
        await engine.start()
        endpoint = Endpoint(url=engine.url)
        assert await asyncio.to_thread(endpoint.engines, 5.0) == [endpoint]
        await engine.die()

    run(test())
