"""Calls of the driver get what its header says, and a failure has the driver's reason."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from segue.errors import CUDADriverError
from segue.memory import cuda_driver
from tests.support.fake_driver import FakeDriver

PAGE = 3 << 20
MANY = cuda_driver.FEW_COPIES + 1
# Above 2**32 elements and 2**33 bytes.
SOURCES = [0x7F00_0000_0000 + index * PAGE for index in range(MANY)]
TARGETS = [0x7E05_0000_0000 - index * PAGE for index in range(MANY)]


@pytest.fixture
def addresses() -> list[np.ndarray]:
    return [np.array(each, np.uint64) for each in (TARGETS, SOURCES)]


def use(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> FakeDriver:
    monkeypatch.setattr(cuda_driver, "_library", lambda: driver)
    monkeypatch.setattr(cuda_driver, "_copy_under_gil", lambda: driver.cuMemcpyDtoDAsync_v2)
    return driver


@pytest.fixture(autouse=True)
def forget_contexts() -> Iterator[None]:
    yield
    cuda_driver._context.cache_clear()


def test_structures_have_the_sizes_of_the_drivers_header() -> None:
    sizes = {
        cuda_driver.MemoryLocation: 8,
        cuda_driver.AllocationProperties: 32,
        cuda_driver.AccessDescription: 12,
        cuda_driver._CopyAttributes: 24,
    }
    assert {kind: ctypes.sizeof(kind) for kind in sizes} == sizes


def test_a_failure_names_the_function_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeDriver()).fails.add("cuMemUnmap")
    with pytest.raises(CUDADriverError, match="cuMemUnmap failed with code 1: invalid argument"):
        cuda_driver.call("cuMemUnmap", 1, 2)


def test_a_driver_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    cuda_driver._library.cache_clear()
    with pytest.raises(CUDADriverError, match=r"libcuda.so.1: cannot open .*--device cpu"):
        cuda_driver.call("cuInit", 0)


def test_one_call_queues_the_copies_of_all_pages(
    monkeypatch: pytest.MonkeyPatch, addresses: list[np.ndarray]
) -> None:
    driver = use(monkeypatch, FakeDriver())
    kept: list[list[int]] = []

    def batch(*arguments: object) -> int:  # the arrays are read during the call
        for address in arguments[:3]:
            assert isinstance(address, int)
            kept.append(list((ctypes.c_uint64 * MANY).from_address(address)))
        driver.calls.append(("batch", arguments))
        return 0

    driver.cuMemcpyBatchAsync_v2 = batch
    cuda_driver.copy_pages(*addresses, PAGE, 77)
    assert kept == [TARGETS, SOURCES, [PAGE] * MANY]
    ((_, (*_, count, attributes, first, num_attributes, stream)),) = driver.calls
    assert (count, num_attributes, stream) == (MANY, 1, 77)
    assert (attributes._obj.order, attributes._obj.flags, first._obj.value) == (1, 1, 0)


def test_a_driver_without_batches_gets_a_call_per_page(
    monkeypatch: pytest.MonkeyPatch, addresses: list[np.ndarray]
) -> None:
    driver = use(monkeypatch, FakeDriver("cuMemcpyBatchAsync_v2"))
    cuda_driver.copy_pages(*addresses, PAGE, 77)
    calls = [(TARGETS[i], SOURCES[i], PAGE, 77) for i in range(MANY)]
    assert driver.of("cuMemcpyDtoDAsync_v2") == calls


def test_few_copies_are_queued_one_by_one_and_a_failure_is_told(
    monkeypatch: pytest.MonkeyPatch, addresses: list[np.ndarray]
) -> None:
    driver = use(monkeypatch, FakeDriver())
    few = [each[: cuda_driver.FEW_COPIES] for each in addresses]
    cuda_driver.copy_pages(*few, PAGE, 77)
    calls = [(TARGETS[i], SOURCES[i], PAGE, 77) for i in range(cuda_driver.FEW_COPIES)]
    assert driver.of("cuMemcpyDtoDAsync_v2") == calls
    driver.fails.add("cuMemcpyDtoDAsync_v2")
    with pytest.raises(CUDADriverError, match="cuMemcpyDtoDAsync_v2 failed with code 1"):
        cuda_driver.copy_pages(*few, PAGE, 77)


@pytest.mark.parametrize("absent", [(), ("cuMemcpyBatchAsync_v2",)], ids=["batch", "single"])
def test_no_pages_need_no_call(monkeypatch: pytest.MonkeyPatch, absent: tuple[str, ...]) -> None:
    driver = use(monkeypatch, FakeDriver(*absent))
    cuda_driver.copy_pages(np.zeros(0, np.uint64), np.zeros(0, np.uint64), PAGE, 77)
    assert driver.calls == []


def test_a_devices_context_is_taken_once_and_made_current_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = use(monkeypatch, FakeDriver())
    for _ in range(3):
        cuda_driver.use_device(1)
    assert driver.names.count("cuDevicePrimaryCtxRetain") == 1
    assert driver.of("cuCtxSetCurrent") == 3 * [driver.of("cuCtxSetCurrent")[0]]


def test_devices_are_named_as_torch_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(name: str, *arguments: Any) -> None:
        if name == "cuDeviceGetCount":
            arguments[0]._obj.value = 2
        elif name == "cuDeviceGet":
            arguments[0]._obj.value = 10 + arguments[1]
        else:
            arguments[0].raw = bytes(range(15)) + bytes([arguments[1].value])

    monkeypatch.setattr(cuda_driver, "call", call)
    assert cuda_driver.device_uuids() == [f"00010203-0405-0607-0809-0a0b0c0d0e0{last}" for last in "ab"]
