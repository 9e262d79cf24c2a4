"""Root-mean-square normalisation."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, with the statistics in float32; the dtype of `x`."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum `x + residual` normalised, and the sum itself, the next residual. May overwrite `residual`."""
    residual = residual.add_(x)
    return rms_norm(residual, weight, eps), residual
