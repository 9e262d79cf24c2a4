"""Process groups of the tensor-parallel ranks.

They are made directly on a store and never registered as torch's default group, so an engine embedded in a training script leaves the
script's own `torch.distributed` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from segue.distributed.collectives import Collectives, GroupCollectives, SingleRank
from segue.distributed.info import TPInfo


class TPGroups:
    """The groups of one rank: `control` for small host values, `collectives` for tensors on the device."""

    def __init__(self, tp: TPInfo, control: dist.ProcessGroup | None, collectives: Collectives) -> None:
        """Take groups made by `connect`; `control` is None in a group of one."""
        self.tp = tp
        self.collectives = collectives
        self._control = control

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, by rank; all ranks give equally many."""
        if self._control is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64)
        parts = [torch.empty_like(mine) for _ in range(self.tp.size)]
        self._control.allgather([parts], [mine]).wait()
        return [part.tolist() for part in parts]

    def barrier(self) -> None:
        """Return once every rank has come here."""
        self.all_gather([0])


def connect(
    tp: TPInfo, *, rendezvous: Path, device: torch.device, timeout: timedelta = timedelta(minutes=5)
) -> TPGroups:
    """Meet the other ranks in the file `rendezvous`, new for each start and in a directory all ranks see, and make the groups.

    A group of one touches no file.
    """
    if tp.size == 1:
        return TPGroups(tp, None, SingleRank())
    store = dist.FileStore(str(rendezvous), tp.size)
    control = dist.ProcessGroupGloo(dist.PrefixStore("control", store), tp.rank, tp.size, timeout)
    data = control if device.type == "cpu" else _nccl(dist.PrefixStore("data", store), tp)
    return TPGroups(tp, control, GroupCollectives(tp, data))


def _nccl(store: dist.Store, tp: TPInfo) -> dist.ProcessGroup:
    return dist.ProcessGroupNCCL(store, tp.rank, tp.size, dist.ProcessGroupNCCL.Options())
