"""What the web page shows, as server-sent events.

One task takes it for all who look, and there is none while nobody does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import ASGIApp

from segue.errors import SegueError
from segue.frontend.control_log import ControlLog
from segue.server.access import Access, Routes
from segue.server.responses import EventStream, event, native_body

TICK_S = 0.2  # between two looks whether anything has changed
SAMPLE_S = 1.0  # between two samples
MOST_SAMPLES = 300  # that are kept for those who look later
MOST_WAITING = 100  # messages for one client, who is dropped if more would wait

EVENTS = "/page_events"

routes = Routes(Access.ADMIN, "Information")


@routes.get(EVENTS, hidden=True)
async def events(request: Request) -> ASGIApp:
    """What the web page shows, until the server shuts down or its engine ends."""
    feed: Feed = request.app.state.feed
    return feed.stream()


def failure(error: SegueError) -> bytes:
    """Returns the last event of a stream that fails."""
    return event(native_body(error))


class FeedSource(Protocol):
    """What is shown: an engine, or a router."""

    @property
    def log(self) -> ControlLog:
        """What has happened; another one once the engine is there."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come, so that the streams must end."""

    def status(self) -> dict[str, Any]:
        """What changes seldom; it is sent whenever it differs."""

    def sample(self, seconds: float) -> dict[str, Any]:
        """The figures of now, or of the ``seconds`` since the last sample; 0: a first one begins there."""

    def detail(self) -> dict[str, Any]:
        """More fields of the messages with samples, which are not kept."""


class Counted(Protocol):
    """A histogram's counts, by upper bound, and the sum of its values in seconds."""

    counts: list[int]
    total: float


@dataclass(slots=True)
class Mean:
    """The mean of what a histogram has counted since the last look."""

    _count: int = 0
    _total: float = 0.0

    def take(self, histogram: Counted) -> float | None:
        """Returns it in seconds; None: nothing was counted."""
        count, total = sum(histogram.counts), histogram.total
        number, seconds = count - self._count, total - self._total
        self._count, self._total = count, total
        return round(seconds / number, 6) if number > 0 else None


@dataclass(slots=True, eq=False)
class Feed:
    """The streams of one server. It lives on one event loop."""

    source: FeedSource
    _clients: set[asyncio.Queue[bytes | None]] = field(default_factory=set)
    _samples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    _status: bytes = b""  # the event that was sent last
    _log: ControlLog | None = None
    _num_logged: int = 0  # entries of this log that were sent
    _task: asyncio.Task[None] | None = None

    def stream(self) -> EventStream:
        """Returns what sends one client all that is known now, and then what happens."""
        return EventStream(self._events(), failure, lambda: None)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events for one client until the source is over, or the client is too slow."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING)
        if self._task is None:
            self.source.sample(0.0)  # from which the next one counts
            self._tick(None)
        queue.put_nowait(self._status)
        queue.put_nowait(event({"log": self.source.log.since(0)}))
        queue.put_nowait(event({"samples": list(self._samples)} | self.source.detail()))
        self._clients.add(queue)
        if self.source.is_over:
            self._drop(queue)
        elif self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            while (data := await queue.get()) is not None:
                yield data
        finally:
            self._clients.discard(queue)

    async def _run(self) -> None:
        """Look until nobody else does, or the source is over."""
        sampled = time.monotonic()
        try:
            while self._clients:
                await asyncio.sleep(TICK_S)
                now = time.monotonic()
                is_due = now >= sampled + SAMPLE_S - TICK_S / 2
                self._tick(now - sampled if is_due else None)
                sampled = now if is_due else sampled
                if self.source.is_over:
                    break
        finally:
            self._task = None
            for queue in list(self._clients):
                self._drop(queue)

    def _tick(self, seconds: float | None) -> None:
        """Send everybody what is new; ``seconds``: since the last sample, None: no sample is due."""
        status = event({"status": self.source.status()})
        if status != self._status:
            self._status = status
            self._send(status)
        log = self.source.log
        if log is not self._log:
            self._log, self._num_logged = log, 0
        if new := log.since(self._num_logged):
            self._num_logged = log.num_entries
            self._send(event({"log": new}))
        if seconds is not None:
            sample = {"at": round(time.time(), 3)} | self.source.sample(seconds)
            self._samples.append(sample)
            self._send(event({"samples": [sample]} | self.source.detail()))

    def _send(self, data: bytes) -> None:
        for queue in list(self._clients):
            if queue.qsize() < MOST_WAITING - 1:
                queue.put_nowait(data)
            else:
                self._drop(queue)

    def _drop(self, queue: asyncio.Queue[bytes | None]) -> None:
        """End a client's stream behind what it has not taken yet; it may come again."""
        self._clients.discard(queue)
        queue.put_nowait(None)
