"""The process groups of the tensor-parallel ranks, and the device memory that they share.

They are made directly on a store and never registered as torch's default group, so an engine that is embedded
in a training script does not disturb the script's own `torch.distributed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    FileStore,
    PrefixStore,
    ProcessGroup,
    Store,
    _register_process_group,
    _SymmetricMemory,
)

from segue.distributed.collectives import Collectives
from segue.distributed.info import TPInfo


@dataclass
class TPGroups:
    """One rank's groups: `control` for small values on the host, `collectives` for tensors on the device."""

    tp: TPInfo
    collectives: Collectives
    control: ProcessGroup | None = None  # None in a group of one
    store: Store | None = None  # None in a group of one
    name: str = ""  # unique in this process, and the same on all ranks
    _num_shared: int = 0  # the calls of `share`, which number the names of what it allocates

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's integers, by rank. All ranks call it, with the same number of integers."""
        if self.control is None:
            return [list(values)]
        mine = torch.tensor(list(values), dtype=torch.int64)  # torch refuses `bytes`
        parts = [torch.empty_like(mine) for _ in range(self.tp.size)]
        self.control.allgather([parts], [mine]).wait()
        return [part.tolist() for part in parts]

    def share(self, device: torch.device, num_bytes: int) -> tuple[list[int], object]:
        """Allocate bytes, zero at first, that the kernels of every rank can access, over NVLink or PCIe.

        All ranks call it, with the same number of bytes, and each allocates them on its CUDA device. There is
        more than one rank.

        Returns:
            The address of each rank's bytes in this process, and the object that keeps them allocated.
        """
        assert self.store is not None
        self._num_shared += 1
        name = f"{self.name} {self._num_shared}"
        # The allocator asks a group of this name for its ranks and its store only. Registering the group does
        # not keep it alive.
        group = ProcessGroup(PrefixStore(name, self.store), self.tp.rank, self.tp.size)
        _register_process_group(name, group)  # type: ignore[arg-type]
        memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, name)
        memory.zero_()
        torch.cuda.synchronize(device)  # before another rank can write
        handle = _SymmetricMemory.rendezvous(memory, name)
        return list(handle.buffer_ptrs), (group, memory, handle)

    def barrier(self) -> None:
        """Return once every rank has called this."""
        self.all_gather([0])


def connect(
    tp: TPInfo, *, rendezvous: Path, device: torch.device, timeout: timedelta = timedelta(minutes=5)
) -> TPGroups:
    """Make the groups together with the other ranks.

    The ranks meet through the file `rendezvous`, which is new for each start and lies in a directory that all
    ranks see. A group of one uses no file. Collectives over gloo fail after `timeout`; NCCL's keep torch's
    default. On a CPU, one gloo group is both `control` and that of `collectives`.
    """
    if tp.size == 1:
        return TPGroups(tp, Collectives(tp))
    store = FileStore(str(rendezvous), tp.size)
    # Both backends have the methods of a ProcessGroup, though torch's stubs do not say so.
    gloo = dist.ProcessGroupGloo(PrefixStore("control", store), tp.rank, tp.size, timeout)
    control = cast(ProcessGroup, gloo)
    if device.type == "cpu":
        data = control
    else:
        options = dist.ProcessGroupNCCL.Options()
        nccl = dist.ProcessGroupNCCL(PrefixStore("data", store), tp.rank, tp.size, options)
        data = cast(ProcessGroup, nccl)
    return TPGroups(tp, Collectives(tp, data), control, store, str(rendezvous))


def all_devices_have_peer_access(size: int) -> bool:
    """Whether each of the first `size` CUDA devices can access the memory of all others."""
    pairs = ((a, b) for a in range(size) for b in range(size) if a != b)
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
