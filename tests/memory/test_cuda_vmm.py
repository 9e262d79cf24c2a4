"""Slabs of a GPU: the order of the driver's calls, and what a failure leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from segue.errors import CUDADriverError, SharedMemoryError, SlabMemoryError
from segue.memory import cuda_driver
from segue.memory.cuda_vmm import CudaVMM
from segue.memory.window import MemoryWindow
from tests.support.fake_driver import FakeDriver

GRANULARITY = 0x1000  # the first result of the fake driver, which `granularity` asks for first
SIZE = 3 * GRANULARITY


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    driver = FakeDriver()
    monkeypatch.setattr(cuda_driver, "_library", lambda: driver)
    yield driver
    cuda_driver._context.cache_clear()


@pytest.fixture
def vmm(driver: FakeDriver) -> CudaVMM:
    vmm = CudaVMM(1, lambda: driver.calls.append(("synchronise", ())))
    assert vmm.granularity == GRANULARITY
    driver.calls.clear()
    return vmm


def test_an_owner_makes_a_descriptor_without_a_context(vmm: CudaVMM, driver: FakeDriver) -> None:
    assert vmm.create(SIZE) > 0
    assert driver.names == ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemRelease"]
    ((handle, size, properties, _),) = driver.of("cuMemCreate")
    assert (size, properties._obj.handle_types, properties._obj.location.id) == (SIZE, 1, 1)
    assert driver.of("cuMemRelease") == [(handle._obj.value,)]


def test_a_failed_export_gives_the_memory_back(vmm: CudaVMM, driver: FakeDriver) -> None:
    driver.fails.add("cuMemExportToShareableHandle")
    with pytest.raises(CUDADriverError, match="cuMemExportToShareableHandle failed"):
        vmm.create(SIZE)
    assert driver.names[-1] == "cuMemRelease"


def test_too_little_memory_is_a_named_error(vmm: CudaVMM, driver: FakeDriver) -> None:
    driver.fails.add("cuMemCreate")
    for take in (vmm.create, vmm.private):
        with pytest.raises(SlabMemoryError, match=r"GPU 1 has no memory for a slab of 12288 bytes .*lower"):
            take(SIZE)
    assert "cuMemRelease" not in driver.names


@pytest.mark.parametrize(("writable", "flags"), [(True, 3), (False, 1)])
def test_a_slab_is_mapped_with_the_access_that_is_asked_for(
    vmm: CudaVMM, driver: FakeDriver, writable: bool, flags: int
) -> None:
    address, slab = vmm.reserve(SIZE), vmm.adopt(5, SIZE)
    vmm.map(address, slab, writable=writable)
    vmm.close(slab)
    assert driver.of("cuMemMap") == [(address, SIZE, 0, slab.handle, 0)]
    ((where, size, access, count),) = driver.of("cuMemSetAccess")
    assert (where, size, count, access._obj.flags) == (address, SIZE, 1, flags)
    assert (access._obj.location.type, access._obj.location.id) == (1, 1)
    assert driver.of("cuMemRelease") == [(slab.handle,)]


def test_queued_work_ends_before_a_slab_is_unmapped(vmm: CudaVMM, driver: FakeDriver) -> None:
    window = MemoryWindow(vmm, SIZE)
    window.map(0, vmm.private(SIZE), writable=True)
    driver.calls.clear()
    window.close()
    assert driver.names == ["synchronise", "cuCtxSetCurrent", "cuMemUnmap", "cuMemAddressFree"]
    assert driver.of("cuMemUnmap") == driver.of("cuMemAddressFree") == [(window.address, SIZE)]


def test_slabs_take_the_places_of_others_with_one_wait_and_one_call_for_neighbours(
    vmm: CudaVMM, driver: FakeDriver
) -> None:
    window = MemoryWindow(vmm, 4 * SIZE)
    for place in range(4):
        window.map(place * SIZE, vmm.private(SIZE), writable=False)
    driver.calls.clear()
    window.remap({place * SIZE: vmm.adopt(5, SIZE) for place in (0, 1, 3)}, writable=False)
    assert driver.names.count("synchronise") == 1
    assert len(driver.of("cuMemMap")) == 3
    for name in ("cuMemUnmap", "cuMemSetAccess"):
        found = [(where - window.address, size) for where, size, *_ in driver.of(name)]
        assert found == [(0, 2 * SIZE), (3 * SIZE, SIZE)]


@pytest.mark.parametrize("failing", ["cuMemMap", "cuMemSetAccess"])
def test_a_slab_that_cannot_be_mapped_leaves_nothing_mapped(
    vmm: CudaVMM, driver: FakeDriver, failing: str
) -> None:
    window, slab = MemoryWindow(vmm, SIZE), vmm.adopt(5, SIZE)
    driver.fails.add(failing)
    with pytest.raises(
        SharedMemoryError, match=rf"12288 bytes cannot be mapped at 0x.* of GPU 1 .*{failing}"
    ):
        window.map(0, slab, writable=False)
    assert ("cuMemUnmap" in driver.names) == (failing == "cuMemSetAccess")
    assert window.mapped_bytes == 0


def test_a_descriptor_of_something_else_is_refused(vmm: CudaVMM, driver: FakeDriver) -> None:
    driver.fails.add("cuMemImportFromShareableHandle")
    with pytest.raises(SharedMemoryError, match=r"cannot be opened .*one container"):
        vmm.adopt(5, SIZE)


def test_sizes_are_whole_blocks(vmm: CudaVMM) -> None:
    for take in (vmm.create, vmm.private, vmm.reserve):
        with pytest.raises(AssertionError, match="4097 bytes are not whole blocks of 4096 bytes"):
            take(GRANULARITY + 1)


def test_what_a_device_does_not_have_is_not_called(vmm: CudaVMM, driver: FakeDriver) -> None:
    vmm.seal(5)
    vmm.populate(0x5000, SIZE)
    assert driver.calls == []
