"""What layers pass on besides tensors, and one token whose norm is left to the GEMM that reads it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from segue.kernels.fp8 import FP8Tokens


@dataclass(frozen=True, slots=True)
class Unnormed:
    """One token before its norm: the GEMM that reads it adds `residual` and normalises the sum itself.

    It also stores the sum in `total`, for the next norm.
    """

    x: Tensor  # [1, K]
    residual: Tensor | None  # [1, K]
    weight: Tensor  # of the norm, [K]
    eps: float
    total: Tensor  # [1, K]

    @property
    def is_cuda(self) -> bool:
        """Whether it is on CUDA, which it always is; all `Activations` are asked."""
        return self.x.is_cuda

    @property
    def dtype(self) -> torch.dtype:
        """Of the token."""
        return self.x.dtype

    def __len__(self) -> int:
        return len(self.x)


Activations = Tensor | FP8Tokens | Unnormed
