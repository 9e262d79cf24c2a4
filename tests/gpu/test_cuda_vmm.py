"""Slabs of a GPU under fixed addresses: graphs see what is mapped now, and a reader cannot write."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from segue.memory import cuda_driver
from segue.memory.binding import tensor_at
from segue.memory.cuda_vmm import CudaVMM
from segue.memory.window import MemoryWindow

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(120)]

DEVICE = torch.device("cuda", 0)
VALUES = 1 << 20  # float32 values that a slab holds; more than one block
# Maps the slab of the descriptor in argv[1] for reading, reads it, and writes to it.
WRITER = """
import sys, torch
from segue.memory.binding import tensor_at
from segue.memory.cuda_vmm import CudaVMM
torch.cuda.init()
size, device = int(sys.argv[2]), torch.device("cuda", 0)
vmm = CudaVMM(0, torch.cuda.synchronize)
address = vmm.reserve(size)
vmm.map(address, vmm.adopt(int(sys.argv[1]), size), writable=False)
values = tensor_at(address, size, device)
print("read", int(values[:8].sum()), flush=True)
values.fill_(9)
torch.cuda.synchronize()
print("written", flush=True)
"""


@pytest.fixture
def vmm() -> CudaVMM:
    torch.cuda.init()
    return CudaVMM(0, lambda: torch.cuda.synchronize(DEVICE))


@pytest.fixture
def size(vmm: CudaVMM) -> int:
    return -(-4 * VALUES // vmm.granularity) * vmm.granularity


@pytest.fixture
def window(vmm: CudaVMM, size: int) -> Iterator[MemoryWindow]:
    window = MemoryWindow(vmm, size)
    yield window
    window.close()


def filled(vmm: CudaVMM, size: int, value: float) -> int:
    """The descriptor of a slab of `value`s."""
    descriptor = vmm.create(size)
    writer, slab = MemoryWindow(vmm, size), vmm.adopt(descriptor, size)
    writer.map(0, slab, writable=True)
    vmm.close(slab)
    tensor_at(writer.address, size, DEVICE).view(torch.float32).fill_(value)
    writer.close()  # waits for the device first
    return descriptor


def values_of(window: MemoryWindow, size: int) -> Tensor:
    return tensor_at(window.address, size, DEVICE).view(torch.float32)


def test_a_tensor_may_be_bound_before_anything_is_mapped(
    vmm: CudaVMM, window: MemoryWindow, size: int
) -> None:
    values = values_of(window, size)
    assert values.data_ptr() == window.address and values.device == DEVICE
    window.map(0, vmm.private(size), writable=True)
    values.fill_(2)
    assert float(values.double().mean()) == 2


def test_a_captured_graph_sees_other_slabs_and_is_bit_equal_to_eager(
    vmm: CudaVMM, window: MemoryWindow, size: int
) -> None:
    weight = values_of(window, size)[:VALUES].view(1024, 1024)
    inputs, output = (torch.randn(64, 1024, device=DEVICE) for _ in range(2))
    slabs = [vmm.adopt(filled(vmm, size, value), size) for value in (0.5, -3.0)]
    window.map(0, slabs[0], writable=False)
    torch.mm(inputs, weight, out=output)  # warms cuBLAS up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(inputs, weight, out=output)
    for cycle in range(20):
        window.remap({0: slabs[cycle % 2]}, writable=False)
        graph.replay()
        replayed = output.clone()
        assert torch.equal(replayed, torch.mm(inputs, weight)), cycle
        assert torch.equal(weight, torch.full_like(weight, (0.5, -3.0)[cycle % 2])), cycle


def test_neighbours_are_exchanged_together(vmm: CudaVMM, size: int) -> None:
    """One call unmaps them, though each was mapped by a call of its own; what is between others stays."""
    window = MemoryWindow(vmm, 5 * size)
    for place in range(5):
        window.map(place * size, vmm.adopt(filled(vmm, size, place), size), writable=False)
    values = tensor_at(window.address, 5 * size, DEVICE).view(5, -1).view(torch.float32)
    for cycle in (10, 20):
        new = {place * size: vmm.adopt(filled(vmm, size, cycle + place), size) for place in (0, 1, 2, 4)}
        window.remap(new, writable=False)
        expected = [cycle, cycle + 1, cycle + 2, 3, cycle + 4]
        assert values.min(1).values.tolist() == values.max(1).values.tolist() == expected
    window.close()


def test_a_write_to_a_slab_that_is_mapped_for_reading_ends_only_that_process(
    vmm: CudaVMM, window: MemoryWindow, size: int
) -> None:
    descriptor = filled(vmm, size, 1.0)
    command = [sys.executable, "-c", WRITER, str(descriptor), str(size)]
    ended = subprocess.run(command, pass_fds=[descriptor], capture_output=True, text=True, timeout=90)
    assert ended.stdout.startswith("read ") and "written" not in ended.stdout, ended.stderr
    assert ended.returncode != 0
    window.map(0, vmm.adopt(descriptor, size), writable=False)
    assert bool(values_of(window, size).eq(1).all())
    os.close(descriptor)


def test_unmapping_waits_for_queued_work(vmm: CudaVMM, window: MemoryWindow, size: int) -> None:
    window.map(0, vmm.private(size), writable=True)
    values, total = values_of(window, size), torch.zeros(1, dtype=torch.float64, device=DEVICE)
    values.fill_(1)
    torch.cuda._sleep(200_000_000)  # about 0.1 s of device time, queued before what reads the slab
    total += values.double().sum()
    window.unmap(0)
    assert int(total) == size // 4  # an access to an unmapped slab would have been an error


def test_memory_goes_back_to_the_device_and_a_descriptor_keeps_it(
    vmm: CudaVMM, window: MemoryWindow, size: int
) -> None:
    large = 64 * size
    wide = MemoryWindow(vmm, large)
    before = torch.cuda.mem_get_info(DEVICE)[0]
    descriptor = vmm.create(large)
    slab = vmm.adopt(descriptor, large)
    wide.map(0, slab, writable=True)
    vmm.close(slab)
    assert before - torch.cuda.mem_get_info(DEVICE)[0] >= large
    wide.close()
    assert before - torch.cuda.mem_get_info(DEVICE)[0] >= large
    os.close(descriptor)
    assert before - torch.cuda.mem_get_info(DEVICE)[0] < large // 20


def test_devices_have_the_names_that_torch_gives_them() -> None:
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    assert cuda_driver.device_uuids() == seen
