"""An engine that has its cohort's lock claims an epoch that nobody else has, or ever had."""

from __future__ import annotations

import asyncio

from segue.discovery.base import DiscoveryBackend
from segue.errors import DiscoveryError
from segue.failover.lock import CohortLock
from segue.logs import logger


async def claim_epoch(
    lock: CohortLock, discovery: DiscoveryBackend, engine_id: str, url: str, *, at_least: int = 0
) -> int:
    """Claim an epoch in the lock's file and in discovery, and return it.

    If the file of the lock was made anew, two engines may hold locks of one cohort. Then both may come here
    at once. Discovery gives each number to one of them only, and the older one's lock is lost.

    Args:
        lock: of the cohort, which this engine holds.
        discovery: where other engines of the cohort have claimed theirs. If it cannot be reached at all, the
            lock alone decides: an engine must be able to take over while etcd is away.
        engine_id: of this engine.
        url: of this engine's HTTP server.
        at_least: the highest epoch that others know of, such as the memory service; 0: none.

    Raises:
        LockLostError: the file of the lock was deleted or made anew.
    """
    cohort = lock.cohort
    while True:
        try:
            known = await _highest_known(discovery, cohort)
        except DiscoveryError as error:
            logger.warning("%s; the epoch is claimed by the lock alone", error)
            return lock.claim(engine_id, url, at_least)
        epoch = lock.claim(engine_id, url, max(known, at_least))
        try:
            if await discovery.claim_epoch(cohort, epoch):
                return epoch
        except DiscoveryError as error:
            logger.warning("%s; the epoch is claimed by the lock alone", error)
            return epoch


async def _highest_known(discovery: DiscoveryBackend, cohort: str) -> int:
    """Returns the highest epoch that was claimed in discovery, or that a record there has."""
    claimed, records = await asyncio.gather(discovery.highest_epoch(cohort), discovery.list())
    return max([claimed, *(record.epoch for record in records if record.cohort == cohort)])
