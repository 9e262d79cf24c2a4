"""Sources that tell a router which workers there are.

A source gives the whole list whenever it changes, so that nothing depends on a change that was missed. The
options are one source, registrations by ``POST /workers`` another, and the backends of `segue.discovery` are
the third.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf
from typing import Protocol

from segue.discovery.base import DiscoveryBackend
from segue.discovery.record import EngineRecord, highest
from segue.messages.fleet import Registration

OnChange = Callable[[Sequence[Registration]], None]


class Discovery(Protocol):
    """One source of workers."""

    async def watch(self, on_change: OnChange) -> None:
        """Call ``on_change`` with all workers of this source: at once, and again whenever they have changed.

        It returns if they will never change again, and is cancelled when nobody is interested any more.
        """

    def nudge(self) -> None:
        """Look for changes at once, because a worker was lost."""


class FixedWorkers:
    """The workers that the router's options name."""

    def __init__(self, workers: Iterable[Registration]) -> None:
        self._workers = list(workers)

    async def watch(self, on_change: OnChange) -> None:
        """Call ``on_change`` once."""
        on_change(self._workers)

    def nudge(self) -> None:
        """Nothing can have changed."""


class DiscoveredWorkers:
    """The engines that have put their records into files, etcd or Kubernetes."""

    def __init__(self, backend: DiscoveryBackend) -> None:
        self._backend = backend

    async def watch(self, on_change: OnChange) -> None:
        """Call ``on_change`` whenever the records change: of each cohort the highest epoch is told."""

        def tell(records: Sequence[EngineRecord]) -> None:
            known = highest(records)
            on_change([Registration(url=each.url, cohort=each.cohort, epoch=each.epoch) for each in known])

        try:
            await self._backend.watch(tell)
        finally:
            await self._backend.close()

    def nudge(self) -> None:
        """Look for changes at once."""
        self._backend.nudge()


class Registrations:
    """The workers that were registered by HTTP, each until its registration lapses.

    Workers that register themselves renew their registrations. One without an end is an operator's. It lives
    on one event loop.
    """

    def __init__(self) -> None:
        self._ends: dict[Registration, float] = {}  # when each one lapses, on the monotonic clock
        self._changed = asyncio.Event()

    def put(self, registration: Registration, ttl_s: float | None) -> None:
        """Register a worker anew: for ``ttl_s`` seconds, or for None without an end."""
        self.remove(registration.url)
        self._ends[registration] = inf if ttl_s is None else time.monotonic() + ttl_s

    def remove(self, url: str) -> None:
        """End a worker's registration, if there is one."""
        for registration in [each for each in self._ends if each.url == url]:
            del self._ends[registration]
        self._changed.set()

    def current(self) -> list[Registration]:
        """Returns the workers whose registrations have not lapsed."""
        now = time.monotonic()
        self._ends = {each: end for each, end in self._ends.items() if end > now}
        return list(self._ends)

    def nudge(self) -> None:
        """Changes are told at once anyway."""

    async def watch(self, on_change: OnChange) -> None:
        """Call ``on_change`` at once, and whenever a worker is registered or a registration lapses."""
        while True:
            self._changed.clear()
            on_change(self.current())
            end = min(self._ends.values(), default=inf)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if end == inf else end - time.monotonic()):
                    await self._changed.wait()
