"""Bounded buffers for bytes on their way to weights that cannot be read in place."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

STAGING_BYTES = 16 << 20


class BounceBuffers:
    """Host buffers used in turn. For CUDA they are pinned, and one is filled while the other is copied."""

    def __init__(self, device: torch.device, num_bytes: int = STAGING_BYTES) -> None:
        """Take buffers of `num_bytes` for weights on `device`."""
        is_cuda = device.type == "cuda"
        count = 2 if is_cuda else 1
        self.num_bytes = num_bytes
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(count)]
        self._copied = [torch.Event(device) for _ in range(count)] if is_cuda else []
        self._next = 0

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[Tensor]:
        """A uint8 buffer `[num_bytes]`, to be filled, and copied from without waiting, inside the block."""
        assert num_bytes <= self.num_bytes
        turn = self._next
        self._next = (turn + 1) % len(self._buffers)
        if self._copied:
            self._copied[turn].synchronize()
        yield self._buffers[turn][:num_bytes]
        if self._copied:
            self._copied[turn].record()
