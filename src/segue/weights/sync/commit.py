"""Copying what was staged onto the live weights, between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def write(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy and cast each pair's second tensor onto its first; on CUDA as the current stream's next work.

    No address changes. On CUDA one kernel does all that is there, contiguous and needs no cast.
    """
    rest = [(to, source) for to, source in pairs if not _is_groupable(to, source)]
    grouped = [(to, source) for to, source in pairs if _is_groupable(to, source)]
    if grouped:
        from segue.kernels.cuda.copying import grouped_copy  # Triton is not there without CUDA

        grouped_copy(grouped)
    for to, source in rest:
        to.copy_(source, non_blocking=True)


def warm_up(device: torch.device) -> None:
    """Compile what commits on a CUDA device run: not in the pause of the first one."""
    source, target = (torch.zeros(64, dtype=torch.uint8, device=device) for _ in range(2))
    for start in (0, 8, 4, 2):  # bytes: so an address is aligned
        write([(target[start : start + 32], source[start : start + 32])])


def _is_groupable(to: Tensor, source: Tensor) -> bool:
    on_one_device = to.is_cuda and source.device == to.device
    return on_one_device and to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous()
