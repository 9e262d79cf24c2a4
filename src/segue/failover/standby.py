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


def has_standby(directory: Path, cohort: str) -> bool:
    """Whether an engine of the cohort waits to take over."""
    for path in directory.glob(f"{_prefix(cohort)}*.lock"):
        lock = CohortLock(directory, path.name.removesuffix(".lock"))
        if not lock.try_acquire():
            return True
        lock.release()
    return False


def _prefix(cohort: str) -> str:
    """Returns how the names of these locks begin; no cohort's name is as long."""
    return f"standby-{zlib.crc32(cohort.encode()):08x}-"
