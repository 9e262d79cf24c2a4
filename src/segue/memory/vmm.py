"""Virtual memory management: slabs have no address of their own, and are mapped where tensors expect them.

A slab is a piece of memory with a file descriptor. Whoever has the descriptor, or a mapping, keeps the bytes,
so they outlive the process that made them. A tensor and a CUDA graph see an address. So a process reserves a
range of addresses once, binds tensors to it, and exchanges what is mapped there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """Memory that this process can map. `VMM.close` gives it up; its mappings stay."""

    size: int  # bytes, a multiple of the granularity
    handle: int  # a descriptor or a handle of the driver, which belongs to this object


class VMM(Protocol):
    """Makes slabs and maps them: on the host (`memfd.py`) or on a device (`cuda_vmm.py`).

    Sizes and addresses are multiples of `granularity`, and a slab is mapped and unmapped as a whole.
    """

    @property
    def granularity(self) -> int:
        """The bytes of which every size and every offset of a mapping is a multiple."""
        ...

    # What the owner of slabs does. It needs no mapping, and on CUDA no context.

    def create(self, size: int) -> int:
        """Return the descriptor of a new slab of `size` bytes; its memory is taken now.

        Raises:
            SlabMemoryError: there is too little memory.
        """
        ...

    def seal(self, descriptor: int) -> None:
        """Make the contents of a slab final, where the system can; a sealed slab stays as it is.

        Raises:
            SlabInUseError: a process has the slab mapped for writing.
        """
        ...

    # What a process does that uses slabs.

    def adopt(self, descriptor: int, size: int) -> Slab:
        """Return the slab of a descriptor, which the caller may close afterwards.

        Raises:
            SharedMemoryError: the descriptor is not one of a slab of `size` bytes.
        """
        ...

    def private(self, size: int) -> Slab:
        """Return memory of this process alone, zeroed on the host and undefined on a device.

        Raises:
            SlabMemoryError: there is too little memory.
        """
        ...

    def close(self, slab: Slab) -> None:
        """Give up a slab. Its memory stays as long as a mapping or a descriptor does."""
        ...

    def reserve(self, size: int) -> int:
        """Return the address of `size` bytes in which nothing is mapped, and where nobody else maps."""
        ...

    def map(self, address: int, slab: Slab, *, writable: bool) -> None:
        """Map a slab inside a reserved range, at an address where nothing is mapped.

        Raises:
            SharedMemoryError: the slab cannot be mapped; nothing is mapped then.
        """
        ...

    def remap(self, slabs: Mapping[int, Slab], *, writable: bool) -> None:
        """Map slabs, by their addresses, in the places of slabs of the same sizes, which are unmapped.

        Raises:
            SharedMemoryError: a slab cannot be mapped; nothing is mapped at any of the addresses then.
        """
        ...

    def populate(self, address: int, size: int) -> None:
        """Make the first access to mapped memory fast, where that is needed."""
        ...

    def unmap(self, address: int, size: int) -> None:
        """Unmap a slab. Its range stays reserved, and an access to it faults from now on.

        On a device all queued work that uses the memory ends first.
        """
        ...

    def free(self, address: int) -> None:
        """Give up a reserved range, in which nothing is mapped any more."""
        ...
