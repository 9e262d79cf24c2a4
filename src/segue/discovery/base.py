"""What every kind of discovery can do: put and remove records, list and watch them, and claim epochs.

An engine that takes over, which holds the lock of its cohort:

    discovery = open_discovery(config.discovery, config.discovery_target, ttl_s=..., directory=failover_dir)
    epoch = await claim_epoch(lock, discovery, engine_id, url, at_least=known)    # `segue.failover.epochs`
    ...                                # it wakes up, listens, and accepts connections
    await discovery.put(EngineRecord(cohort=..., engine=engine_id, epoch=epoch, url=url, ...))
    ...                                # it serves
    await discovery.remove(cohort, engine_id)
    await discovery.close()

Only the code that has just begun to accept connections calls `put`. An engine that waits as a shadow has no
record in any backend, because it never gets there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from segue.discovery.record import EngineRecord
from segue.errors import DiscoveryError
from segue.logs import logger

OnRecords = Callable[[Sequence[EngineRecord]], None]
RETRY_S = 0.5  # between two tries while a backend cannot be reached


class DiscoveryBackend(Protocol):
    """One place where records are kept. It belongs to one event loop.

    Every method but ``nudge`` raises DiscoveryError if the place cannot be reached.
    """

    async def put(self, record: EngineRecord) -> None:
        """Put an engine's record in place of its last one; it goes when the engine dies or removes it."""

    async def remove(self, cohort: str, engine: str) -> None:
        """Remove an engine's record; nothing happens if there is none."""

    async def list(self) -> Sequence[EngineRecord]:
        """Returns the records of all engines that live."""

    async def watch(self, on_records: OnRecords) -> None:
        """Call ``on_records`` with all records: at once, and whenever they change, until it is cancelled.

        While the place cannot be reached it is not called: engines whose records cannot be read serve on.
        """

    async def claim_epoch(self, cohort: str, epoch: int) -> bool:
        """Claim an epoch; returns whether it is this engine's: nobody has claimed it or a higher one."""

    async def highest_epoch(self, cohort: str) -> int:
        """Returns the highest epoch that was ever claimed here; 0: none was."""

    def nudge(self) -> None:
        """Look for changes at once, because a connection to an engine has broken."""

    async def close(self) -> None:
        """Remove the records that were put here, and end what keeps them alive."""


class Polling:
    """Watches a backend by listing its records again and again, and at once when it is nudged."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._nudged = asyncio.Event()

    def nudge(self) -> None:
        """List the records at once."""
        self._nudged.set()

    async def watch(self, backend: DiscoveryBackend, on_records: OnRecords) -> None:
        """Call ``on_records`` at once, and whenever the records have changed."""
        told: Sequence[EngineRecord] | None = None
        problem = ""
        while True:
            self._nudged.clear()
            try:
                records = await backend.list()
            except DiscoveryError as error:
                if str(error) != problem:
                    logger.warning("%s; the engines that are known stay known", error)
                problem = str(error)
            else:
                problem = ""
                if records != told:
                    told = records
                    on_records(records)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(self._period_s, RETRY_S if problem else 0.0)):
                    await self._nudged.wait()
