"""Control routes: every worker gets them, and one answer tells how it went."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.router.fake_engine_routes import CONTINUED, PAUSED, ControlledWorker, refusal
from tests.router.fake_servers import Exchange, FakeWorker, routed, run, say_hello, until
from tests.router.successors import CohortEngine, discovering
from tests.router.workers import report


def test_a_pause_reaches_every_worker_with_its_body_and_adds_up_the_counts() -> None:
    async def test() -> None:
        slow = {"/pause_generation": (200, PAUSED | {"num_running": 5, "drained_ms": 9.0})}
        workers = [ControlledWorker(), ControlledWorker(slow)]
        async with routed(*workers, worker_admin_key="secret") as router:
            reply = await router.http.post("/pause_generation", json={"mode": "retract"})
            assert reply.status_code == 200
            each = reply.json().pop("workers")
            counts = {"num_running": 7, "num_waiting": 2, "num_retracted": 4, "drained_ms": 9.0}
            assert reply.json() == PAUSED | counts | {"workers": each}
            assert each[workers[1].id] == {"status": 200, "reply": slow["/pause_generation"][1], "error": ""}
            for worker in workers:
                assert worker.seen == [("POST", "/pause_generation", b'{"mode":"retract"}')]
                assert worker.exchanges[0].headers["authorization"] == "Bearer secret"

    run(test())


@pytest.mark.parametrize(
    ("method", "path", "answer"),
    [
        ("POST", "/continue_generation", CONTINUED),
        ("POST", "/pause?mode=keep", {"status": "paused"}),
        ("POST", "/resume", {"status": "resumed"}),
        ("GET", "/is_paused", {"is_paused": True}),
    ],
)
def test_an_answer_has_the_shape_of_one_engines(method: str, path: str, answer: dict[str, Any]) -> None:
    async def test() -> None:
        workers = [ControlledWorker(), ControlledWorker()]
        async with routed(*workers) as router:
            reply = (await router.http.request(method, path)).json()
            assert set(reply.pop("workers")) == {worker.id for worker in workers}
            assert reply == answer
            assert [worker.seen[0][:2] for worker in workers] == [(method, path)] * 2

    run(test())


def test_the_fleet_is_paused_only_if_every_worker_is() -> None:
    async def test() -> None:
        workers = [ControlledWorker(), ControlledWorker({"/is_paused": (200, {"is_paused": False})})]
        async with routed(*workers) as router:
            assert (await router.http.get("/is_paused")).json()["is_paused"] is False

    run(test())


def test_the_workers_get_a_request_at_the_same_time() -> None:
    async def test() -> None:
        both = asyncio.Barrier(2)  # each answers only once the other one has the request as well

        async def meet(exchange: Exchange) -> None:
            await both.wait()
            await exchange.whole(b'{"status": "resumed"}')

        async with routed(FakeWorker(meet), FakeWorker(meet)) as router:
            assert (await router.http.post("/resume")).status_code == 200

    run(test())


def test_an_abort_is_answered_with_an_empty_body() -> None:
    async def test() -> None:
        workers = [ControlledWorker(), ControlledWorker()]
        async with routed(*workers) as router:
            reply = await router.http.post("/abort_request", json={"rid": "a"})
            assert (reply.status_code, reply.content) == (200, b"")
            assert [worker.seen[0][2] for worker in workers] == [b'{"rid":"a"}'] * 2

    run(test())


def test_an_error_names_the_workers_that_failed_and_how() -> None:
    async def test() -> None:
        answers = {"/pause_generation": refusal(503, "the engine is dead")}
        good, bad = ControlledWorker(), ControlledWorker(answers)
        async with routed(good, bad) as router:
            reply = await router.http.post("/pause_generation")
            assert reply.status_code == 503
            text = (
                f"/pause_generation failed at 1 of 2 workers: {bad.id}: the engine is dead. Done at 1 of them"
            )
            assert reply.json()["message"] == text
            each = reply.json()["workers"]
            assert (each[good.id]["status"], each[bad.id]["status"]) == (200, 503)
            assert each[good.id]["reply"] == PAUSED

    run(test())


def test_a_worker_that_is_gone_is_a_failure() -> None:
    async def test() -> None:
        good, dead = ControlledWorker(), ControlledWorker()
        async with routed(good, dead) as router:
            await dead.die()
            reply = await router.http.post("/abort_request", json={"abort_all": True})
            assert reply.status_code == 502 and f"{dead.id}: no connection" in reply.json()["message"]
            assert reply.json()["workers"][dead.id]["status"] is None

    run(test())


def test_a_worker_that_does_not_answer_in_time_is_a_failure() -> None:
    async def test() -> None:
        async def never(exchange: Exchange) -> None:
            await exchange.gone.wait()

        silent = FakeWorker(never)
        async with routed(ControlledWorker(), silent, control_timeout_s=0.2) as router:
            reply = await router.http.post("/resume")
            assert reply.status_code == 502
            assert f"{silent.id}: it did not answer within 0.2 s" in reply.json()["message"]
            await until(lambda: silent.exchanges[0].gone.is_set(), "its connection is closed")

    run(test())


def test_what_every_worker_refuses_is_refused_in_their_words() -> None:
    async def test() -> None:
        answers = {"/pause_generation": refusal(400, "mode='x': choose one")}
        async with routed(ControlledWorker(answers), ControlledWorker(answers)) as router:
            reply = await router.http.post("/pause_generation", json={"mode": "x"})
            error = reply.json()
            assert (reply.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error")
            assert error["message"] == "mode='x': choose one"

    run(test())


def test_a_wrong_worker_key_is_not_the_clients_fault() -> None:
    async def test() -> None:
        async with routed(ControlledWorker({"/resume": refusal(401, "a valid key is needed")})) as router:
            assert (await router.http.post("/resume")).status_code == 502

    run(test())


def test_an_answer_that_is_not_an_engines_is_an_error() -> None:
    async def test() -> None:
        async with routed(ControlledWorker({"/is_paused": (200, "yes")})) as router:
            reply = await router.http.get("/is_paused")
            assert reply.status_code == 502 and "without the fields of an engine" in reply.json()["message"]

    run(test())


def test_without_workers_there_is_nobody_to_ask() -> None:
    async def test() -> None:
        async with routed() as router:
            reply = await router.http.post("/pause_generation")
            assert reply.status_code == 503 and "no worker is registered" in reply.json()["message"]

    run(test())


def test_flushed_items_are_added_up() -> None:
    async def test() -> None:
        more = {"/flush_cache": (200, "Cache flushed.\nFlushed items: 4\n")}
        first, second = ControlledWorker(), ControlledWorker(more)
        async with routed(first, second) as router:
            reply = await router.http.post("/flush_cache?timeout=2")
            assert reply.text == f"Cache flushed.\nFlushed items: 7\n{first.id}: 3\n{second.id}: 4\n"
            assert first.seen[0][1] == "/flush_cache?timeout=2"

    run(test())


def test_a_flush_that_a_worker_refuses_names_its_reason() -> None:
    async def test() -> None:
        refused = {"/flush_cache": (400, "Cache not flushed.\nReason: 2 requests run\n")}
        good, busy = ControlledWorker(), ControlledWorker(refused)
        async with routed(good, busy) as router:
            reply = await router.http.get("/flush_cache")
            assert reply.status_code == 400
            text = f"Cache not flushed.\nReason: {busy.id}: 2 requests run\nFlushed: {good.id}\n"
            assert reply.text == text

    run(test())


def test_vllms_names_have_one_answer_for_all_workers() -> None:
    async def test() -> None:
        full = {
            "/reset_prefix_cache": (200, {"success": False, "message": "2 requests run"}),
            "/pause": (200, {"status": "paused", "cache_cleared": False, "message": "2 requests run"}),
        }
        workers = [ControlledWorker(), ControlledWorker(full)]
        async with routed(*workers) as router:
            aborted = (await router.http.post("/abort_requests", json={"request_ids": ["a"]})).json()
            assert (aborted["status"], aborted["aborted"]) == ("aborted", 4)
            reset = (await router.http.post("/reset_prefix_cache?reset_running_requests=true")).json()
            assert (reset["success"], reset["message"]) == (False, "2 requests run")
            paused = (await router.http.post("/pause")).json()
            assert (paused["status"], paused["cache_cleared"]) == ("paused", False)
            assert (await router.http.post("/start_profile", json={"num_steps": 2})).json()["success"]
            assert (await router.http.post("/stop_profile")).json()["files"] == ["trace", "trace"]
            for worker in workers:
                assert worker.seen == [
                    ("POST", "/abort_requests", b'{"request_ids":["a"]}'),
                    ("POST", "/reset_prefix_cache?reset_running_requests=true", b""),
                    ("POST", "/pause", b""),
                    ("POST", "/start_profile", b'{"num_steps":2}'),
                    ("POST", "/stop_profile", b""),
                ]

    run(test())


def test_the_metrics_count_operations_by_route_and_end() -> None:
    async def test() -> None:
        worker = ControlledWorker()
        async with routed(worker) as router:
            await router.http.post("/resume")
            worker.answers["/resume"] = refusal(503, "no")
            await router.http.post("/resume")
            text = (await router.http.get("/metrics")).text
            for end in ("done", "failed"):
                assert f'segue:router_control_requests_total{{end="{end}",route="/resume"}} 1.0' in text

    run(test())


# --- engines that are lost ---


@pytest.mark.parametrize("path", ["/pause_generation", "/flush_cache"])
def test_an_operation_whose_engine_is_lost_may_be_sent_again(path: str) -> None:
    async def test() -> None:
        engine = ControlledWorker(cohort="c", epoch=1)
        engine.report = report(epoch=1)
        async with routed(engine) as router:
            await engine.die()
            reply = await router.http.post(path)
            assert reply.status_code == 503 and reply.headers["retry-after"]
            if path == "/pause_generation":
                assert reply.json()["error_code"] == "failed_over"
                assert "not known whether the engine has done it" in reply.json()["message"]
                assert (await router.http.get("/is_paused")).status_code == 503

    run(test())


def test_an_operation_at_an_engine_that_is_replaced_meanwhile_may_be_sent_again() -> None:
    async def test() -> None:
        async def never(exchange: Exchange) -> None:
            await exchange.gone.wait()

        old, new = FakeWorker(never, cohort="c", epoch=1), ControlledWorker(cohort="c", epoch=2)
        old.report, new.report = report(epoch=1), report(epoch=2)
        await new.start()
        async with routed(old) as router:
            asked = asyncio.ensure_future(router.http.post("/pause_generation"))
            await until(lambda: old.exchanges, "the old one has it")
            router.router.add(new.url)
            reply = await asked
            assert (reply.status_code, reply.json()["error_code"]) == (503, "failed_over")
            await until(lambda: router.serves(new), "the new one serves")
            assert (await router.http.post("/pause_generation")).status_code == 200
            assert len(old.exchanges) == 1  # operations go to the highest epoch of a cohort
        await new.die()

    run(test())


def test_an_acknowledged_pause_holds_at_the_engine_that_takes_over() -> None:
    async def test() -> None:
        old, new = ControlledWorker(cohort="c", epoch=1), ControlledWorker(cohort="c", epoch=2)
        old.report, new.report = report(epoch=1), report(epoch=2)
        await new.start()
        async with routed(old) as router:
            assert (await router.http.post("/pause_generation")).status_code == 200
            await old.die()
            router.router.add(new.url)
            await until(lambda: new.seen, "the new one is asked")
            assert new.seen[0][1] == "/pause_generation"
        await new.die()

    run(test())


def test_an_operation_while_no_engine_of_a_cohort_is_active_may_be_sent_again(tmp_path: Path) -> None:
    async def test() -> None:
        engine = CohortEngine(tmp_path / "failover", 1, say_hello)
        async with discovering(tmp_path / "failover", engine) as router:
            await engine.die()
            await until(lambda: router.registry.get(engine.id) is None, "it is forgotten")
            for path in ("/pause_generation", "/update_weight_version"):
                reply = await router.http.post(path, json={"new_version": "2"})
                assert reply.status_code == 503 and reply.headers["retry-after"]
                assert "no engine of cohort c is active now" in reply.json()["message"]
            router.registry.served["c"] -= 61.0  # the router has been idle for a minute
            reply = await router.http.post("/pause_generation")
            assert (reply.status_code, reply.json()["error_code"]) == (503, "no_worker")

    run(test())
