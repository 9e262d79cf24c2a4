from __future__ import annotations

import asyncio

import pytest

from segue.frontend.signal import Signal


async def waiting(signal: Signal) -> asyncio.Task[None]:
    async def wait() -> None:
        await signal.wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return task


def test_a_reader_is_woken_once_the_flag_is_set() -> None:
    async def work() -> None:
        signal = Signal()
        reader = await waiting(signal)
        assert not reader.done() and not signal.is_set()
        signal.set()
        signal.set()
        await asyncio.wait_for(reader, 60)
        assert signal.is_set()

    asyncio.run(work())


def test_a_flag_that_was_set_before_is_not_waited_for_until_it_is_cleared() -> None:
    async def work() -> None:
        signal = Signal()
        signal.set()
        await asyncio.wait_for(signal.wait(), 60)
        signal.clear()
        reader = await waiting(signal)
        assert not reader.done() and not signal.is_set()
        signal.set()
        await asyncio.wait_for(reader, 60)

    asyncio.run(work())


def test_a_reader_that_was_cancelled_leaves_the_flag_to_the_next_one() -> None:
    async def work() -> None:
        signal = Signal()
        first = await waiting(signal)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        signal.set()
        await asyncio.wait_for(signal.wait(), 60)

    asyncio.run(work())
