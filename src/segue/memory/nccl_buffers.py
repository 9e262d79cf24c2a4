"""Device memory that is registered with NCCL, for the buckets that are sent and received.

Between devices of one host, a broadcast then goes directly from the sender's buffer to the receiver's.
Without registration it goes through NCCL's own buffers, and kernels copy it from there: at the same bytes per
second this takes twice the SMs and three times the memory traffic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from segue.memory import backing
from segue.sizes import round_up

GRANULARITY = 512 << 20  # bytes: the most that NCCL rounds up to, for devices that multicast to each other
_ALIGNMENT = 256  # bytes


class RegisteredBuffers:
    """The registered buffers of one communicator, each `uint8[num_bytes]`.

    Peers may write to the buffers until they know that the communicator has ended. So the memory serves no
    other purpose, and must be kept as long as the communicator. After that the driver keeps it until the last
    peer has released it (not with ``NCCL_CUMEM_ENABLE=0``).
    """

    def __init__(self, nccl: Any, device: torch.device, num_bytes: int, count: int) -> None:
        """Allocate `count` buffers. `nccl` is torch's `ProcessGroupNCCL`.

        Raises:
            torch.OutOfMemoryError: the device has too little memory.
        """
        self.num_bytes = num_bytes
        # Before the pool, so that they are freed first and the pool can free its memory.
        self.buffers: list[Tensor] = []
        self._nccl = nccl
        self._is_registered = False
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool(nccl.mem_allocator)
            size = round_up(num_bytes, _ALIGNMENT)
            try:
                whole = backing.registered(size * count, self._pool)
            except RuntimeError:  # the memory comes from the driver only, and torch's cache may hold it
                torch.cuda.empty_cache()
                try:
                    whole = backing.registered(size * count, self._pool)
                except RuntimeError as error:
                    raise torch.OutOfMemoryError(
                        f"{size * count} bytes of device memory for {count} buckets are not free: send "
                        f"smaller buckets, or keep more memory free ({str(error).splitlines()[0]})"
                    ) from error
        self.buffers += [whole[i * size : i * size + num_bytes] for i in range(count)]

    def register(self) -> None:
        """Register the buffers, once. The communicator must be connected and not aborted."""
        if not self._is_registered:
            self._nccl.register_mem_pool(self._pool)
            self._is_registered = True


def can_register(nccl: Any, device: torch.device) -> bool:
    """Whether memory of `device` can be registered: NCCL requires a device that can multicast."""
    return bool(nccl.supports_tensor_alloc(device))
