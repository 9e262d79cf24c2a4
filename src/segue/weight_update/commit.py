"""Copying staged weights onto the served weights, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


class Copies:
    """Prepared copies and casts of tensors onto others; preparing them makes the pause for a commit short."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], *, in_background: bool = False) -> None:
        """Prepare to copy each pair's second tensor onto its first; on CUDA on the current stream.

        On CUDA one kernel copies all pairs that are on the device, contiguous, aligned and of one dtype.
        ``in_background``: the kernel is slower and leaves most of the device to the steps.
        """
        grouped: list[tuple[Tensor, Tensor]] = []
        self._rest: list[tuple[Tensor, Tensor]] = []
        for to, source in pairs:
            (grouped if is_groupable(to, source) else self._rest).append((to, source))
        self._grouped: Callable[[], None] | None = None
        if grouped:
            from segue.kernels.triton.grouped_copy import GroupedCopy  # needs Triton, and so CUDA

            self._grouped = GroupedCopy(grouped, in_background=in_background)

    def write(self) -> None:
        """Copy; on CUDA as the current stream's next work. No address changes."""
        if self._grouped is not None:
            self._grouped()
        for to, source in self._rest:
            to.copy_(source, non_blocking=True)


def is_groupable(to: Tensor, source: Tensor) -> bool:
    """Whether the grouped kernel can do this copy."""
    if not (to.is_cuda and source.device == to.device and to.dtype == source.dtype):
        return False
    from segue.kernels.triton.grouped_copy import is_aligned

    return is_aligned(to) and is_aligned(source)
