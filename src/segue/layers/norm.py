"""RMSNorm layer."""

import torch
from torch import Tensor, nn

from segue.distributed.collectives import Collectives, SingleRank
from segue.kernels.norm import add_rms_norm, rms_norm
from segue.layers.base import Layer


class RMSNorm(Layer):
    """Normalises the last dimension by its root mean square, alone or after adding to the residual stream."""

    def __init__(self, size: int, eps: float, collectives: Collectives | None = None) -> None:
        """Scale `size` channels; `collectives` are those that `add` sums over."""
        super().__init__()
        self.eps = eps
        self.collectives = collectives or SingleRank()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.weight_float32: Tensor | None = None

    def build_derived(self) -> int:
        """Keep the weight in float32 too, which is what CPUs multiply by; bytes taken."""
        self.weight_float32 = self.weight.float() if self.weight.device.type == "cpu" else None
        return 0 if self.weight_float32 is None else self.weight_float32.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalised."""
        return rms_norm(x, self.weight if self.weight_float32 is None else self.weight_float32, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The ranks' `x` summed, plus `residual`: normalised, and as it is. May overwrite both."""
        weight = self.weight if self.weight_float32 is None else self.weight_float32
        one_shot = self.collectives.one_shot
        if one_shot is not None and x.shape[-2] <= one_shot.max_rows:
            return one_shot.add_rms_norm(x, residual, weight, self.eps)
        return add_rms_norm(self.collectives.all_reduce(x), residual, weight, self.eps)
