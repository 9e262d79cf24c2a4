"""The KV cache of a rank in memory of the memory service, which hands it on to the next engine."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf

import torch

from segue.errors import MemoryServiceError, SegueError
from segue.gms.client import GmsClient
from segue.gms.client_kv import KVGrant
from segue.gms.transport import close
from segue.kvcache.journal import renew_name
from segue.logs import logger
from segue.memory.arena import SLAB_BYTES
from segue.memory.budget import gib
from segue.memory.releasable import ReleasableMemory
from segue.messages.life import HeldKV

RETRY_S = 0.05  # between two tries to reach the service


class ServiceKVMemory(ReleasableMemory):
    """The KV cache of an engine that stands by: its scratch page, and the whole of it once the engine wakes.

    The whole comes from the service (:meth:`lease`). If it does not, `wake` takes memory of this process.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, parks_kv=True)
        self.is_leased = False
        self.journal_bytes = 0  # of the journal that is kept with the memory; 0: none

    def lease_in_time(
        self,
        session: Callable[[], GmsClient],
        epoch: int,
        *,
        away_until: float,
        fence_until: float,
        limit: float,
    ) -> None:
        """Get the memory from the service, unless that is away, or takes too long: see `is_leased`.

        Args:
            session: returns the session with the service; another thread opens it again if it is lost.
            epoch: that the engine has claimed in the service.
            away_until: until when a service that is away is waited for (as all times, `time.monotonic`).
            fence_until: until when the end of the process that wrote before is waited for.
            limit: until when an answer of the service is waited for.

        Raises:
            MemoryServiceError: the service refuses.
            SharedMemoryError: see :meth:`lease`.
        """
        while True:
            now = time.monotonic()
            try:
                self.lease(session(), epoch, max(0.0, fence_until - now), max(0.0, limit - now))
                return
            except MemoryServiceError as error:
                is_over = time.monotonic() >= min(away_until, limit)
                if error.code in ("lost", "late"):
                    if is_over:
                        logger.warning("the KV cache is memory of this process: %s", error.message)
                        return
                elif error.code != "unclaimed" or is_over:  # the first rank may still have to tell the epoch
                    raise
            time.sleep(RETRY_S)

    def lease(self, client: GmsClient, epoch: int, wait_s: float, limit_s: float = inf) -> None:
        """Map what the service grants to this rank, in place of the scratch page.

        Fresh memory is zeroed, because that of a device may have bytes of any process, and the service is
        told so: if this engine dies before, the next one zeroes it. What an engine of the cohort has left
        stays: attention reads no KV slot that its own engine has not written, as it is in a pool that has
        served for hours.

        Args:
            client: a session with the service.
            epoch: that the engine has claimed in the service.
            wait_s: how long the end of the process that wrote before, and memory, are waited for.
            limit_s: how long the service may take for its answer.

        Raises:
            MemoryServiceError: the service refuses, or has not answered (codes "late" and "lost").
            SharedMemoryError: the memory cannot be mapped, and is given back; the scratch page is away then.
        """
        held = self._ranges["kv_cache"]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the service cannot take what torch keeps for later
        grant = client.ask_kv(
            epoch,
            held.window.size,
            slab_bytes=SLAB_BYTES,
            journal_bytes=self.journal_bytes,
            wait_s=wait_s,
            limit_s=limit_s,
        )
        try:
            held.window.clear()
            self._take_journal(grant, epoch)
            start = 0
            for size, descriptor in zip(grant.sizes, grant.descriptors, strict=True):
                slab = self._vmm.adopt(descriptor, size)
                try:
                    held.window.map(start, slab, writable=True)
                finally:
                    self._vmm.close(slab)  # the mapping keeps the memory
                start += size
            if grant.is_fresh and self.device.type == "cuda":
                held.tensors[0].zero_()
                self._synchronise()
        except BaseException:
            self._give_back(client)
            raise
        finally:
            close([*grant.descriptors, *([] if grant.journal is None else [grant.journal])])
        if grant.is_fresh:
            with suppress(MemoryServiceError):  # then it is fresh for the next engine, too
                client.kv_prepared()
        self.is_leased, self._is_parked = True, False
        what = "fresh" if grant.is_fresh else "of the engine before"
        logger.info("KV cache: %s of the memory service, %s", gib(held.window.size), what)

    def _give_back(self, client: GmsClient) -> None:
        """Leave nothing of a lease that has failed. What cannot be unmapped is not given back."""
        self.kv_journal = self.held_kv = None
        with suppress(SegueError, OSError):
            self._ranges["kv_cache"].window.clear()
            client.release_kv()

    def _take_journal(self, grant: KVGrant, epoch: int) -> None:
        """Map the journal, and give the memory, to which this engine will write, another name.

        So no journal describes the memory of a rank that was leased without that of the others.
        """
        if grant.journal is None:
            return
        mapped = mmap.mmap(grant.journal, os.fstat(grant.journal).st_size)
        mapped.madvise(mmap.MADV_DONTFORK)  # as the KV memory itself, it is this process's alone
        self.kv_journal = memoryview(mapped)
        before, now = renew_name(self.kv_journal)
        self.held_kv = HeldKV(before=before.hex(), now=now.hex(), is_fresh=grant.is_fresh, epoch=epoch)
