"""The pause that a router has asked all its workers for, which workers that join later get too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import ExitStack
from dataclasses import replace

from segue.logs import logger
from segue.router.entry import WorkerEntry
from segue.router.fan_out import Replies, WorkerRequest, ask


class FleetPause:
    """Whether a router's workers are paused, as far as its own clients have asked for it.

    A pause that is asked of a worker itself is not known here, and neither is one from before the router's
    start.
    """

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: within which a worker has to answer."""
        self._timeout_s = timeout_s
        self._request: WorkerRequest | None = None  # by which the workers were paused; None: they are not
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, request: WorkerRequest, replies: Awaitable[Replies]) -> Replies:
        """Wait for the answers to a pause; it stands, also for workers that join, if one of them did it."""
        before, self._request = self._request, request
        has_begun = False
        try:
            answers = await replies
            has_begun = any(reply.is_ok for reply in answers.values())
            return answers
        finally:
            if not has_begun and self._request is request:
                self._request = before

    def end(self) -> None:
        """Pause no workers that join from now on."""
        self._request = None

    def joined(self, entry: WorkerEntry) -> None:
        """Pause a worker if the others are paused; it gets no requests until it has answered."""
        if self._request is not None:
            changing = ExitStack()
            changing.enter_context(entry.changing())
            task = asyncio.ensure_future(self._pause(entry, self._request))
            self._tasks.add(task)
            task.add_done_callback(lambda task: changing.close())
            task.add_done_callback(self._tasks.discard)

    async def _pause(self, entry: WorkerEntry, request: WorkerRequest) -> None:
        reply = await ask(entry, request, self._timeout_s)
        if reply.is_ok and self._request is None:  # the others go on again, and may have done so before
            resume = replace(request, path=b"/continue_generation", body=b"")
            reply = await ask(entry, resume, self._timeout_s)
        if reply.is_ok:
            logger.info("worker %s: paused, as the other workers are", entry.id)
        else:
            logger.warning(
                "worker %s: it joins paused workers, and is not paused: %s", entry.id, reply.reason
            )

    async def close(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
