"""RMSNorm fused with the addition to the residual stream. See `segue.kernels.ops`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.triton.gemm import load_split_k
from segue.kernels.triton.launch import launch_options, pdl_launch_dependents, pdl_wait


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm(
    x,
    residual,
    weight,
    normed,
    total_out,
    num_rows,
    size,
    eps,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    total = load_split_k(x + row * size, columns, num_rows.to(tl.int64) * size, inside, SPLITS)
    if residual is not None:
        total += tl.load(residual + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    pdl_launch_dependents(PDL)
    rounded = total.to(total_out.dtype.element_ty)
    tl.store(total_out + row * size + columns, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    rms = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    tl.store(normed + row * size + columns, wide * rms * scale, mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `segue.kernels.ops.add_rms_norm`; `x` may be split-K partials, float32 `[S, T, N]`."""
    num_rows, size = x.shape[-2], x.shape[-1]
    normed = torch.empty((num_rows, size), dtype=weight.dtype, device=x.device)
    total = torch.empty_like(normed)
    block = triton.next_power_of_2(size)
    _add_rms_norm[(num_rows,)](
        x=x,
        residual=residual,
        weight=weight,
        normed=normed,
        total_out=total,
        num_rows=num_rows,
        size=size,
        eps=eps,
        SPLITS=x.shape[0] if x.dim() == 3 else 1,
        BLOCK=block,
        **launch_options(min(8, max(1, block // 512)), num_rows),
    )
    return normed, total
