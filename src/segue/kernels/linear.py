"""The linear product, and weights packed for it."""

import torch
import torch.nn.functional as F
from torch import Tensor


def pack(weight: Tensor) -> Tensor | None:
    """A copy of `weight` `[out, in]` in the layout the device multiplies fastest; None where it has none.

    On CPUs oneDNN's blocked layout: without it each product of a few rows first reorders the weight.
    """
    if weight.device.type != "cpu" or not _can_pack(weight.dtype):
        return None
    rows_hint = 16  # oneDNN picks the same layout for 1 to 1024 rows where this was measured
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows_hint)
    return packed


def packed_bytes(packed: Tensor) -> int:
    """Bytes of a packed weight."""
    return int(torch.ops.mkldnn._nbytes(packed))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    packed: Tensor | None = None,
    *,
    may_split: bool = False,
    wide: bool = False,
) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: `[M, in]`.
        weight: `[out, in]`.
        bias: `[out]`.
        packed: `pack(weight)`, if there is one.
        may_split: split sums, float32 `[S, M, out]`, may be returned: who takes them adds them up.
        wide: the result is float32, as precise as the device sums up.
    """
    if x.is_cuda:
        from segue.kernels.cuda.product import product

        return product(x, weight, bias, may_split=may_split, dtype=torch.float32 if wide else None)
    result = _linear_cpu(x, weight, bias, packed)
    return result.float() if wide else result


def _linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    if packed is None:
        return F.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return product


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
