"""A tensor over addresses sees what is mapped there now."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import torch

from segue.memory.binding import tensor_at
from segue.memory.memfd import GRANULARITY, MemfdVMM
from segue.memory.window import MemoryWindow

CPU = torch.device("cpu")
SIZE = 2 * GRANULARITY
# A tensor may outlive the interpreter's objects, and is then freed without the GIL.
UNTIL_THE_END = """
import torch
from segue.memory.binding import tensor_at
from segue.memory.memfd import GRANULARITY, MemfdVMM
torch.kept_until_the_end = tensor_at(MemfdVMM().reserve(GRANULARITY), GRANULARITY, torch.device("cpu"))
"""


def test_a_tensor_is_the_bytes_at_its_address() -> None:
    source = torch.arange(64, dtype=torch.uint8)
    tensor = tensor_at(source.data_ptr() + 8, 16, CPU)
    assert (tensor.dtype, tensor.shape, tensor.device) == (torch.uint8, (16,), CPU)
    assert tensor.data_ptr() == source.data_ptr() + 8 and tensor.is_contiguous()
    tensor[0] = 99
    assert source[8] == 99


def test_a_tensor_sees_other_slabs_at_the_same_addresses() -> None:
    vmm = MemfdVMM()
    window = MemoryWindow(vmm, SIZE)
    tensor = tensor_at(window.address, SIZE, CPU)  # nothing is mapped yet
    weight = tensor[GRANULARITY:].view(torch.float32)[:4].view(2, 2)
    for value in (1.0, 2.0):
        descriptor = vmm.create(SIZE)
        os.pwrite(descriptor, torch.full((4,), value).numpy().tobytes(), GRANULARITY)
        vmm.seal(descriptor)
        window.map(0, vmm.adopt(descriptor, SIZE), writable=False)
        os.close(descriptor)
        assert weight.tolist() == [[value, value], [value, value]]
        assert torch.equal(weight @ torch.eye(2), weight)
        window.unmap(0)
    window.map(0, vmm.private(SIZE), writable=True)
    weight.fill_(3)
    assert tensor[GRANULARITY:].view(torch.float32)[:5].tolist() == [3, 3, 3, 3, 0]
    window.close()


def test_a_tensor_over_an_unmapped_range_can_be_viewed_and_freed() -> None:
    window = MemoryWindow(MemfdVMM(), SIZE)
    tensor = tensor_at(window.address, SIZE, CPU)
    views = [tensor[i : i + 8].view(torch.int32) for i in range(0, 64, 8)]
    assert views[7].data_ptr() == window.address + 56
    del tensor, views
    gc.collect()
    window.close()


def test_making_a_tensor_accesses_nothing() -> None:
    address = MemfdVMM().reserve(SIZE)
    for _ in range(1000):
        assert tensor_at(address, SIZE, CPU).numel() == SIZE


def test_a_tensor_may_be_freed_after_the_interpreter() -> None:
    ended = subprocess.run([sys.executable, "-c", UNTIL_THE_END], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
