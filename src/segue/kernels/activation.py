"""The SiLU-and-multiply activation of the gated MLP."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.kernels import batch_invariant
from segue.kernels.batch_invariant import Gemm
from segue.kernels.linear import linear


def gate_up_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    packed: Gemm | None,
    activation: Callable[[Tensor, torch.dtype], Tensor],
) -> Tensor:
    """Returns `activation(linear(x, weight, bias, packed))`, `[T, K] -> [T, I]`.

    `weight` is `[2 * I, K]`, gate rows first; `activation` is one of the `silu_mul` functions below. On CUDA
    one kernel does both where that is faster.
    """
    if x.is_cuda and bias is None and packed is None:
        from segue.kernels.triton.gate_up_silu import gate_up_silu as fused

        gated = fused(x, weight)
        if gated is not None:
            return gated
    return activation(linear(x, weight, bias, packed, may_split=True), x.dtype)


def silu_mul(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `silu(gate) * up` of `gate_up` `[T, 2 * I]`, gate first: `[T, I]` in `dtype`.

    May overwrite `gate_up`. On CUDA `gate_up` may be split-K partials, float32 `[S, T, 2 * I]`.
    """
    if gate_up.is_cuda:
        from segue.kernels.triton.activation import silu_mul as fused

        return fused(gate_up, dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def silu_mul_batch_invariant(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """`silu_mul` that gives a row the same bits in any batch; on CUDA the ordinary `silu_mul` does so."""
    return silu_mul(gate_up, dtype) if gate_up.is_cuda else batch_invariant.silu_mul(gate_up, dtype)
