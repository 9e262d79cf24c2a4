"""The GEMM of linear layers, and weights packed for it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.kernels.batch_invariant import BatchInvariantGemm, Gemm


@dataclass(frozen=True, slots=True)
class Packed:
    """A copy of a weight in oneDNN's blocked layout."""

    weight: Tensor  # opaque

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[M, in] -> [M, out]`."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, bias, "none", [], "")
        return result

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy."""
        return int(torch.ops.mkldnn._nbytes(self.weight))


@dataclass(frozen=True, slots=True)
class Plain:
    """A weight in its plain layout, multiplied by `F.linear`."""

    weight: Tensor  # [out, in]
    num_bytes = 0

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[M, in] -> [M, out]`."""
        return F.linear(x, self.weight, bias)


def pack(weight: Tensor, *, deterministic: bool = False, float32_output: bool = False) -> Gemm | None:
    """Returns a GEMM by `weight` `[out, in]` in another layout or by another kernel; None: use it as it is.

    On CPUs the GEMM holds a copy in oneDNN's blocked layout: without it, each GEMM of a few rows first
    reorders the weight. With `deterministic` the GEMM is batch-invariant. `float32_output` has to be the same
    as in the later calls of `linear`.

    Raises:
        ConfigError: this device has no batch-invariant GEMM for the weight.
    """
    if weight.is_cuda and deterministic:
        from segue.kernels.triton.batch_invariant_gemm import TritonBatchInvariantGemm as OnCUDA

        return OnCUDA.from_weight(weight, torch.float32 if float32_output else weight.dtype)
    if weight.device.type != "cpu":
        return None
    if deterministic:
        return BatchInvariantGemm.from_weight(weight, _pack_cpu)
    return _pack_cpu(weight) if _can_pack(weight.dtype) else None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    packed: Gemm | None = None,
    *,
    may_split: bool = False,
    float32_output: bool = False,
) -> Tensor:
    """Returns `x @ weight.T + bias`.

    Args:
        x: `[M, in]`.
        weight: `[out, in]`.
        bias: `[out]`.
        packed: the result of `pack(weight)`.
        may_split: the result may be split-K partials, float32 `[S, M, out]`, which the caller adds up.
        float32_output: the result is float32, with the precision of the device's accumulation.
    """
    if x.is_cuda and packed is None:
        from segue.kernels.triton.gemm import gemm

        return gemm(x, weight, bias, may_split=may_split, dtype=torch.float32 if float32_output else None)
    result = F.linear(x, weight, bias) if packed is None else packed(x, bias)
    return result.float() if float32_output else result


def _pack_cpu(weight: Tensor) -> Gemm:
    if not _can_pack(weight.dtype):
        return Plain(weight)
    rows_hint = 16  # oneDNN chose the same layout for 1 to 1024 rows on the machine measured
    return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows_hint))


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
