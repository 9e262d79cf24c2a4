"""Weight updates of weights that the memory service keeps: each one is a new generation of them.

An update goes into new slabs, beside the served ones. When all ranks have sealed theirs, rank 0 commits the
generation, and each rank maps its new slabs where the old ones were. Nothing that serves is ever written, and
slabs that the update does not touch are those of the generation before. The other engines of the cohort are
told, and follow: they map the same slabs.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import torch
from msgspec import structs

from segue.errors import MemoryServiceError
from segue.gms.client import GmsClient
from segue.gms.manifest import WeightsManifest
from segue.gms.messages import EpochChanged, GenerationChanged, Notice, SessionOpened, WeightsGranted
from segue.gms.reconnecting import KeptWeights
from segue.logs import logger
from segue.memory.arena import Arena, Layout
from segue.memory.binding import tensor_at
from segue.memory.checksum import MASK, digest
from segue.memory.vmm import VMM, Slab
from segue.memory.window import MemoryWindow

MEMORY_S = 60.0  # how long it is tried again if the device is out of memory
FOLLOW_S = 30.0  # that an update waits for engines which still read the generation before the present one


class ServedGeneration:
    """The generation that a rank serves. See `rank_memory.Generations`."""

    def __init__(
        self,
        client: GmsClient,
        vmm: VMM,
        window: MemoryWindow,
        arena: Arena,
        manifest: WeightsManifest,
        grant: WeightsGranted,
        descriptors: list[int],
    ) -> None:
        """Take over the slabs that were granted, and are mapped in a window, to which an arena is bound.

        Their descriptors, of which this object closes those that it gives up, are for a service that has
        lost them.
        """
        self.client = client
        self.vmm = vmm
        self.window = window
        self.layout = arena.layout
        self.device = arena.slabs[0].device
        self.starts = starts_of(self.layout)
        self.rank = client.target.rank
        self.manifest = manifest
        self.number = grant.generation
        self.version, self.model_path = grant.weight_version, grant.model_path  # when the engine started
        self.retired: list[int] = []  # generations that are not served any more, and still pinned
        self.abandoned: list[NextGeneration] = []
        self._unpinning = threading.Lock()
        self._is_loaded = grant.is_loaded
        self._versions = {self.number: (self.version, self.model_path)}  # of generations, if known
        self._descriptors = descriptors
        self._changing = threading.Lock()  # of what `kept` returns
        self._has_claimed = False  # an epoch of its own
        self._claimed_in: SessionOpened | None = None  # the session in which it has claimed one
        self.epoch = client.opened.epoch  # an engine that is in no cohort has that of its start

    @property
    def name(self) -> str:
        """See `Generations.name`."""
        digests = hashlib.sha256(repr(self.manifest.digests).encode()).hexdigest()
        return f"{self.number}-{digests[:16]}"

    def close(self) -> None:
        """Give the descriptors up."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def kept(self) -> KeptWeights:
        """See `reconnecting.HeldWeights`."""
        with self._changing:
            version, model_path = self._versions.get(self.number, ("", None))
            return KeptWeights(
                generation=self.number,
                manifest=self.manifest,
                descriptors=[os.dup(descriptor) for descriptor in self._descriptors],
                is_loaded=self._is_loaded,
                weight_version=version,
                model_path=model_path,
            )

    def renumber(self, number: int) -> None:
        """See `reconnecting.HeldWeights`."""
        with self._changing:
            self._versions = {number: self._versions.get(self.number, ("", None))}
            self.number = number
            self.retired.clear()  # the service does not know them

    def note_version(self, number: int, version: str, model_path: str | None) -> None:
        """Note the version of a generation, which this rank may serve later."""
        with self._changing:
            self._versions[number] = version, model_path

    def replace(self, number: int, manifest: WeightsManifest, descriptors: dict[int, int]) -> None:
        """Serve another generation, whose slabs are mapped; `descriptors` are of those that differ."""
        with self._changing:
            for place, descriptor in descriptors.items():
                os.close(self._descriptors[place])
                self._descriptors[place] = descriptor
            self.number, self.manifest, self._is_loaded = number, manifest, False
            self._versions = {each: found for each, found in self._versions.items() if each >= number}

    def open(self) -> NextGeneration:
        """See `Generations.open`."""
        self.unpin_retired()  # the ask would wait for it, and no other call is made meanwhile
        wanted = structs.replace(self.manifest, digests=[])
        grant = self.client.ask(wanted, "rw", wait_s=FOLLOW_S, update_epoch=self.epoch)
        return self._next(grant)

    def join(self, lease: int) -> NextGeneration:
        """See `Generations.join`."""
        return self._next(self.client.join(lease))

    def _next(self, grant: WeightsGranted) -> NextGeneration:
        if grant.parent != self.number:
            self.client.abort(grant.lease)
            raise MemoryServiceError(
                f"rank {self.rank} serves generation {self.number}, and the update starts from "
                f"{grant.parent}: another engine of the cohort has just changed the weights. Retry the update"
            )
        return NextGeneration(self, grant.generation, grant.lease)

    def fetch(self, number: int) -> NextGeneration:
        """See `Generations.fetch`."""
        client = self.client
        client.pin(number)
        manifest = client.manifest(number, self.rank)
        fetched = NextGeneration(self, number)
        try:
            fetched.read(manifest, client.export(number, self.rank)[1])
        except BaseException:
            fetched.release()
            raise
        return fetched

    def unpin_retired(self) -> None:
        """Give up the generations that this rank has served before."""
        with self._unpinning:
            while self.retired:
                number = self.retired[-1]
                self.client.unpin(number)
                with suppress(ValueError):  # the list is cleared if the service is started again
                    self.retired.remove(number)  # others may have been appended meanwhile

    def rename(self, version: str) -> None:
        """See `Generations.rename`."""
        self.note_version(self.number, version, self._versions.get(self.number, ("", None))[1])
        self.client.rename(self.number, self.epoch, version)

    def claim(self, epoch: int) -> None:
        """See `Generations.claim`."""
        session = self.client.opened
        self.epoch = self.client.claim(seen=epoch - 1)
        self._has_claimed, self._claimed_in = True, session
        fenced = self.client.fence(self.epoch, kills=True)
        if fenced.alive:
            logger.info("processes of engines that served before are killed: %s", fenced.alive)

    @property
    def has_claimed(self) -> bool:
        """Whether the service that is there now has given an epoch to this engine."""
        return self._claimed_in is self.client.opened

    def watch(self, on_changed: Callable[[int, str, str | None], None]) -> None:
        """See `Generations.watch`."""

        def on_notice(notice: Notice) -> None:
            match notice:
                case GenerationChanged():
                    self.note_version(notice.generation, notice.weight_version, notice.model_path)
                    on_changed(notice.generation, notice.weight_version, notice.model_path)
                case EpochChanged() if self._has_claimed and notice.epoch > self.epoch:
                    _end_replaced(notice.epoch)

        self.client.listen(on_notice)


class NextGeneration:
    """The slabs of a rank in which another generation differs from the served one, in a window of their own.

    With a `lease` they are to be written; without one they were exported. See `rank_memory.NextWeights`.
    """

    def __init__(self, served: ServedGeneration, number: int, lease: int | None = None) -> None:
        self.lease = lease
        self._number = number
        self._served = served
        self._window = MemoryWindow(served.vmm, served.layout.num_bytes)
        self.arena = bound_arena(served.layout, self._window, served.device)
        self._slabs: dict[int, Slab] = {}  # by their places, in the order in which they were taken
        self._descriptors: dict[int, int] = {}  # of these slabs
        self._manifest = served.manifest
        self._is_served = False

    @property
    def parameters(self) -> set[str]:
        """See `NextWeights.parameters`."""
        return {each.name for each in self._served.layout.table.values() if each.slab in self._slabs}

    def take(self, slabs: Collection[int]) -> list[int]:
        """See `NextWeights.take`."""
        assert self.lease is not None
        new = sorted(set(slabs) - self._slabs.keys())
        if new:
            served = self._served
            sizes = [served.layout.sizes[place] for place in new]
            self._map(new, served.client.allocate(self.lease, sizes, wait_s=MEMORY_S), writable=True)
            self.arena.zero_gaps(new)
        return new

    def seal(self) -> None:
        """See `NextWeights.seal`."""
        assert self.lease is not None
        self._manifest = structs.replace(self._manifest, digests=self._digests())
        self._window.clear()  # what is mapped to be written cannot be sealed
        self._served.client.seal(self.lease, self._manifest, list(self._slabs))

    def commit(self, version: str, model_path: str | None) -> None:
        """See `NextWeights.commit`."""
        assert self.lease is not None
        self._served.client.commit(self.lease, version, model_path)
        self._served.note_version(self._number, version, model_path)

    def adopt(self) -> None:
        """See `NextWeights.adopt`."""
        served = self._served
        self._window.clear()
        slabs = {served.starts[place]: slab for place, slab in self._slabs.items()}
        served.window.remap(slabs, writable=False)
        served.window.populate(slabs)
        if served.number != self._number:  # the service may have been started again, and counts anew
            served.retired.append(served.number)
        served.replace(self._number, self._manifest, self._descriptors)
        self._descriptors = {}
        self._is_served = True

    def read(self, manifest: WeightsManifest, descriptors: Sequence[int]) -> None:
        """Map the slabs that differ, to read, and compare their bytes with their digests.

        Raises:
            MemoryServiceError: the bytes are others than their writer's.
        """
        pairs = enumerate(zip(manifest.digests, self._served.manifest.digests, strict=True))
        places = [place for place, (new, old) in pairs if new != old]
        others = [descriptor for place, descriptor in enumerate(descriptors) if place not in places]
        for descriptor in others:
            os.close(descriptor)
        self._map(places, [descriptors[place] for place in places], writable=False)
        self._manifest = manifest
        found = self._digests()
        if bad := [place for place in places if found[place] != manifest.digests[place]]:
            raise MemoryServiceError(damaged(bad[0], self._number, self._served.rank))

    def release(self, *, in_use: bool = False) -> None:
        """See `NextWeights.release`."""
        client = self._served.client
        try:
            if self._is_served:
                self._served.unpin_retired()
            elif self.lease is None:
                client.unpin(self._number)
            else:
                client.abort(self.lease, is_abandoned=in_use)
        except MemoryServiceError as error:
            logger.debug("the memory service is not told: %s", error.message)  # it has ended this itself
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        if in_use:  # something may still write there
            self._served.abandoned.append(self)
            return
        self._window.close()
        for slab in self._slabs.values():
            self._served.vmm.close(slab)
        self._slabs.clear()

    def _map(self, places: Sequence[int], descriptors: Sequence[int], *, writable: bool) -> None:
        """Map slabs at their places; their descriptors are this object's now."""
        served = self._served
        self._descriptors |= zip(places, descriptors, strict=True)
        for place, descriptor in zip(places, descriptors, strict=True):
            self._slabs[place] = slab = served.vmm.adopt(descriptor, served.layout.sizes[place])
            self._window.map(served.starts[place], slab, writable=writable)

    def _digests(self) -> list[int]:
        """Return the digest of each slab of the rank: of those that are here, by their present bytes."""
        found = list(self._manifest.digests)
        for place in self._slabs:
            found[place] = int(digest(self.arena.slabs[place])) & MASK
        return found


def _end_replaced(epoch: int) -> None:
    """End this process, because another engine serves in its engine's place: nothing that it does counts."""
    logger.error("another engine of the cohort has claimed epoch %d, and serves; this one ends", epoch)
    os._exit(1)


def bound_arena(layout: Layout, window: MemoryWindow, device: torch.device) -> Arena:
    """Return an arena in a window of addresses, where nothing need be mapped yet."""
    places = zip(starts_of(layout), layout.sizes, strict=True)
    return Arena(layout, [tensor_at(window.address + start, size, device) for start, size in places])


def starts_of(layout: Layout) -> list[int]:
    """Return the offset of each slab in a window that has all of them."""
    return [sum(layout.sizes[:place]) for place in range(len(layout.sizes))]


def damaged(slab: int, generation: int, rank: int) -> str:
    """Return the message for a slab with other bytes than its writer has sealed."""
    return (
        f"slab {slab} of generation {generation}, rank {rank}, has other bytes in the memory service than "
        "were written; the memory of this host or device is damaged. End the service and its holder, so that "
        "the weights are loaded again"
    )
