"""Memory of a CUDA device that several processes of one host map, and its descriptor.

The driver's virtual memory management makes it: physical memory has a POSIX descriptor, which travels over
unix sockets as that of a memfd does (`memory/shared.py`), and each process maps it at an address of its own.
The memory is freed with the last mapping and descriptor, so a process that still writes to it when its owner
has ended does no harm. Unlike CUDA's older IPC handles it can be mapped in the process that made it, it is
never part of a larger allocation, and torch's allocator and its settings have nothing to do with it.
"""

from __future__ import annotations

import os
import sys
from ctypes import byref, c_int, c_uint64
from typing import Any

import torch
from torch import Tensor

from segue.errors import CUDADriverError, SharedMemoryError
from segue.memory import cuda_driver as cuda
from segue.sizes import round_up


class DeviceMapping:
    """A mapping of shared memory of a device, which `device` can read and write.

    torch takes it as a tensor of bytes, and keeps it alive as long as the tensor.
    """

    def __init__(self, handle: int, mapped_bytes: int, num_bytes: int, device: torch.device) -> None:
        """Map an allocation of `mapped_bytes`, of which `num_bytes` are used, and release its `handle`."""
        self.num_bytes = num_bytes
        self.address = 0  # of the first byte, in this process; 0: it is not mapped
        self._mapped_bytes = mapped_bytes
        self._device = device
        address = c_uint64()
        access = cuda.AccessDescription(cuda.MemoryLocation(cuda.ON_DEVICE, device.index), cuda.READ_WRITE)
        try:
            cuda.call("cuMemAddressReserve", byref(address), mapped_bytes, 0, 0, 0)
            try:
                cuda.call("cuMemMap", address, mapped_bytes, 0, handle, 0)
                try:
                    cuda.call("cuMemSetAccess", address, mapped_bytes, byref(access), 1)
                except CUDADriverError:
                    cuda.call("cuMemUnmap", address, mapped_bytes)
                    raise
            except CUDADriverError:
                cuda.call("cuMemAddressFree", address, mapped_bytes)
                raise
        finally:
            cuda.call("cuMemRelease", handle)  # the mapping keeps the memory
        self.address = address.value

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False)}

    def close(self) -> None:
        """Unmap the memory, to which all copies must have ended."""
        address, self.address = self.address, 0
        if address:
            cuda.call("cuMemUnmap", address, self._mapped_bytes)
            cuda.call("cuMemAddressFree", address, self._mapped_bytes)

    def __del__(self) -> None:
        """Unmap the memory when the last tensor that was made of it is freed."""
        if self.address and not sys.is_finalizing():  # the end of the process unmaps it too
            torch.cuda.synchronize(self._device)  # kernels may still use it
            self.close()


def create(num_bytes: int, device: torch.device) -> tuple[DeviceMapping, int]:
    """Allocate memory of a device, with undefined contents; returns it with its descriptor.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
        SharedMemoryError: the device cannot share memory by descriptors.
    """
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if not cuda.attribute(device.index, cuda.SHARES_DESCRIPTORS):
        raise SharedMemoryError(
            f"{device} cannot share memory by POSIX descriptors, which handing over KV needs; use another "
            "device, or serve with --role both"
        )
    properties = cuda.allocation(device.index)
    mapped_bytes = round_up(num_bytes, cuda.granularity(properties))
    handle, descriptor = c_uint64(), c_int(-1)
    try:
        cuda.call("cuMemCreate", byref(handle), mapped_bytes, byref(properties), 0)
    except CUDADriverError as error:
        raise torch.OutOfMemoryError(
            f"{num_bytes} bytes of {device} for the KV cache cannot be allocated ({error.message}); lower "
            "--memory-ratio or --num-kv-tokens"
        ) from error
    try:
        arguments = (byref(descriptor), handle, cuda.POSIX_DESCRIPTOR, 0)
        cuda.call("cuMemExportToShareableHandle", *arguments)
    except CUDADriverError:
        cuda.call("cuMemRelease", handle)
        raise
    try:
        return DeviceMapping(handle.value, mapped_bytes, num_bytes, device), descriptor.value
    except CUDADriverError:
        os.close(descriptor.value)
        raise


def open_descriptor(descriptor: int, num_bytes: int, device: torch.device) -> DeviceMapping:
    """Map memory that another process has made by `create` on any device, for `device` to write to.

    Args:
        descriptor: of the memory; the caller may close it afterwards.
        num_bytes: as they were given to `create`.
        device: of this process, that will access the memory.

    Raises:
        SharedMemoryError: the memory cannot be mapped: it has fewer bytes, or `device` cannot reach it.
    """
    handle = c_uint64()
    mapped_bytes = round_up(num_bytes, cuda.granularity(cuda.allocation(device.index)))
    try:
        cuda.call("cuMemImportFromShareableHandle", byref(handle), descriptor, cuda.POSIX_DESCRIPTOR)
        return DeviceMapping(handle.value, mapped_bytes, num_bytes, device)
    except CUDADriverError as error:
        raise SharedMemoryError(
            f"{num_bytes} bytes of GPU memory of another process cannot be mapped ({error.message}); both "
            "processes have to be in one container, with GPUs that can access each other's memory"
        ) from error


def as_tensor(mapping: DeviceMapping, device: torch.device) -> Tensor:
    """Returns the bytes of a mapping as a tensor of `device`, which keeps the mapping alive."""
    return torch.as_tensor(mapping, device=device)


def visible_uuids() -> list[str]:
    """Returns the UUIDs of the CUDA devices that this process sees, by index."""
    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]


def reachable_uuids(device: torch.device) -> list[str]:
    """Returns the UUIDs of the devices to whose memory `device` can write; its own is the first."""
    uuids = visible_uuids()
    others = (index for index in range(len(uuids)) if index != device.index)
    reached = [index for index in others if torch.cuda.can_device_access_peer(device.index, index)]
    return [uuids[index] for index in (device.index, *reached)]
