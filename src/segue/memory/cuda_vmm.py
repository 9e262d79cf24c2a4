"""Slabs of a CUDA device, mapped at addresses that this process has reserved.

The owner of a slab needs no context, which would take 0.5 GiB of the device: it makes physical memory,
exports the descriptor, and gives its own handle up. A device knows no seals: who may write is decided per
mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import byref, c_int, c_uint64
from functools import cached_property

from segue.errors import CUDADriverError, SharedMemoryError, SlabMemoryError
from segue.memory import cuda_driver as cuda
from segue.memory.vmm import Slab


class CudaVMM:
    """See `VMM`. The calling thread then uses the device, as `cuda_driver.use_device` has it."""

    def __init__(self, device: int, synchronise: Callable[[], object] = lambda: None) -> None:
        """Serve one device.

        Args:
            device: its index among the devices that this process sees.
            synchronise: waits for all queued work that uses mapped slabs; called before each unmapping.
        """
        self._device = device
        self._synchronise = synchronise
        self._reserved: dict[int, int] = {}  # the bytes of each range, by its address

    @cached_property
    def granularity(self) -> int:
        """See `VMM.granularity`: 2 MiB on the devices of today."""
        return cuda.granularity(cuda.allocation(self._device))

    def create(self, size: int) -> int:
        """See `VMM.create`; the contents are undefined, and may be those of another process."""
        handle, descriptor = self._allocate(size), c_int(-1)
        try:
            cuda.call("cuMemExportToShareableHandle", byref(descriptor), handle, cuda.POSIX_DESCRIPTOR, 0)
        finally:
            cuda.call("cuMemRelease", handle)  # the descriptor keeps the memory
        return descriptor.value

    def seal(self, descriptor: int) -> None:
        """See `VMM.seal`: there is nothing to do."""

    def adopt(self, descriptor: int, size: int) -> Slab:
        """See `VMM.adopt`; a descriptor of fewer bytes is noticed when the slab is mapped."""
        self._check_size(size)
        cuda.use_device(self._device)
        handle = c_uint64()
        try:
            cuda.call("cuMemImportFromShareableHandle", byref(handle), descriptor, cuda.POSIX_DESCRIPTOR)
        except CUDADriverError as error:
            raise SharedMemoryError(
                f"a slab of {size} bytes of GPU {self._device} cannot be opened ({error.message}); both "
                "processes have to be in one container, and see the GPU that has the slab"
            ) from error
        return Slab(size=size, handle=handle.value)

    def private(self, size: int) -> Slab:
        """See `VMM.private`; the memory is taken now."""
        return Slab(size=size, handle=self._allocate(size))

    def close(self, slab: Slab) -> None:
        """See `VMM.close`."""
        cuda.call("cuMemRelease", slab.handle)

    def reserve(self, size: int) -> int:
        """See `VMM.reserve`."""
        self._check_size(size)
        cuda.use_device(self._device)
        address = c_uint64()
        cuda.call("cuMemAddressReserve", byref(address), size, self.granularity, 0, 0)
        self._reserved[address.value] = size
        return address.value

    def map(self, address: int, slab: Slab, *, writable: bool) -> None:
        """See `VMM.map`; a kernel that writes to a slab that is not writable ends this process's context."""
        self._map({address: slab}, writable=writable)

    def remap(self, slabs: Mapping[int, Slab], *, writable: bool) -> None:
        """See `VMM.remap`.

        Generation stands still meanwhile, so it waits once for the device, and unmaps neighbours in one call.
        """
        self._synchronise()
        cuda.use_device(self._device)
        for address, size in _joined({address: slab.size for address, slab in slabs.items()}):
            cuda.call("cuMemUnmap", address, size)
        self._map(slabs, writable=writable)

    def _map(self, slabs: Mapping[int, Slab], *, writable: bool) -> None:
        """Map slabs where nothing is mapped: all of them or none; neighbours get their access in one call."""
        location = cuda.MemoryLocation(cuda.ON_DEVICE, self._device)
        access = cuda.AccessDescription(location, cuda.READ_WRITE if writable else cuda.READ)
        cuda.use_device(self._device)
        mapped: dict[int, int] = {}  # bytes, by address
        try:
            for address, slab in slabs.items():
                cuda.call("cuMemMap", address, slab.size, 0, slab.handle, 0)
                mapped[address] = slab.size
            for address, size in _joined(mapped):
                cuda.call("cuMemSetAccess", address, size, byref(access), 1)
        except CUDADriverError as error:
            for address, size in mapped.items():
                cuda.call("cuMemUnmap", address, size)
            sizes = ", ".join(str(slab.size) for slab in slabs.values())
            raise SharedMemoryError(
                f"slabs of {sizes} bytes cannot be mapped at {min(slabs):#x} of GPU {self._device} "
                f"({error.message}); one may have another size, or be of a GPU that this one cannot access"
            ) from error

    def populate(self, address: int, size: int) -> None:
        """See `VMM.populate`: all memory of a device is there from the start."""

    def unmap(self, address: int, size: int) -> None:
        """See `VMM.unmap`."""
        self._synchronise()
        cuda.use_device(self._device)
        cuda.call("cuMemUnmap", address, size)

    def free(self, address: int) -> None:
        """See `VMM.free`."""
        cuda.call("cuMemAddressFree", address, self._reserved.pop(address))

    def _allocate(self, size: int) -> int:
        """Return the handle of new physical memory."""
        self._check_size(size)
        handle, properties = c_uint64(), cuda.allocation(self._device)
        try:
            cuda.call("cuMemCreate", byref(handle), size, byref(properties), 0)
        except CUDADriverError as error:
            raise SlabMemoryError(
                f"GPU {self._device} has no memory for a slab of {size} bytes ({error.message}); free some, "
                "or lower --memory-ratio or --num-kv-tokens"
            ) from error
        return handle.value

    def _check_size(self, size: int) -> None:
        assert size > 0 and size % self.granularity == 0, (
            f"{size} bytes are not whole blocks of {self.granularity} bytes"
        )


def _joined(ranges: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return ranges, given as bytes by address, as addresses and bytes, with neighbours joined."""
    joined: list[tuple[int, int]] = []
    for address, size in sorted(ranges.items()):
        if joined and sum(joined[-1]) == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((address, size))
    return joined
