"""Which engines of a cohort stand by, so that the one that serves knows whether another one can take over."""

from __future__ import annotations

import zlib
from pathlib import Path

from segue.failover.lock import CohortLock


def sign_of(directory: Path, cohort: str, engine_id: str) -> CohortLock:
    """Returns the lock that an engine holds for as long as it waits for the lock of its cohort.

    The kernel takes it away from an engine that dies, so whoever can take it knows that nobody waits.
    """
    name = f"{_prefix(cohort)}{zlib.crc32(engine_id.encode()):08x}"
    return CohortLock(directory, name)


def count_standbys(directory: Path, cohort: str) -> int:
    """Return how many engines of the cohort wait to take over."""
    names = [path.name.removesuffix(".lock") for path in directory.glob(f"{_prefix(cohort)}*.lock")]
    return sum(_is_held(CohortLock(directory, name)) for name in names)


def has_standby(directory: Path, cohort: str) -> bool:
    """Whether an engine of the cohort waits to take over."""
    return count_standbys(directory, cohort) > 0


def _is_held(lock: CohortLock) -> bool:
    if not lock.try_acquire():
        return True
    lock.release()
    return False


def _prefix(cohort: str) -> str:
    """Returns how the names of these locks begin; no cohort's name is as long."""
    return f"standby-{zlib.crc32(cohort.encode()):08x}-"
