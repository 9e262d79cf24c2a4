"""Memory of a GPU is mapped with the right size, and a failure leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from segue.errors import SharedMemoryError
from segue.memory import cuda_driver, device_shared
from tests.support.fake_driver import FakeDriver

DEVICE = torch.device("cuda", 1)
GRANULARITY = 0x1000  # the first result of the fake driver, which asks for it first
NUM_BYTES = 0x2345
# Each call that takes something, and the one that gives it back.
PAIRS = [
    ("cuMemImportFromShareableHandle", "cuMemRelease"),
    ("cuMemAddressReserve", "cuMemAddressFree"),
    ("cuMemMap", "cuMemUnmap"),
]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(cuda_driver, "_library", lambda: driver)
    return driver


def test_a_descriptor_is_mapped_for_the_device_that_will_write(driver: FakeDriver) -> None:
    mapping = device_shared.open_descriptor(5, NUM_BYTES, DEVICE)
    ((address, num_bytes, access, count),) = driver.of("cuMemSetAccess")
    assert (address.value, num_bytes, count) == (mapping.address, 3 * GRANULARITY, 1)
    location = access._obj.location
    assert (location.type, location.id, access._obj.flags) == (1, DEVICE.index, 3)
    assert mapping.__cuda_array_interface__["shape"] == (NUM_BYTES,)
    assert mapping.__cuda_array_interface__["data"] == (mapping.address, False)
    mapping.close()


def test_a_mapping_is_closed_once(driver: FakeDriver) -> None:
    mapping = device_shared.open_descriptor(5, NUM_BYTES, DEVICE)
    mapping.close()
    mapping.close()
    assert [driver.names.count(name) for pair in PAIRS for name in pair] == 6 * [1]
    assert mapping.address == 0


@pytest.mark.parametrize("failing", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_what_was_taken_before_a_failure_is_given_back(driver: FakeDriver, failing: str) -> None:
    driver.fails.add(failing)
    with pytest.raises(
        SharedMemoryError, match=f"9029 bytes .*{failing} failed .*invalid argument.*peer|access"
    ):
        device_shared.open_descriptor(5, NUM_BYTES, DEVICE)
    for take, give in PAIRS:
        assert (take in driver.names and take not in driver.fails) == (give in driver.names), give


def test_a_descriptor_of_something_else_is_refused(driver: FakeDriver) -> None:
    driver.fails.add("cuMemImportFromShareableHandle")
    with pytest.raises(SharedMemoryError, match="one container"):
        device_shared.open_descriptor(5, NUM_BYTES, DEVICE)
    assert "cuMemMap" not in driver.names


@pytest.fixture
def attribute(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> Callable[[int], None]:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)

    def set_to(value: int) -> None:
        monkeypatch.setattr(cuda_driver, "attribute", lambda *_: value)

    return set_to


def test_a_device_that_cannot_share_memory_is_refused(attribute: Callable[[int], None]) -> None:
    attribute(0)
    with pytest.raises(SharedMemoryError, match=r"cuda:1 cannot share memory .*--role both"):
        device_shared.create(NUM_BYTES, DEVICE)


def test_too_little_memory_is_an_error_of_memory(
    attribute: Callable[[int], None], driver: FakeDriver
) -> None:
    attribute(1)
    driver.fails.add("cuMemCreate")
    with pytest.raises(torch.OutOfMemoryError, match=r"9029 bytes of cuda:1 .*--memory-ratio"):
        device_shared.create(NUM_BYTES, DEVICE)


def test_a_failed_export_frees_the_memory(attribute: Callable[[int], None], driver: FakeDriver) -> None:
    attribute(1)
    driver.fails.add("cuMemExportToShareableHandle")
    with pytest.raises(Exception, match="cuMemExportToShareableHandle failed"):
        device_shared.create(NUM_BYTES, DEVICE)
    assert driver.names.count("cuMemRelease") == 1


def test_memory_that_cannot_be_mapped_leaves_no_descriptor(
    attribute: Callable[[int], None], driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    attribute(1)
    driver.fails.add("cuMemMap")
    ended: list[int] = []
    monkeypatch.setattr(os, "close", ended.append)
    with pytest.raises(Exception, match="cuMemMap failed"):
        device_shared.create(NUM_BYTES, DEVICE)
    monkeypatch.undo()
    assert len(ended) == 1


def test_a_device_reaches_itself_and_those_with_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    def can_access(device: int, peer: int) -> bool:
        return peer == 2

    monkeypatch.setattr(device_shared, "visible_uuids", lambda: ["a", "b", "c", "d"])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    found: Any = device_shared.reachable_uuids(DEVICE)
    assert found == ["b", "c"]
