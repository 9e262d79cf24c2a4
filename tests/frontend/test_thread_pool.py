from __future__ import annotations

import asyncio
import threading

import pytest

from segue.errors import EngineDeadError
from segue.frontend.thread_pool import NUM_THREADS, TURN, ThreadPool, turn


def test_work_that_is_cancelled_in_the_queue_never_begins() -> None:
    begun: list[int] = []
    go_on = threading.Event()

    def hold() -> None:
        begun.append(0)
        assert go_on.wait(60)

    async def work() -> None:
        thread_pool = ThreadPool()
        holders = [asyncio.create_task(thread_pool.run(hold)) for _ in range(NUM_THREADS)]
        queued = [asyncio.create_task(thread_pool.run(lambda: begun.append(1))) for _ in range(5)]
        while len(begun) < NUM_THREADS:
            await asyncio.sleep(0)
        for task in queued[:4]:
            task.cancel()
        await asyncio.wait(queued[:4])
        go_on.set()
        await asyncio.gather(*holders, queued[4])
        assert sum(begun) == 1

    asyncio.run(work())


def test_the_pieces_of_several_calls_alternate() -> None:
    order: list[str] = []

    async def in_pieces(thread_pool: ThreadPool, name: str) -> None:
        for _ in range(20):
            await thread_pool.run(lambda: order.append(name))

    async def work() -> None:
        thread_pool = ThreadPool()
        await asyncio.gather(*(in_pieces(thread_pool, name) for name in "abcd"))

    asyncio.run(work())
    assert {*order[:12]} == {*"abcd"}


def test_closing_ends_queued_and_later_work() -> None:
    go_on = threading.Event()

    async def work() -> None:
        thread_pool = ThreadPool()
        tasks = [asyncio.create_task(thread_pool.run(lambda: go_on.wait(60))) for _ in range(NUM_THREADS + 1)]
        await asyncio.sleep(0)
        thread_pool.close(EngineDeadError("gone"))
        for waiting in (tasks[-1], thread_pool.run(lambda: 1)):
            with pytest.raises(EngineDeadError, match="gone"):
                await waiting
        go_on.set()
        await asyncio.gather(*tasks[:-1])

    asyncio.run(work())


def test_turn_lets_other_tasks_run() -> None:
    async def work() -> None:
        others = 0

        async def count() -> None:
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(count())
        for number in range(10 * TURN):
            await turn(number)
        task.cancel()
        assert others == 10

    asyncio.run(work())
