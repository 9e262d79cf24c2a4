"""The slabs of the memory service: their descriptors, per generation and rank. It maps none of them.

A descriptor is in several generations if a slab is. The lock knows who has which, and says what is freed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from segue.errors import MemoryServiceError
from segue.gms.messages import MAX_SLABS
from segue.gms.transport import close
from segue.memory.vmm import VMM

Result = TypeVar("Result")


@dataclass(slots=True, kw_only=True)
class RankSlabs:
    """The slabs of one rank of a generation, or of a lease to write that is not sealed yet."""

    device: str
    sizes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    manifest: bytes = b""  # once the slabs are complete


class SlabStore:
    """All slabs. Calls of the driver run in a thread per device, so that no device delays another one."""

    def __init__(self, vmms: Mapping[str, VMM]) -> None:
        """Serve the devices of `vmms`, by their names."""
        self.vmms = vmms
        self.ranks: dict[tuple[int, int], RankSlabs] = {}  # by generation and rank
        self._sizes: dict[int, tuple[str, int]] = {}  # the device and the bytes of each slab
        self._threads = {
            name: ThreadPoolExecutor(1, thread_name_prefix=f"segue-gms-{name[:8]}") for name in vmms
        }

    async def on_device(self, device: str, work: Callable[[], Result]) -> Result:
        """Run a call of a device's driver in the device's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[device], work)

    async def create(self, device: str, sizes: Sequence[int]) -> list[int]:
        """Return the descriptors of new slabs, all or none.

        Raises:
            SlabMemoryError: the device has too little memory.
            MemoryServiceError: a size is not a multiple of the granularity, or there would be too many slabs.
        """
        vmm = self.vmms[device]
        if self.num_slabs + len(sizes) > MAX_SLABS:
            text = f"the service has {self.num_slabs} slabs, and {len(sizes)} more would exceed {MAX_SLABS}"
            raise MemoryServiceError(f"{text}; use larger slabs")

        def work() -> list[int]:
            if wrong := [size for size in sizes if size % vmm.granularity]:
                rule = f"a slab of this device has a multiple of {vmm.granularity}"
                raise MemoryServiceError(f"slab of {wrong[0]} bytes: {rule}")
            made: list[int] = []
            try:
                for size in sizes:
                    made.append(vmm.create(size))
            except BaseException:
                close(made)
                raise
            return made

        made = await self.on_device(device, work)
        for descriptor, size in zip(made, sizes, strict=True):
            self.add(device, size, descriptor)
        return made

    async def seal(self, device: str, descriptors: Sequence[int]) -> None:
        """Make the contents of slabs final.

        Raises:
            SlabInUseError: a process still has one of them mapped for writing.
        """
        vmm = self.vmms[device]
        copies = [os.dup(descriptor) for descriptor in descriptors]  # the slabs may be freed meanwhile

        def work() -> None:
            for descriptor in copies:
                vmm.seal(descriptor)

        try:
            await self.on_device(device, work)
        finally:
            close(copies)

    def of(self, generation: int) -> Iterator[tuple[int, RankSlabs]]:
        """Yield the ranks of a generation, and their slabs."""
        return ((rank, slabs) for (number, rank), slabs in self.ranks.items() if number == generation)

    def drop(self, generation: int, freed: Collection[int]) -> int:
        """Forget a generation, and give up those of its descriptors that are `freed`.

        A process that has a slab mapped keeps it. Returns the number of bytes of the freed slabs.
        """
        for key in [key for key in self.ranks if key[0] == generation]:
            del self.ranks[key]
        return self.free(freed)

    def free(self, descriptors: Collection[int]) -> int:
        """Give slabs up; returns the number of their bytes."""
        close(list(descriptors))
        return sum(self._sizes.pop(descriptor)[1] for descriptor in descriptors)

    def add(self, device: str, size: int, descriptor: int) -> None:
        """Keep a slab, which was made elsewhere."""
        self._sizes[descriptor] = device, size

    @property
    def num_slabs(self) -> int:
        """The number of all slabs."""
        return len(self._sizes)

    def device_of(self, descriptor: int) -> str:
        """Return the device of a slab."""
        return self._sizes[descriptor][0]

    def size_of(self, descriptor: int) -> int:
        """Return the bytes of a slab."""
        return self._sizes[descriptor][1]

    def bytes_by_device(self) -> dict[str, int]:
        """Return the bytes of the slabs of each device."""
        found = dict.fromkeys(self.vmms, 0)
        for device, size in self._sizes.values():
            found[device] += size
        return found

    def close(self) -> None:
        """Give everything up."""
        self.ranks.clear()
        self.free(list(self._sizes))
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)
