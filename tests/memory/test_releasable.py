"""Releasable memory keeps its addresses, and its contents only with a backup."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from segue.errors import OutOfMemoryError, SlabMemoryError
from segue.memory import releasable
from segue.memory.arena import Arena, Layout, TensorSpec
from segue.memory.memfd import MemfdVMM
from segue.memory.releasable import ReleasableMemory
from segue.memory.vmm import Slab

LAYOUT = Layout.of([TensorSpec(name=name, shape=(5,), dtype=torch.float32) for name in "ab"], slab_bytes=256)


@pytest.fixture
def memory() -> Iterator[ReleasableMemory]:
    memory = ReleasableMemory(torch.device("cpu"))
    yield memory
    memory.close()


def fill(take: Callable[[], Arena]) -> None:
    arena = take()
    for name in "ab":
        arena.view(name).fill_(ord(name))
    arena.zero_gaps()


def test_weights_and_kv_come_back_as_zeros_at_the_same_addresses(memory: ReleasableMemory) -> None:
    arena, kv = memory.load(LAYOUT, fill), memory.take_kv(1000)
    assert len(arena.slabs) == 2 and kv.shape == (1000,) and not kv.any()
    kv.fill_(9)
    addresses = [slab.data_ptr() for slab in (*arena.slabs, kv)]
    assert memory.unmap("weights") == LAYOUT.num_bytes
    assert memory.unmap("kv_cache") == 2 << 20
    assert memory.unmap("kv_cache") == 0  # once more
    assert memory.map(["weights", "kv_cache"]) == LAYOUT.num_bytes + (2 << 20)
    assert memory.map(["weights"]) == 0
    assert [slab.data_ptr() for slab in (*arena.slabs, kv)] == addresses
    assert not kv.any() and not any(slab.any() for slab in arena.slabs)


def test_weights_with_a_backup_come_back_with_their_values(memory: ReleasableMemory) -> None:
    arena = memory.load(LAYOUT, fill)
    memory.unmap("weights", backup=True)
    assert memory.has_backup("weights")
    memory.map(["weights"])
    assert not memory.has_backup("weights")
    assert [arena.view(name).tolist() for name in "ab"] == [[97.0] * 5, [98.0] * 5]


def test_a_backup_that_does_not_fit_leaves_the_weights_where_they_are(
    memory: ReleasableMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = memory.load(LAYOUT, fill)
    monkeypatch.setattr(releasable, "free_cpu_memory", lambda: 1 << 20)
    with pytest.raises(OutOfMemoryError, match=r"missing; free memory, or release .*level=2"):
        memory.unmap("weights", backup=True)
    assert arena.view("a").tolist() == [97.0] * 5


def test_all_of_the_memory_is_taken_or_none(
    memory: ReleasableMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.load(LAYOUT, fill)
    memory.take_kv(1000)
    memory.unmap("weights")
    memory.unmap("kv_cache")
    private, taken = MemfdVMM.private, list[int]()

    def second_fails(self: MemfdVMM, size: int) -> Slab:
        taken.append(size)
        if len(taken) == 2:
            raise SlabMemoryError("none is left")
        return private(self, size)

    monkeypatch.setattr(MemfdVMM, "private", second_fails)
    with pytest.raises(SlabMemoryError):
        memory.map(["weights", "kv_cache"])
    assert memory.unmap("weights") == memory.unmap("kv_cache") == 0
    assert memory.map(["weights", "kv_cache"]) == LAYOUT.num_bytes + (2 << 20)


def test_what_a_filler_checks_first_takes_no_memory(memory: ReleasableMemory) -> None:
    def refuse(take: Callable[[], Arena]) -> None:
        raise ValueError("a bad checkpoint")

    with pytest.raises(ValueError, match="bad"):
        memory.load(LAYOUT, refuse)
    assert memory._ranges == {}


def test_parked_kv_has_only_its_scratch_page_until_the_engine_wakes() -> None:
    memory = ReleasableMemory(torch.device("cpu"), parks_kv=True)
    num_bytes, page = 9 << 20, 3 << 20
    kv = memory.take_kv(num_bytes, scratch_bytes=page)
    window = memory._ranges["kv_cache"].window
    assert window.mapped_bytes == 4 << 20  # whole blocks around the last page
    kv[-page:].fill_(7)
    memory.wake()
    assert window.mapped_bytes == window.size == 10 << 20
    assert not kv.any()
    kv.fill_(1)
    memory.wake()  # once more takes nothing
    assert kv.all() and memory.unmap("kv_cache") == window.size
    memory.close()


def test_kv_that_is_not_parked_is_whole_from_the_start(memory: ReleasableMemory) -> None:
    kv = memory.take_kv(9 << 20, scratch_bytes=1 << 20)
    kv.fill_(1)
    memory.wake()
    assert kv.all()


class ScarceVMM(MemfdVMM):
    """Has no memory for the next `refusals` slabs."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals

    def private(self, size: int) -> Slab:
        if self.refusals:
            self.refusals -= 1
            raise SlabMemoryError("none is left")
        return super().private(size)


def parked(refusals: int) -> ReleasableMemory:
    """Memory of an engine that stands by; its wake meets so many refusals."""
    memory = ReleasableMemory(torch.device("cpu"), parks_kv=True)
    memory._vmm = vmm = ScarceVMM(0)
    memory.take_kv(9 << 20, scratch_bytes=1 << 20)
    vmm.refusals = refusals
    return memory


def test_a_wake_waits_for_memory_that_comes_back() -> None:
    memory = parked(3)
    memory.wake(1, timeout_s=30.0)
    assert memory._ranges["kv_cache"].window.mapped_bytes == 10 << 20
    memory.close()


@pytest.mark.parametrize("timeout_s", [0.0, 0.2])
def test_a_wake_without_memory_says_how_much_is_missing(
    timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releasable, "free_cpu_memory", lambda: 4 << 20)
    memory, began = parked(1_000_000), time.monotonic()
    with pytest.raises(
        SlabMemoryError, match=r"needs 10\.0 MiB, .* 4\.0 MiB is free .* 6\.0 MiB are missing"
    ):
        memory.wake(1, timeout_s=timeout_s)
    assert 0.8 * timeout_s <= time.monotonic() - began < 0.8 * timeout_s + 5
    assert not memory._ranges["kv_cache"].window.mapped_bytes
    memory.close()
