"""Takes over what engines read, when neither the service nor its holder knows it any more.

A rank offers its manifest and its descriptors. Once all ranks of an engine have done so, their weights are a
committed generation again. If the cohort has the same weights by then, another engine was first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from segue.errors import SharedMemoryError
from segue.gms import messages as wire
from segue.gms.lock_state import AdoptEvent, Cohort, PinEvent
from segue.gms.manifest import WeightsManifest, difference, key_of
from segue.gms.session import GmsSession
from segue.gms.slab_calls import read_manifest
from segue.gms.store import RankSlabs
from segue.gms.transport import GmsFrameError, close
from segue.memory.memfd import check_slab
from segue.messages.requests import FIRST_WEIGHT_VERSION

if TYPE_CHECKING:
    from segue.gms.service import MemoryService


@dataclass(slots=True)
class OfferedRank:
    """What one rank has offered so far."""

    session: int
    device: str
    manifest: WeightsManifest
    message: wire.OfferRank
    descriptors: list[int] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether all slabs are there."""
        return len(self.descriptors) == len(self.manifest.identity.slab_sizes)


class WeightOffers:
    """The offers of engines that have not offered all of their ranks yet."""

    def __init__(self, service: MemoryService) -> None:
        self._service = service
        self._ranks: dict[tuple[str, str, int], dict[int, OfferedRank]] = {}  # by cohort, engine, old number

    def take(self, session: GmsSession, message: wire.OfferRank, descriptors: list[int]) -> None:
        """Carry an offer out; the descriptors are the caller's.

        Raises:
            GmsFrameError: the manifest cannot be read, or the slabs are not those that it names.
        """
        if not descriptors:
            raise GmsFrameError("OfferRank has no manifest")
        manifest, hello, service = read_manifest(descriptors[0]), session.hello, self._service
        number, rank, size = session.number, hello.rank, hello.size
        cohort = service.state.cohorts.get(hello.cohort, Cohort())
        if cohort.current is not None:
            if self._has_equal(cohort.current, rank, manifest):
                service.step(PinEvent(session=number, generation=cohort.current), message.call)
                return
            if message.epoch <= cohort.adopted_from:
                service.refuse(session, message.call, "other")
                return
        ranks = self._ranks.setdefault((hello.cohort, hello.engine, message.generation), {})
        if message.first == 0:
            close(old.descriptors if (old := ranks.pop(rank, None)) else [])
            ranks[rank] = OfferedRank(number, hello.device, manifest, message)
        if rank not in ranks or ranks[rank].session != number:
            raise GmsFrameError("OfferRank does not begin with slab 0")
        self._add_slabs(ranks[rank], message.first, descriptors[1:])
        if len(ranks) < size or not all(each.is_whole for each in ranks.values()):
            session.port.send(wire.GenerationNumber(call=message.call, generation=0))
            return
        del self._ranks[hello.cohort, hello.engine, message.generation]
        self._adopt(session, message, [ranks[each] for each in range(size)])

    def forget(self, session: int) -> None:
        """Give up what a session has offered, because it has ended."""
        for key, ranks in list(self._ranks.items()):
            for rank in [rank for rank, each in ranks.items() if each.session == session]:
                close(ranks.pop(rank).descriptors)
            if not ranks:
                del self._ranks[key]

    def _has_equal(self, generation: int, rank: int, manifest: WeightsManifest) -> bool:
        """Whether a committed generation has the bytes that a rank reads."""
        slabs = self._service.store.ranks.get((generation, rank))
        if slabs is None:
            return False
        known = msgspec.msgpack.decode(slabs.manifest, type=WeightsManifest)
        return difference(known.identity, manifest.identity) is None and known.digests == manifest.digests

    def _add_slabs(self, offer: OfferedRank, first: int, descriptors: list[int]) -> None:
        sizes = offer.manifest.identity.slab_sizes[first : first + len(descriptors)]
        if first != len(offer.descriptors) or len(sizes) != len(descriptors):
            raise GmsFrameError(f"OfferRank has {len(descriptors)} slabs from {first} on, which do not fit")
        try:
            for size, descriptor in zip(sizes, descriptors, strict=True):
                if offer.device == "cpu":  # those of a GPU cannot be looked at
                    check_slab(descriptor, size)
        except SharedMemoryError as error:
            raise GmsFrameError(f"OfferRank has what is no slab: {error.message}") from error
        offer.descriptors += [os.dup(descriptor) for descriptor in descriptors]

    def _adopt(self, session: GmsSession, message: wire.OfferRank, ranks: list[OfferedRank]) -> None:
        """Make the weights of an engine a generation, in place of a loading one."""
        service, store, first = self._service, self._service.store, ranks[0].message
        for offer in ranks:
            for size, descriptor in zip(offer.manifest.identity.slab_sizes, offer.descriptors, strict=True):
                store.add(offer.device, size, descriptor)
        number = service.state.serial + 1
        for rank, offer in enumerate(ranks):
            store.ranks[number, rank] = RankSlabs(
                device=offer.device,
                sizes=list(offer.manifest.identity.slab_sizes),
                descriptors=offer.descriptors,
                manifest=msgspec.msgpack.encode(offer.manifest),
            )
        adopt = AdoptEvent(
            session=session.number,
            sessions=tuple(offer.session for offer in ranks),
            cohort=session.hello.cohort,
            key=key_of(ranks[0].manifest.identity),
            is_loaded=first.is_loaded,
            slabs=tuple(tuple(offer.descriptors) for offer in ranks),
            epoch=message.epoch,
            version=first.weight_version,
            first_version=FIRST_WEIGHT_VERSION if first.is_loaded else first.weight_version,
            model_path=first.model_path,
        )
        service.note_event("adopted", f"generation {number} from {session.name}")
        service.step(adopt, message.call)
