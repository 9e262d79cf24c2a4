"""A reserved range of addresses, and the slabs that are mapped in it.

Tensors are bound to the range once (`binding.py`). To load, to update, to sleep and to wake is to map other
slabs, or none, under the same addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from segue.errors import SharedMemoryError
from segue.memory.vmm import VMM, Slab
from segue.sizes import round_up


class MemoryWindow:
    """A range of addresses, in which whole slabs are mapped and unmapped."""

    def __init__(self, vmm: VMM, size: int) -> None:
        """Reserve `size` bytes (more than 0), rounded up to the granularity; nothing is mapped yet."""
        self.size = round_up(size, vmm.granularity)
        self.address = vmm.reserve(self.size)
        self._vmm = vmm
        self._mapped: dict[int, int] = {}  # the bytes of each mapped slab, by its offset

    @property
    def mapped_bytes(self) -> int:
        """The bytes at which a slab is mapped."""
        return sum(self._mapped.values())

    def map(self, offset: int, slab: Slab, *, writable: bool) -> None:
        """Map a slab at `offset` bytes from the start, where nothing is mapped yet.

        Raises:
            SharedMemoryError: the slab cannot be mapped; nothing is mapped there then.
        """
        end = offset + slab.size
        assert offset >= 0 and end <= self.size, f"bytes {offset} to {end} are outside of the window"
        taken = [start for start, size in self._mapped.items() if start < end and offset < start + size]
        assert not taken, f"bytes {offset} to {end} overlap the slab that is mapped at {taken[0]}"
        self._vmm.map(self.address + offset, slab, writable=writable)
        self._mapped[offset] = slab.size

    def remap(self, slabs: Mapping[int, Slab], *, writable: bool) -> None:
        """Map slabs, by their offsets, in the places of those that are mapped there, of the same sizes.

        Raises:
            SharedMemoryError: a slab cannot be mapped; nothing is mapped at any of the offsets any more.
        """
        for offset, slab in slabs.items():
            assert self._mapped.get(offset) == slab.size, (
                f"no slab of {slab.size} bytes is mapped at {offset}"
            )
        try:
            self._vmm.remap(
                {self.address + offset: slab for offset, slab in slabs.items()}, writable=writable
            )
        except SharedMemoryError:
            for offset in slabs:
                del self._mapped[offset]
            raise

    def populate(self, offsets: Iterable[int] | None = None) -> None:
        """Make the first access to the slabs that are mapped at these offsets fast; None: to all slabs."""
        for offset in self._mapped if offsets is None else offsets:
            self._vmm.populate(self.address + offset, self._mapped[offset])

    def unmap(self, offset: int) -> None:
        """Unmap the slab that is mapped at `offset`; an access there faults from now on."""
        self._vmm.unmap(self.address + offset, self._mapped[offset])
        del self._mapped[offset]

    def clear(self) -> None:
        """Unmap all slabs; the range stays reserved."""
        for offset in list(self._mapped):
            self.unmap(offset)

    def close(self) -> None:
        """Unmap all slabs and give the range up; no tensor that is bound to it may be used any more."""
        self.clear()
        self._vmm.free(self.address)
