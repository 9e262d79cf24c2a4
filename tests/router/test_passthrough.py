"""Requests that generate nothing: the models, and what becomes of texts; any worker can answer."""

from __future__ import annotations

import asyncio

import pytest

from tests.router.fake_servers import REPLY, Answer, Exchange, FakeWorker, overloaded, routed, run, until
from tests.router.test_relay import cut, stay_silent


async def refuse(exchange: Exchange) -> None:
    await exchange.whole(overloaded(), 503)


async def not_found(exchange: Exchange) -> None:
    await exchange.whole(b"{}", 404)


@pytest.mark.parametrize("answer", [cut, refuse])
def test_another_worker_is_asked_if_one_does_not_answer(answer: Answer) -> None:
    async def test() -> None:
        async with routed(FakeWorker(answer), FakeWorker(), policy="round_robin") as router:
            reply = await router.http.get("/v1/models")
            assert (reply.status_code, reply.content) == (200, REPLY)

    run(test())


def test_if_all_refuse_the_client_gets_the_last_answer() -> None:
    async def test() -> None:
        async with routed(FakeWorker(refuse), FakeWorker(refuse)) as router:
            reply = await router.http.get("/v1/models")
            assert (reply.status_code, reply.content) == (503, overloaded())

    run(test())


def test_an_error_of_the_request_is_passed_on() -> None:
    async def test() -> None:
        workers = [FakeWorker(not_found), FakeWorker(not_found)]
        async with routed(*workers) as router:
            assert (await router.http.get("/v1/models")).status_code == 404
            assert sum(len(worker.exchanges) for worker in workers) == 1

    run(test())


def test_a_worker_of_any_role_answers() -> None:
    async def test() -> None:
        async with routed(FakeWorker(role="decode")) as router:
            assert (await router.http.get("/v1/models")).content == REPLY

    run(test())


def test_without_a_worker_the_reasons_are_named() -> None:
    async def test() -> None:
        worker = FakeWorker(cut)
        async with routed(worker) as router:
            reply = await router.http.get("/v1/models")
            assert reply.status_code == 503 and "it has failed at this request" in reply.text
        async with routed() as router:
            assert "no worker is registered" in (await router.http.get("/v1/models")).text

    run(test())


def test_a_client_that_leaves_closes_the_connection() -> None:
    async def test() -> None:
        worker = FakeWorker(stay_silent)
        async with routed(worker) as router:
            request = asyncio.create_task(router.http.get("/v1/models"))
            await until(lambda: worker.exchanges, "the worker has the request")
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await asyncio.wait_for(worker.exchanges[0].gone.wait(), 60)

    run(test())


@pytest.mark.parametrize(
    "path", ["/tokenize", "/detokenize", "/v1/chat/completions/render", "/v1/messages/count_tokens"]
)
def test_a_body_is_passed_on(path: str) -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(FakeWorker(cut), worker, policy="round_robin") as router:
            for _ in range(2):
                reply = await router.http.post(path, json={"prompt": "x"})
                assert (reply.status_code, reply.content) == (200, REPLY)
            (first, second) = worker.exchanges
            assert (first.method, first.path, first.body) == ("POST", path, b'{"prompt":"x"}')
            assert second.body == first.body

    run(test())
