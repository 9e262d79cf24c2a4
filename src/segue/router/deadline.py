"""Deadlines for what a worker owes the router, in time that the router was there to see."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
LOOKS = 3  # per deadline


async def within(seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of ``work``, which is cancelled once ``seconds`` have passed without one.

    A router that was stopped finds a deadline over before it has read what came meanwhile. So the time is
    passed in several looks: a stop ends one of them, and the next one finds what came. The router does not
    take its own absence for a worker's silence.

    Raises:
        TimeoutError: the time has passed.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(LOOKS):
            await asyncio.wait({task}, timeout=seconds / LOOKS)
            if task.done():
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
