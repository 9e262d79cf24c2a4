"""What layers pass on besides tensors, and one token whose norm is left to the GEMM that reads it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from segue.kernels.fp8 import FP8Tokens
from segue.kernels.gemv_plan import fits_gemv


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
        """Whether it is on CUDA, which it always is."""
        return self.x.is_cuda

    @property
    def dtype(self) -> torch.dtype:
        """Of the token."""
        return self.x.dtype

    def __len__(self) -> int:
        return len(self.x)


Activations = Tensor | FP8Tokens | Unnormed


def can_stream(x: Activations, weight: Tensor) -> bool:
    """Returns whether a GEMM of `x` by `weight` `[N, K]` has the kernel for one token.

    It has not where the weight has another layout, as for `--deterministic`.
    """
    is_token = not isinstance(x, FP8Tokens) and x.is_cuda and len(x) == 1
    return is_token and x.dtype in (torch.bfloat16, torch.float16) and fits_gemv(weight.shape[1])
