"""Requests over the real router to fake workers."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from segue.messages.leg import End
from segue.router import fleet, watch
from segue.router.breaker import FAILURES, Breaker, BreakerState
from segue.server.body_writer import BodyWriter
from tests.router.fake_servers import (
    REPLY,
    STREAM,
    Exchange,
    FakeWorker,
    RunningRouter,
    native_error,
    overloaded,
    routed,
    run,
    say_hello,
    until,
)
from tests.router.workers import report

EVENTS = [b'data: {"text": "a"}\n\n', b'data: {"text": "ab"}\n\n', b"data: [DONE]\n\n"]


async def stay_silent(exchange: Exchange) -> None:
    await exchange.gone.wait()


async def stream(exchange: Exchange) -> None:
    exchange.begin()
    for event in EVENTS:
        exchange.send(event)
    exchange.end()


async def begin_only(exchange: Exchange) -> None:
    exchange.begin()
    exchange.send(EVENTS[0])
    await exchange.gone.wait()


async def cut(exchange: Exchange) -> None:
    exchange.cut()


def busy(worker: FakeWorker) -> FakeWorker:
    """Lets a worker report so much work that any other one is preferred."""
    worker.report = report(queued_s=100.0)
    return worker


async def settled(router: RunningRouter, *workers: FakeWorker) -> None:
    """Waits until the router has seen the present report of each worker."""

    def seen() -> bool:
        entries = [router.registry.get(worker.id) for worker in workers]
        return all(
            entry is not None and entry.view is not None and entry.view.report == worker.report
            for entry, worker in zip(entries, workers, strict=True)
        )

    await until(seen, "the reports have arrived")


def not_read(router: RunningRouter, worker: FakeWorker) -> bool:
    """Whether the router has stopped to read one of its connections to a worker."""
    entry = router.registry.get(worker.id)
    assert entry is not None
    transports = [connection._transport for connection in entry.upstream._all]
    return any(transport is not None and not transport.is_reading() for transport in transports)


def test_a_whole_reply_reaches_the_client_as_it_is() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            reply = await router.generate()
            assert (reply.status_code, reply.content) == (200, REPLY)
            assert reply.headers["content-type"] == "application/json"
            (exchange,) = worker.exchanges
            assert (exchange.method, exchange.path) == ("POST", "/leg")
            assert (exchange.leg.path, exchange.leg.kind) == ("/generate", "whole")
            assert exchange.leg.body == b'{"text":"Hello"}'

    run(test())


def test_the_events_of_a_stream_reach_the_client_as_they_come() -> None:
    async def test() -> None:
        go_on = asyncio.Event()

        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            exchange.send(EVENTS[0])
            await go_on.wait()
            for event in EVENTS[1:]:
                exchange.send(event)
            exchange.end()

        async with (
            routed(FakeWorker(answer)) as router,
            router.http.stream("POST", "/v1/completions", json=STREAM) as reply,
        ):
            assert reply.headers["content-type"].startswith("text/event-stream")
            parts = reply.aiter_raw()
            assert await anext(parts) == EVENTS[0]
            go_on.set()
            assert b"".join([part async for part in parts]) == b"".join(EVENTS[1:])

    run(test())


def test_the_hold_lasts_until_the_body_has_ended() -> None:
    async def test() -> None:
        go_on = asyncio.Event()

        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            exchange.send(EVENTS[0])
            await go_on.wait()
            exchange.end()

        worker = FakeWorker(answer)
        async with (
            routed(worker) as router,
            router.http.stream("POST", "/generate", json=STREAM) as reply,
        ):
            parts = reply.aiter_raw()
            await anext(parts)
            assert router.registry.num_requests(worker.id) == 1
            go_on.set()
            assert [part async for part in parts] == []
            await until(lambda: router.registry.num_requests(worker.id) == 0, "the hold is released")

    run(test())


@pytest.mark.parametrize("answer", [begin_only, stay_silent])
def test_a_client_that_leaves_closes_the_connection_to_the_worker(answer: object) -> None:
    async def test() -> None:
        worker = FakeWorker(answer)  # type: ignore[arg-type]
        async with routed(worker) as router:
            request = asyncio.create_task(router.generate(stream=True))
            await until(lambda: worker.exchanges, "the worker has the request")
            assert router.registry.num_requests() == 1
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await asyncio.wait_for(worker.exchanges[0].gone.wait(), 60)
            await until(lambda: router.registry.num_requests() == 0, "the hold is released")
            assert router.registry.counters.requests == {(worker.id, "client_left"): 1}

    run(test())


@pytest.mark.parametrize("answer", [cut, stay_silent])
def test_a_worker_that_is_lost_before_a_byte_is_replaced_by_another(answer: object) -> None:
    async def test() -> None:
        bad, good = FakeWorker(answer), busy(FakeWorker())  # type: ignore[arg-type]
        async with routed(bad, good) as router:
            await settled(router, good)
            request = asyncio.create_task(router.generate())
            await until(lambda: bad.exchanges, "the first worker has the request")
            await bad.die()
            assert (await request).content == REPLY
            assert router.registry.counters.retries == 1

    run(test())


def test_a_worker_that_takes_no_connections_is_replaced_by_another() -> None:
    async def test() -> None:
        bad, good = FakeWorker(), busy(FakeWorker())
        async with routed(bad, good) as router:
            await settled(router, good)
            await bad.refuse_connections()
            assert (await router.generate()).content == REPLY
            assert router.registry.counters.requests[bad.id, "connect"] == 1

    run(test())


def test_a_worker_that_is_full_is_replaced_by_another() -> None:
    async def test() -> None:
        async def refuse(exchange: Exchange) -> None:
            await exchange.whole(overloaded(), 503)

        full, good = FakeWorker(refuse), busy(FakeWorker())
        async with routed(full, good) as router:
            await settled(router, good)
            for _ in range(FAILURES):
                assert (await router.generate()).content == REPLY
            assert router.serves(full), "a refusal does not count against a worker"

    run(test())


@pytest.mark.parametrize("status", [400, 503])
def test_a_worker_whose_role_has_changed_is_replaced_by_another(status: int) -> None:
    async def test() -> None:
        async def refuse(exchange: Exchange) -> None:
            await exchange.whole(native_error(status, "wrong_role"), status)

        changed, good = FakeWorker(refuse), busy(FakeWorker())
        async with routed(changed, good) as router:
            await settled(router, good)
            for _ in range(FAILURES):
                assert (await router.generate()).content == REPLY
            assert router.serves(changed), "a refusal does not count against a worker"

    run(test())


def test_if_all_workers_are_full_the_client_gets_their_answer() -> None:
    async def test() -> None:
        async def refuse(exchange: Exchange) -> None:
            await exchange.whole(overloaded(), 503)

        async with routed(FakeWorker(refuse), FakeWorker(refuse)) as router:
            reply = await router.generate()
            assert (reply.status_code, reply.content) == (503, overloaded())

    run(test())


def test_a_wrong_request_is_tried_once_and_does_not_count_against_the_worker() -> None:
    async def test() -> None:
        async def refuse(exchange: Exchange) -> None:
            await exchange.whole(b'{"message": "wrong"}', 400)

        workers = [FakeWorker(refuse), FakeWorker(refuse)]
        async with routed(*workers) as router:
            for _ in range(2 * FAILURES):
                assert (await router.generate()).status_code == 400
            assert sum(len(worker.exchanges) for worker in workers) == 2 * FAILURES
            assert all(router.serves(worker) for worker in workers)

    run(test())


def test_failures_open_the_breaker_and_the_refusal_names_it() -> None:
    async def test() -> None:
        worker = FakeWorker(cut)
        async with routed(worker) as router:
            for _ in range(FAILURES):
                assert (await router.generate()).status_code == 503
            reply = await router.http.post("/v1/completions", json={"prompt": "Hello"})
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (503, "no_worker")
            assert f"{worker.id}: its circuit breaker is open" in error["message"]
            assert reply.headers["retry-after"] == "1"

    run(test())


def test_another_process_at_the_same_url_begins_with_a_new_breaker() -> None:
    async def test() -> None:
        worker = FakeWorker(cut)
        async with routed(worker) as router:
            for _ in range(FAILURES):
                await router.generate()
            entry = router.registry.get(worker.id)
            assert entry is not None and entry.view is not None
            assert entry.view.breaker.state is BreakerState.OPEN
            again = FakeWorker(incarnation="second")
            await worker.die()
            await again.start(int(worker.url.rpartition(":")[2]))
            await until(lambda: router.serves(again), "the new process serves")
            assert entry.view.breaker == Breaker()
            assert (await router.generate()).content == REPLY
            await again.die()

    run(test())


def test_the_worker_gets_its_own_key_and_not_the_clients() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker, api_key="client", worker_api_key="upstream") as router:
            await router.generate()
            assert worker.exchanges[0].headers["authorization"] == "Bearer upstream"
            assert "client" not in str(worker.exchanges[0].headers)
            assert worker.watchers[0].headers["authorization"] == "Bearer upstream"

    run(test())


def test_legs_have_the_admin_key_of_the_workers() -> None:
    """Only then an engine believes that another one has accepted a grammar."""

    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker, worker_api_key="key", worker_admin_key="admin key") as router:
            await router.generate()
            assert worker.exchanges[0].headers["authorization"] == "Bearer admin key"

    run(test())


def test_without_a_key_for_workers_no_key_is_sent() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker, api_key="client") as router:
            await router.generate()
            assert "authorization" not in worker.exchanges[0].headers

    run(test())


def test_a_connection_to_a_worker_is_used_again() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            for _ in range(5):
                await router.generate()
            assert worker.num_connections == 2, "one for reports, one for requests"

    run(test())


def test_the_end_of_a_workers_reply_is_awaited_behind_the_clients() -> None:
    async def test() -> None:
        has_reply = asyncio.Event()

        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            exchange.send_frame(End(REPLY))
            await has_reply.wait()
            exchange.close_body()

        worker = FakeWorker(answer)
        async with routed(worker) as router:
            assert (await router.generate()).content == REPLY
            has_reply.set()
            await until(lambda: router.registry.num_requests() == 0, "the hold is released")
            await router.generate()
            assert worker.num_connections == 2, "one for reports, one for requests"

    run(test())


def test_a_request_waits_no_longer_for_a_worker_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (watch, fleet):
        monkeypatch.setattr(module, "SILENT_S", 0.3)

    async def test() -> None:
        hung, good = FakeWorker(stay_silent), busy(FakeWorker())
        async with routed(hung, good) as router:
            await settled(router, good)
            request = asyncio.create_task(router.generate())
            await until(lambda: hung.exchanges, "the worker has the request")
            hung.is_silent = True
            began = time.monotonic()
            assert (await request).content == REPLY
            assert time.monotonic() - began < 30
            assert router.registry.counters.requests[hung.id, "timeout"] == 1

    run(test())


def test_a_request_waits_no_longer_for_a_scheduler_that_hangs_behind_a_server_that_reports() -> None:
    async def test() -> None:
        hung, good = FakeWorker(stay_silent), busy(FakeWorker())
        async with routed(hung, good) as router:
            await settled(router, good)
            request = asyncio.create_task(router.generate())
            await until(lambda: hung.exchanges, "the worker has the request")
            hung.report = report(heartbeat_age_s=fleet.SILENT_S + 0.1)
            assert (await request).content == REPLY
            assert router.registry.counters.requests[hung.id, "timeout"] == 1
            hung.report = report()
            await until(lambda: router.serves(hung), "it serves again")
            assert len(hung.watchers) == 1, "the reports go on meanwhile"

    run(test())


def test_a_client_that_does_not_read_holds_up_the_worker() -> None:
    async def test() -> None:
        event = b"data: " + b"x" * 65_000 + b"\n\n"
        sent = 0

        async def flood(exchange: Exchange) -> None:
            nonlocal sent
            exchange.begin()
            while not exchange.gone.is_set():
                exchange.send(event)
                await exchange.writer.drain()
                sent += 1

        worker = FakeWorker(flood)
        async with (
            routed(worker) as router,
            httpx.AsyncClient(base_url=router.url, timeout=60, verify=False) as client,
        ):
            async with client.stream("POST", "/generate", json=STREAM) as reply:
                parts = reply.aiter_raw()
                await anext(parts)
                await until(lambda: not_read(router, worker), "the connection to the worker is not read")
                assert sent * len(event) < 64 << 20
            await until(lambda: worker.exchanges[0].gone.is_set(), "the worker's connection is closed")

    run(test())


def test_a_client_that_reads_late_gets_every_event_in_order() -> None:
    """Events wait in several places while it does not read, and pass by these places when it does."""

    async def test() -> None:
        def event(number: int) -> bytes:
            return b"data: %d %b\n\n" % (number, b"x" * (60_000 if number % 10 else 10))

        num_events = 1000  # 54 MB: more than sockets and buffers hold

        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            for number in range(num_events):
                exchange.send(event(number))
                await exchange.writer.drain()
            exchange.end(EVENTS[-1])

        worker = FakeWorker(answer)
        async with (
            routed(worker) as router,
            httpx.AsyncClient(base_url=router.url, timeout=60, verify=False) as client,
            client.stream("POST", "/generate", json=STREAM) as reply,
        ):
            await until(lambda: not_read(router, worker), "the connection to the worker is not read")
            body = b"".join([part async for part in reply.aiter_raw()])
            assert body == b"".join(map(event, range(num_events))) + EVENTS[-1]

    run(test())


def test_events_are_passed_on_without_a_task_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each event wakes a task, it takes half as much CPU time again."""
    written: list[bool] = []
    write = BodyWriter.write

    def counted(writer: BodyWriter, part: bytes) -> bool:
        written.append(write(writer, part))
        return written[-1]

    monkeypatch.setattr(BodyWriter, "write", counted)
    num_events = 20

    async def answer(exchange: Exchange) -> None:
        exchange.begin()
        for number in range(num_events):
            exchange.send(b"data: %d\n\n" % number)
            if number:
                await until(lambda number=number: len(written) == number, "the event was passed on")
            else:
                await has_begun.wait()
        exchange.end(EVENTS[-1])

    async def test() -> None:
        async with (
            routed(FakeWorker(answer)) as router,
            router.http.stream("POST", "/generate", json=STREAM) as reply,
        ):
            parts = reply.aiter_raw()
            assert await anext(parts) == b"data: 0\n\n"  # by a task: it begins the reply
            has_begun.set()
            rest = [b"data: %d\n\n" % number for number in range(1, num_events)]
            assert b"".join([part async for part in parts]) == b"".join(rest) + EVENTS[-1]
        assert written == [True] * (num_events - 1)

    has_begun = asyncio.Event()

    run(test())


def test_the_round_robin_policy_takes_turns() -> None:
    async def test() -> None:
        workers = [FakeWorker(), FakeWorker()]
        async with routed(*workers, policy="round_robin") as router:
            for _ in range(6):
                await router.generate()
            assert [len(worker.exchanges) for worker in workers] == [3, 3]

    run(test())


def test_concurrent_requests_spread_over_equal_workers() -> None:
    async def test() -> None:
        go_on = asyncio.Event()

        async def answer(exchange: Exchange) -> None:
            await go_on.wait()
            await say_hello(exchange)

        workers = [FakeWorker(answer), FakeWorker(answer)]
        async with routed(*workers) as router:
            requests = [asyncio.create_task(router.generate(text="x" * 4000)) for _ in range(10)]
            await until(lambda: sum(len(worker.exchanges) for worker in workers) == 10, "all have arrived")
            assert [len(worker.exchanges) for worker in workers] == [5, 5]
            go_on.set()
            assert all(reply.content == REPLY for reply in await asyncio.gather(*requests))

    run(test())


def test_many_clients_that_leave_at_once_leave_no_hold() -> None:
    async def test() -> None:
        worker = FakeWorker(begin_only)
        async with routed(worker) as router:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=router.url, limits=limits, verify=False) as client:
                body = {"text": "Hello", "stream": True}
                requests = [asyncio.create_task(client.post("/generate", json=body)) for _ in range(60)]
                await until(lambda: len(worker.exchanges) == 60, "the worker has all requests")
                assert router.registry.num_requests() == 60
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)
            await until(lambda: router.registry.num_requests() == 0, "every hold is released")
            await until(lambda: all(each.gone.is_set() for each in worker.exchanges), "all are closed")
            assert router.serves(worker)

    run(test())
