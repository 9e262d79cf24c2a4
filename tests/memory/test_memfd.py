"""Slabs of the host: they have their memory and their size from the start, and once sealed they are final."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from segue.errors import SharedMemoryError, SlabInUseError, SlabMemoryError
from segue.memory import memfd
from segue.memory.memfd import GRANULARITY, MemfdVMM, is_sealed

SIZE = 2 * GRANULARITY
# A process that maps the slab of the descriptor in argv[1] and prints the address; then it runs argv[3].
CHILD = """
import ctypes, resource, sys
from segue.memory.memfd import GRANULARITY, MemfdVMM
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
vmm, size = MemfdVMM(), 2 * GRANULARITY
address = vmm.reserve(size)
vmm.map(address, vmm.adopt(int(sys.argv[1]), size), writable=sys.argv[2] == "writable")
print(ctypes.string_at(address, 3), flush=True)
exec(sys.argv[3])
"""

StartChild = Callable[[int, str, str], "subprocess.Popen[str]"]


@pytest.fixture
def vmm() -> MemfdVMM:
    return MemfdVMM()


@pytest.fixture
def start_child() -> Iterator[StartChild]:
    with ExitStack() as stack:

        def start(descriptor: int, access: str, program: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", CHILD, str(descriptor), access, program]
            child = subprocess.Popen(
                command, pass_fds=[descriptor], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            return child

        yield start


def bytes_at(address: int, count: int = 3) -> bytes:
    return ctypes.string_at(address, count)


def mapped(vmm: MemfdVMM, descriptor: int, *, writable: bool) -> int:
    address = vmm.reserve(SIZE)
    slab = vmm.adopt(descriptor, SIZE)
    vmm.map(address, slab, writable=writable)
    vmm.close(slab)
    return address


def filled(vmm: MemfdVMM, content: bytes, *, seal: bool = True) -> int:
    """The descriptor of a slab that begins with `content`."""
    descriptor = vmm.create(SIZE)
    os.pwrite(descriptor, content, 0)
    if seal:
        vmm.seal(descriptor)
    return descriptor


def test_a_slab_has_all_of_its_memory_from_the_start(vmm: MemfdVMM) -> None:
    descriptor = vmm.create(SIZE)
    status = os.fstat(descriptor)
    assert (status.st_size, status.st_blocks * 512) == (SIZE, SIZE)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_the_size_of_a_slab_is_final_before_it_is_sealed(vmm: MemfdVMM) -> None:
    descriptor = vmm.create(SIZE)
    for size in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


def test_too_little_memory_is_a_named_error(vmm: MemfdVMM, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def fail(descriptor: int, *_: int) -> None:
        ended.append(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(SlabMemoryError, match=r"too little memory for a slab of 4194304 bytes .*No space"):
        vmm.create(SIZE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ended[0])


def test_what_a_writer_fills_is_read_by_others_after_it_is_sealed(vmm: MemfdVMM) -> None:
    descriptor = vmm.create(SIZE)
    writer = mapped(vmm, descriptor, writable=True)
    ctypes.memmove(writer, b"abc", 3)
    vmm.unmap(writer, SIZE)
    vmm.seal(descriptor)
    assert is_sealed(descriptor)
    reader = mapped(vmm, descriptor, writable=False)
    os.close(descriptor)  # the mapping keeps the memory
    vmm.populate(reader, SIZE)
    assert bytes_at(reader) == b"abc"
    for address in (writer, reader):
        vmm.unmap(address, SIZE)
        vmm.free(address)


def test_a_sealed_slab_is_final(vmm: MemfdVMM) -> None:
    descriptor = filled(vmm, b"abc")
    vmm.seal(descriptor)  # once more changes nothing
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(SharedMemoryError, match="sealed cannot be mapped to be written; take a new slab"):
        mapped(vmm, descriptor, writable=True)
    os.close(descriptor)


def test_a_slab_that_can_still_change_is_not_mapped_for_reading(vmm: MemfdVMM) -> None:
    descriptor = filled(vmm, b"abc", seal=False)
    with pytest.raises(SharedMemoryError, match=r"not sealed cannot be mapped to be read.*seal it first"):
        mapped(vmm, descriptor, writable=False)
    os.close(descriptor)


def test_a_slab_is_not_sealed_while_a_process_can_write_to_it(vmm: MemfdVMM, start_child: StartChild) -> None:
    descriptor = filled(vmm, b"abc", seal=False)
    writer = start_child(descriptor, "writable", "sys.stdin.read()")
    assert writer.stdout is not None and writer.stdout.readline() == "b'abc'\n"
    with pytest.raises(SlabInUseError, match=r"still has it mapped for writing.*unmap it, or end"):
        vmm.seal(descriptor)
    assert not is_sealed(descriptor)
    writer.kill()  # an abandoned writer keeps the slab busy until it has ended
    writer.wait()
    vmm.seal(descriptor)
    os.close(descriptor)


def test_a_forked_child_of_a_writer_does_not_keep_a_slab_busy(vmm: MemfdVMM) -> None:
    descriptor = filled(vmm, b"abc", seal=False)
    writer = mapped(vmm, descriptor, writable=True)
    reader, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    vmm.unmap(writer, SIZE)
    vmm.seal(descriptor)
    os.close(end)
    assert os.waitpid(child, 0)[1] == 0
    os.close(descriptor)
    vmm.free(writer)


def test_a_write_to_a_slab_that_is_mapped_for_reading_kills_that_process_only(
    vmm: MemfdVMM, start_child: StartChild
) -> None:
    descriptor = filled(vmm, b"abc")
    child = start_child(descriptor, "readable", "ctypes.memmove(address, b'x', 1)")
    assert child.communicate()[0] == "b'abc'\n" and child.returncode == -signal.SIGSEGV
    reader = mapped(vmm, descriptor, writable=False)
    assert bytes_at(reader) == b"abc"
    os.close(descriptor)


def test_an_access_to_an_unmapped_range_is_a_fault(vmm: MemfdVMM, start_child: StartChild) -> None:
    descriptor = filled(vmm, b"abc")
    child = start_child(descriptor, "readable", "vmm.unmap(address, size); ctypes.string_at(address, 1)")
    child.communicate()
    assert child.returncode == -signal.SIGSEGV
    os.close(descriptor)


def test_private_memory_is_zero_again_after_it_was_unmapped(vmm: MemfdVMM) -> None:
    address, slab = vmm.reserve(SIZE), vmm.private(SIZE)
    for _ in range(2):
        vmm.map(address, slab, writable=True)
        assert bytes_at(address + SIZE - 3) == b"\0\0\0"
        ctypes.memset(address, 7, SIZE)
        vmm.unmap(address, SIZE)
    vmm.close(slab)
    vmm.free(address)


def test_nobody_else_gets_the_addresses_of_a_reserved_range(vmm: MemfdVMM) -> None:
    address = vmm.reserve(SIZE)
    assert address % GRANULARITY == 0
    maps = [mmap.mmap(-1, GRANULARITY) for _ in range(8)]
    others = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in maps]
    assert not any(address - GRANULARITY < other < address + SIZE for other in others)
    vmm.free(address)


def test_a_mapping_that_fails_leaves_the_range_reserved(
    vmm: MemfdVMM, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, slab = vmm.reserve(SIZE), vmm.private(SIZE)
    do_mmap, calls = memfd._mmap, list[int]()

    def fail_first(where: int | None, size: int, protection: int, flags: int, descriptor: int = -1) -> int:
        calls.append(flags)
        if len(calls) == 1:
            memfd._libc.munmap(where, size)  # as some kernels do
            raise OSError(12, "Cannot allocate memory")
        return do_mmap(where, size, protection, flags, descriptor)

    monkeypatch.setattr(memfd, "_mmap", fail_first)
    with pytest.raises(SharedMemoryError, match=r"4194304 bytes cannot be mapped .*Cannot allocate memory"):
        vmm.map(address, slab, writable=True)
    with pytest.raises(OSError, match="File exists"):  # the range is taken
        do_mmap(address, SIZE, 0, memfd._HOLE | memfd._MAP_FIXED_NOREPLACE)
    vmm.map(address, slab, writable=True)


@pytest.mark.parametrize("size", [0, 1, GRANULARITY + 4096])
def test_sizes_are_whole_blocks(vmm: MemfdVMM, size: int) -> None:
    with pytest.raises(AssertionError, match=f"{size} bytes are not whole blocks"):
        vmm.create(size)


def test_nothing_is_mapped_outside_of_a_reserved_range(vmm: MemfdVMM) -> None:
    address, slab = vmm.reserve(SIZE), vmm.private(SIZE)
    for wrong in (address - GRANULARITY, address + GRANULARITY, address + 4096):
        with pytest.raises(AssertionError, match="not in a window"):
            vmm.map(wrong, slab, writable=True)
    vmm.free(address)
    with pytest.raises(AssertionError, match="not in a window"):
        vmm.unmap(address, SIZE)


def test_a_descriptor_that_is_not_one_of_such_a_slab_is_refused(vmm: MemfdVMM) -> None:
    slab, other = vmm.create(SIZE), os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(other, SIZE)
    with pytest.raises(SharedMemoryError, match="of 4194304 bytes with the seals 0x6; a slab of 2097152"):
        vmm.adopt(slab, GRANULARITY)
    with pytest.raises(SharedMemoryError, match="with the seals 0x0"):
        vmm.adopt(other, SIZE)
    reader, writer = os.pipe()
    with pytest.raises(SharedMemoryError, match="not one of a slab"):
        vmm.adopt(reader, SIZE)
    for descriptor in (slab, other, reader, writer):
        os.close(descriptor)
