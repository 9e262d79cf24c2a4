"""The exchanges between tensor-parallel ranks that a model and a runner need."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from segue.distributed.info import TPInfo


class OneShot(Protocol):
    """An all-reduce of few rows, in one kernel with what follows it; see `kernels.triton.all_reduce`."""

    max_rows: int

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`kernels.norm.add_rms_norm` of the sum of all ranks' `x`, at most `max_rows` tokens."""
        ...


class Collectives(Protocol):
    """Exchanges of tensors during a forward pass. Every rank calls the same ones in the same order."""

    @property
    def tp(self) -> TPInfo:
        """This rank and the size of its group."""
        ...

    @property
    def one_shot(self) -> OneShot | None:
        """What few rows are reduced by, where the devices can do that."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks; may overwrite `tensor`."""
        ...

    def gather(self, tensor: Tensor) -> Tensor | None:
        """On rank 0 all ranks' tensors, equal in shape, joined along the last dimension; None elsewhere."""
        ...

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with rank 0's."""
        ...


class SingleRank:
    """The collectives of a group of one."""

    tp = TPInfo(0, 1)
    one_shot = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor


class GroupCollectives:
    """Collectives over a process group (gloo on CPU, NCCL on CUDA)."""

    def __init__(self, tp: TPInfo, group: ProcessGroup) -> None:
        """Exchange over `group`, in which this process has rank `tp.rank`."""
        self.tp = tp
        self.one_shot: OneShot | None = None  # the runner sets it: a kernel's room lies below this one
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        options = dist.AllreduceOptions()
        options.asyncOp = False  # NCCL's kernel goes on the current stream, and nothing is left to wait for
        _wait(self._group.allreduce([tensor], options))
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with rank 0's."""
        options = dist.BroadcastOptions()
        options.asyncOp = False
        options.rootRank = 0
        options.rootTensor = 0
        _wait(self._group.broadcast([tensor], options))
        return tensor

    def gather(self, tensor: Tensor) -> Tensor | None:
        """On rank 0 all ranks' tensors side by side along the last dimension; None elsewhere."""
        options = dist.GatherOptions()
        options.rootRank = 0
        if not self.tp.is_first:
            self._group.gather([], [tensor.contiguous()], options).wait()
            return None
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.tp.size)]
        self._group.gather([parts], [tensor.contiguous()], options).wait()
        return torch.cat(parts, dim=-1)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
