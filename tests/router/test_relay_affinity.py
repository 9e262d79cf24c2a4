"""Prompts go where their beginning has been computed before."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.fake_servers import Answer, Exchange, FakeWorker, RunningRouter, routed, run
from tests.router.test_relay import settled
from tests.router.test_relay_pairs import full, prefill
from tests.router.workers import report

# Some 10,000 tokens, which take 0.24 s to compute.
TURN = [{"role": "user", "content": "".join(map(str, range(8000)))}]
NEXT = [*TURN, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
OTHER = [{"role": "user", "content": "".join(map(str, range(8000, 0, -1)))}]


async def chat(router: RunningRouter, messages: list[dict[str, str]], **fields: Any) -> None:
    reply = await router.http.post("/v1/chat/completions", json={"messages": messages} | fields)
    assert reply.status_code == 200


def answering(cached: int) -> Answer:
    """An answer that says how many tokens of the prompt were cached."""

    async def answer(exchange: Exchange) -> None:
        num_tokens = len(exchange.leg.body) // 4
        usage = b'{"prompt_tokens": %d, "prompt_tokens_details": {"cached_tokens": %d}}'
        await exchange.whole(b'{"usage": %b}' % (usage % (num_tokens, cached)))

    return answer


async def nearly_idle(router: RunningRouter, worker: FakeWorker, **fields: Any) -> None:
    """Lets a worker report so little work that another one is preferred only for a prompt without a hit."""
    worker.report = report(queued_s=0.15, **fields)
    await settled(router, worker)


def test_the_next_turn_of_a_chat_goes_where_the_last_one_was() -> None:
    async def test() -> None:
        first, second = FakeWorker(answering(0)), FakeWorker(answering(0))
        second.report = report(queued_s=1.0)
        async with routed(first, second) as router:
            await settled(router, second)
            await chat(router, TURN)
            second.report = report()
            await nearly_idle(router, first)
            await settled(router, second)
            await chat(router, OTHER)
            await chat(router, NEXT)
            assert [len(first.exchanges), len(second.exchanges)] == [2, 1]
            assert b"Why?" in first.exchanges[-1].leg.body

    run(test())


def test_a_worker_whose_cache_was_emptied_has_nothing() -> None:
    async def test() -> None:
        first, second = FakeWorker(answering(0)), FakeWorker(answering(0))
        second.report = report(queued_s=1.0)
        async with routed(first, second) as router:
            await settled(router, second)
            await chat(router, TURN)
            second.report = report()
            await nearly_idle(router, first, num_flushes=1)
            await settled(router, second)
            await chat(router, NEXT)
            assert len(second.exchanges) == 1

    run(test())


@pytest.mark.parametrize(("cached", "stays"), [(9000, True), (0, False)])
def test_a_reply_that_tells_of_fewer_cached_tokens_takes_the_claim_back(cached: int, stays: bool) -> None:
    async def test() -> None:
        first, second = FakeWorker(answering(cached)), FakeWorker(answering(0))
        second.report = report(queued_s=1.0)
        async with routed(first, second) as router:
            await settled(router, second)
            for _ in range(2):
                await chat(router, TURN)
            second.report = report()
            await nearly_idle(router, first)
            await settled(router, second)
            await chat(router, NEXT)
            assert bool(second.exchanges) is not stays

    run(test())


def test_a_short_rest_of_a_prompt_is_computed_by_the_decode_worker_that_has_the_beginning() -> None:
    async def test() -> None:
        one, two, other = prefill(), FakeWorker(answering(0), role="decode"), full(FakeWorker(role="decode"))
        async with routed(one, two, other) as router:
            await settled(router, other)
            await chat(router, TURN)
            await chat(router, NEXT)
            kinds = [exchange.leg.kind for exchange in two.exchanges]
            assert kinds == ["decode", "whole"] and len(one.exchanges) == 1
            assert router.registry.counters.local == 1
            text = (await router.http.get("/metrics")).text
            assert "segue:router_local_total 1.0" in text and "segue:router_pairs_total 1.0" in text

    run(test())


def test_a_worker_that_left_is_forgotten() -> None:
    async def test() -> None:
        first = FakeWorker()
        async with routed(first) as router:
            await chat(router, TURN)
            assert len(router.registry.index) > 0
            entry = router.registry.get(first.id)
            assert entry is not None and entry.view is not None
            facts = router.router.sizes.facts("/v1/chat/completions", first.exchanges[0].leg.body)
            assert router.registry.index.match(facts.keys) == {first.id: len(facts.keys) * 256}
            await router.http.delete(f"/workers/{first.id}")
            assert router.registry.index.match(facts.keys) == {}

    run(test())
