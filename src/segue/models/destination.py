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

# Quantized at a time: temporaries stay in the caches of a CPU, of which one core is used in the background.
_ELEMENTS, _ELEMENTS_BACKGROUND, _ELEMENTS_CUDA = 1 << 18, 1 << 15, 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The memory of one part."""

    values: Tensor  # in the shape of `source`
    source: Box  # the part's box of the checkpoint's tensor
    scales: Tensor | None = None  # float32 `[rows, blocks]` of weights in FP8, of several experts one more
    block: int = 0  # see `Scales`
    dtype: torch.dtype | None = None  # of the engine, to which values are cast before they are quantized

    @property
    def tensors(self) -> list[Tensor]:
        """The memory of values and scales."""
        return [self.values] if self.scales is None else [self.values, self.scales]

    def expert(self, place: int) -> Destination:
        """Return the part of one expert, of a part of several."""
        scales = None if self.scales is None else self.scales[place]
        return replace(self, values=self.values[place], scales=scales, source=self.source[1:])

    def write(self, tensor: Tensor) -> None:
        """Copy the part of the whole `tensor`, and cast it or quantize it, beside steps that run."""
        if self.scales is None or tensor.dtype == FP8:
            copy_into(self.values, tensor[self.source])
        elif tensor.dim() == 3:
            for place, matrix in enumerate(tensor[self.source[0]]):
                self.expert(place).write(matrix)
        else:
            self.write_rows(tensor[self.source[0]], 0, in_background=True)

    def write_rows(self, rows: Tensor, first: int, *, in_background: bool = False) -> None:
        """Write whole `rows` of the tensor, from row `first` of the part on.

        Values in FP8 are copied: their scales come by `write_scales`. The copy from pinned memory is
        asynchronous. With `in_background` a CPU quantizes by one thread.
        """
        target = self.values[first : first + len(rows)]
        if self.scales is None or rows.dtype == FP8:
            target.copy_(rows[(slice(None), *self.source[1:])], non_blocking=True)
            return
        scales = self.scales[first : first + len(rows)]
        device = rows.device if rows.is_cuda else target.device  # a copy to the host would have to be awaited
        step = rows_at_a_time(rows.shape[1], device, in_background=in_background)
        for start in range(0, len(rows), step):
            some = slice(start, start + step)
            self._quantize(rows[some].to(device, non_blocking=True), target[some], scales[some])

    def _quantize(self, rows: Tensor, target: Tensor, scales: Tensor) -> None:
        """Write `rows` in FP8, and their scales."""
        assert self.dtype is not None
        values, columns = rows.to(self.dtype), self.source[1]
        if self.block:
            values, columns = values[:, columns], slice(0, columns.stop - columns.start)
        weight, found = quantize(values, self.block)
        target.copy_(weight[:, columns])
        scales.copy_(found)

    def write_scales(self, scales: Tensor, shape: tuple[int, ...]) -> None:
        """Write the scales of a checkpoint's tensor of `shape`, whose values are in FP8."""
        assert self.scales is not None
        if len(shape) == 3:
            for place, of_expert in enumerate(scales[self.source[0]]):
                self.expert(place).write_scales(of_expert, shape[1:])
            return
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
    rows = view(scales.name)[part.destination[:-1]]
    return Destination(
        values=values,
        source=part.source,
        scales=rows if rows.dim() == values.dim() else rows[0],  # see `box_of`
        block=scales.block,
        dtype=dtype,
    )


def rows_at_a_time(width: int, device: torch.device, *, in_background: bool) -> int:
    """Return how many rows of `width` values are quantized at a time."""
    if device.type == "cuda":
        return max(1, _ELEMENTS_CUDA // width)
    return max(1, (_ELEMENTS_BACKGROUND if in_background else _ELEMENTS) // width)
