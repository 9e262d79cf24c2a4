"""Each kind of memory has its size, its contents and its alignment."""

import gc
import mmap
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from segue.memory import backing
from segue.memory.arena import ALIGNMENT

CPU = torch.device("cpu")
huge_pages = partial(backing.pageable, huge=True)


@pytest.mark.parametrize("take", [backing.pageable, huge_pages])
def test_memory_of_the_host_is_zero_and_aligned_to_pages(take: Callable[[int], Tensor]) -> None:
    for num_bytes in (1, 5000, 3 << 20):
        memory = take(num_bytes)
        assert (memory.dtype, memory.numel()) == (torch.uint8, num_bytes)
        assert memory.data_ptr() % mmap.PAGESIZE == 0 and mmap.PAGESIZE % ALIGNMENT == 0
        assert memory.count_nonzero() == 0
    assert take(0).numel() == 0


@pytest.mark.parametrize("take", [backing.pageable, huge_pages])
def test_memory_of_the_host_is_private(take: Callable[[int], Tensor]) -> None:
    # A kernel's setting for huge pages rarely covers shared memory, and a fork would write to it.
    memory = take(3 << 20)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        if start <= memory.data_ptr() < end:
            assert permissions == "rw-p"
            return
    raise AssertionError("the memory is not mapped")


def test_a_pool_is_taken_on_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing.mmap, "MADV_HUGEPAGE", 12345, raising=False)  # madvise raises EINVAL
    assert huge_pages(4096).count_nonzero() == 0
    assert backing.zeros(4096, CPU).count_nonzero() == 0


def test_memory_for_copies_to_a_cpu_is_not_pinned() -> None:
    memory = backing.pinned((3, 64), torch.float32, CPU)
    assert (memory.shape, memory.dtype, memory.is_pinned()) == ((3, 64), torch.float32, False)


def test_memory_is_freed_with_its_last_view() -> None:
    memory = backing.pageable(1 << 20)
    view, freed = memory[5:9], weakref.ref(memory.untyped_storage())
    del memory
    view.fill_(1)
    del view
    gc.collect()
    assert freed() is None


def test_memory_that_the_driver_does_not_pin_is_pageable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It warns once, and the error is not told again by the next launch."""
    later = ["operation not supported (801)"]

    def refuse(*_: object) -> None:
        raise RuntimeError(later[0])

    def launch(*_: object, device: str) -> None:
        raise RuntimeError(later.pop())

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 801))
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    monkeypatch.setattr(torch, "zeros", launch)
    raw = backing.page_locked(5000)
    assert not raw.any() and later == []
    (record,) = caplog.records
    assert (
        "5000 bytes of host memory cannot be pinned for the GPU (operation not supported (801);"
        in record.message
    )
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)  # no machine without a GPU has any
    backing.unlock(raw)  # which it never was
