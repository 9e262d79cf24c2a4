"""The RMSNorm layer."""

import torch
from torch import Tensor, nn

from segue.distributed.collectives import Collectives
from segue.kernels.norm import add_rms_norm, rms_norm
from segue.layers.base import Layer


class RMSNorm(Layer):
    """Divides the last dimension by its root mean square, optionally after adding to the residual stream."""

    def __init__(self, size: int, eps: float, collectives: Collectives | None = None) -> None:
        """Make a norm of `size` channels; `add` sums over the ranks of `collectives`."""
        super().__init__()
        self.eps = eps
        self.collectives = collectives or Collectives()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.weight_float32: Tensor | None = None

    def build_derived(self) -> int:
        """Copy the weight to float32 on CPUs, which multiply by that; returns the bytes of the copy."""
        self.weight_float32 = self.weight.float() if self.weight.device.type == "cpu" else None
        return 0 if self.weight_float32 is None else self.weight_float32.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x` normalised."""
        return rms_norm(x, self.weight if self.weight_float32 is None else self.weight_float32, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sums `x` over the ranks and adds `residual`: returns the sum normalised, and the sum.

        May overwrite both inputs.
        """
        weight = self.weight if self.weight_float32 is None else self.weight_float32
        fused_all_reduce = self.collectives.fused_all_reduce
        if fused_all_reduce is not None and x.shape[-2] <= fused_all_reduce.max_rows:
            return fused_all_reduce.add_rms_norm(x, residual, weight, self.eps)
        return add_rms_norm(self.collectives.all_reduce(x), residual, weight, self.eps)
