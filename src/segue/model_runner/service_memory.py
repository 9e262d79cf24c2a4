"""Weights that the memory service keeps: one engine of a cohort loads them, and all read the same bytes.

The weights are mapped for reading, so nothing may write to them: a write would end the process. The KV cache
is another object's, which may get it from the service too (`service_kv.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache
from math import inf

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from segue.distributed.groups import TPGroups
from segue.errors import MemoryServiceError, WeightsMismatchError
from segue.gms.client import GmsClient
from segue.gms.client_connection import GmsTarget
from segue.gms.lock_state import AskMode
from segue.gms.manifest import WeightsIdentity, WeightsManifest, difference
from segue.gms.messages import MAX_JOURNAL, WeightsGranted
from segue.gms.reconnecting import SessionKeeper
from segue.kvcache.journal import NAME_BYTES, journal_bytes
from segue.logs import logger
from segue.memory.arena import Arena, Layout
from segue.memory.budget import gib
from segue.memory.cuda_vmm import CudaVMM
from segue.memory.geometry import KVGeometry
from segue.memory.memfd import MemfdVMM
from segue.memory.rank_memory import PrivateMemory, RankMemory
from segue.memory.releasable import WAKE_SHARE
from segue.memory.vmm import VMM
from segue.memory.window import MemoryWindow
from segue.messages.requests import FIRST_WEIGHT_VERSION
from segue.model_runner.service_generations import (
    MEMORY_S,
    ServedGeneration,
    bound_arena,
    damaged,
    starts_of,
)
from segue.model_runner.service_kv import RETRY_S, ServiceKVMemory
from segue.model_runner.service_progress import reporting
from segue.version import __version__

WAIT_S = 7200.0  # how long the load of another engine is waited for
_WAITING, _FAILED, _GRANTED = range(3)  # what rank 0 tells the other ranks
AWAY_S = 3.0  # how long an engine that wakes waits for a service that is away, for the sake of its KV memory
KV_NOTE = "kv_geometry"  # the note of the cohort with the sizes that all its engines have
_REASON = "memory service"  # the key under which rank 0 leaves the text of its error


class ServiceMemory(PrivateMemory):
    """Memory of this process alone, except that the weights, and perhaps the KV cache, are the service's."""

    def __init__(
        self,
        device: torch.device,
        target: GmsTarget,
        mode: AskMode,
        groups: TPGroups,
        identify: Callable[[Layout], WeightsIdentity],
        *,
        kv: RankMemory | None = None,
        fence_timeout_s: float = 5.0,
        keeps_journal: bool = False,
    ) -> None:
        """Serve a rank.

        Args:
            device: of the rank.
            target: the service, and who asks.
            mode: how the weights are asked for.
            groups: the ranks of the engine.
            identify: says what the weights are, once their layout is known.
            kv: has the KV cache; by default, memory of this process.
            fence_timeout_s: how long the end of the process is waited for that wrote to the KV cache before.
            keeps_journal: whether the KV cache has a journal, for the next engine.
        """
        super().__init__(device)
        self._kv = kv or PrivateMemory(device)
        self._leasable = self._kv if isinstance(self._kv, ServiceKVMemory) else None
        self.parks_kv = self._kv.parks_kv
        self._fence_timeout_s = fence_timeout_s
        self._keeps_journal = keeps_journal
        self._target = target
        self._mode = mode
        self._groups = groups
        self._identify = identify
        self._vmm: VMM = MemfdVMM() if device.type == "cpu" else CudaVMM(device.index, self._synchronise)
        self._client: GmsClient | None = None
        self._keeper: SessionKeeper | None = None
        self._on_owner: Callable[[bool], None] = lambda lost: None
        self._epoch = 0  # under which the engine serves
        self._owes_claim = False  # the service was away when the engine began to serve
        self._has_own_kv = False  # though the KV cache was to be the service's
        self._claiming = threading.Lock()
        self._geometry: KVGeometry | None = None
        self._window: MemoryWindow | None = None
        self._served: ServedGeneration | None = None

    def load(self, layout: Layout, fill: Callable[[Callable[[], Arena]], None]) -> Arena:
        """See `RankMemory.load`; `fill` is called if this engine is the one that loads. All ranks call it.

        Raises:
            MemoryServiceError: the service cannot be reached, is lost meanwhile, or refuses a call.
            WeightsMismatchError: the cohort has other weights.
        """
        client = self._session()
        try:
            wanted = WeightsManifest(identity=self._identify(layout), segue=__version__)
            grant = self._ask(client, wanted)
            self._window = window = MemoryWindow(self._vmm, layout.num_bytes)
            arena = bound_arena(layout, window, self.device)
            if grant.mode == "rw":
                self._fill(client, grant.lease, wanted, arena, fill)
            manifest, descriptors = self._read(client, grant, wanted.identity, arena)
        except BaseException:
            client.close()  # the next engine need not wait for the end of this process
            raise
        if grant.mode == "rw":
            grant = structs.replace(grant, weight_version=FIRST_WEIGHT_VERSION)
        self.generations = self._served = served = ServedGeneration(
            client, self._vmm, window, arena, manifest, grant, descriptors
        )
        self._keeper = SessionKeeper(
            client,
            served,
            epoch=lambda: served.epoch if self._epoch else 0,
            on_change=lambda lost: self._on_owner(lost),
            on_reopened=self._introduce_again,
            on_stale=_end_stale,
        )
        what = "loaded into" if grant.mode == "rw" else "mapped from"
        logger.info("weights %s the memory service: generation %d", what, grant.generation)
        return arena

    def wake(self, epoch: int = 0, timeout_s: float = 0.0) -> None:
        """See `RankMemory.wake`: rank 0 ends what the engine before may still change, and KV is taken.

        A service that is away changes nothing either; without it the engine serves what it has mapped. If its
        KV cache is to be the service's, it waits a while, and takes memory of this process then. The service
        is told so, before if it answers, and else once it does: it keeps no second KV cache.

        Raises:
            MemoryServiceError: the service refuses the epoch, or the KV memory.
            SharedMemoryError: there is too little memory for the KV cache, or it cannot be mapped.
        """
        began, kv = time.monotonic(), self._leasable if epoch > 0 else None
        self._epoch = epoch
        if self._served is not None:
            self._served.epoch = max(self._served.epoch, epoch)
        away_until = began if kv is None else began + AWAY_S
        claimed = self._claim(away_until) if epoch and self._groups.tp.is_first else 0
        if kv is not None:
            claimed = self._groups.all_gather([claimed])[0][0]
            if claimed:
                if self._served is not None:  # told to a service that is started again meanwhile
                    self._served.epoch = max(self._served.epoch, claimed)
                share = WAKE_SHARE * timeout_s
                kv.lease_in_time(
                    self._session,
                    claimed,
                    away_until=away_until,
                    fence_until=began + min(self._fence_timeout_s, share),
                    limit=began + share if timeout_s else inf,
                )
            if not kv.is_leased:
                self._withdraw_kv()
        self._kv.wake(epoch, max(0.0, began + timeout_s - time.monotonic()))
        self.held_kv, self.kv_journal = self._kv.held_kv, self._kv.kv_journal

    def _claim(self, away_until: float) -> int:
        """Claim an epoch in the service, as rank 0; returns it, 0: the service is away."""
        served = self._served
        if served is None:
            return 0
        while True:
            try:
                with self._claiming:
                    if not served.has_claimed:
                        served.claim(max(served.epoch, self._epoch))
                    return served.epoch
            except MemoryServiceError as error:
                if error.code != "lost":
                    raise
                if time.monotonic() >= away_until:
                    self._owes_claim = True
                    logger.warning("serves without the memory service: %s", error.message)
                    return 0
            time.sleep(RETRY_S)

    def _withdraw_kv(self) -> None:
        """Have the service keep no KV memory for this rank, which takes memory of its own."""
        self._has_own_kv = True
        with suppress(MemoryServiceError):  # then it is told when it is there again
            self._session().withdraw_kv()

    def watch_owner(self, on_change: Callable[[bool], None]) -> None:
        """See `RankMemory.watch_owner`."""
        self._on_owner = on_change

    def take_kv(self, num_bytes: int, scratch_bytes: int = 0) -> Tensor:
        """See `RankMemory.take_kv`."""
        tensor = self._kv.take_kv(num_bytes, scratch_bytes)
        self.kv_descriptor = self._kv.kv_descriptor
        return tensor

    def pinned_kv(self) -> KVGeometry | None:
        """See `RankMemory.pinned_kv`: rank 0 asks the service."""
        note = self._session().note(KV_NOTE) if self._groups.tp.rank == 0 else None
        return self._spread(None if note is None else msgspec.json.decode(note, type=KVGeometry))

    def pin_kv(self, geometry: KVGeometry) -> KVGeometry:
        """See `RankMemory.pin_kv`: the sizes hold until the last engine of the cohort has ended."""
        holds = None
        if self._groups.tp.rank == 0:
            note = self._session().put_note(KV_NOTE, msgspec.json.encode(geometry), keeps=True)
            assert note is not None
            self._geometry = holds = msgspec.json.decode(note, type=KVGeometry)
        found = self._spread(holds)
        assert found is not None
        if self._leasable is not None and self._keeps_journal:
            size = journal_bytes(found.num_pages, found.page_size) if self._groups.tp.is_first else NAME_BYTES
            if size > MAX_JOURNAL:
                logger.warning(
                    "--warm-kv: the journal of %d pages of %d tokens would have %s, and the memory service "
                    "keeps %s at most, so no engine goes on with the prefix cache of the one before; choose "
                    "a larger --page-size",
                    *(found.num_pages, found.page_size, gib(size), gib(MAX_JOURNAL)),
                )
                size = NAME_BYTES  # which is no journal: see `worker.warm_kv`
            self._leasable.journal_bytes = size
        return found

    def _introduce_again(self) -> None:
        """Tell a service that was started again what it may have lost: the cohort's sizes, and its epoch."""
        client, served = self._session(), self._served
        if self._geometry is not None:
            client.put_note(KV_NOTE, msgspec.json.encode(self._geometry), keeps=True)
        if served is not None and self._epoch and self._groups.tp.is_first:
            with self._claiming:
                known = client.epoch()
                is_behind = known < served.epoch and not served.has_claimed
                if known <= served.epoch and (self._owes_claim or is_behind):
                    served.claim(max(served.epoch, self._epoch))
                    self._owes_claim = False
        if self._has_own_kv:
            client.withdraw_kv()

    def _spread(self, geometry: KVGeometry | None) -> KVGeometry | None:
        """Return on every rank what rank 0 has."""
        none = [0] * len(fields(KVGeometry))
        numbers = self._groups.all_gather(none if geometry is None else geometry.numbers)[0]
        return None if numbers == none else KVGeometry.of(numbers)

    def _session(self) -> GmsClient:
        """Return the session with the service, which is opened first if need be."""
        if self._client is None:
            self._client = GmsClient(self._target)
        return self._client

    def close(self) -> None:
        """See `RankMemory.close`."""
        self._kv.close()
        if self._leasable is not None and self._leasable.is_leased:
            with suppress(MemoryServiceError):  # else the service sees that this process ends
                self._session().release_kv()
        if self._keeper is not None:
            self._keeper.close()
        elif self._client is not None:
            self._client.close()
        if self._served is not None:
            self._served.close()
        if self._window is not None:
            self._window.close()
            self._window = None

    def _ask(self, client: GmsClient, wanted: WeightsManifest) -> WeightsGranted:
        """Return what this rank is granted: rank 0 asks, and the others join its lease."""
        groups = self._groups
        if groups.tp.rank == 0:
            try:
                # The other ranks hear of each wait, because a collective has a shorter deadline.
                grant = client.ask(wanted, self._mode, wait_s=WAIT_S, on_wait=self._tell_waiting)
            except MemoryServiceError as error:
                if groups.store is not None:
                    groups.store.set(_REASON, error.message)
                groups.all_gather([_FAILED, 0])
                raise
            groups.all_gather([_GRANTED, grant.lease])
            return grant
        while (told := groups.all_gather([_WAITING, 0])[0])[0] == _WAITING:
            pass
        if told[0] == _FAILED:
            assert groups.store is not None
            raise MemoryServiceError(groups.store.get(_REASON).decode())
        return client.join(told[1])

    def _tell_waiting(self, position: int) -> None:
        self._groups.all_gather([_WAITING, 0])

    def _fill(
        self,
        client: GmsClient,
        lease: int,
        wanted: WeightsManifest,
        arena: Arena,
        fill: Callable[[Callable[[], Arena]], None],
    ) -> None:
        """Fill the slabs of a lease to write, make them final, and commit them with the other ranks."""
        assert self._window is not None

        @cache
        def take() -> Arena:
            sizes = arena.layout.sizes
            self._map(arena.layout, client.allocate(lease, sizes, wait_s=MEMORY_S), writable=True)
            return arena

        with reporting(client, lease):
            fill(take)
            digests = list(take().checksum())
        self._window.clear()  # what is mapped to be written cannot be sealed
        client.seal(lease, structs.replace(wanted, digests=digests))
        self._groups.barrier()
        if self._groups.tp.rank == 0:
            client.commit(lease, FIRST_WEIGHT_VERSION)
        self._groups.barrier()

    def _read(
        self, client: GmsClient, grant: WeightsGranted, wanted: WeightsIdentity, arena: Arena
    ) -> tuple[WeightsManifest, list[int]]:
        """Map a committed generation to read; returns its manifest, and descriptors, which the caller closes.

        Bytes that another engine has loaded are compared with its digests.
        """
        assert self._window is not None
        generation, rank = grant.generation, self._groups.tp.rank
        served = client.manifest(generation, rank)
        if (found := difference(served.identity, wanted)) is not None:
            raise WeightsMismatchError(
                f"memory service: rank {rank} of cohort {self._target.cohort!r} has other weights: "
                f"{found.field} is {found.have}, and this engine has {found.want}; use the same model and "
                "options, or another --cohort",
                param=found.field,
            )
        descriptors = client.export(generation, rank)[1]
        kept = [os.dup(descriptor) for descriptor in descriptors]
        self._map(arena.layout, descriptors, writable=False)
        self._window.populate()
        if grant.mode == "ro" and (bad := _differing(arena, served.digests)):
            raise MemoryServiceError(damaged(bad[0], generation, rank))
        return served, kept

    def _map(self, layout: Layout, descriptors: Sequence[int], *, writable: bool) -> None:
        """Map slabs one behind the other; their descriptors are closed."""
        assert self._window is not None
        for start, size, descriptor in zip(starts_of(layout), layout.sizes, descriptors, strict=True):
            slab = self._vmm.adopt(descriptor, size)
            os.close(descriptor)
            try:
                self._window.map(start, slab, writable=writable)
            finally:
                self._vmm.close(slab)  # the mapping keeps the memory

    def _synchronise(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


def _end_stale(error: MemoryServiceError) -> None:
    """End this process, because the service has newer weights than those that it reads."""
    logger.error("%s", error.message)
    os._exit(1)


def _differing(arena: Arena, digests: Sequence[int]) -> list[int]:
    """Return the slabs whose bytes are not those of the digests."""
    found = zip(arena.checksum(), digests, strict=True)
    return [number for number, (one, other) in enumerate(found) if one != other]
