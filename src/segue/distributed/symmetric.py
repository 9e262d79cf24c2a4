"""Memory that the kernels of every rank can read and write directly, over NVLink or PCIe."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import (
    ProcessGroup,
    Store,
    _register_process_group,
    _SymmetricMemory,
)

from segue.distributed.info import TPInfo


class SymmetricMemory:
    """The same number of bytes on every rank's device, initially zero, at addresses known to all ranks."""

    def __init__(self, tp: TPInfo, store: Store, name: str, device: torch.device, num_bytes: int) -> None:
        """Allocate together with the other ranks, through `store`. All pass one size and one new `name`."""
        # The allocator asks a group of this name for its ranks and its store only. Registering the group does
        # not keep it alive.
        self._group = ProcessGroup(store, tp.rank, tp.size)
        _register_process_group(name, self._group)  # type: ignore[arg-type]
        self._bytes = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, name)
        self._bytes.zero_()
        torch.cuda.synchronize(device)  # before another rank can write
        self._handle = _SymmetricMemory.rendezvous(self._bytes, name)
        self.addresses: list[int] = list(
            self._handle.buffer_ptrs
        )  # of each rank's bytes, in this process's address space


def all_devices_have_peer_access(size: int) -> bool:
    """Whether each of the first `size` CUDA devices can access the memory of all others."""
    pairs = ((a, b) for a in range(size) for b in range(size) if a != b)
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
