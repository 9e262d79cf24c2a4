"""The few functions of the CUDA driver that torch has no Python function for, called through ctypes.

They are those of memory that several processes map, and of copies to it. Loading this module needs no driver;
calling a function does. ctypes releases the GIL during each call, except where few pages are copied.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ushort, c_void_p
from ctypes import c_uint64 as c_address  # CUdeviceptr, and the handle of an allocation
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segue.errors import CUDADriverError

PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
POSIX_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ = 1  # CU_MEM_ACCESS_FLAGS_PROT_READ
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
BESIDE_KERNELS = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
SHARES_DESCRIPTORS = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED


class MemoryLocation(Structure):
    """A device: ``CUmemLocation``."""

    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(Structure):
    _fields_ = (
        ("compression", c_ubyte),
        ("gpu_direct_rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class AllocationProperties(Structure):
    """What kind of memory is allocated, and where: ``CUmemAllocationProp``."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", MemoryLocation),
        ("windows", c_void_p),
        ("flags", _AllocationFlags),
    )


class AccessDescription(Structure):
    """Which device may access a mapping, and how: ``CUmemAccessDesc``."""

    _fields_ = (("location", MemoryLocation), ("flags", c_int))


class _CopyAttributes(Structure):
    """How copies of a batch are made: ``CUmemcpyAttributes``."""

    _fields_ = (("order", c_int), ("source", MemoryLocation), ("target", MemoryLocation), ("flags", c_uint))


# The argument types of each function; all of them return a CUresult.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemCreate": (POINTER(c_address), c_size_t, POINTER(AllocationProperties), c_address),
    "cuMemRelease": (c_address,),
    "cuMemExportToShareableHandle": (c_void_p, c_address, c_int, c_address),
    "cuMemImportFromShareableHandle": (POINTER(c_address), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_address), c_size_t, c_size_t, c_address, c_address),
    "cuMemAddressFree": (c_address, c_size_t),
    "cuMemMap": (c_address, c_size_t, c_size_t, c_address, c_address),
    "cuMemUnmap": (c_address, c_size_t),
    "cuMemSetAccess": (c_address, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemcpyDtoDAsync_v2": (c_address, c_address, c_size_t, c_void_p),
}
FEW_COPIES = 16  # so many are queued faster one by one than as a batch
# Drivers for CUDA 13 and later have this one.
_BATCH = "cuMemcpyBatchAsync_v2"
_BATCH_TYPES = (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p)


@cache
def _library() -> ctypes.CDLL:
    """Load the driver's library and initialise the driver, once per process."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CUDADriverError(
            f"the CUDA driver cannot be loaded ({error}); install NVIDIA's driver, or use --device cpu"
        ) from error
    for name, types in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, c_int
    if hasattr(library, _BATCH):
        batch = getattr(library, _BATCH)
        batch.argtypes, batch.restype = _BATCH_TYPES, c_int
    if code := library.cuInit(0):
        raise CUDADriverError(f"the CUDA driver cannot be initialised: cuInit returned {code}")
    return library


@cache
def _copy_under_gil() -> Callable[[int, int, int, int], int]:
    """Returns ``cuMemcpyDtoDAsync_v2``, whose calls keep the GIL."""
    _library()  # raises the named error where there is no driver
    copy = ctypes.PyDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
    copy.argtypes, copy.restype = _FUNCTIONS["cuMemcpyDtoDAsync_v2"], c_int
    return copy


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        CUDADriverError: it failed; the text has the driver's reason.
    """
    _check(name, getattr(_library(), name)(*arguments))


def _check(name: str, code: int) -> None:
    """Raise CUDADriverError if a function has failed."""
    if code:
        text = c_char_p()
        _library().cuGetErrorString(code, byref(text))
        reason = text.value.decode(errors="replace") if text.value else "an unknown error"
        raise CUDADriverError(f"{name} failed with code {code}: {reason}")


def attribute(device: int, number: int) -> int:
    """Returns an attribute of a device, which is given as an index among the visible ones."""
    handle, value = c_int(), c_int()
    call("cuDeviceGet", byref(handle), device)
    call("cuDeviceGetAttribute", byref(value), number, handle)
    return value.value


def device_uuids() -> list[str]:
    """Return the UUIDs of the devices that this process sees, by index, as torch writes them.

    Two processes may see the same device at different indices. No context is made.
    """
    count = c_int()
    call("cuDeviceGetCount", byref(count))
    return [_uuid(index) for index in range(count.value)]


def _uuid(device: int) -> str:
    handle, raw = c_int(), ctypes.create_string_buffer(16)
    call("cuDeviceGet", byref(handle), device)
    call("cuDeviceGetUuid_v2", raw, handle)
    return str(uuid.UUID(bytes=raw.raw))


def allocation(device: int) -> AllocationProperties:
    """Return the properties of memory of a device that has a descriptor."""
    location = MemoryLocation(ON_DEVICE, device)
    return AllocationProperties(type=PINNED, handle_types=POSIX_DESCRIPTOR, location=location)


def granularity(properties: AllocationProperties) -> int:
    """Return the bytes of which the size of an allocation must be a multiple."""
    found = c_size_t()
    call("cuMemGetAllocationGranularity", byref(found), byref(properties), RECOMMENDED)
    return found.value


@cache
def _context(device: int) -> int:
    """Returns the context that torch uses on a device; it is kept for the rest of the process."""
    handle, context = c_int(), c_void_p()
    call("cuDeviceGet", byref(handle), device)
    call("cuDevicePrimaryCtxRetain", byref(context), handle)
    assert context.value
    return context.value


def use_device(device: int) -> None:
    """Make a device current in this thread; torch does that only when it launches something itself."""
    call("cuCtxSetCurrent", _context(device))


def copy_pages(targets: NDArray[np.uint64], sources: NDArray[np.uint64], num_bytes: int, stream: int) -> None:
    """Queue copies of `num_bytes` each, from and to the addresses at the same index, on a stream.

    The device of the stream must be in use (`use_device`). Copy engines make the copies, so that kernels keep
    all SMs; only a few copies within one GPU may be made by a kernel. Where the driver can, one call queues
    many copies: a call gives the GIL away, and to get it back takes up to 5 ms while another thread runs
    Python code. Few copies are queued one by one with the GIL, since a batch begins 25 µs later.
    """
    count = len(targets)
    if count <= FEW_COPIES:
        copy = _copy_under_gil()
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            _check("cuMemcpyDtoDAsync_v2", copy(target, source, num_bytes, stream))
    elif not hasattr(_library(), _BATCH):
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            call("cuMemcpyDtoDAsync_v2", target, source, num_bytes, stream)
    elif count:
        sizes = np.full(count, num_bytes, np.uintp)
        attributes = _CopyAttributes(order=IN_STREAM_ORDER, flags=BESIDE_KERNELS)
        first = c_size_t(0)  # the attributes hold from this copy on
        addresses = [array.ctypes.data for array in (targets, sources, sizes)]
        call(_BATCH, *addresses, count, byref(attributes), byref(first), 1, stream)
