"""Where the large memory of a rank comes from: served weights, the KV cache, staged weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from segue.memory import backing, device_shared, shared
from segue.memory.arena import Arena, Layout
from segue.memory.geometry import KVGeometry

Place = Literal["device", "host"]


class RankMemory(Protocol):
    """Gives a rank its large memory, and takes back what was staged."""

    device: torch.device
    kv_descriptor: int | None  # of the KV cache's memory, where other processes may map it

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
        """Return zeroed bytes for the KV cache.

        Until `wake` only the last `scratch_bytes` are accessed: the scratch page.
        """
        ...

    def wake(self) -> None:
        """Take what an engine that stands by does not have: called once, before the engine serves."""
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

    def wake(self) -> None:
        """See `RankMemory.wake`: an engine with memory of its own has all of it from the start."""

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
