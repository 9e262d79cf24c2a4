"""What the grammars of the request slots allow next: written on the host, read by the sampling kernels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from segue.memory import backing
from segue.sizes import ceil_div


class MaskTable:
    """One mask per request slot, as `segue.guided.matchers` writes it; on a CPU both sides are one memory.

    A row of the host is written again only when its slot has drawn a token from it, or is another request's.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        shape = (num_slots, ceil_div(vocab_size, 32))
        self._staged = backing.pinned(shape, torch.int32, device).fill_(-1)
        self.host: NDArray[np.int32] = self._staged.numpy()
        self.on_device = self._staged
        self._stream: torch.Stream | None = None  # None: there is nothing to copy
        if device.type != "cpu":
            self.on_device = self._staged.to(device)
            self._stream = torch.Stream(device)
            self._sent, self._sampled = torch.Event(device), torch.Event(device)

    def send(self, slots: NDArray[np.int64]) -> None:
        """Copy the rows of `slots` to the device; what the current stream gets next comes behind the copy.

        The copy runs beside what the current stream has got since `sampled`, such as the step's forward pass.
        It is one copy, of all rows from the first slot to the last; nobody reads those of other slots.
        """
        if self._stream is None:
            return
        span = slice(int(slots.min()), int(slots.max()) + 1)
        self._sampled.wait(self._stream)
        with self._stream:
            self.on_device[span].copy_(self._staged[span], non_blocking=True)
            self._sent.record()
        self._sent.wait()

    def sampled(self) -> None:
        """Note that the current stream has got all that reads the rows that were sent."""
        if self._stream is not None:
            self._sampled.record()
