"""Writes single elements of tensors that outlive a step, such as the page table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segue.memory import backing


class DeviceWriter:
    """Writes single elements of contiguous tensors of 4- or 8-byte elements; this class writes on the CPU."""

    def write(self, tensor: Tensor, index: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Set the elements `index` of the flattened tensor to `values`, which have the tensor's dtype.

        An element must not be written twice between two flushes.
        """
        tensor.view(-1).numpy()[index] = values

    def capture(self) -> None:
        """Prepare for steps that replay graphs: then a flush replays one, too."""

    def flush(self) -> None:
        """Launch all writes since the last flush; on a CPU they are done."""


class CUDAWriter(DeviceWriter):
    """Stages writes in a ring of pinned buffers; a buffer is used again when its copy is done.

    Single elements of several tensors are written with one copy to the device and one kernel. A buffer holds
    their count (8 bytes), their byte addresses (8 bytes each) and their values (4-byte words, two for an
    element of 8 bytes). The device has one such buffer, at an address that never changes, so that a captured
    graph can read it: to launch a kernel through Triton takes several times as long as to replay a graph.
    """

    _RING = 4

    def __init__(self, device: torch.device, capacity: int = 1 << 15) -> None:
        """Allocate the buffers. `capacity` counts the 4-byte words of one copy; more words take several."""
        self._capacity = capacity
        size = 2 + 3 * capacity  # int32: an address takes two, a value one
        self._staged = backing.pinned((self._RING, size), torch.int32, device)
        self._received = torch.zeros(size, dtype=torch.int32, device=device)
        self._copied = [torch.Event(device) for _ in range(self._RING)]
        self._next = 0
        self._addresses: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.int32]] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def write(self, tensor: Tensor, index: NDArray[np.int64], values: NDArray[Any]) -> None:
        """See `DeviceWriter.write`: notes addresses and words; `flush` sends them."""
        size = tensor.element_size()
        addresses = tensor.data_ptr() + index * size
        words = np.ascontiguousarray(values).view(np.int32)
        if size == 8:  # two words, the second one at the next address
            addresses = (addresses[:, None] + np.array([0, 4])).ravel()
        self._addresses.append(addresses)
        self._values.append(words)

    def capture(self) -> None:
        """See `DeviceWriter.capture`. The graph has programs for as many words as a buffer has."""
        from segue.kernels.triton.step_inputs import scatter

        assert not self._addresses, "writes wait for a flush"
        self._received[:2].zero_()
        scatter(self._received, self._capacity)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        scatter(self._received, self._capacity)
        graph.capture_end()
        graph.replay()  # the first replay uploads it
        self._graph = graph

    def flush(self) -> None:
        """Copy all noted words to the device and launch the kernel that scatters them to their addresses."""
        from segue.kernels.triton.step_inputs import scatter

        if not self._addresses:
            return
        addresses, values = np.concatenate(self._addresses), np.concatenate(self._values)
        self._addresses, self._values = [], []
        for start in range(0, len(values), self._capacity):
            count = min(self._capacity, len(values) - start)
            ring_index, self._next = self._next, (self._next + 1) % self._RING
            self._copied[ring_index].synchronize()  # its last copy may not have read the buffer yet
            size, staged = 2 + 3 * count, self._staged[ring_index]
            host = staged.numpy()
            numbers = host[: 2 + 2 * count].view(np.int64)
            numbers[0], numbers[1:] = count, addresses[start : start + count]
            host[2 + 2 * count : size] = values[start : start + count]
            self._received[:size].copy_(staged[:size], non_blocking=True)
            self._copied[ring_index].record()
            if self._graph is not None:
                self._graph.replay()
            else:
                scatter(self._received, count)
