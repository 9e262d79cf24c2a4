"""Device memory that is registered with NCCL, for buckets to be sent from and to land in.

Between devices of one host a broadcast then goes from the sender's buffer straight into the receiver's. Else
it goes through buffers of NCCL's own, from which kernels copy it: for as many bytes a second that takes twice
the SMs, and three times the memory traffic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RegisteredBuffers:
    """Buffers of one communicator, `uint8[num_bytes]` each.

    They lie in a pool of their own: what a peer can write to is never used for anything else. They are to be
    held until the communicator has ended, or was told to forget them.
    """

    def __init__(self, nccl: Any, device: torch.device, num_bytes: int, count: int) -> None:
        """Take `count` buffers; `nccl`: torch's `ProcessGroupNCCL`.

        Raises:
            torch.OutOfMemoryError: there is too little memory.
        """
        self.num_bytes = num_bytes
        self._nccl = nccl
        self._pool = torch.cuda.MemPool(nccl.mem_allocator)
        self._is_registered = False
        with torch.cuda.use_mem_pool(self._pool, device):
            self.buffers: list[Tensor] = [
                torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(count)
            ]

    def register(self) -> None:
        """Tell the communicator, which has to be connected; once."""
        if not self._is_registered:
            self._nccl.register_mem_pool(self._pool)
            self._is_registered = True

    def forget(self) -> None:
        """Have the communicator forget them: no broadcast may be under way."""
        if self._is_registered:
            self._nccl.deregister_mem_pool(self._pool)
            self._is_registered = False
