"""Device memory that is registered with NCCL, for buckets to be sent from and to land in.

Between devices of one host a broadcast then goes from the sender's buffer straight into the receiver's. Else
it goes through buffers of NCCL's own, from which kernels copy it: for as many bytes a second that takes twice
the SMs, and three times the memory traffic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GRANULARITY = 512 << 20  # bytes: at most what NCCL rounds up to, for devices that multicast to each other
_ALIGNMENT = 256  # bytes


class RegisteredBuffers:
    """Buffers of one communicator, `uint8[num_bytes]` each.

    Peers write to them, until they know that the communicator has ended. So their memory is used for nothing
    else, and is to be held for as long as the communicator; after that the driver keeps it until the last
    peer has let go (not with ``NCCL_CUMEM_ENABLE=0``).
    """

    def __init__(self, nccl: Any, device: torch.device, num_bytes: int, count: int) -> None:
        """Take `count` buffers; `nccl`: torch's `ProcessGroupNCCL`.

        Raises:
            torch.OutOfMemoryError: the device has too little memory.
        """
        self.num_bytes = num_bytes
        self.buffers: list[Tensor] = []  # before the pool: so they go first, and it gives the memory back
        self._nccl = nccl
        self._is_registered = False
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool(nccl.mem_allocator)
            size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            try:
                whole = self._take(size * count)
            except RuntimeError:  # this memory comes from the driver alone, and torch's cache may have it
                torch.cuda.empty_cache()
                try:
                    whole = self._take(size * count)
                except RuntimeError as error:
                    raise torch.OutOfMemoryError(
                        f"{size * count} bytes of device memory for {count} buckets are not there: send "
                        f"smaller buckets, or keep more memory free ({str(error).splitlines()[0]})"
                    ) from error
        self.buffers += [whole[i * size : i * size + num_bytes] for i in range(count)]

    def register(self) -> None:
        """Tell the communicator, once; it has to be connected, and not aborted."""
        if not self._is_registered:
            self._nccl.register_mem_pool(self._pool)
            self._is_registered = True

    def _take(self, num_bytes: int) -> Tensor:
        with torch.cuda.use_mem_pool(self._pool):
            return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def can_register(nccl: Any, device: torch.device) -> bool:
    """Whether there is such memory: with a device that can multicast."""
    return bool(nccl.supports_tensor_alloc(device))
