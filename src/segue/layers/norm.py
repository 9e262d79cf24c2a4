"""RMSNorm layer."""

import torch
from torch import Tensor, nn

from segue.kernels.norm import add_rms_norm, rms_norm
from segue.layers.base import Layer


class RMSNorm(Layer):
    """Normalises the last dimension by its root mean square, alone or after adding to the residual stream."""

    def __init__(self, size: int, eps: float) -> None:
        """Scale `size` channels."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.wide: Tensor | None = None

    def build_derived(self) -> int:
        """Keep the weight in float32 too, which is what CPUs multiply by; bytes taken."""
        self.wide = self.weight.float() if self.weight.device.type == "cpu" else None
        return 0 if self.wide is None else self.wide.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalised."""
        return rms_norm(x, self.weight if self.wide is None else self.wide, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """`x + residual` normalised, and the sum. May overwrite both."""
        return add_rms_norm(x, residual, self.weight if self.wide is None else self.wide, self.eps)
