"""RMSNorm layer."""

import torch
from torch import Tensor, nn

from segue.kernels.norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Normalises the last dimension by its root mean square, alone or after adding to the residual stream."""

    def __init__(self, size: int, eps: float) -> None:
        """Scale `size` channels."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalised."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`x + residual` normalised, and the sum. May overwrite `residual`."""
        return add_rms_norm(x, residual, self.weight, self.eps)
