"""Several backends act as one, and one that is away stops nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from segue.discovery.base import OnRecords, Polling
from segue.discovery.file import FileDiscovery
from segue.discovery.record import EngineRecord
from segue.discovery.several import SeveralBackends
from segue.errors import DiscoveryError
from tests.discovery.contract import CHECKS, NAMES, Check, Watching, record, until


class MemoryBackend:
    """A backend in memory, which may be away."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], EngineRecord] = {}
        self.epochs: dict[str, int] = {}
        self.is_away = False
        self._polling = Polling(0.005)

    async def put(self, record: EngineRecord) -> None:
        self._check()
        self.records[record.cohort, record.engine] = record

    async def remove(self, cohort: str, engine: str) -> None:
        self._check()
        self.records.pop((cohort, engine), None)

    async def list(self) -> Sequence[EngineRecord]:
        self._check()
        return [self.records[key] for key in sorted(self.records)]

    async def watch(self, on_records: OnRecords) -> None:
        await self._polling.watch(self, on_records)

    async def claim_epoch(self, cohort: str, epoch: int) -> bool:
        self._check()
        if epoch <= self.epochs.get(cohort, 0):
            return False
        self.epochs[cohort] = epoch
        return True

    async def highest_epoch(self, cohort: str) -> int:
        self._check()
        return self.epochs.get(cohort, 0)

    def nudge(self) -> None:
        self._polling.nudge()

    async def close(self) -> None:
        self.records.clear()

    def _check(self) -> None:
        if self.is_away:
            raise DiscoveryError("the memory is away")


@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_what_every_backend_does(check: Check, tmp_path: Path) -> None:
    def make() -> SeveralBackends:
        return SeveralBackends([FileDiscovery(tmp_path / "a"), FileDiscovery(tmp_path / "b")])

    asyncio.run(check(make))


def test_a_backend_that_was_away_gets_the_record_later() -> None:
    async def run() -> None:
        near, far = MemoryBackend(), MemoryBackend()
        both = SeveralBackends([near, far])
        far.is_away = True
        assert await both.claim_epoch("default", 1)
        await both.put(record())
        assert list(await both.list()) == [record()]
        assert far.records == {}
        far.is_away = False
        await until(lambda: list(far.records.values()) == [record()])
        await both.close()

    asyncio.run(run())


def test_a_removed_record_is_not_put_later() -> None:
    async def run() -> None:
        near, far = MemoryBackend(), MemoryBackend()
        both = SeveralBackends([near, far])
        far.is_away = True
        await both.put(record(epoch=1))
        await both.remove("default", "engine-a")
        await both.put(record(epoch=2))
        far.is_away = False
        await until(lambda: bool(far.records))
        assert list(far.records.values()) == [record(epoch=2)]
        await both.close()

    asyncio.run(run())


def test_if_all_backends_are_away_the_error_says_so() -> None:
    async def run() -> None:
        far = MemoryBackend()
        far.is_away = True
        both = SeveralBackends([far, far])
        for call in (both.put(record()), both.list(), both.claim_epoch("a", 1), both.highest_epoch("a")):
            with pytest.raises(DiscoveryError, match="the memory is away"):
                await call
        await both.close()

    asyncio.run(run())


def test_an_epoch_that_one_backend_refuses_is_refused() -> None:
    async def run() -> None:
        near, far = MemoryBackend(), MemoryBackend()
        both = SeveralBackends([near, far])
        assert await far.claim_epoch("default", 7)
        assert not await both.claim_epoch("default", 7)
        assert await both.highest_epoch("default") == 7
        assert await both.claim_epoch("default", 8)

    asyncio.run(run())


def test_what_is_known_stays_known_while_a_backend_is_away() -> None:
    async def run() -> None:
        near, far = MemoryBackend(), MemoryBackend()
        both = SeveralBackends([near, far])
        await far.put(record("engine-a", 1))
        watching = Watching(both)
        await watching.shows(record("engine-a", 1))
        far.is_away = True
        await near.put(record("engine-b", 2))
        await watching.shows(record("engine-a", 1), record("engine-b", 2))
        await near.put(record("engine-a", 3))  # of one engine the highest epoch counts
        await watching.shows(record("engine-a", 3), record("engine-b", 2))
        await watching.close()

    asyncio.run(run())


def test_without_backends_there_are_no_records_and_every_epoch_is_free() -> None:
    async def run() -> None:
        none = SeveralBackends([])
        await none.put(record())
        assert list(await none.list()) == []
        assert await none.claim_epoch("default", 1)
        assert await none.highest_epoch("default") == 0
        await none.close()

    asyncio.run(run())
