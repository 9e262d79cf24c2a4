"""Copying what was staged onto the live weights, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Copies:
    """Copies and casts of tensors onto others: prepared, so that the pause for them is short."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Each pair's second tensor is to come onto its first; on CUDA the current stream is used.

        On CUDA one kernel does all that is there, contiguous and needs no cast.
        """
        self._rest = [(to, source) for to, source in pairs if not _is_groupable(to, source)]
        grouped = [(to, source) for to, source in pairs if _is_groupable(to, source)]
        self._grouped: Callable[[], None] | None = None
        if grouped:
            from segue.kernels.cuda.copying import GroupedCopy  # Triton is not there without CUDA

            self._grouped = GroupedCopy(grouped)

    def write(self) -> None:
        """Copy; on CUDA as the current stream's next work. No address changes."""
        if self._grouped is not None:
            self._grouped()
        for to, source in self._rest:
            to.copy_(source, non_blocking=True)


def warm_up(device: torch.device) -> None:
    """Compile what commits on a CUDA device run: not in the pause of the first one."""
    source, target = (torch.zeros(64, dtype=torch.uint8, device=device) for _ in range(2))
    for start in (0, 8, 4, 2):  # bytes: so an address is aligned
        Copies([(target[start : start + 32], source[start : start + 32])]).write()


def _is_groupable(to: Tensor, source: Tensor) -> bool:
    on_one_device = to.is_cuda and source.device == to.device
    return on_one_device and to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous()
