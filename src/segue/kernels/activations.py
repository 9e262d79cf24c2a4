"""What layers and kernels pass on besides tensors."""

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


@dataclass(frozen=True, slots=True)
class TokenQKV:
    """The output of the QKV projection for one token, and what makes queries, a key and a value of it.

    For the fields see `segue.kernels.triton.norm.qk_norm_rope_store`.
    """

    qkv: Tensor  # [1, (num_heads + 2 * num_kv_heads) * head_dim]
    qk_weight: Tensor | None
    eps: float
    cosines: Tensor
    sines: Tensor


Activations = Tensor | FP8Tokens | Unnormed
