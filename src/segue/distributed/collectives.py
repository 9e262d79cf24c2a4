"""The collectives between tensor-parallel ranks that a model and a runner need."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from segue.distributed.info import TPInfo


class FusedAllReduce(Protocol):
    """An all-reduce of few rows, fused with the RMS norm behind it; see `kernels.triton.all_reduce`."""

    max_rows: int

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Apply `kernels.ops.add_rms_norm` to the sum of all ranks' `x`, of at most `max_rows` rows."""
        ...


class Collectives:
    """The collectives of a forward pass. Every rank calls the same ones in the same order.

    They run over a process group: gloo on CPU, NCCL on CUDA. The root is rank 0. Without a group, each
    collective returns its tensor unchanged.
    """

    # For few rows; None where the devices do not support it. The runner sets it: this package may not import
    # kernels.
    fused_all_reduce: FusedAllReduce | None = None

    def __init__(self, tp: TPInfo | None = None, group: ProcessGroup | None = None) -> None:
        """Use `group`, in which this process is rank `tp`; None: this rank is the only one."""
        self.tp = tp or TPInfo()
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks. May overwrite `tensor`."""
        if self._group is not None:
            options = dist.AllreduceOptions()
            options.asyncOp = False  # NCCL's kernel runs on the current stream: there is no other to wait for
            _wait(self._group.allreduce([tensor], options))
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with rank 0's, and return it."""
        if self._group is not None:
            options = dist.BroadcastOptions()
            options.asyncOp = False  # as in `all_reduce`
            _wait(self._group.broadcast([tensor], options))
        return tensor

    def gather(self, tensor: Tensor) -> Tensor | None:
        """Return on rank 0 all ranks' tensors joined along the last dimension, in the order of the ranks.

        The tensors have the same shape. The other ranks get None.
        """
        if self._group is None:
            return tensor
        if not self.tp.is_first:
            self._group.gather([], [tensor.contiguous()], dist.GatherOptions()).wait()
            return None
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.tp.size)]
        self._group.gather([parts], [tensor.contiguous()], dist.GatherOptions()).wait()
        return torch.cat(parts, dim=-1)


def _wait(work: dist.Work | None) -> None:
    """Wait for a collective; one that is not asynchronous may return None instead of its work."""
    if work is not None:
        work.wait()
