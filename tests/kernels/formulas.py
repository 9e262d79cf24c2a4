"""Formulas as written, which the operations are compared with."""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `x / rms(x) * weight` over the last dimension, in the dtype of `x`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(x[i], x[i + D/2])` of `x` `[T, heads, D]`."""
    first, second = x.chunk(2, dim=-1)
    low, high = sin.chunk(2, dim=-1)
    cos_low, cos_high = cos.chunk(2, dim=-1)
    return torch.cat([first * cos_low + second * low, second * cos_high + first * high], dim=-1)
