"""The linear GEMM, and weights packed for it."""

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
    """A weight as it is."""

    weight: Tensor  # [out, in]
    num_bytes = 0

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[M, in] -> [M, out]`."""
        return F.linear(x, self.weight, bias)


def pack(weight: Tensor, *, deterministic: bool = False, float32_output: bool = False) -> Gemm | None:
    """How the device multiplies by `weight` `[out, in]`, where that is not as it lies there.

    On CPUs by a copy in oneDNN's blocked layout: without it each GEMM of a few rows first reorders the
    weight. With `deterministic` a row of the GEMM has the same bits among any others. `wide`: as `linear`
    will be asked to.

    Raises:
        ConfigError: this device cannot do it deterministically.
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
    """`x @ weight.T + bias`.

    Args:
        x: `[M, in]`.
        weight: `[out, in]`.
        bias: `[out]`.
        packed: `pack(weight)`, if there is one.
        may_split: split-K partials, float32 `[S, M, out]`, may be returned: who takes them adds them up.
        wide: the result is float32, as precise as the device sums up.
    """
    if x.is_cuda and packed is None:
        from segue.kernels.triton.gemm import gemm

        return gemm(x, weight, bias, may_split=may_split, dtype=torch.float32 if float32_output else None)
    result = F.linear(x, weight, bias) if packed is None else packed(x, bias)
    return result.float() if float32_output else result


def _pack_cpu(weight: Tensor) -> Gemm:
    if not _can_pack(weight.dtype):
        return Plain(weight)
    rows_hint = 16  # oneDNN picks the same layout for 1 to 1024 rows where this was measured
    return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows_hint))


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
