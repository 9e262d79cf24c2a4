"""Memory that every rank's kernels can read and write directly, over NVLink or PCIe."""

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
    """Equally many bytes on the device of every rank, zero at first, at addresses that all ranks know."""

    def __init__(self, tp: TPInfo, store: Store, name: str, device: torch.device, num_bytes: int) -> None:
        """Allocate and meet the other ranks in `store`. All give one size, and a `name` never used before."""
        # The allocator asks a group of this name for its ranks and its store, and for nothing else; the
        # register does not keep it alive.
        self._group = ProcessGroup(store, tp.rank, tp.size)
        _register_process_group(name, self._group)  # type: ignore[arg-type]
        self._bytes = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, name)
        self._bytes.zero_()
        torch.cuda.synchronize(device)  # before another rank can write
        self._handle = _SymmetricMemory.rendezvous(self._bytes, name)
        self.addresses: list[int] = list(self._handle.buffer_ptrs)  # of each rank's bytes, as seen from here


def all_devices_meet(size: int) -> bool:
    """Whether each of the first `size` CUDA devices can address the memory of all others."""
    pairs = ((a, b) for a in range(size) for b in range(size) if a != b)
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
