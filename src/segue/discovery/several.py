"""Several backends as one: a record is put into all, and an epoch is claimed in all that can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from segue.discovery.base import RETRY_S, DiscoveryBackend, OnRecords
from segue.discovery.record import EngineRecord
from segue.errors import DiscoveryError
from segue.logs import logger

Answer = TypeVar("Answer")


class SeveralBackends:
    """Backends that are used together; see `segue.discovery.base.DiscoveryBackend`.

    One that cannot be reached stops nobody, as long as another one can. It gets the records of this process
    as soon as it can be reached again. Without any backend there are no records, and every epoch can be
    claimed: the lock of the cohort alone decides.
    """

    def __init__(self, backends: Sequence[DiscoveryBackend]) -> None:
        self._backends = list(backends)
        self._late: dict[tuple[int, str, str], asyncio.Task[None]] = {}  # puts that are tried again

    async def put(self, record: EngineRecord) -> None:
        """Put a record into all backends; raises DiscoveryError if there are some, and none takes it."""
        self._forget(record.cohort, record.engine)
        errors: list[DiscoveryError] = []
        for index, backend in enumerate(self._backends):
            try:
                await backend.put(record)
            except DiscoveryError as error:
                logger.warning("%s; the record of %s is put there later", error, record.engine)
                errors.append(error)
                key = index, record.cohort, record.engine
                self._late[key] = asyncio.ensure_future(_put_later(backend, record))
        if errors and len(errors) == len(self._backends):
            self._forget(record.cohort, record.engine)
            raise errors[0]

    async def remove(self, cohort: str, engine: str) -> None:
        """Remove a record from all backends; where one cannot be reached, it ends by itself."""
        self._forget(cohort, engine)
        await self._all([backend.remove(cohort, engine) for backend in self._backends])

    async def list(self) -> Sequence[EngineRecord]:
        """Returns the records of all backends: of each engine the one with the highest epoch."""
        return _merged(await self._all([backend.list() for backend in self._backends]))

    async def watch(self, on_records: OnRecords) -> None:
        """Call ``on_records`` with the records of all backends, whenever those of one of them change."""
        found: dict[int, Sequence[EngineRecord]] = {}
        told: Sequence[EngineRecord] | None = None

        def take(index: int, records: Sequence[EngineRecord]) -> None:
            nonlocal told
            found[index] = records
            if (merged := _merged(found.values())) != told:
                told = merged
                on_records(merged)

        def taker(index: int) -> OnRecords:
            return lambda records: take(index, records)

        async with asyncio.TaskGroup() as watching:
            for index, backend in enumerate(self._backends):
                watching.create_task(backend.watch(taker(index)))

    async def claim_epoch(self, cohort: str, epoch: int) -> bool:
        """Claim an epoch in all backends that can be reached; returns whether none of them refused it."""
        return all(await self._all([backend.claim_epoch(cohort, epoch) for backend in self._backends]))

    async def highest_epoch(self, cohort: str) -> int:
        """Returns the highest epoch that was ever claimed in a backend that can be reached."""
        known = await self._all([backend.highest_epoch(cohort) for backend in self._backends])
        return max(known, default=0)

    def nudge(self) -> None:
        """Look for changes at once."""
        for backend in self._backends:
            backend.nudge()

    async def close(self) -> None:
        """Remove the records that were put here."""
        for key in list(self._late):
            self._late.pop(key).cancel()
        with suppress(DiscoveryError):
            await self._all([backend.close() for backend in self._backends])

    def _forget(self, cohort: str, engine: str) -> None:
        for key in [each for each in self._late if each[1:] == (cohort, engine)]:
            self._late.pop(key).cancel()

    async def _all(self, calls: Sequence[Awaitable[Answer]]) -> Sequence[Answer]:
        """Returns the answers of the backends that can be reached; raises DiscoveryError if none can."""
        answers = await asyncio.gather(*calls, return_exceptions=True)
        problems = [each for each in answers if isinstance(each, BaseException)]
        for problem in problems:
            if not isinstance(problem, DiscoveryError):
                raise problem
            logger.warning("%s", problem)
        if problems and len(problems) == len(answers):
            raise problems[0]
        return [each for each in answers if not isinstance(each, BaseException)]


async def _put_later(backend: DiscoveryBackend, record: EngineRecord) -> None:
    while True:
        await asyncio.sleep(RETRY_S)
        with suppress(DiscoveryError):
            await backend.put(record)
            return


def _merged(lists: Iterable[Sequence[EngineRecord]]) -> list[EngineRecord]:
    """Returns the records of several backends: of each engine the one with the highest epoch."""
    found: dict[tuple[str, str], EngineRecord] = {}
    for record in (each for records in lists for each in records):
        key = record.cohort, record.engine
        if key not in found or record.epoch > found[key].epoch:
            found[key] = record
    return [found[key] for key in sorted(found)]
