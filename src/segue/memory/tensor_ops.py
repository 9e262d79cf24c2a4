"""Copies and comparisons that run beside the steps without taking their threads, streams or memory.

On a CPU they work in blocks so small that torch uses one thread. The other threads stay free for the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 1 << 15  # elements per block
BLOCK_CUDA = 1 << 22


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy and cast `source` to `target`, of equal shape; asynchronous between a device and pinned memory.

    A copy from a device to the host casts block by block, so that the casts take little memory there. A copy
    within the host stays on one thread: numpy copies equal dtypes, and torch casts small blocks.
    """
    if target.is_cuda:
        target.copy_(source, non_blocking=True)
    elif source.is_cuda:
        for to, block in _blocks(target, source, limit=BLOCK_CUDA):
            to.copy_(as_sent(block, target.dtype), non_blocking=True)
    elif target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
        np.copyto(_bytes(target), _bytes(source))
    else:
        for to, block in _blocks(target, source):
            to.copy_(block)


def as_sent(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a block as it is copied from a device to the host: contiguous, in `dtype`."""
    return block.to(dtype).contiguous()


def are_finite(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[bool]:
    """Return for each tensor whether it has no infinity and no NaN once it is cast to `dtype`.

    Tensors on CUDA are checked all together, because every answer that the host reads waits for the device.
    """
    on_cuda = [tensor for tensor in tensors if tensor.is_cuda and tensor.numel()]
    found = iter(_are_finite_on_cuda(on_cuda, dtype) if on_cuda else ())
    # If the steps run on CUDA, tensors of the host are checked in large blocks: the cores are free.
    steps_on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    limit = BLOCK_CUDA if steps_on_cuda else BLOCK
    return [
        next(found)
        if tensor.is_cuda and tensor.numel()
        else all(_is_finite(block, dtype) for block, _ in _blocks(tensor, tensor, limit=limit))
        for tensor in tensors
    ]


def warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels of weight updates on a CUDA device, before a receive is open or a commit pauses."""
    from segue.kernels.triton.grouped_copy import GroupedCopy

    source, target = (torch.zeros(64, dtype=dtype, device=device) for _ in range(2))
    GroupedCopy([(target, source)])()
    are_finite([source], dtype)


def _are_finite_on_cuda(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[bool]:
    """As `are_finite`, for non-empty CUDA tensors. It waits for the device at most twice.

    One kernel checks all tensors that it supports. For each other tensor the least and the greatest value are
    checked after the cast: they are NaN if any value is.
    """
    from segue.kernels.triton import grouped_copy

    by_kernel = [grouped_copy.can_check_finite(tensor, dtype) for tensor in tensors]
    searched = [tensor for tensor, supported in zip(tensors, by_kernel, strict=True) if supported]
    rest = [
        torch.stack(torch.aminmax(tensor)).to(dtype)
        for tensor, supported in zip(tensors, by_kernel, strict=True)
        if not supported
    ]
    found = iter(grouped_copy.are_finite(searched, dtype).tolist() if searched else ())
    others = iter(torch.isfinite(torch.stack(rest)).all(1).tolist() if rest else ())
    return [next(found if supported else others) for supported in by_kernel]


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
        """Do all prepared copies; on CUDA they are launched on the current stream. No address changes."""
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


def equal(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors of equal shape have equal bits in `dtype`. They may be on different devices."""
    limit = BLOCK_CUDA if one.is_cuda else BLOCK
    return all(
        torch.equal(_bits(a, dtype), _bits(b.to(a.device), dtype))
        for a, b in _blocks(one, other, limit=limit)
    )


def _is_finite(block: Tensor, dtype: torch.dtype) -> bool:
    """Whether a block is finite in `dtype`: its extremes are, and they are NaN if any value is NaN."""
    if not block.numel():
        return True
    low, high = torch.aminmax(block)
    return math.isfinite(low.to(dtype).item()) and math.isfinite(high.to(dtype).item())


def _bits(block: Tensor, dtype: torch.dtype) -> Tensor:
    return block.to(dtype).contiguous().view(torch.uint8)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array


def _blocks(one: Tensor, other: Tensor, *, limit: int = BLOCK) -> Iterator[tuple[Tensor, Tensor]]:
    """Split two tensors of equal shape into pairs of blocks of whole rows, of at most `limit` elements each.

    If one row has more elements, it is split itself.
    """
    if one.numel() <= limit:
        yield one, other
        return
    step = limit // one[0].numel()
    for start in range(0, len(one), max(step, 1)):
        if step:
            yield one[start : start + step], other[start : start + step]
        else:
            yield from _blocks(one[start], other[start], limit=limit)
