"""A window keeps its addresses while slabs come and go, as wholes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from segue.errors import SharedMemoryError
from segue.memory.memfd import GRANULARITY, MemfdVMM
from segue.memory.vmm import Slab
from segue.memory.window import MemoryWindow


@pytest.fixture
def vmm() -> MemfdVMM:
    return MemfdVMM()


@pytest.fixture
def window(vmm: MemfdVMM) -> Iterator[MemoryWindow]:
    window = MemoryWindow(vmm, 3 * GRANULARITY - 5)
    yield window
    window.close()


def sealed(vmm: MemfdVMM, content: bytes, size: int = GRANULARITY) -> Slab:
    descriptor = vmm.create(size)
    os.pwrite(descriptor, content, 0)
    vmm.seal(descriptor)
    slab = vmm.adopt(descriptor, size)
    os.close(descriptor)
    return slab


def content(window: MemoryWindow, offset: int) -> bytes:
    return ctypes.string_at(window.address + offset, 1)


def test_a_window_is_rounded_up_and_empty(window: MemoryWindow) -> None:
    assert (window.size, window.mapped_bytes) == (3 * GRANULARITY, 0)


def test_other_slabs_are_seen_at_the_same_addresses(vmm: MemfdVMM, window: MemoryWindow) -> None:
    for name in (b"a", b"b"):
        window.map(GRANULARITY, sealed(vmm, name), writable=False)
        window.populate()
        assert (content(window, GRANULARITY), window.mapped_bytes) == (name, GRANULARITY)
        window.unmap(GRANULARITY)
    assert window.mapped_bytes == 0


def test_a_slab_takes_the_place_of_another(vmm: MemfdVMM, window: MemoryWindow) -> None:
    window.map(0, sealed(vmm, b"a"), writable=False)
    window.map(GRANULARITY, sealed(vmm, b"b", 2 * GRANULARITY), writable=False)
    window.remap({0: sealed(vmm, b"c")}, writable=False)
    assert [content(window, offset) for offset in (0, GRANULARITY)] == [b"c", b"b"]
    with pytest.raises(AssertionError, match=f"no slab of {GRANULARITY} bytes is mapped at {GRANULARITY}"):
        window.remap({GRANULARITY: sealed(vmm, b"d")}, writable=False)


def test_slabs_do_not_overlap_and_stay_inside(vmm: MemfdVMM, window: MemoryWindow) -> None:
    window.map(GRANULARITY, vmm.private(GRANULARITY), writable=True)
    with pytest.raises(AssertionError, match=f"overlap the slab that is mapped at {GRANULARITY}"):
        window.map(0, vmm.private(2 * GRANULARITY), writable=True)
    for offset in (-GRANULARITY, 3 * GRANULARITY):
        with pytest.raises(AssertionError, match="outside of the window"):
            window.map(offset, vmm.private(GRANULARITY), writable=True)


def test_a_slab_that_cannot_be_mapped_leaves_its_place_empty(vmm: MemfdVMM, window: MemoryWindow) -> None:
    window.map(0, sealed(vmm, b"a"), writable=False)
    with pytest.raises(SharedMemoryError, match="sealed"):
        window.remap({0: sealed(vmm, b"b")}, writable=True)
    assert window.mapped_bytes == 0
    window.map(0, sealed(vmm, b"c"), writable=False)
    assert content(window, 0) == b"c"


def test_clear_unmaps_all_slabs(vmm: MemfdVMM, window: MemoryWindow) -> None:
    for offset in (0, 2 * GRANULARITY):
        window.map(offset, vmm.private(GRANULARITY), writable=True)
    window.clear()
    assert window.mapped_bytes == 0
