"""Copying what was staged onto the live weights, between two steps."""

from __future__ import annotations

from collections.abc import Sequence

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


def _is_groupable(to: Tensor, source: Tensor) -> bool:
    on_one_device = to.is_cuda and source.device == to.device
    return on_one_device and to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous()
