"""The SiLU-and-multiply activation. See `segue.kernels.ops`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.triton.gemm import load_split_k, silu_mul_tile
from segue.kernels.triton.launch import launch_options, pdl_launch_dependents, pdl_wait

_BLOCK = tl.constexpr(1024)


@triton.jit(do_not_specialize=["num_rows"])
def _silu_mul(gate_up, output, num_rows, size, SPLITS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = columns < size
    pdl_wait(PDL)
    at, stride = row * 2 * size + columns, num_rows.to(tl.int64) * 2 * size
    gate = load_split_k(gate_up, at, stride, inside, SPLITS)
    up = load_split_k(gate_up, at + size, stride, inside, SPLITS)
    pdl_launch_dependents(PDL)
    tl.store(output + row * size + columns, silu_mul_tile(gate, up), mask=inside)


def silu_mul(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """See `segue.kernels.ops.silu_mul`; `gate_up` may be split-K partials, float32 `[S, T, 2 * I]`."""
    num_rows, size = gate_up.shape[-2], gate_up.shape[-1] // 2
    output = torch.empty((num_rows, size), dtype=dtype, device=gate_up.device)
    _silu_mul[(num_rows, triton.cdiv(size, _BLOCK.value))](
        gate_up=gate_up,
        output=output,
        num_rows=num_rows,
        size=size,
        SPLITS=gate_up.shape[0] if gate_up.dim() == 3 else 1,
        **launch_options(4, num_rows),
    )
    return output
