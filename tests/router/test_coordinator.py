"""A router of several processes behaves as one of a single process: real processes, in front of fake workers.

All tests share one router of two processes, with two workers and a key. The kernel draws the process of each
connection, so where every process is meant, there are many connections: that all 24 go to the same of two
processes happens once in eight million times.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from segue.errors import ChildStartError
from segue.listener import bind
from segue.router import coordinator as coordinator_module
from segue.router import lifecycle
from segue.router.config import RouterConfig
from segue.router.coordinator import Coordinator
from segue.router.router import Router
from tests.router.fake_servers import DEADLINE_S, REPLY, STREAM, Exchange, FakeWorker, run, say_hello, until
from tests.router.router_process import RouterProcess, process
from tests.router.test_relay import EVENTS, begin_only

KEY = "secret"
MANY = 24  # connections: all processes get some of them


@dataclass(eq=False)
class SharedRouter:
    """The router of all tests here, and its workers."""

    runner: asyncio.Runner
    router: RouterProcess
    workers: list[FakeWorker]

    def run(self, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs a test to its end; all that it has begun must have ended."""
        for worker in self.workers:
            worker.exchanges.clear()
            worker.answer = say_hello
        self.runner.run(asyncio.wait_for(self._run(test), 30))

    async def _run(self, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await test()
        await self.settled(lambda: self.in_flight(), 0, "no request is in flight")

    @property
    def exchanges(self) -> list[Exchange]:
        return [each for worker in self.workers for each in worker.exchanges]

    async def settled(self, ask: Callable[[], Awaitable[object]], wanted: object, what: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (found := await ask()) != wanted:
                assert found is not None, what

    async def in_flight(self) -> int:
        workers = (await self.router.http.get("/workers")).json()["workers"]
        return sum(worker["in_flight"] for worker in workers)

    async def each_time(self, send: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> list[Any]:
        """Returns what comes of ``MANY`` requests, each over a connection of its own."""

        async def one() -> Any:
            async with self.client() as client:
                return await send(client)

        return list(await asyncio.gather(*(one() for _ in range(MANY))))

    def client(self, **options: Any) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {KEY}"}
        return httpx.AsyncClient(
            **{"base_url": self.router.url, "headers": headers, "timeout": 10, "verify": False, **options}
        )

    @asynccontextmanager
    async def streams(self) -> Any:
        """Keeps ``MANY`` streams open, of which each has its first event, in all processes."""
        async with AsyncExitStack() as stack:
            replies = []
            for _ in range(MANY):
                client = await stack.enter_async_context(self.client())
                reply = await stack.enter_async_context(client.stream("POST", "/generate", json=STREAM))
                parts = reply.aiter_raw()
                assert await anext(parts) == EVENTS[0]
                replies.append(parts)
            yield replies


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedRouter]:
    with asyncio.Runner() as runner:
        workers = [FakeWorker(), FakeWorker()]
        running = process(*workers, processes="2", api_key=KEY)
        router = runner.run(running.__aenter__())
        workers.sort(key=lambda worker: worker.id)
        try:
            yield SharedRouter(runner, router, workers)
        finally:
            router.process.send_signal(signal.SIGTERM)
            assert runner.run(asyncio.wait_for(router.process.wait(), 60)) == 0
            runner.run(running.__aexit__(None, None, None))


async def rest_of(parts: Any) -> bytes:
    return b"".join([part async for part in parts])


def test_requests_in_flight_are_counted_whichever_process_is_asked(shared: SharedRouter) -> None:
    go_on = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        exchange.begin()
        exchange.send(EVENTS[0])
        await go_on.wait()
        exchange.send(EVENTS[1])
        exchange.end(EVENTS[2])

    async def count(client: httpx.AsyncClient) -> int:
        lines = (await client.get("/metrics")).text.splitlines()
        return sum(
            int(float(line.split()[1])) for line in lines if line.startswith("segue:router_in_flight{")
        )

    async def test() -> None:
        for worker in shared.workers:
            worker.answer = answer
        async with shared.streams() as replies:
            assert await shared.each_time(count) == [MANY] * MANY
            assert await shared.in_flight() == MANY
            go_on.set()
            assert [await rest_of(parts) for parts in replies] == [EVENTS[1] + EVENTS[2]] * MANY

    shared.run(test)


def test_ends_of_requests_are_counted_in_one_sum(shared: SharedRouter) -> None:
    async def total() -> tuple[int, int]:
        lines = (await shared.router.http.get("/metrics")).text.splitlines()
        ended = [line for line in lines if line.startswith("segue:router_requests_total{")]
        name = "segue:router_e2e_request_latency_seconds_count"
        (timed,) = [line for line in lines if line.startswith(name)]
        return sum(int(float(line.split()[1])) for line in ended), int(float(timed.split()[1]))

    async def test() -> None:
        ended, timed = await total()
        replies = await shared.each_time(lambda client: client.post("/generate", json={"text": "Hello"}))
        assert [reply.content for reply in replies] == [REPLY] * MANY
        assert await total() == (ended + MANY, timed + MANY)

    shared.run(test)


def test_an_answer_of_the_coordinator_has_the_clients_request_id_once(shared: SharedRouter) -> None:
    async def test() -> None:
        for path in ("/workers", "/v1/models"):  # the process itself answers the second
            reply = await shared.router.http.get(path, headers={"X-Request-Id": "mine"})
            assert reply.headers.get_list("x-request-id") == ["mine"]

    shared.run(test)


def test_a_drain_holds_in_every_process_once_it_is_answered(shared: SharedRouter) -> None:
    first, second = shared.workers

    async def test() -> None:
        first.answer = begin_only
        async with shared.client() as client, client.stream("POST", "/generate", json=STREAM) as reply:
            parts = reply.aiter_raw()  # once it is collected, the client has left
            assert await anext(parts) == EVENTS[0]
            assert len(first.exchanges) == 1  # of equal workers, the one with the smaller id
            drained = await shared.router.http.post(f"/workers/{first.id}/drain")
            assert drained.json()["in_flight"] == 1 and not drained.json()["serves"]
            await shared.each_time(lambda client: client.post("/generate", json={"text": "Hello"}))
            assert (len(first.exchanges), len(second.exchanges)) == (1, MANY)
            undone = await shared.router.http.post(f"/workers/{first.id}/drain", json={"drain": False})
            assert undone.json()["serves"]

    shared.run(test)


def test_a_worker_that_is_removed_goes_when_the_last_request_of_all_processes_has_ended(
    shared: SharedRouter,
) -> None:
    async def listed() -> list[str]:
        return [worker["id"] for worker in (await shared.router.http.get("/workers")).json()["workers"]]

    async def test() -> None:
        third = FakeWorker(begin_only)
        await third.start()
        kept = [worker.id for worker in shared.workers]
        try:
            for worker in shared.workers:
                await shared.router.http.post(f"/workers/{worker.id}/drain")
            assert (await shared.router.http.post("/workers", json={"url": third.url})).status_code == 201
            await shared.settled(lambda: serving(shared, third), True, "it serves")
            async with shared.streams() as replies:
                gone = await shared.router.http.delete(f"/workers/{third.id}")
                assert gone.json() == {"id": third.id, "in_flight": MANY}
                refused = await shared.each_time(lambda client: client.post("/generate", json=STREAM))
                assert {reply.status_code for reply in refused} == {503}
                for exchange in third.exchanges[1:]:
                    exchange.end()
                assert set([await rest_of(parts) for parts in replies[1:]]) == {b""}
                assert set(await listed()) == {*kept, third.id}
                third.exchanges[0].end()
                assert await rest_of(replies[0]) == b""
            await shared.settled(lambda: sorted_ids(listed), sorted(kept), "it is forgotten")
        finally:
            for worker in shared.workers:
                await shared.router.http.post(f"/workers/{worker.id}/drain", json={"drain": False})
            await third.die()

    shared.run(test)


async def serving(shared: SharedRouter, worker: FakeWorker) -> bool:
    workers = (await shared.router.http.get("/workers")).json()["workers"]
    return any(each["id"] == worker.id and each["serves"] for each in workers)


async def sorted_ids(listed: Callable[[], Awaitable[list[str]]]) -> list[str]:
    return sorted(await listed())


def test_a_prefill_worker_alone_gets_no_request_of_any_process(shared: SharedRouter) -> None:
    async def test() -> None:
        prefill = FakeWorker(role="prefill", kv_address="127.0.0.1:9")
        await prefill.start()
        try:
            for worker in shared.workers:
                await shared.router.http.post(f"/workers/{worker.id}/drain")
            await shared.router.http.post("/workers", json={"url": prefill.url})
            await shared.settled(lambda: serving(shared, prefill), True, "it serves")
            replies = await shared.each_time(lambda client: client.post("/generate", json={"text": "Hello"}))
            assert {reply.status_code for reply in replies} == {503}
            assert prefill.exchanges == []
        finally:
            await shared.router.http.delete(f"/workers/{prefill.id}")
            for worker in shared.workers:
                await shared.router.http.post(f"/workers/{worker.id}/drain", json={"drain": False})
            await prefill.die()

    shared.run(test)


def test_a_prompt_that_one_process_has_sent_is_known_to_all(shared: SharedRouter) -> None:
    first, second = shared.workers
    body = {"text": "the same beginning " * 100}
    reply = b'{"text": "hello", "meta_info": {"prompt_tokens": 475}}'  # four bytes per token

    async def answer(exchange: Exchange) -> None:
        await exchange.whole(reply)

    async def test() -> None:
        for worker in shared.workers:
            worker.answer = answer
        await shared.router.http.post(f"/workers/{first.id}/drain")
        assert (await shared.router.http.post("/generate", json=body)).content == reply
        await shared.router.http.post(f"/workers/{first.id}/drain", json={"drain": False})
        for _ in range(MANY):  # one at a time: others in flight would weigh more than a prefix
            async with shared.client() as client:
                await client.post("/generate", json=body)
            await shared.in_flight()  # waits until all processes know that it has ended
        assert (len(first.exchanges), len(second.exchanges)) == (0, 1 + MANY)

    shared.run(test)


def test_control_requests_reach_each_worker_once(shared: SharedRouter) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.whole(b'{"is_paused": true}')

    async def test() -> None:
        for worker in shared.workers:
            worker.answer = answer
        replies = await shared.each_time(lambda client: client.get("/is_paused?x=1%202"))
        assert {reply.json()["is_paused"] for reply in replies} == {True}
        assert [len(worker.exchanges) for worker in shared.workers] == [MANY, MANY]
        assert {each.path for each in shared.exchanges} == {"/is_paused?x=1%202"}

    shared.run(test)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/workers", None, 401),
        ("POST", "/workers", "{}", 401),
        ("GET", "/nothing", None, 401),
        ("POST", "/generate", "{}", 401),
        ("GET", "/health", None, 200),
        ("OPTIONS", "/workers", None, 401),
    ],
)
def test_every_process_makes_the_same_checks(
    shared: SharedRouter, method: str, path: str, body: str | None, status: int
) -> None:
    async def test() -> None:
        async def send(_: httpx.AsyncClient) -> int:
            kind = {} if body is None else {"content-type": "application/json"}
            async with shared.client(headers=kind) as stranger:
                return (await stranger.request(method, path, content=body)).status_code

        assert set(await shared.each_time(send)) == {status}

    shared.run(test)


def test_a_body_without_a_key_is_not_read(shared: SharedRouter) -> None:
    async def test() -> None:
        url = httpx.URL(shared.router.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /workers HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 60)
        writer.close()

    shared.run(test)


def test_a_process_that_is_killed_takes_its_streams_with_it_and_comes_back(shared: SharedRouter) -> None:
    go_on = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        exchange.begin()
        exchange.send(EVENTS[0])
        await go_on.wait()
        exchange.end(EVENTS[2])

    async def test() -> None:
        for worker in shared.workers:
            worker.answer = answer
        before = shared.router.children()
        async with shared.streams() as replies:
            victim = min(before)
            os.kill(victim, signal.SIGKILL)
            await until(lambda: any(each.gone.is_set() for each in shared.exchanges), "its streams are lost")
            await until(lambda: len(shared.router.children() - {victim}) == 2, "another takes its place")
            num_lost = 0
            async with asyncio.timeout(60):  # until the workers have heard of the end of each connection
                while not num_lost or await shared.in_flight() != MANY - num_lost:
                    await asyncio.sleep(0.005)
                    num_lost = sum(each.gone.is_set() for each in shared.exchanges)
            assert 0 < num_lost < MANY
            go_on.set()
            ends = await asyncio.gather(*(rest_of(parts) for parts in replies), return_exceptions=True)
            assert [end for end in ends if isinstance(end, bytes)] == [EVENTS[2]] * (MANY - num_lost)
        assert len(before & shared.router.children()) == 1
        # The new process serves too, as soon as it listens.
        replies = await shared.each_time(lambda client: client.post("/generate", json={"text": "Hello"}))
        assert {reply.status_code for reply in replies} == {200}

    shared.run(test)


# --- without clients ---


@asynccontextmanager
async def coordinated() -> Any:
    """A coordinator in the test's own process, with one real serving process."""
    config = RouterConfig(port=0, log_level="error")
    with bind(config.host, 0) as listener:
        yield Coordinator(Router.create(config), listener, b"")


def test_a_process_that_cannot_start_ends_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "COMMAND", ("sh", "-c", "exit 3"))

    async def test() -> None:
        async with coordinated() as coordinator:
            with pytest.raises(ChildStartError, match="process 0 of the router ended with exit code 3"):
                await coordinator.run()

    run(test())


def test_a_process_that_no_longer_starts_is_tried_again_until_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator_module, "BACKOFF_S", 30.0)

    async def test() -> None:
        async with coordinated() as coordinator:
            running = asyncio.create_task(coordinator.run())
            await asyncio.wait_for(coordinator.is_ready.wait(), 60)
            monkeypatch.setattr(coordinator_module, "COMMAND", ("/no/such/program",))
            (serving,) = coordinator._running.values()
            serving.process.kill()
            await until(lambda: "could not be started" in caplog.text, "it is tried again")
            coordinator.end(0.0)
            await asyncio.wait_for(running, 60)

    run(test())
    assert "started again now" in caplog.text and "started again in 30 s" in caplog.text


def test_a_process_that_hangs_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with coordinated() as coordinator:
            running = asyncio.create_task(coordinator.run())
            await asyncio.wait_for(coordinator.is_ready.wait(), 60)
            (hung,) = coordinator._running.values()
            os.kill(hung.process.pid, signal.SIGSTOP)
            monkeypatch.setattr(coordinator_module, "HANGS_S", 0.2)  # only now: the machine may be busy
            await until(lambda: hung.process.returncode is not None, "it is killed")
            await until(lambda: coordinator._running, "another takes its place")
            coordinator.end(0.0)
            await asyncio.wait_for(running, 60)

    run(test())


def test_a_change_is_known_once_every_process_has_taken_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "SETTLE_S", 10.0)

    async def test() -> None:
        async with coordinated() as coordinator:
            running = asyncio.create_task(coordinator.run())
            await asyncio.wait_for(coordinator.is_ready.wait(), 60)
            (serving,) = coordinator._running.values()
            router, sent = coordinator._router, []
            entry = router.membership.add("http://127.0.0.1:1")

            async def stop_it(scope: Any, receive: Any, send: Any) -> None:
                serving.process.send_signal(signal.SIGSTOP)
                entry.leave()
                await send({"type": "http.response.start"})

            async def send(message: Any) -> None:
                sent.append(message)

            app = lifecycle._settling(stop_it, coordinator)
            answering = asyncio.ensure_future(app({"type": "http", "method": "POST"}, None, send))
            told = coordinator._fleet.version
            await until(lambda: coordinator._fleet.version > told + 3, "it is told several states")
            assert sent == [] and not router.is_idle(entry)
            serving.process.send_signal(signal.SIGCONT)
            await asyncio.wait_for(answering, 60)
            assert len(sent) == 1
            await until(lambda: router.is_idle(entry), "it can be forgotten")
            coordinator.end(0.0)
            await asyncio.wait_for(running, 60)

    run(test())
