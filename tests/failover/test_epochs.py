"""An epoch is claimed by the lock and by discovery together, and none is given to two engines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from segue.discovery.file import FileDiscovery
from segue.discovery.record import EngineRecord
from segue.discovery.several import SeveralBackends
from segue.errors import LockLostError
from segue.failover.epochs import claim_epoch
from segue.failover.lock import CohortLock
from tests.discovery.test_several import MemoryBackend

URL = "http://127.0.0.1:1"


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def held(directory: Path) -> CohortLock:
    lock = CohortLock(directory, "default")
    assert lock.try_acquire()
    return lock


def test_the_epoch_is_above_all_that_anybody_knows(tmp_path: Path) -> None:
    async def test() -> None:
        lock, discovery = held(tmp_path / "f"), FileDiscovery(tmp_path / "f")
        assert await claim_epoch(lock, discovery, "a", URL) == 1
        assert await discovery.claim_epoch("default", 6)
        assert await claim_epoch(lock, discovery, "a", URL) == 7
        assert await claim_epoch(lock, discovery, "a", URL, at_least=20) == 21
        assert await discovery.highest_epoch("default") == 21
        lock.release()

    run(test())


def test_the_epoch_is_above_those_of_records_too(tmp_path: Path) -> None:
    async def test() -> None:
        lock, discovery = held(tmp_path / "f"), FileDiscovery(tmp_path / "f")
        await discovery.put(EngineRecord(cohort="default", engine="b", epoch=7, url=URL))
        await discovery.put(EngineRecord(cohort="another", engine="b", epoch=70, url=URL))
        assert await claim_epoch(lock, discovery, "a", URL) == 8
        await discovery.close()
        lock.release()

    run(test())


def test_two_holders_of_two_files_get_different_epochs_and_the_older_one_loses(tmp_path: Path) -> None:
    async def test() -> None:
        old, discovery = held(tmp_path / "f"), FileDiscovery(tmp_path / "f")
        first = await claim_epoch(old, discovery, "a", URL)
        old.path.unlink()
        new = held(tmp_path / "f")
        assert await claim_epoch(new, discovery, "b", URL) == first + 1
        assert not old.is_ours()
        assert new.is_ours()
        with pytest.raises(LockLostError):
            await claim_epoch(old, discovery, "a", URL)
        old.release()
        new.release()

    run(test())


class _Late(MemoryBackend):
    """A backend in which another engine claims each epoch first, some times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    async def claim_epoch(self, cohort: str, epoch: int) -> bool:
        if self.times:
            self.times -= 1
            assert await super().claim_epoch(cohort, epoch)
        return await super().claim_epoch(cohort, epoch)


def test_an_epoch_that_another_engine_has_claimed_meanwhile_is_not_taken(tmp_path: Path) -> None:
    async def test() -> None:
        lock = held(tmp_path / "f")
        assert await claim_epoch(lock, _Late(2), "a", URL) == 3
        lock.release()

    run(test())


def test_an_engine_takes_over_while_discovery_is_away(tmp_path: Path) -> None:
    async def test() -> None:
        lock, far = held(tmp_path / "f"), MemoryBackend()
        far.is_away = True
        assert await claim_epoch(lock, far, "a", URL) == 1
        assert await claim_epoch(lock, SeveralBackends([]), "a", URL) == 2
        lock.release()

    run(test())
