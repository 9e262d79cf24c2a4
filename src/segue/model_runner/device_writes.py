"""Writes to single elements of device tensors, collected on the host; one copy and one kernel per step."""

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

    def flush(self) -> None:
        """Launch all writes since the last flush; on a CPU they are done."""


class CUDAWriter(DeviceWriter):
    """Stages writes in a ring of pinned buffers; a buffer is used again when its copy is done."""

    _RING = 4

    def __init__(self, device: torch.device, capacity: int = 1 << 15) -> None:
        """Allocate the ring. `capacity` counts the 4-byte words of one copy; more words take several."""
        self._capacity = capacity
        size = (self._RING, 3 * capacity)
        self._staged = backing.pinned(size, torch.int32, device)
        self._received = torch.empty(size, dtype=torch.int32, device=device)
        self._copied = [torch.Event(device) for _ in range(self._RING)]
        self._next = 0
        self._addresses: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.int32]] = []

    def write(self, tensor: Tensor, index: NDArray[np.int64], values: NDArray[Any]) -> None:
        size = tensor.element_size()
        addresses = tensor.data_ptr() + index * size
        words = np.ascontiguousarray(values).view(np.int32)
        if size == 8:
            addresses = (addresses[:, None] + np.array([0, 4])).ravel()
        self._addresses.append(addresses)
        self._values.append(words)

    def flush(self) -> None:
        from segue.kernels.triton.step_inputs import scatter

        if not self._addresses:
            return
        addresses, values = np.concatenate(self._addresses), np.concatenate(self._values)
        self._addresses, self._values = [], []
        for start in range(0, len(values), self._capacity):
            count = min(self._capacity, len(values) - start)
            ring_index, self._next = self._next, (self._next + 1) % self._RING
            self._copied[ring_index].synchronize()
            staged, received = self._staged[ring_index], self._received[ring_index]
            host = staged.numpy()
            host[: 2 * count].view(np.int64)[:] = addresses[start : start + count]
            host[2 * count : 3 * count] = values[start : start + count]
            received[: 3 * count].copy_(staged[: 3 * count], non_blocking=True)
            self._copied[ring_index].record()
            scatter(received[: 2 * count].view(torch.int64), received[2 * count :], count)
