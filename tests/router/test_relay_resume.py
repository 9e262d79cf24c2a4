"""Requests whose worker is lost in the middle of the reply go on at another one."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from segue.messages.leg import Data, LegOutput, pack_frame
from segue.router import breaker, fleet, watch
from segue.router.attempts import MOST_RESUMES
from tests.router.fake_servers import (
    STREAM,
    Answer,
    Exchange,
    FakeWorker,
    RunningRouter,
    overloaded,
    routed,
    run,
)
from tests.router.fake_servers import until as wait_until
from tests.router.test_relay import begin_only, busy, settled
from tests.router.workers import report

NUM_TOKENS = 8
DONE = b"data: [DONE]\n\n"
PATHS = ["/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages"]


def token_event(token: int) -> bytes:
    return b"data: %d\n\n" % token


WHOLE_STREAM = b"".join(map(token_event, range(1, NUM_TOKENS + 1))) + DONE


async def generate(exchange: Exchange, until: int = NUM_TOKENS) -> None:
    """Streams the tokens behind those that the client has, up to ``until``."""
    exchange.begin()
    for token in range(len(exchange.given) + 1, until + 1):
        exchange.send(token_event(token))
    await exchange.writer.drain()


async def finish(exchange: Exchange) -> None:
    """Streams the rest of the reply, or answers with all of it."""
    if json.loads(exchange.leg.body).get("stream"):
        await generate(exchange)
        exchange.end(DONE)
    else:
        exchange.begin()
        exchange.end(json.dumps({"tokens": NUM_TOKENS, "given": exchange.given}).encode())


def dies_behind(token: int) -> Answer:
    """An answer that is cut behind a token."""

    async def answer(exchange: Exchange) -> None:
        await generate(exchange, token)
        await exchange.hang_up()

    return answer


async def fail_behind_three(exchange: Exchange) -> None:
    await generate(exchange, 3)
    exchange.fail("engine_dead", payload=b"data: {}\n\n")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("answer", [dies_behind(3), fail_behind_three])
def test_a_stream_goes_on_at_another_worker_behind_what_the_client_has(answer: Answer, path: str) -> None:
    async def test() -> None:
        first, second = FakeWorker(answer), busy(FakeWorker(finish))
        async with routed(first, second) as router:
            await settled(router, second)
            reply = await router.http.post(path, json=STREAM)
            assert (reply.status_code, reply.content) == (200, WHOLE_STREAM)
            (lost,), (going_on,) = first.exchanges, second.exchanges
            assert lost.given == [] and going_on.given == [1, 2, 3]
            same = [
                (each.leg.id, each.leg.created, each.leg.seed, each.leg.body) for each in (lost, going_on)
            ]
            assert same[0] == same[1]
            assert router.registry.counters.resumes == 1 and router.registry.counters.retries == 0

    run(test())


def test_tokens_that_came_one_by_one_are_known_when_a_stream_goes_on() -> None:
    """Each event is passed on as it arrives, and by a task only if that cannot be done at once."""

    async def test() -> None:
        received = b""

        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            for token in range(1, 6):
                exchange.send(token_event(token))
                await wait_until(
                    lambda token=token: received.endswith(token_event(token)), "the client has the event"
                )
            exchange.cut()

        first, second = FakeWorker(answer), busy(FakeWorker(finish))
        async with routed(first, second) as router:
            await settled(router, second)
            async with router.http.stream("POST", "/generate", json=STREAM) as reply:
                async for part in reply.aiter_raw():
                    received += part
            assert received == WHOLE_STREAM
            assert second.exchanges[0].given == [1, 2, 3, 4, 5]

    run(test())


@pytest.mark.parametrize(
    ("path", "prefix"),
    [
        ("/generate", ""),
        ("/v1/chat/completions", "chatcmpl-"),
        ("/v1/completions", "cmpl-"),
        ("/v1/responses", "resp_"),
        ("/v1/messages", "msg_"),
    ],
)
def test_ids_are_those_of_the_route(path: str, prefix: str) -> None:
    async def test() -> None:
        worker = FakeWorker(finish)
        async with routed(worker) as router:
            for _ in range(2):
                await router.http.post(path, json=STREAM)
            first, second = (exchange.leg for exchange in worker.exchanges)
            assert first.id.startswith(prefix) and len(first.id) == len(prefix) + 32
            assert first.id != second.id and first.seed != second.seed

    run(test())


def test_a_reply_that_is_no_stream_goes_on_behind_the_tokens_that_were_named() -> None:
    async def test() -> None:
        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            for _ in range(2):
                exchange.send(b"")
            await exchange.hang_up()

        first, second = FakeWorker(answer), busy(FakeWorker(finish))
        async with routed(first, second) as router:
            await settled(router, second)
            reply = await router.generate()
            assert reply.json() == {"tokens": NUM_TOKENS, "given": [1, 2]}
            assert reply.headers["content-type"] == "application/json"

    run(test())


def test_each_prompt_of_a_batch_goes_on_where_it_was() -> None:
    async def test() -> None:
        outputs = [LegOutput(1, b"aaaa", b"p"), LegOutput(0, b"bbbb"), LegOutput(1, b"cccc", b"q", b"stop")]

        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            for output in outputs:
                exchange.send_frame(Data(b"data: {}\n\n", [output]))
            await exchange.hang_up()

        first, second = FakeWorker(answer), busy(FakeWorker(finish))
        async with routed(first, second) as router:
            await settled(router, second)
            await router.generate(stream=True)
            joined = [LegOutput(0, b"bbbb"), LegOutput(1, b"aaaacccc", b"pq", b"stop")]
            assert second.exchanges[0].leg.outputs == joined

    run(test())


def test_a_reply_that_is_cut_at_any_byte_reaches_the_client_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "FAILURES", 1 << 30)
    named = [LegOutput(0, array("i", [token]).tobytes()) for token in (1, 2, 3)]
    data = b"".join(pack_frame(Data(token_event(n + 1), [each])) for n, each in enumerate(named))

    async def test() -> None:
        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            if cut:
                exchange.send_chunk(data[:cut])
            await exchange.hang_up()

        first, second = FakeWorker(answer), busy(FakeWorker(finish))
        async with routed(first, second) as router:
            await settled(router, second)
            for cut in range(len(data) + 1):
                assert (await router.generate(stream=True)).content == WHOLE_STREAM, cut
            assert len(first.exchanges) == len(second.exchanges) == len(data) + 1

    run(test())


def test_a_request_is_resumed_three_times_at_most() -> None:
    async def test() -> None:
        async def answer(exchange: Exchange) -> None:
            await generate(exchange, len(exchange.given) + 1)
            await exchange.hang_up()

        workers = [FakeWorker(answer) for _ in range(MOST_RESUMES + 2)]
        async with routed(*workers) as router:
            reply = await router.generate(stream=True)
            made = b"".join(token_event(token) for token in range(1, MOST_RESUMES + 2))
            assert reply.content.startswith(made) and b"too many workers have failed" in reply.content
            assert sum(len(worker.exchanges) for worker in workers) == MOST_RESUMES + 1
            assert router.registry.counters.resumes == MOST_RESUMES

    run(test())


@asynccontextmanager
async def lost_with_three_tokens(
    worker: FakeWorker, **options: float
) -> AsyncIterator[tuple[RunningRouter, asyncio.Task[httpx.Response]]]:
    """A router whose only worker has died behind the third token, and the client's request."""
    worker.answer = dies_behind(3)
    async with routed(worker, **options) as router:
        request = asyncio.create_task(router.generate(stream=True))
        await wait_until(lambda: worker.exchanges and worker.exchanges[0].gone.is_set(), "it was lost")
        await worker.die()
        yield router, request
        await request


def test_a_request_waits_for_the_process_that_takes_the_place_of_the_only_worker() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with lost_with_three_tokens(worker) as (router, request):
            again = FakeWorker(finish, incarnation="second")
            await wait_until(lambda: not router.serves(worker), "it is lost")
            await again.start(int(worker.url.rpartition(":")[2]))
            assert (await request).content == WHOLE_STREAM
            assert again.exchanges[0].given == [1, 2, 3]
            await again.die()

    run(test())


def test_a_request_that_nobody_can_go_on_with_ends_with_an_error_event() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with lost_with_three_tokens(worker, resume_timeout_s=0.05) as (_, request):
            content = (await request).content
            assert content.startswith(token_event(1)) and b"none took its place" in content
            assert f"worker {worker.id} was lost".encode() in content

    run(test())


def test_an_error_in_a_stream_of_messages_is_an_event_of_that_name() -> None:
    """Whether the router makes it, or an engine that should go on refuses the request."""
    start = b'event: error\ndata: {"type":"error","error":'

    async def refuse(exchange: Exchange) -> None:
        await exchange.whole(start.partition(b"data: ")[2] + b"{}}", 400)

    async def test() -> None:
        first = FakeWorker(dies_behind(3))
        async with routed(first, resume_timeout_s=0.05) as router:
            lost = (await router.http.post("/v1/messages", json=STREAM)).content
            *_, last = lost.split(b"\n\n")[:-1]
            assert last.startswith(start) and b"none took its place" in last
        first, second = FakeWorker(dies_behind(3)), busy(FakeWorker(refuse))
        async with routed(first, second) as router:
            await settled(router, second)
            refused = (await router.http.post("/v1/messages", json=STREAM)).content
            assert second.exchanges and refused.endswith(b"\n\n" + start + b"{}}\n\n")

    run(test())


@pytest.mark.parametrize("answer", [begin_only, dies_behind(3)])
def test_a_stream_that_the_end_of_the_router_cuts_says_so(answer: Answer) -> None:
    async def test() -> None:
        async with (
            routed(FakeWorker(answer)) as router,
            router.http.stream("POST", "/generate", json=STREAM) as reply,
        ):
            parts = reply.aiter_raw()  # the reply is closed with it
            await anext(parts)
            await router.router.close()
            rest = b"".join([part async for part in parts])
            assert b"the router ended before the reply did; send the request again" in rest
            assert b"worker" not in rest

    run(test())


def test_a_worker_that_refuses_to_go_on_is_asked_again() -> None:
    async def test() -> None:
        refusals = 3

        async def answer(exchange: Exchange) -> None:
            nonlocal refusals
            refusals -= 1
            await (exchange.whole(overloaded(), 503) if refusals >= 0 else finish(exchange))

        first, second = FakeWorker(dies_behind(2)), busy(FakeWorker(answer))
        async with routed(first, second) as router:
            await settled(router, second)
            assert (await router.generate(stream=True)).content == WHOLE_STREAM
            assert len(second.exchanges) == 4

    run(test())


def test_a_stream_whose_worker_hangs_goes_on_at_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (watch, fleet):
        monkeypatch.setattr(module, "SILENT_S", 0.2)

    async def test() -> None:
        async def answer(exchange: Exchange) -> None:
            await generate(exchange, 4)
            hung.is_silent = True
            await exchange.gone.wait()

        hung, good = FakeWorker(answer), busy(FakeWorker(finish))
        async with routed(hung, good) as router:
            await settled(router, good)
            assert (await router.generate(stream=True)).content == WHOLE_STREAM
            assert good.exchanges[0].given == [1, 2, 3, 4]

    run(test())


def test_an_error_that_no_other_worker_would_mend_ends_the_stream_as_the_worker_says() -> None:
    async def test() -> None:
        async def answer(exchange: Exchange) -> None:
            await generate(exchange, 1)
            exchange.fail("non_finite_logits", 500, b"data: {}\n\n", retryable=False)

        first, second = FakeWorker(answer), busy(FakeWorker(finish))
        async with routed(first, second) as router:
            await settled(router, second)
            assert (await router.generate(stream=True)).content == token_event(1) + b"data: {}\n\n"
            assert not second.exchanges

    run(test())


def test_a_whole_reply_that_fails_has_the_status_of_the_error() -> None:
    async def test() -> None:
        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            exchange.fail("non_finite_logits", 500, b'{"message": "NaN"}', retryable=False)

        async with routed(FakeWorker(answer)) as router:
            reply = await router.generate()
            assert (reply.status_code, reply.json()) == (500, {"message": "NaN"})

    run(test())


def test_a_client_of_a_silent_stream_gets_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker sends signs of life, from which the router makes comments before the first event, too."""
    monkeypatch.setattr("segue.router.reply.KEEP_ALIVE_S", 0.0)

    async def test() -> None:
        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            exchange.send_frame(Data(b"", []))
            await exchange.writer.drain()
            await finish_later.wait()
            await exchange.hang_up()

        finish_later = asyncio.Event()
        first, second = FakeWorker(answer), busy(FakeWorker(finish))
        async with routed(first, second) as router:
            await settled(router, second)
            async with router.http.stream("POST", "/generate", json=STREAM) as reply:
                parts = reply.aiter_raw()
                assert await anext(parts) == b": keep-alive\n\n"
                finish_later.set()
                assert b"".join([part async for part in parts]) == WHOLE_STREAM
            assert router.registry.counters.retries == 1

    run(test())


def test_paused_workers_get_requests_only_if_all_others_cannot() -> None:
    async def test() -> None:
        paused, awake = FakeWorker(finish), busy(FakeWorker(finish))
        paused.report = report(paused=True)
        async with routed(paused, awake, waits=False) as router:
            await settled(router, paused, awake)
            await router.generate()
            assert awake.exchanges and not paused.exchanges
            await awake.die()
            await wait_until(lambda: not router.serves(awake), "it is lost")
            assert (await router.generate()).status_code == 200
            assert len(paused.exchanges) == 1

    run(test())


def test_a_new_request_without_a_worker_is_refused_at_once() -> None:
    async def test() -> None:
        worker = FakeWorker(finish)
        async with routed(worker) as router:
            await worker.die()
            await wait_until(lambda: not router.serves(worker), "it is lost")
            reply = await asyncio.wait_for(router.generate(stream=True), 30)
            assert reply.status_code == 503 and worker.id in reply.json()["message"]

    run(test())


def test_a_client_that_leaves_while_its_request_waits_ends_the_wait() -> None:
    async def test() -> None:
        worker = FakeWorker(dies_behind(3))
        async with routed(worker) as router:
            async with router.http.stream("POST", "/generate", json=STREAM) as reply:
                parts = reply.aiter_raw()
                await anext(parts)
                await wait_until(lambda: worker.exchanges[0].gone.is_set(), "it was lost")
            await wait_until(lambda: not router.server.server_state.tasks, "the request has ended")

    run(test())
