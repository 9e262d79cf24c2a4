"""The calls of a session about slabs: taking, sealing and reading the memory of a generation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from segue.errors import MemoryServiceError, SlabInUseError, SlabMemoryError
from segue.gms import messages as wire
from segue.gms.answers import REFUSALS
from segue.gms.lock_state import AbortEvent, SealEvent, TakeEvent, WeightsLease
from segue.gms.manifest import WeightsManifest, decode_manifest
from segue.gms.session import GmsSession
from segue.gms.store import RankSlabs
from segue.gms.transport import GmsFrameError, unpacked

if TYPE_CHECKING:
    from segue.gms.service import MemoryService

RETRY_MEMORY_S = 0.5


def read_manifest(descriptor: int) -> WeightsManifest:
    """Return the manifest in a client's memfd.

    Raises:
        GmsFrameError: it is none.
    """
    try:
        return decode_manifest(unpacked(descriptor))
    except msgspec.MsgspecError as error:
        raise GmsFrameError(f"a manifest cannot be read ({error})") from None


class SlabCalls:
    """Carries these calls out for a service."""

    def __init__(self, service: MemoryService) -> None:
        self._service = service

    async def allocate(self, session: GmsSession, message: wire.AllocateSlabs) -> None:
        if (found := self._writing(session, message)) is None:
            return
        lease, rank = found
        deadline = time.monotonic() + message.wait_s
        while True:
            try:
                made = await self._service.store.create(session.hello.device, message.sizes)
                break
            except MemoryServiceError as error:
                session.refuse(message.call, "slabs", error.message)
                return
            except SlabMemoryError as error:
                self._service.note_event("out_of_memory", f"{session.hello.device}: {error.message}")
                if time.monotonic() >= deadline or session.port.has_left():
                    session.refuse(message.call, "memory", error.message)
                    return
                await asyncio.sleep(RETRY_MEMORY_S)
        self._service.step(
            TakeEvent(session=session.number, lease=message.lease, slabs=tuple(made)), message.call
        )
        now = self._service.state.leases.get(message.lease)
        if now is None or not set(made) <= set(now.ranks[rank].own):  # another rank has ended it meanwhile
            self._service.store.free(made)
            return
        slabs = self._service.store.ranks.setdefault(
            (lease.generation, rank), RankSlabs(device=session.hello.device)
        )
        slabs.sizes += message.sizes
        slabs.descriptors += made
        self._give(session, message.call, message.sizes, made)

    def export(self, session: GmsSession, message: wire.ExportSlabs) -> None:
        slabs = self._committed(session, message)
        if slabs is not None:
            self._give(session, message.call, slabs.sizes, slabs.descriptors)

    def give_manifest(self, session: GmsSession, message: wire.GetManifest) -> None:
        slabs = self._committed(session, message)
        if slabs is not None:
            session.send_file(wire.ManifestGiven(call=message.call), slabs.manifest)

    def _committed(
        self, session: GmsSession, message: wire.ExportSlabs | wire.GetManifest
    ) -> RankSlabs | None:
        """Return a rank's slabs that a session pins, or refuse the call."""
        if (session.number, message.generation) in self._service.state.pins:
            found = self._service.store.ranks.get((message.generation, message.rank))
            if found is not None:
                return found
        session.refuse(message.call, "generation", "the session does not pin this generation and rank")
        return None

    def _give(self, session: GmsSession, call: int, sizes: Sequence[int], descriptors: Sequence[int]) -> None:
        """Send the descriptors of slabs, in as many messages as they need."""
        step, total = wire.MAX_DESCRIPTORS, len(sizes)
        for first in range(0, max(total, 1), step):
            part = slice(first, first + step)
            given = wire.SlabsGiven(call=call, sizes=list(sizes[part]), more=first + step < total)
            session.port.send(given, descriptors[part])

    async def seal(self, session: GmsSession, message: wire.SealRank, descriptor: int) -> None:
        if (found := self._writing(session, message)) is None:
            return
        lease, rank = found
        manifest = read_manifest(descriptor)
        slabs = self._merged(lease, rank, manifest, message.places)
        if slabs is None:
            session.refuse(message.call, "slabs", REFUSALS["slabs"])
            return
        try:
            await self._service.store.seal(session.hello.device, lease.ranks[rank].own)
        except SlabInUseError as error:
            session.refuse(message.call, "in_use", error.message)
            abandon = AbortEvent(session=session.number, lease=message.lease, is_abandoned=True)
            self._service.step(abandon, call=None)  # the call is answered
            return
        event = SealEvent(session=session.number, lease=message.lease, slabs=tuple(slabs.descriptors))
        self._service.step(event, message.call)
        now = self._service.state.leases.get(message.lease)
        if now is not None and now.ranks[rank].is_sealed:
            self._service.store.ranks[lease.generation, rank] = slabs

    def _merged(
        self, lease: WeightsLease, rank: int, manifest: WeightsManifest, places: Sequence[int] | None
    ) -> RankSlabs | None:
        """Return all slabs of a rank: its own, and those of its parent; None: they do not fit."""
        store, own, sizes = self._service.store, lease.ranks[rank].own, manifest.identity.slab_sizes
        slabs = [-1] * len(sizes)
        if lease.parent is not None:
            slabs = list(store.ranks[lease.parent, rank].descriptors)
        places = range(len(own)) if places is None else places
        if len(set(places)) != len(own) or not set(places) <= set(range(len(slabs))):
            return None
        for place, slab in zip(places, own, strict=True):
            slabs[place] = slab
        if -1 in slabs or [store.size_of(slab) for slab in slabs] != sizes:
            return None
        if len(manifest.digests) != len(sizes):
            return None
        return RankSlabs(
            device=store.device_of(slabs[0]),
            sizes=sizes,
            descriptors=slabs,
            manifest=msgspec.msgpack.encode(manifest),
        )

    def _writing(
        self, session: GmsSession, message: wire.AllocateSlabs | wire.SealRank
    ) -> tuple[WeightsLease, int] | None:
        """Return a lease that a session may write, and its rank in it, or refuse the call."""
        lease = self._service.state.leases.get(message.lease)
        rank = None if lease is None or not lease.is_rw else lease.rank_of(session.number)
        if lease is None or rank is None:
            session.refuse(message.call, "lease", REFUSALS["lease"])
            return None
        return lease, rank
