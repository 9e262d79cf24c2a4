"""The slabs of the memory service: their descriptors, per generation and rank. It maps none of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """The slabs of one rank of a generation."""

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

        return await self.on_device(device, work)

    async def seal(self, slabs: RankSlabs) -> None:
        """Make the contents of a rank's slabs final.

        Raises:
            SlabInUseError: a process still has one of them mapped for writing.
        """
        vmm = self.vmms[slabs.device]
        copies = [
            os.dup(descriptor) for descriptor in slabs.descriptors
        ]  # the slabs may be dropped meanwhile

        def work() -> None:
            for descriptor in copies:
                vmm.seal(descriptor)

        try:
            await self.on_device(slabs.device, work)
        finally:
            close(copies)

    def of(self, generation: int) -> Iterator[tuple[int, RankSlabs]]:
        """Yield the ranks of a generation, and their slabs."""
        return ((rank, slabs) for (number, rank), slabs in self.ranks.items() if number == generation)

    def drop(self, generation: int) -> int:
        """Give up the descriptors of a generation; a process that has a slab mapped keeps it.

        Returns the number of bytes.
        """
        num_bytes = 0
        for key in [key for key in self.ranks if key[0] == generation]:
            slabs = self.ranks.pop(key)
            close(slabs.descriptors)
            num_bytes += sum(slabs.sizes)
        return num_bytes

    @property
    def num_slabs(self) -> int:
        """The number of all slabs."""
        return sum(len(slabs.sizes) for slabs in self.ranks.values())

    def bytes_by_device(self) -> dict[str, int]:
        """Return the bytes of the slabs of each device."""
        found = dict.fromkeys(self.vmms, 0)
        for slabs in self.ranks.values():
            found[slabs.device] += sum(slabs.sizes)
        return found

    def close(self) -> None:
        """Give everything up."""
        for generation in {number for number, _ in self.ranks}:
            self.drop(generation)
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)
