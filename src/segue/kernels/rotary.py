"""Rotary position embedding."""

import torch
from torch import Tensor


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(x[i], x[i + D/2])` of `x` `[T, heads, D]`: the formula as written."""
    first, second = x.chunk(2, dim=-1)
    low, high = sin.chunk(2, dim=-1)
    cos_low, cos_high = cos.chunk(2, dim=-1)
    return torch.cat([first * cos_low + second * low, second * cos_high + first * high], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(x[i], x[i + D/2])` of `x` `[T, heads, D]` by each token's angles.

    `cos` and `sin` are `[T, 1, D]`: `cos` has the D/2 cosines twice, `sin` the negated sines, then the sines.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
