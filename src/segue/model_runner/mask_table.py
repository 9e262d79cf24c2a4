"""What the grammars of the request slots allow next: written on the host, read by the sampling kernels."""

from __future__ import annotations

import os
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segue.memory import backing, shared
from segue.sizes import ceil_div


class MaskTable:
    """One mask per request slot, as `segue.guided.matchers` writes it, in memory of the host.

    A CUDA device reads the rows that it needs from there, while it samples, which saves a copy and its
    launch. A row is written again only when its slot has drawn a token from it, or is another request's; so
    nobody reads it then.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, *, shared: bool = False
    ) -> None:
        """Allocate the masks; with `shared`, other processes can map them. Call `close` then.

        A device that cannot read shared memory gets masks that are not shared.
        """
        shape = num_slots, ceil_div(vocab_size, 32)
        self.descriptor: int | None = None  # of memory that begins with the masks; None: it is not shared
        self._free: weakref.finalize[..., MaskTable] | None = None
        if shared:
            self.descriptor, self.rows = _shared(shape)
            locks = device.type == "cuda"
            if locks and not backing.lock(self.rows, "one thread follows guided requests, and no processes"):
                os.close(self.descriptor)
                self.descriptor = None
            else:
                self._free = weakref.finalize(self, _free, self.descriptor, self.rows if locks else None)
                self._free.atexit = False
        if self.descriptor is None:
            self.rows = backing.pinned(shape, torch.int32, device).fill_(-1)
        self.host: NDArray[np.int32] = self.rows.numpy()

    def close(self) -> None:
        """Let the memory go with the last tensor of it; no step may read it any more."""
        if self._free is not None:
            self._free()  # which happens once


def _shared(shape: tuple[int, int]) -> tuple[int, Tensor]:
    num_bytes = 4 * shape[0] * shape[1]
    descriptor = shared.create(num_bytes)
    rows = torch.frombuffer(shared.map_shared(descriptor, num_bytes), dtype=torch.int32)
    return descriptor, rows.view(shape).fill_(-1)


def _free(descriptor: int, locked: Tensor | None) -> None:
    os.close(descriptor)
    if locked is not None:
        backing.unlock(locked)
