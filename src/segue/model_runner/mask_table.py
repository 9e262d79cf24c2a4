"""What the grammars of the request slots allow next: written on the host, read by the sampling kernels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from segue.memory import backing
from segue.sizes import ceil_div


class MaskTable:
    """One mask per request slot, as `segue.guided.matchers` writes it, in memory of the host.

    A CUDA device reads the rows that it needs from there, while it samples, which saves a copy and its
    launch. A row is written again only when its slot has drawn a token from it, or is another request's; so
    nobody reads it then.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.rows = backing.pinned((num_slots, ceil_div(vocab_size, 32)), torch.int32, device).fill_(-1)
        self.host: NDArray[np.int32] = self.rows.numpy()
