"""The calls of a session about slabs: taking, sealing and reading the memory of a generation."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from segue.errors import MemoryServiceError, SlabInUseError, SlabMemoryError
from segue.gms import messages as wire
from segue.gms.answers import REFUSALS
from segue.gms.lock_state import SealEvent, WeightsLease
from segue.gms.manifest import WeightsManifest, decode_manifest
from segue.gms.session import GmsSession
from segue.gms.store import RankSlabs
from segue.gms.transport import GmsFrameError, close, unpacked

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
        if (lease.generation, rank) in self._service.store.ranks:
            session.refuse(message.call, "slabs", "this rank has its slabs already")
            return
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
                if time.monotonic() >= deadline or session.port.is_closed:
                    session.refuse(message.call, "memory", error.message)
                    return
                await asyncio.sleep(RETRY_MEMORY_S)
        if self._service.state.leases.get(message.lease) is None:  # another rank has ended it meanwhile
            close(made)
            session.refuse(message.call, "lease", REFUSALS["lease"])
            return
        slabs = RankSlabs(device=session.hello.device, sizes=list(message.sizes), descriptors=made)
        self._service.store.ranks[lease.generation, rank] = slabs
        self._give(session, message.call, slabs)

    def export(self, session: GmsSession, message: wire.ExportSlabs) -> None:
        slabs = self._committed(session, message)
        if slabs is not None:
            self._give(session, message.call, slabs)

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

    def _give(self, session: GmsSession, call: int, slabs: RankSlabs) -> None:
        """Send the descriptors of slabs, in as many messages as they need."""
        step, total = wire.MAX_DESCRIPTORS, len(slabs.sizes)
        for first in range(0, max(total, 1), step):
            part = slice(first, first + step)
            given = wire.SlabsGiven(call=call, sizes=slabs.sizes[part], more=first + step < total)
            session.port.send(given, slabs.descriptors[part])

    async def seal(self, session: GmsSession, message: wire.SealRank, descriptor: int) -> None:
        if (found := self._writing(session, message)) is None:
            return
        lease, rank = found
        manifest = read_manifest(descriptor)
        slabs = self._service.store.ranks.get((lease.generation, rank))
        if (
            slabs is None
            or manifest.identity.slab_sizes != slabs.sizes
            or len(manifest.digests) != len(slabs.sizes)
        ):
            session.refuse(message.call, "slabs", "the manifest is not one of the rank's slabs")
            return
        try:
            await self._service.store.seal(slabs)
        except SlabInUseError as error:
            session.refuse(message.call, "in_use", error.message)
            return
        slabs.manifest = msgspec.msgpack.encode(manifest)
        self._service.step(SealEvent(session=session.number, lease=message.lease), message.call)

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
