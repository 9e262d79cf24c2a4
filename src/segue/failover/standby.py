"""Which engines of a cohort stand by, so that the one that serves knows whether another one can take over."""

from __future__ import annotations

import zlib
from pathlib import Path

from segue.failover.lock import CohortLock

_NAME = "standby-"
_HASH = "[0-9a-f]" * 8  # as a pattern of file names; names of cohorts may begin with "standby-", too


def sign_of(directory: Path, cohort: str, engine_id: str) -> CohortLock:
    """Returns the lock that an engine holds for as long as it waits for the lock of its cohort.

    The kernel takes it away from an engine that dies, so whoever can take it knows that nobody waits.
    """
    name = f"{_prefix(cohort)}{zlib.crc32(engine_id.encode()):08x}"
    return CohortLock(directory, name)


def count_standbys(directory: Path, cohort: str) -> int:
    """Return how many engines of the cohort wait to take over."""
    return _count_held(directory, _prefix(cohort))


def remove_unheld(directory: Path) -> None:
    """Delete the files of engines, of whatever cohort, that wait no more."""
    _count_held(directory, f"{_NAME}{_HASH}-")


def has_standby(directory: Path, cohort: str) -> bool:
    """Whether an engine of the cohort waits to take over."""
    return count_standbys(directory, cohort) > 0


def _count_held(directory: Path, prefix: str) -> int:
    """Return how many locks whose names begin so are held; the files of the others are deleted."""
    num_held = 0
    for path in directory.glob(f"{prefix}{_HASH}.lock"):
        lock = CohortLock(directory, path.name.removesuffix(".lock"))
        if lock.try_acquire():
            lock.discard()
        else:
            num_held += 1
    return num_held


def _prefix(cohort: str) -> str:
    """Returns how the names of these locks begin."""
    return f"{_NAME}{zlib.crc32(cohort.encode()):08x}-"
