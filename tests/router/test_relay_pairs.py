"""Requests whose prompt one worker computes, and whose output another one makes."""

from __future__ import annotations

import asyncio

import pytest

from segue.messages.leg import Data
from segue.router import legs
from tests.router.fake_servers import (
    STREAM,
    Answer,
    Exchange,
    FakeWorker,
    RunningRouter,
    overloaded,
    routed,
    run,
    until,
)
from tests.router.test_relay import busy, cut, settled, stay_silent
from tests.router.test_relay_resume import WHOLE_STREAM, dies_behind, finish
from tests.router.workers import record, report


async def hand_over(exchange: Exchange) -> None:
    """What a prefill worker answers once the first token is known."""
    exchange.begin()
    exchange.end()


def prefill(answer: Answer = hand_over) -> FakeWorker:
    return FakeWorker(answer, role="prefill")


def decode(answer: Answer = finish) -> FakeWorker:
    return FakeWorker(answer, role="decode")


def full(worker: FakeWorker) -> FakeWorker:
    """Lets a decode worker report so few free pages that any other one is preferred."""
    worker.report = report(taken_pages=3900)
    return worker


async def cannot_get_the_kv(exchange: Exchange) -> None:
    exchange.begin()
    exchange.fail("kv_peer_lost", payload=b"data: lost\n\n")


async def all_closed(*workers: FakeWorker) -> None:
    exchanges = [exchange for worker in workers for exchange in worker.exchanges]
    await until(lambda: all(exchange.gone.is_set() for exchange in exchanges), "all legs are closed")


def counts(router: RunningRouter) -> tuple[int, int, int, int]:
    counters = router.registry.counters
    return counters.pairs, counters.second_claims, counters.retries, counters.resumes


def test_both_workers_of_a_pair_get_their_legs_at_once() -> None:
    async def test() -> None:
        both = asyncio.Barrier(2)

        async def first(exchange: Exchange) -> None:
            await both.wait()
            await hand_over(exchange)

        async def second(exchange: Exchange) -> None:
            await both.wait()
            await finish(exchange)

        one, two = prefill(first), decode(second)
        async with routed(one, two) as router:
            reply = await router.generate(stream=True)
            assert reply.content == WHOLE_STREAM
            computing, answering = one.exchanges[0].leg, two.exchanges[0].leg
            assert (computing.kind, computing.peer) == ("prefill", "")
            assert (answering.kind, answering.peer) == ("decode", one.record.kv_address)
            assert computing.room == answering.room > 0
            assert (computing.id, computing.seed, computing.body) == (
                answering.id,
                answering.seed,
                answering.body,
            )
            assert counts(router) == (1, 0, 0, 0)

    run(test())


@pytest.mark.parametrize("alone", [prefill, decode])
def test_half_a_pair_gets_nothing(alone: type[FakeWorker]) -> None:
    async def test() -> None:
        worker = alone()
        async with routed(worker) as router:
            assert (await router.generate()).status_code == 503
            assert not worker.exchanges

    run(test())


def test_a_prefill_worker_without_an_address_for_kv_is_no_half_of_a_pair() -> None:
    async def test() -> None:
        one, two = prefill(), decode()
        one.record = record("fake", "prefill", kv_address="")
        async with routed(one, two) as router:
            reply = await router.generate()
            assert reply.status_code == 503 and not one.exchanges and not two.exchanges
            assert "has no address where it hands over KV" in reply.json()["message"]

    run(test())


def test_a_request_for_one_token_needs_no_decode_worker() -> None:
    async def test() -> None:
        one, two = prefill(finish), decode()
        async with routed(one, two) as router:
            await router.generate(stream=True, sampling_params={"max_new_tokens": 1})
            assert one.exchanges[0].leg.kind == "whole" and not two.exchanges

    run(test())


def test_connections_of_a_pair_are_used_again() -> None:
    async def test() -> None:
        one, two = prefill(), decode()
        async with routed(one, two) as router:
            for _ in range(5):
                await router.generate(stream=True)
            assert (one.num_connections, two.num_connections) == (2, 2), "one is for reports"

    run(test())


@pytest.mark.parametrize("answer", [cut, cannot_get_the_kv])
def test_a_pair_whose_kv_is_lost_is_tried_again_with_another_room(answer: Answer) -> None:
    """A decode worker that was cut off has another one in its place, and the same prefill worker."""

    async def test() -> None:
        one, other = prefill(), prefill()
        bad, good = decode(answer), full(decode())
        async with routed(one, other, bad, good) as router:
            await settled(router, good)
            assert (await router.generate(stream=True)).content == WHOLE_STREAM
            again = answer is cannot_get_the_kv
            legs_of_both = [*one.exchanges, *other.exchanges]
            assert len({exchange.leg.room for exchange in legs_of_both}) == len(legs_of_both) == 1 + again
            assert counts(router) == (1 + again, 1 - again, 1, 0)

    run(test())


async def answer_that_kv_is_lost(exchange: Exchange) -> None:
    await exchange.whole(b'{"error_code": "kv_peer_lost"}', 503)


@pytest.mark.parametrize("answer", [cannot_get_the_kv, answer_that_kv_is_lost])
def test_where_kv_is_lost_another_prefill_worker_is_tried(answer: Answer) -> None:
    """Its decode workers notice the death of a prefill worker's engine before the router does."""

    async def test() -> None:
        async def second(exchange: Exchange) -> None:
            await (answer if exchange.leg.peer == dead.record.kv_address else finish)(exchange)

        dead, alive = prefill(stay_silent), busy(prefill())
        dead.record = record("dead", "prefill")
        async with routed(dead, alive, decode(second), full(decode(second))) as router:
            await settled(router, alive)
            assert (await router.generate(stream=True)).content == WHOLE_STREAM
            assert counts(router) == (2, 0, 1, 0)

    run(test())


def test_the_only_pair_is_tried_again_if_only_its_connection_was_lost() -> None:
    async def test() -> None:
        async def answer(exchange: Exchange) -> None:
            await (finish if len(two.exchanges) == 3 else cannot_get_the_kv)(exchange)

        one, two = prefill(), decode(answer)
        async with routed(one, two) as router:
            assert (await router.generate(stream=True)).content == WHOLE_STREAM
            assert len({exchange.leg.room for exchange in two.exchanges}) == 3

    run(test())


def test_after_three_tries_the_client_gets_the_workers_own_error() -> None:
    async def test() -> None:
        one, two = prefill(), decode(cannot_get_the_kv)
        async with routed(one, two) as router:
            assert (await router.generate(stream=True)).content == b"data: lost\n\n"
            assert len(two.exchanges) == 3
            assert router.serves(two), "a lost connection does not count against the decode worker"

    run(test())


@pytest.mark.parametrize("how", ["cut", "refused"])
def test_a_decode_worker_is_not_waited_for_once_its_prefill_worker_is_lost(how: str) -> None:
    async def test() -> None:
        async def refuse(exchange: Exchange) -> None:
            await exchange.whole(overloaded(), 503)

        async def wait_or_finish(exchange: Exchange) -> None:
            await (finish if good.exchanges else stay_silent)(exchange)

        bad, good = prefill(cut if how == "cut" else refuse), busy(prefill())
        two = decode(wait_or_finish)
        async with routed(bad, good, two) as router:
            await settled(router, good)
            assert (await router.generate(stream=True)).content == WHOLE_STREAM
            first, second = two.exchanges
            assert first.leg.room != second.leg.room == good.exchanges[0].leg.room
            end = "cut" if how == "cut" else "answered"
            assert router.registry.counters.requests[bad.id, end] == 1
            assert router.serves(two)

    run(test())


def test_a_sign_of_life_of_the_decode_worker_is_not_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.router.reply.KEEP_ALIVE_S", 0.0)

    async def test() -> None:
        seen = asyncio.Event()

        async def compute(exchange: Exchange) -> None:
            await seen.wait()
            exchange.cut()

        async def wait_or_finish(exchange: Exchange) -> None:
            if good.exchanges:
                await finish(exchange)
            else:
                exchange.begin()
                exchange.send_frame(Data(b"", []))
                await stay_silent(exchange)

        bad, good, two = prefill(compute), busy(prefill()), decode(wait_or_finish)
        async with routed(bad, good, two) as router:
            await settled(router, good)
            async with router.http.stream("POST", "/generate", json=STREAM) as reply:
                parts = reply.aiter_raw()
                assert await anext(parts) == b": keep-alive\n\n"
                seen.set()
                assert b"".join([part async for part in parts]) == WHOLE_STREAM

    run(test())


def test_a_prefill_worker_that_is_lost_behind_the_first_token_does_not_matter_to_the_client() -> None:
    async def test() -> None:
        answering = asyncio.Event()

        async def compute(exchange: Exchange) -> None:
            await answering.wait()
            exchange.cut()

        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            exchange.send(b"data: 1\n\n")
            await exchange.writer.drain()
            await go_on.wait()
            for token in range(2, 9):
                exchange.send(b"data: %d\n\n" % token)
            exchange.end(b"data: [DONE]\n\n")

        go_on = asyncio.Event()
        one, two = prefill(compute), decode(answer)
        async with routed(one, two) as router, router.http.stream("POST", "/generate", json=STREAM) as reply:
            parts = reply.aiter_raw()
            first = await anext(parts)
            answering.set()
            requests = router.registry.counters.requests
            await until(lambda: requests.get((one.id, "cut")) == 1, "the loss is noted")
            go_on.set()
            assert first + b"".join([part async for part in parts]) == WHOLE_STREAM
            assert counts(router) == (1, 0, 0, 0)

    run(test())


@pytest.mark.parametrize("prefill_has_ended", [True, False])
def test_another_decode_worker_claims_what_the_prefill_worker_still_offers(prefill_has_ended: bool) -> None:
    async def test() -> None:
        lost = asyncio.Event()

        async def compute(exchange: Exchange) -> None:
            if not prefill_has_ended:
                await lost.wait()
            await hand_over(exchange)

        async def die(exchange: Exchange) -> None:
            exchange.begin()
            exchange.send_frame(Data(b"", []))  # a sign of life
            if prefill_has_ended:
                await until(lambda: router.registry.num_requests(one.id) == 0, "the first token is known")
            await exchange.hang_up()

        async def answer(exchange: Exchange) -> None:
            lost.set()
            await finish(exchange)

        one, bad, good = prefill(compute), decode(die), full(decode(answer))
        async with routed(one, bad, good) as router:
            await settled(router, good)
            assert (await router.generate(stream=True)).content == WHOLE_STREAM
            first, second = bad.exchanges[0].leg, good.exchanges[0].leg
            assert (second.kind, second.room, second.peer) == ("decode", first.room, first.peer)
            assert len(one.exchanges) == 1 and counts(router) == (1, 1, 1, 0)

    run(test())


def test_what_was_offered_for_too_long_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.router.relay.UNCLAIMED_S", 0.0)

    async def test() -> None:
        async def die(exchange: Exchange) -> None:
            exchange.begin()
            await until(lambda: router.registry.num_requests(one.id) == 0, "the first token is known")
            await exchange.hang_up()

        one, bad, good = prefill(), decode(die), full(decode())
        async with routed(one, bad, good) as router:
            await settled(router, good)
            assert (await router.generate(stream=True)).content == WHOLE_STREAM
            assert len(one.exchanges) == 2 and counts(router) == (2, 0, 1, 0)

    run(test())


def test_a_pair_goes_on_where_a_decode_worker_died() -> None:
    async def test() -> None:
        one, bad, good = prefill(), decode(dies_behind(3)), full(decode())
        async with routed(one, bad, good) as router:
            await settled(router, good)
            assert (await router.generate(stream=True)).content == WHOLE_STREAM
            again, going_on = one.exchanges[1], good.exchanges[0]
            assert again.given == going_on.given == [1, 2, 3]
            assert again.leg.room == going_on.leg.room != one.exchanges[0].leg.room
            assert counts(router) == (2, 0, 0, 1)

    run(test())


def test_without_a_prefill_worker_a_decode_worker_goes_on_alone() -> None:
    async def test() -> None:
        async def die(exchange: Exchange) -> None:
            await one.die()
            await until(lambda: not router.serves(one), "the prefill worker is lost")
            await dies_behind(3)(exchange)

        one, bad, good = prefill(), decode(die), full(decode())
        async with routed(one, bad, good) as router:
            await settled(router, good)
            assert (await router.generate(stream=True)).content == WHOLE_STREAM
            assert good.exchanges[-1].leg.kind == "whole" and good.exchanges[-1].given == [1, 2, 3]
            assert router.registry.counters.local == 1

    run(test())


@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_an_error_of_the_request_is_the_clients_whichever_worker_says_it(by: str) -> None:
    async def test() -> None:
        async def refuse(exchange: Exchange) -> None:
            await until(lambda: len(one.exchanges) == len(two.exchanges), "both have their legs")
            await exchange.whole(b'{"message": "wrong"}', 400)

        one = prefill(refuse if by == "prefill" else stay_silent)
        two = decode(refuse if by == "decode" else stay_silent)
        async with routed(one, two) as router:
            for path in ("/generate", "/v1/completions"):
                reply = await router.http.post(path, json=STREAM)
                assert (reply.status_code, reply.content) == (400, b'{"message": "wrong"}')
            assert len(one.exchanges) == len(two.exchanges) == 2
            assert counts(router) == (2, 0, 0, 0) and router.serves(one) and router.serves(two)

    run(test())


def test_a_client_that_leaves_closes_both_legs() -> None:
    async def test() -> None:
        one, two = prefill(stay_silent), decode(stay_silent)
        async with routed(one, two) as router:
            request = asyncio.create_task(router.generate(stream=True))
            await until(lambda: one.exchanges and two.exchanges, "both have their legs")
            assert router.registry.num_requests() == 2
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await all_closed(one, two)
            await until(lambda: router.registry.num_requests() == 0, "both holds are released")

    run(test())


def test_a_prefill_leg_that_does_not_end_with_the_reply_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.router.relay.PREFILL_GRACE_S", 0.01)

    async def test() -> None:
        one, two = prefill(stay_silent), decode()
        async with routed(one, two) as router:
            assert (await router.generate(stream=True)).content == WHOLE_STREAM
            await all_closed(one)

    run(test())


def test_signs_of_life_say_nothing() -> None:
    assert not legs.names_tokens([Data(b"", []), Data(b"", [])])
    assert legs.names_tokens([Data(b"", []), Data(b"x", [])])
