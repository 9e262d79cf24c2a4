"""Workers that are no engines of Segue: requests pass through as they are, and their health is polled."""

from __future__ import annotations

import time

import pytest

from segue.router import foreign, watch
from tests.router.fake_servers import REPLY, Answer, Exchange, FakeWorker, routed, run, until

BODY = {"model": "m", "prompt": "Hello", "x_unknown": [1, 2]}
EVENTS = "text/event-stream; charset=utf-8"
PARTS = [b'data: {"choices": [{"text": "a"}]}\n\n', b"data: [DONE]\n\n"]


@pytest.fixture(autouse=True)
def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "POLL_S", 0.01)
    monkeypatch.setattr(watch, "RETRY_S", 0.01)


class ForeignWorker(FakeWorker):
    """A server without ``/watch``."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(self._route)
        self.watch_status = 404
        self.health = 200
        self._completes = answer

    async def _route(self, exchange: Exchange) -> None:
        if exchange.path == "/health":
            await exchange.whole(b"", self.health)
        else:
            await self._completes(exchange)


async def complete(exchange: Exchange) -> None:
    await exchange.whole(b'{"choices": []}')


async def stream(exchange: Exchange) -> None:
    exchange.begin(EVENTS)
    for part in PARTS:
        exchange.send_chunk(part)
    exchange.close_body()


async def break_off(exchange: Exchange) -> None:
    exchange.begin(EVENTS)
    exchange.send_chunk(PARTS[0])
    await exchange.writer.drain()
    exchange.cut()


def test_a_request_reaches_it_as_it_is_and_so_does_its_reply() -> None:
    async def test() -> None:
        worker = ForeignWorker(complete)
        async with routed(worker, worker_api_key="theirs", worker_admin_key="of engines") as router:
            reply = await router.http.post("/v1/completions", json=BODY)
            assert (reply.status_code, reply.content) == (200, b'{"choices": []}')
            (exchange,) = worker.exchanges
            assert (exchange.method, exchange.path) == ("POST", "/v1/completions")
            assert exchange.body == reply.request.content
            assert exchange.headers["authorization"] == "Bearer theirs"

    run(test())


def test_a_stream_passes_through() -> None:
    async def test() -> None:
        async with routed(ForeignWorker(stream)) as router:
            reply = await router.http.post("/v1/completions", json=BODY | {"stream": True})
            assert reply.content == b"".join(PARTS)
            assert reply.headers["content-type"].startswith("text/event-stream")

    run(test())


def test_a_router_sends_itself_no_requests() -> None:
    async def test() -> None:
        worker = ForeignWorker(complete)
        async with routed(worker, api_key="one", worker_api_key="one") as router:
            itself = router.router.add(router.url)
            await until(lambda: "itself" in itself.problem, "the router recognises itself")
            assert itself.problem == "this URL leads to the router itself; give the URLs of engines"
            await worker.die()
            await until(lambda: not router.serves(worker), "no engine is left")
            assert (await router.http.get("/health")).status_code == 503

    run(test())


def test_another_router_is_a_worker() -> None:
    async def test() -> None:
        async with routed(ForeignWorker(complete)) as inner, routed() as outer:
            entry = outer.router.add(inner.url)
            await until(lambda: entry.why_not(time.monotonic()) is None, "it serves")
            reply = await outer.http.post("/v1/completions", json=BODY)
            assert reply.content == b'{"choices": []}'

    run(test())


NATIVE = ["/generate", "/v1/chat/completions/tokens", "/v1/responses", "/v1/messages", "/tokenize"]


@pytest.mark.parametrize("path", NATIVE)
def test_another_router_has_the_routes_that_a_worker_of_its_own_has(path: str) -> None:
    async def test() -> None:
        engine, other = FakeWorker(), ForeignWorker(complete)
        async with routed(other) as inner, routed() as outer:
            entry = outer.router.add(inner.url)
            await until(lambda: entry.why_not(time.monotonic()) is None, "it serves")
            assert (await outer.http.post(path, json=BODY)).status_code == 501, "it has no engine"
            await engine.start()
            inner.router.add(engine.url)
            await until(lambda: inner.serves(engine), "the engine serves")
            await until(lambda: entry.view is not None and entry.view.has_all_routes, "it has an engine")
            reply = await outer.http.post(path, json=BODY)
            assert (reply.status_code, reply.content) == (200, REPLY)
            assert len(engine.exchanges) == 1 and not other.exchanges
            await engine.die()
            await until(lambda: not inner.serves(engine), "the engine is lost")
            assert (await outer.http.post(path, json=BODY)).status_code == 503, "the engine may come back"

    run(test())


def test_another_router_that_needs_a_key_gets_no_requests_without_it() -> None:
    async def test() -> None:
        async with routed(ForeignWorker(complete), api_key="inner") as inner, routed() as outer:
            entry = outer.router.add(inner.url)
            await until(lambda: "401" in entry.problem, "the key is missed")
            assert entry.problem == "/watch was answered 401: give its admin key by --worker-admin-key"

    run(test())


def test_an_error_of_its_own_is_the_clients() -> None:
    async def test() -> None:
        async def refuse(exchange: Exchange) -> None:
            await exchange.whole(b'{"error": {"message": "no such model"}}', 404)

        async with routed(ForeignWorker(refuse)) as router:
            reply = await router.http.post("/v1/completions", json=BODY | {"stream": True})
            assert (reply.status_code, reply.json()["error"]["message"]) == (404, "no such model")

    run(test())


def test_workers_marks_it() -> None:
    async def test() -> None:
        async with routed(ForeignWorker(complete), FakeWorker()) as router:
            listed = (await router.http.get("/workers")).json()["workers"]
            assert [each["foreign"] for each in listed] == [True, False]
            assert [each["record"] is None for each in listed] == [True, False]
            assert listed[0]["serves"]

    run(test())


@pytest.mark.parametrize("path", NATIVE)
def test_a_route_that_no_worker_has_is_refused_for_good(path: str) -> None:
    async def test() -> None:
        other = ForeignWorker(complete)
        async with routed(other) as router:
            reply = await router.http.post(path, json=BODY)
            assert (reply.status_code, "retry-after" in reply.headers) == (501, False)
            assert reply.headers["x-should-retry"] == "false"
            assert f"no worker of this router has {path}" in reply.text and "Add an engine" in reply.text
            unknown = router.router.add("http://127.0.0.1:9")
            reply = await router.http.post(path, json=BODY)
            assert (reply.status_code, "retry-after" in reply.headers) == (503, True), "it may be an engine"
            await router.router.remove(unknown)
            assert not other.exchanges

    run(test())


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/tokenize", "/v1/responses"])
def test_a_route_that_not_every_server_has_goes_to_engines_of_segue_only(path: str) -> None:
    async def test() -> None:
        other, engine = ForeignWorker(complete), FakeWorker()
        async with routed(other, engine, policy="round_robin", resume_timeout_s=0.0) as router:
            for _ in range(2):
                reply = await router.http.post(path, json=BODY)
                assert reply.status_code == 200, reply.text
            assert not other.exchanges and len(engine.exchanges) == 2
            await engine.die()
            await until(lambda: not router.serves(engine), "no engine is left")
            reply = await router.http.post(path, json=BODY)
            assert reply.status_code == 503 and f"{other.id}: it is not an engine of Segue" in reply.text
            assert not other.exchanges
            assert (await router.http.get("/v1/models/m")).status_code == 200 and other.exchanges

    run(test())


def test_a_reply_that_breaks_off_ends_with_an_error_and_is_not_sent_again() -> None:
    async def test() -> None:
        workers = [ForeignWorker(break_off), ForeignWorker(break_off)]
        async with routed(*workers) as router:
            reply = await router.http.post("/v1/completions", json=BODY | {"stream": True})
            assert reply.content.startswith(PARTS[0]) and b"after the reply had begun" in reply.content
            assert sum(len(worker.exchanges) for worker in workers) == 1

    run(test())


@pytest.mark.parametrize("status", [0, 503])
def test_before_a_reply_has_begun_another_worker_is_tried(status: int) -> None:
    async def test() -> None:
        async def fail(exchange: Exchange) -> None:
            if status:
                await exchange.whole(b'{"error": {"message": "full"}}', status)
            else:
                exchange.cut()

        bad, good = ForeignWorker(fail), ForeignWorker(complete)
        async with routed(bad, good, policy="round_robin") as router:
            for _ in range(2):
                assert (await router.http.post("/v1/completions", json=BODY)).status_code == 200
            assert bad.exchanges

    run(test())


def test_it_does_not_go_on_with_the_reply_of_an_engine() -> None:
    async def test() -> None:
        async def begin_and_die(exchange: Exchange) -> None:
            exchange.begin()
            exchange.send(PARTS[0])
            await exchange.writer.drain()
            exchange.cut()

        engine, other = FakeWorker(begin_and_die), ForeignWorker(complete)
        async with routed(engine, other, policy="round_robin", resume_timeout_s=0.0) as router:
            for _ in range(2):  # one of them goes to each
                reply = await router.http.post("/v1/completions", json=BODY | {"stream": True})
                if engine.exchanges:
                    break
            assert b"was lost" in reply.content
            assert b"it cannot go on with a reply" in reply.content

    run(test())


def test_a_client_that_leaves_ends_the_request_and_its_hold() -> None:
    async def test() -> None:
        async def begin(exchange: Exchange) -> None:
            exchange.begin(EVENTS)
            exchange.send_chunk(PARTS[0])
            await exchange.gone.wait()

        worker = ForeignWorker(begin)
        async with routed(worker) as router:
            body = BODY | {"stream": True}
            async with router.http.stream("POST", "/v1/completions", json=body) as reply:
                parts = reply.aiter_raw()
                await anext(parts)
                assert router.registry.num_requests() == 1
            await until(lambda: worker.exchanges[0].gone.is_set(), "the connection is closed")
            await until(lambda: not router.registry.num_requests(), "the hold is released")

    run(test())


def test_it_gets_no_requests_while_it_is_not_well() -> None:
    async def test() -> None:
        worker = ForeignWorker(complete)
        async with routed(worker) as router:
            worker.health = 500
            await until(lambda: "/health with 500" in router.reason(worker), "the reason is named")
            worker.health = 200
            await until(lambda: router.serves(worker), "it serves again")
            await worker.die()
            await until(lambda: "no connection" in router.reason(worker), "it is lost")

    run(test())


def test_an_engine_that_takes_its_place_is_watched() -> None:
    async def test() -> None:
        worker = ForeignWorker(complete)
        async with routed(worker) as router:
            port = int(worker.url.rpartition(":")[2])
            await worker.die()
            await until(lambda: not router.serves(worker), "it is lost")
            engine = FakeWorker()
            await engine.start(port)
            await until(lambda: bool(engine.watchers), "it is watched")
            await until(lambda: router.serves(engine), "it serves")
            (listed,) = (await router.http.get("/workers")).json()["workers"]
            assert not listed["foreign"]
            await engine.die()

    run(test())


def test_it_is_lost_when_its_health_is_not_answered_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "SILENT_S", 0.3)

    async def never(exchange: Exchange) -> None:
        await exchange.gone.wait()

    async def test() -> None:
        worker = ForeignWorker(complete)
        async with routed(worker) as router:
            worker.answer = never
            await until(lambda: not router.serves(worker), "it is lost")

    run(test())


def test_it_is_in_no_group() -> None:
    async def test() -> None:
        engines = [FakeWorker(), FakeWorker()]
        async with routed(ForeignWorker(complete), *engines, enable_laps_alloc=True) as router:
            found = (await router.http.get("/laps_status")).json()
            assert found["short_group"] + found["long_group"] == [engine.url for engine in engines]

    run(test())
