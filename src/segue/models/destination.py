"""Where a part of a checkpoint tensor goes: a box of a parameter, and if that is in FP8, also scales.

Whoever loads or updates weights writes them here, so that values are quantized in one place. A scale is that
of the whole row of the checkpoint's tensor, whichever of its columns a rank has: so ranks of a group of any
size hold slices of the same weights in FP8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from segue.kernels.fp8 import FP8, dequantize, expand_scales, has_nan, quantize
from segue.memory.tensor_ops import copy_into
from segue.models.weight_map import Box, Slice, WeightMap, box_of

_BLOCK, _BLOCK_CUDA = 1 << 15, 1 << 22  # elements quantized at a time: on a CPU by one thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The memory of one part."""

    values: Tensor  # in the shape of `source`
    source: Box  # the part's box of the checkpoint's tensor
    scales: Tensor | None = None  # float32 `[rows, blocks]` of weights in FP8
    block: int = 0  # see `Scales`
    dtype: torch.dtype | None = None  # of the engine, to which values are cast before they are quantized

    @property
    def tensors(self) -> list[Tensor]:
        """The memory of values and scales."""
        return [self.values] if self.scales is None else [self.values, self.scales]

    def expert(self, place: int) -> Destination:
        """Return the part of one expert, of a part of several."""
        return replace(self, values=self.values[place], source=self.source[1:])

    def write(self, tensor: Tensor) -> None:
        """Copy the part of the whole `tensor`, and cast it or quantize it."""
        if self.scales is None or tensor.dtype == FP8:
            copy_into(self.values, tensor[self.source])
            return
        rows = tensor[self.source[0]]
        step = rows_at_a_time(rows)
        for first in range(0, len(rows), step):
            self.write_rows(rows[first : first + step], first)

    def write_rows(self, rows: Tensor, first: int) -> None:
        """Write whole `rows` of the tensor, from row `first` of the part on.

        Values in FP8 are copied: their scales come by `write_scales`. The copy from pinned memory is
        asynchronous.
        """
        target = self.values[first : first + len(rows)]
        if self.scales is None or rows.dtype == FP8:
            target.copy_(rows[(slice(None), *self.source[1:])], non_blocking=True)
            return
        assert self.dtype is not None
        columns = self.source[1]
        device = rows.device if rows.is_cuda else target.device  # a copy to the host would have to be awaited
        values = rows.to(device, non_blocking=True).to(self.dtype)
        if self.block:
            values, columns = values[:, columns], slice(0, columns.stop - columns.start)
        weight, scales = quantize(values, self.block)
        target.copy_(weight[:, columns])
        self.scales[first : first + len(rows)].copy_(scales)

    def write_scales(self, scales: Tensor, shape: tuple[int, ...]) -> None:
        """Write the scales of a checkpoint's tensor of `shape`, whose values are in FP8."""
        assert self.scales is not None
        rows, columns = self.source
        self.scales.copy_(expand_scales(scales, shape, rows, columns, self.block))

    def read(self) -> Tensor:
        """Return the values; those in FP8 in float32."""
        return self.values if self.scales is None else dequantize(self.values, self.scales, self.block)

    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite."""
        if self.scales is None:
            return bool(self.values.isfinite().all())
        return bool(self.scales.isfinite().all()) and not has_nan(self.values)


def destination_of(
    view: Callable[[str], Tensor], weight_map: WeightMap, part: Slice, dtype: torch.dtype | None = None
) -> Destination:
    """Return where `part` goes; `view` returns the memory of a parameter by its name."""
    values, scales = box_of(view(part.parameter), part), weight_map.scales.get(part.parameter)
    if scales is None:
        return Destination(values=values, source=part.source)
    return Destination(
        values=values,
        source=part.source,
        scales=view(scales.name)[part.destination[0]],
        block=scales.block,
        dtype=dtype,
    )


def rows_at_a_time(tensor: Tensor) -> int:
    """Return how many rows of a tensor `Destination.write` quantizes at a time."""
    return max(1, (_BLOCK_CUDA if tensor.is_cuda else _BLOCK) // tensor.shape[1])
