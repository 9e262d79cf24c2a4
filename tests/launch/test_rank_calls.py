from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from segue.errors import EngineDeadError, EngineStartError
from segue.launch import rank_calls
from segue.launch.rank_calls import RankCalls
from segue.messages.life import EndWake, LifeMessage, PingRanks, RankAnswer, WakeRanks


def run(work: Callable[[RankCalls, list[LifeMessage]], Awaitable[None]]) -> None:
    async def whole() -> None:
        sent: list[LifeMessage] = []
        await work(RankCalls(2, sent.append), sent)

    asyncio.run(asyncio.wait_for(whole(), 60))


async def started(calls: RankCalls) -> asyncio.Task[None]:
    wake = asyncio.ensure_future(calls.wake(2.5))
    await asyncio.sleep(0)
    return wake


def test_a_wake_ends_once_every_rank_has_answered() -> None:
    async def work(calls: RankCalls, sent: list[LifeMessage]) -> None:
        wake = await started(calls)
        assert sent == [WakeRanks(1, 2.5)]
        calls.take(RankAnswer(1, 1))
        calls.take(RankAnswer(0, 0))  # to an older call
        await asyncio.sleep(0)
        assert not wake.done()
        calls.take(RankAnswer(1, 0))
        await wake
        calls.end_wake()
        assert sent[-1] == EndWake()

    run(work)


def test_a_rank_that_cannot_wake_is_named() -> None:
    async def work(calls: RankCalls, sent: list[LifeMessage]) -> None:
        wake = await started(calls)
        calls.take(RankAnswer(1, 1, "MemoryError: no pages are left"))
        calls.take(RankAnswer(1, 0))
        with pytest.raises(EngineStartError, match="rank 1 cannot wake: MemoryError: no pages are left"):
            await wake

    run(work)


def test_a_wake_ends_with_the_engine() -> None:
    async def work(calls: RankCalls, sent: list[LifeMessage]) -> None:
        calls.fail(EngineDeadError("nobody waits"))
        wake = await started(calls)
        calls.fail(EngineDeadError("worker rank 0 ended"))
        calls.fail(EngineDeadError("again"))
        with pytest.raises(EngineDeadError, match="worker rank 0 ended"):
            await wake

    run(work)


def test_the_most_silent_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(rank_calls.time, "monotonic", lambda: now)
    calls = RankCalls(2, lambda _: None)
    now += 1.5
    calls.take(RankAnswer(1, 0))
    assert calls.silent_s == 1.5, "rank 1 has not answered yet"
    calls.take(RankAnswer(1, 1))
    now += 0.5
    assert calls.silent_s == 0.5
    now += 1000.0  # this process did not run, and has read nothing
    assert calls.silent_s <= 0.5 + 2 * rank_calls.PING_S


def test_pings_are_deep_while_somebody_says_so() -> None:
    async def work(calls: RankCalls, sent: list[LifeMessage]) -> None:
        task = asyncio.ensure_future(calls.ping_forever(lambda: not sent))
        while len(sent) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        assert sent == [PingRanks(1, True), PingRanks(2, False)]

    run(work)
