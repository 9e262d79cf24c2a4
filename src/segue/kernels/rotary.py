"""Rotary position embedding."""

import torch
from torch import Tensor


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(x[i], x[i + D/2])` of `x` `[T, heads, D]`, written out."""
    first, second = x.chunk(2, dim=-1)
    low, high = sin.chunk(2, dim=-1)
    cos_low, cos_high = cos.chunk(2, dim=-1)
    return torch.cat([first * cos_low + second * low, second * cos_high + first * high], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(x[i], x[i + D/2])` of `x` `[T, heads, D]` by each token's angles.

    `cos` and `sin` are `[T, 1, D]`: the cosines twice, and the sines negated, then as they are.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
