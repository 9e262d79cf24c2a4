"""Where the large memory of a rank comes from: served weights, the KV cache, staged weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from segue.memory import backing, device_shared, shared
from segue.memory.arena import Arena, Layout
from segue.memory.geometry import KVGeometry
from segue.messages.life import HeldKV

Place = Literal["device", "host"]


class NextWeights(Protocol):
    """Weights beside the served ones, which take their place as a whole: nothing that serves is written.

    Only those slabs of the arena are there in which the weights differ.
    """

    arena: Arena  # has the layout of the served weights
    lease: int | None  # by which all ranks of the engine write these weights; None: another engine has

    @property
    def parameters(self) -> set[str]:
        """The parameters in the slabs that differ."""
        ...

    def take(self, slabs: Collection[int]) -> list[int]:
        """Take memory for slabs that are to be written; returns those that are new, with undefined contents.

        Raises:
            MemoryServiceError: the service is lost, has too little memory, or has ended the lease.
        """
        ...

    def seal(self) -> None:
        """Make the slabs final, which nothing uses any more.

        Raises:
            MemoryServiceError: as above; or something still has a slab mapped for writing.
        """
        ...

    def commit(self, version: str, model_path: str | None) -> None:
        """Make these weights the current ones of the cohort, as rank 0, when all ranks have sealed theirs.

        Raises:
            MemoryServiceError: as above; nothing has changed, unless the service was lost meanwhile.
        """
        ...

    def adopt(self) -> None:
        """Serve these weights, between two steps: the slabs that differ take the places of the served ones.

        Raises:
            SharedMemoryError: a slab cannot be mapped; this rank cannot serve any more.
        """
        ...

    def release(self, *, in_use: bool = False) -> None:
        """Give up the memory, which is kept for its user for ever if it is `in_use`.

        Weights that were committed stay with the service.
        """
        ...


class Generations(Protocol):
    """The served weights, as one generation of those that a cohort of engines shares."""

    number: int  # of the generation that this rank serves
    version: str  # of the weights with which the engine started
    model_path: str | None  # where they came from, if an update has brought them

    @property
    def name(self) -> str:
        """What tells the served weights apart from all others."""
        ...

    def open(self) -> NextWeights:
        """Begin to write the next generation, as rank 0.

        Raises:
            MemoryServiceError: the service is lost; or another engine writes, or serves in this one's place,
                or still reads the generation before this one.
        """
        ...

    def join(self, lease: int) -> NextWeights:
        """Begin to write this rank's part of the generation for which rank 0 has a lease.

        Raises:
            MemoryServiceError: the service is lost, or has ended the lease.
        """
        ...

    def fetch(self, number: int) -> NextWeights:
        """Return a generation that another engine has committed.

        Raises:
            MemoryServiceError: the service is lost or does not have it, or its bytes are damaged.
        """
        ...

    def rename(self, version: str) -> None:
        """Give the current generation another version, as rank 0.

        Raises:
            MemoryServiceError: the service is lost, or another engine serves in this one's place.
        """
        ...

    def claim(self, epoch: int) -> None:
        """Take the place of the engine that served before, as rank 0: its updates are over.

        Raises:
            MemoryServiceError: the service is lost.
        """
        ...

    def watch(self, on_changed: Callable[[int, str, str | None], None]) -> None:
        """Have a function called, in any thread, whenever another engine has changed the weights.

        It gets the number, the version and the path of the current generation.
        """
        ...


class RankMemory(Protocol):
    """Gives a rank its large memory, and takes back what was staged."""

    device: torch.device
    kv_descriptor: int | None  # of the KV cache's memory, where other processes may map it
    held_kv: HeldKV | None  # the KV cache's memory, if it is kept for the next engine; known from the wake on
    kv_journal: memoryview | None  # that is kept with it
    generations: Generations | None  # None: the weights are this process's own, and updates write to them
    parks_kv: bool  # an engine that stands by has the first and the scratch page of its KV cache alone

    def pinned_kv(self) -> KVGeometry | None:
        """Return the sizes that the engines of this cohort have; None: this engine is the first, or alone.

        All ranks call it together.
        """
        ...

    def pin_kv(self, geometry: KVGeometry) -> KVGeometry:
        """Propose sizes for all engines of this cohort; returns those that hold, the first engine's.

        All ranks call it together, with equal sizes.
        """
        ...

    def load(self, layout: Layout, fill: Callable[[Callable[[], Arena]], None]) -> Arena:
        """Return the arena of the served weights, filled.

        `fill` first checks where the weights come from. Then it calls its argument, which returns the arena,
        the same one at every call, and writes all of it, gaps and padding too. Memory that has these weights
        already need not call `fill`.
        """
        ...

    def take_kv(self, num_bytes: int, scratch_bytes: int = 0) -> Tensor:
        """Return bytes for the KV cache: zeros, or what an engine before this one has left there.

        Until `wake` only the last `scratch_bytes` are accessed: the scratch page.
        """
        ...

    def wake(self, epoch: int = 0, timeout_s: float = 0.0) -> None:
        """Take what an engine that stands by does not have: called once, before the engine serves.

        All ranks call it together. `epoch` is the engine's among those that serve in each other's place; 0:
        it is in no cohort. `timeout_s` are the seconds in which the engine must serve, so that it may wait
        for memory that an engine before it still has; 0: there is nothing to wait for.
        """
        ...

    def watch_owner(self, on_change: Callable[[bool], None]) -> None:
        """Have a function called from another thread when the memory's owner is away, or there again.

        It gets True if the owner is away. The memory stays meanwhile.
        """
        ...

    def stage(self, layout: Layout, place: Place) -> Arena:
        """Return an arena for staged weights, with undefined contents.

        Raises:
            torch.OutOfMemoryError: the device has too little memory.
        """
        ...

    def release(self, arena: Arena, place: Place) -> None:
        """Take back an arena of `stage`, which nothing uses any more."""
        ...

    def close(self) -> None:
        """Give back what is not freed with its tensors; none of the memory may be used any more."""
        ...


class PrivateMemory:
    """Memory of this process alone."""

    kv_descriptor: int | None = None  # of memory that other processes map: there is none
    held_kv: HeldKV | None = None
    kv_journal: memoryview | None = None
    generations: Generations | None = None
    parks_kv = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._take = backing.pageable if device.type == "cpu" else partial(backing.on_device, device=device)

    def pinned_kv(self) -> KVGeometry | None:
        """See `RankMemory.pinned_kv`: no other engine matters."""
        return None

    def pin_kv(self, geometry: KVGeometry) -> KVGeometry:
        """See `RankMemory.pin_kv`: every engine has sizes of its own."""
        return geometry

    def load(self, layout: Layout, fill: Callable[[Callable[[], Arena]], None]) -> Arena:
        """See `RankMemory.load`; memory is taken when `fill` first asks for the arena, and not before."""
        arena = cache(partial(Arena.take, layout, self._take))
        fill(arena)
        return arena()

    def take_kv(self, num_bytes: int, scratch_bytes: int = 0) -> Tensor:
        """See `RankMemory.take_kv`; all of it is taken now."""
        return backing.zeros(num_bytes, self.device)

    def wake(self, epoch: int = 0, timeout_s: float = 0.0) -> None:
        """See `RankMemory.wake`: an engine with memory of its own has all of it from the start."""

    def watch_owner(self, on_change: Callable[[bool], None]) -> None:
        """See `RankMemory.watch_owner`: the owner is this process."""

    def stage(self, layout: Layout, place: Place) -> Arena:
        """See `RankMemory.stage`; memory of the host is pinned where the device is CUDA."""
        if self.device.type == "cpu" or place == "device":
            return Arena.take(layout, self._take)
        with torch.cuda.device(self.device):  # a new thread uses device 0
            return Arena.take(layout, backing.page_locked)

    def release(self, arena: Arena, place: Place) -> None:
        """See `RankMemory.release`: unlocks pinned memory; all other memory is freed with its tensors."""
        if self.device.type == "cuda" and place == "host":
            with torch.cuda.device(self.device):
                for slab in arena.slabs:
                    backing.unlock(slab)

    def close(self) -> None:
        """See `RankMemory.close`: there is nothing to do."""


class SharedKVMemory(PrivateMemory):
    """Memory of this process, except that other processes can map the KV cache."""

    def take_kv(self, num_bytes: int, scratch_bytes: int = 0) -> Tensor:
        """See `RankMemory.take_kv`; all of it is taken now.

        Raises:
            torch.OutOfMemoryError: the device has too little memory.
            SharedMemoryError: its memory cannot be shared.
        """
        if self.device.type == "cpu":
            self.kv_descriptor = shared.create(num_bytes)
            return torch.frombuffer(shared.map_shared(self.kv_descriptor, num_bytes), dtype=torch.uint8)
        torch.cuda.empty_cache()  # the driver cannot take what torch keeps for later
        mapping, self.kv_descriptor = device_shared.create(num_bytes, self.device)
        return device_shared.as_tensor(mapping, self.device).zero_()
