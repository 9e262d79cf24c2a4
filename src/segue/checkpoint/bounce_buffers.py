"""Bounded host buffers for bytes that cannot be read from a file straight into the weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from segue.memory import backing

STAGING_BYTES = 16 << 20


class BounceBuffers:
    """Holds one host buffer, or for CUDA two pinned ones: one is filled while the other is copied."""

    def __init__(self, device: torch.device, num_bytes: int = STAGING_BYTES) -> None:
        """Allocate buffers of `num_bytes` each for weights on `device`."""
        is_cuda = device.type == "cuda"
        count = 2 if is_cuda else 1
        self.num_bytes = num_bytes
        self._buffers = [backing.pinned((num_bytes,), torch.uint8, device) for _ in range(count)]
        self._copied = [torch.Event(device) for _ in range(count)] if is_cuda else []
        self._next = 0

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[Tensor]:
        """Yield a uint8 buffer `[num_bytes]`; the block fills it, and may copy from it asynchronously."""
        assert num_bytes <= self.num_bytes
        turn = self._next
        self._next = (turn + 1) % len(self._buffers)
        if self._copied:
            self._copied[turn].synchronize()
        yield self._buffers[turn][:num_bytes]
        if self._copied:
            self._copied[turn].record()
