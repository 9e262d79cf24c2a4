"""FP8: quantization to float8_e4m3fn with float32 scales, and back, in plain torch.

A scale of a weight belongs to a row, or to a block of consecutive weights of the row. Keys and values have
one scale per layer each. A number in FP8 times its scale is the value. The same values give the same bits on
every device.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.dtypes import FP8_BLOCK
from segue.sizes import ceil_div

FP8 = torch.float8_e4m3fn
MAX = torch.finfo(FP8).max
MAX_INVERSE = 1 / MAX  # torch divides by a number in another way on CUDA than on a CPU
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of zeros, which are divided by it
_ERROR_UNITS = 4096
_NAN = 0x7F  # all bits but the sign
_CHUNK, _CHUNK_CUDA = 1 << 15, 1 << 24  # elements searched at a time: on a CPU by one thread


@dataclass(frozen=True, slots=True)
class FP8Tokens:
    """Activations in FP8, each token divided by its own scale, for a GEMM that multiplies in FP8."""

    values: Tensor  # [T, K]
    scales: Tensor  # float32 [T, 1]
    dtype: torch.dtype  # of the activations that they were, and of the GEMM's result

    @property
    def is_cuda(self) -> bool:
        """Whether they are on CUDA."""
        return self.values.is_cuda

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class FP8Experts:
    """The weights of E experts in FP8, each a matrix `[N, K]` with scales as `quantize` returns them."""

    weight: Tensor  # [E, N, K]
    scales: Tensor  # float32 [E, N, blocks]
    block: int
    dtype: torch.dtype  # of the activations

    @property
    def shape(self) -> torch.Size:
        """Of the weight."""
        return self.weight.shape

    @property
    def device(self) -> torch.device:
        """Of the weight."""
        return self.weight.device

    @property
    def nbytes(self) -> int:
        """Of the weight."""
        return self.weight.nbytes

    def __getitem__(self, expert: int) -> Tensor:
        """Returns the values of one expert, `[N, K]`, in the dtype of the activations."""
        return dequantize(self.weight[expert], self.scales[expert], self.block).to(self.dtype)

    def values(self) -> Tensor:
        """Returns the values of all experts in the dtype of the activations: a large copy."""
        found = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for expert, values in enumerate(found):
            values.copy_(self[expert])
        return found


ExpertWeights = Tensor | FP8Experts
"""The weights of experts, `[E, N, K]`, in the dtype of the activations or in FP8."""


def block_of(weights: ExpertWeights) -> int | None:
    """Returns `FP8Experts.block`; None: the weights are not in FP8."""
    return weights.block if isinstance(weights, FP8Experts) else None


def quantize(values: Tensor, block: int = 0, num_scales: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns `values` `[N, K]` in FP8, and their scales, float32 `[N, blocks]`.

    `block` consecutive values of a row have one scale, 0: the whole row. A scale is not finite if a value is
    not. Of `num_scales` scales, from the one that makes the greatest value the greatest of FP8 up to twice
    that, the one with the least squared error is taken. For rows of weights it is 8 % less with 4 of them
    than with the first alone; for short blocks it gains more, so that the default there is 12.
    """
    num_scales = num_scales or (12 if 0 < block < FP8_BLOCK else 4)
    width = values.shape[1]
    size = block or width
    groups = F.pad(values.float(), (0, -width % size)).view(len(values), -1, size)
    least = groups.abs().amax(-1, keepdim=True).mul_(MAX_INVERSE)
    weight, scales, errors = None, least, least
    for step in range(num_scales):
        factor = 2 ** (step / num_scales)
        tried = (least * factor).clamp_min_(SMALLEST_SCALE)
        scaled = groups / tried
        rounded = scaled.clamp(-MAX, MAX).to(FP8)
        # Summed as integers, so that the order of the sum, and with it the device, makes no difference.
        error = rounded.float().sub_(scaled).mul_(factor).square_().mul_(_ERROR_UNITS)
        summed = error.to(torch.int32).sum(-1, keepdim=True)
        if weight is None:
            weight, scales, errors = rounded, tried, summed
            continue
        better = summed < errors
        weight = torch.where(better, rounded.view(torch.uint8), weight.view(torch.uint8)).view(FP8)
        scales, errors = torch.where(better, tried, scales), torch.minimum(summed, errors)
    assert weight is not None
    return weight.view(len(values), -1)[:, :width], scales.squeeze(-1)


def dequantize(weight: Tensor, scales: Tensor, block: int = 0) -> Tensor:
    """Returns the values of `weight` `[..., N, K]`, float32; see `quantize`."""
    wide = weight.float()
    if block:
        return wide.mul_(scales.repeat_interleave(block, -1)[..., : wide.shape[-1]])
    return wide.mul_(scales)


def quantize_by(values: Tensor, scale: float) -> Tensor:
    """Returns `values` in FP8, divided by a given scale; what is too large becomes the greatest of FP8."""
    return (values.float() * (1 / scale)).clamp_(-MAX, MAX).to(FP8)


def dequantize_by(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns `values`, which are in FP8, times a given scale, in `dtype`."""
    return values.to(dtype) if scale == 1 else (values.float() * scale).to(dtype)


def scale_shapes(shape: tuple[int, ...], block: int) -> list[tuple[int, ...]]:
    """Returns the shapes that the scales of a checkpoint's tensor of `shape` `[N, K]` may have.

    There is one for the tensor, one per row, or if an engine has scales for each `block` of a row, one per
    block of `FP8_BLOCK` rows and columns. A tensor `[E, N, K]` of all experts has those of each expert.
    """
    if len(shape) == 3:
        return [(shape[0], *each) for each in scale_shapes(shape[1:], block)]
    found: list[tuple[int, ...]] = [(), (1,), (1, 1), (shape[0],), (shape[0], 1)]
    return [*found, (ceil_div(shape[0], FP8_BLOCK), ceil_div(shape[1], FP8_BLOCK))] if block else found


def expand_scales(scales: Tensor, shape: tuple[int, ...], rows: slice, columns: slice, block: int) -> Tensor:
    """Returns the scales of a part of a checkpoint's tensor in the form of `quantize`.

    `scales` are those of the whole tensor of `shape`, in one of `scale_shapes`. The part consists of `rows`
    and `columns`, which begin at a multiple of `block`.
    """
    grid = scales.float().reshape(scales.shape if scales.dim() == 2 else (-1, 1))
    height = {1: shape[0], shape[0]: 1}.get(len(grid), FP8_BLOCK)
    width = shape[1] if grid.shape[1] == 1 else FP8_BLOCK
    every_row = torch.arange(rows.start, rows.stop, device=grid.device) // height
    groups = torch.arange(columns.start, columns.stop, block or shape[1], device=grid.device) // width
    return grid[every_row][:, groups]


def has_nan(weight: Tensor) -> bool:
    """Returns whether a weight in FP8, which has no infinities, has a NaN."""
    raw = weight.reshape(-1).view(torch.uint8)
    step = _CHUNK_CUDA if raw.is_cuda else _CHUNK
    return any(bool((raw[at : at + step] & _NAN).eq(_NAN).any()) for at in range(0, len(raw), step))
