"""Slabs of the host: files without a name (memfds), mapped at addresses that this process has reserved.

A slab that is filled is sealed: nobody can write to it or change its size any more. The kernel seals nothing
that is mapped as shared from a writable descriptor, not even if the mapping is read-only. So readers map a
slab after it is sealed, and as private: a write to it is a fault, and can never reach the slab.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress

from segue.errors import SharedMemoryError, SlabInUseError, SlabMemoryError
from segue.memory.vmm import Slab
from segue.sizes import round_up

GRANULARITY = 2 << 20  # bytes: a huge page
FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # else an access could fail because a slab has shrunk
SEALED = FIXED_SIZE | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_ANONYMOUS = -1  # the handle of a slab of this process alone

# Python's mmap can do none of these.
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
_MADV_POPULATE_READ = 22
_HOLE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MemfdVMM:
    """See `VMM`. Memory of this process alone is anonymous, in huge pages where the kernel has them."""

    granularity = GRANULARITY

    def __init__(self) -> None:
        self._reserved: dict[int, int] = {}  # the bytes of each range, by its address

    def create(self, size: int) -> int:
        """See `VMM.create`: all pages are taken now, and are charged to this process's control group."""
        _check_size(size)
        descriptor = os.memfd_create("segue-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, FIXED_SIZE)
        except OSError as error:
            os.close(descriptor)
            raise SlabMemoryError(
                f"the host has too little memory for a slab of {size} bytes ({error}); free some, or raise "
                "the limit of the control group"
            ) from error
        return descriptor

    def seal(self, descriptor: int) -> None:
        """See `VMM.seal`."""
        if is_sealed(descriptor):
            return
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALED)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise SlabInUseError(
                "a slab cannot be sealed, because a process still has it mapped for writing; that process "
                "must unmap it, or end, first"
            ) from error

    def adopt(self, descriptor: int, size: int) -> Slab:
        """See `VMM.adopt`."""
        _check_size(size)
        found, seals = os.fstat(descriptor).st_size, _seals(descriptor)
        if found != size or seals & FIXED_SIZE != FIXED_SIZE:
            raise SharedMemoryError(
                f"the descriptor is one of {found} bytes with the seals {seals:#x}; a slab of {size} bytes "
                f"with at least the seals {FIXED_SIZE:#x} is needed. Pass one that `create` returned"
            )
        return Slab(size=size, handle=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0))

    def private(self, size: int) -> Slab:
        """See `VMM.private`; pages are taken when they are touched first."""
        _check_size(size)
        return Slab(size=size, handle=_ANONYMOUS)

    def close(self, slab: Slab) -> None:
        """See `VMM.close`."""
        if slab.handle != _ANONYMOUS:
            os.close(slab.handle)

    def reserve(self, size: int) -> int:
        """See `VMM.reserve`."""
        _check_size(size)
        start = _mmap(None, size + GRANULARITY, _PROT_NONE, _HOLE)
        address = round_up(start, GRANULARITY)
        end, taken_end = address + size, start + size + GRANULARITY
        for first, last in ((start, address), (end, taken_end)):
            if first != last:
                _libc.munmap(first, last - first)
        self._reserved[address] = size
        return address

    def map(self, address: int, slab: Slab, *, writable: bool) -> None:
        """See `VMM.map`. A slab of a descriptor is mapped for reading only once it is sealed."""
        self._check_range(address, slab.size)
        if slab.handle == _ANONYMOUS:
            protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        elif is_sealed(slab.handle) == writable:
            rule = "to be written" if writable else "to be read, because its contents could still change"
            raise SharedMemoryError(
                f"a slab that is {'sealed' if writable else 'not sealed'} cannot be mapped {rule}; "
                f"{'take a new slab' if writable else 'seal it first'}"
            )
        elif writable:
            protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
        else:
            protection, flags = mmap.PROT_READ, mmap.MAP_PRIVATE
        try:
            _mmap(address, slab.size, protection, flags | _MAP_FIXED, slab.handle)
        except OSError as error:
            with suppress(OSError):  # the kernel may have left a gap in the range; else this changes nothing
                _mmap(address, slab.size, _PROT_NONE, _HOLE | _MAP_FIXED_NOREPLACE)
            raise SharedMemoryError(
                f"a slab of {slab.size} bytes cannot be mapped at {address:#x} ({error}); the system may "
                "allow too few mappings (vm.max_map_count) or too little memory (ulimit -v)"
            ) from error
        if slab.handle == _ANONYMOUS:
            _advise(address, slab.size, mmap.MADV_HUGEPAGE)
        elif writable:  # a forked child that has the mapping would keep the slab from being sealed
            _advise(address, slab.size, mmap.MADV_DONTFORK)

    def populate(self, address: int, size: int) -> None:
        """See `VMM.populate`: 55 ms per GiB, which the first accesses would take otherwise."""
        self._check_range(address, size)
        _advise(address, size, _MADV_POPULATE_READ)

    def remap(self, slabs: Mapping[int, Slab], *, writable: bool) -> None:
        """See `VMM.remap`."""
        for address, slab in slabs.items():
            self.unmap(address, slab.size)
        try:
            for address, slab in slabs.items():
                self.map(address, slab, writable=writable)
        except SharedMemoryError:
            for address, slab in slabs.items():
                self.unmap(address, slab.size)
            raise

    def unmap(self, address: int, size: int) -> None:
        """See `VMM.unmap`; pages of this process alone are freed."""
        self._check_range(address, size)
        _mmap(address, size, _PROT_NONE, _HOLE | _MAP_FIXED)

    def free(self, address: int) -> None:
        """See `VMM.free`."""
        _libc.munmap(address, self._reserved.pop(address))

    def _check_range(self, address: int, size: int) -> None:
        """Refuse a range that is not reserved: MAP_FIXED would replace whatever the process has there."""
        inside = any(first <= address and address + size <= first + n for first, n in self._reserved.items())
        assert inside and address % GRANULARITY == 0, f"{size} bytes at {address:#x} are not in a window"
        _check_size(size)


def is_sealed(descriptor: int) -> bool:
    """Whether the contents of a slab are final.

    Raises:
        SharedMemoryError: the descriptor is not one of a slab.
    """
    return _seals(descriptor) & SEALED == SEALED


def check_slab(descriptor: int, size: int) -> None:
    """Check that a descriptor is one of a sealed slab of `size` bytes.

    Raises:
        SharedMemoryError: it is not.
    """
    if (found := os.fstat(descriptor).st_size) != size or not is_sealed(descriptor):
        raise SharedMemoryError(f"a slab has {found} bytes; a sealed one of {size} bytes is needed")


def _seals(descriptor: int) -> int:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise SharedMemoryError(
            f"the descriptor is not one of a slab ({error}); pass one that `create` returned"
        ) from error


def _check_size(size: int) -> None:
    assert size > 0 and size % GRANULARITY == 0, f"{size} bytes are not whole blocks of {GRANULARITY} bytes"


def _mmap(address: int | None, size: int, protection: int, flags: int, descriptor: int = -1) -> int:
    found = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    assert isinstance(found, int)
    return found


def _advise(address: int, size: int, advice: int) -> None:
    """Give the kernel advice, which older kernels do not know; the memory works without it too."""
    _libc.madvise(address, size, advice)
