"""SiLU-and-multiply, and the gate-up SiLU GEMM: both projections and their activation in one kernel.

Few rows use the kernel of `gemm.py`. For many rows and a small K, writing 2 * I columns and reading them
again for the activation takes a fifth of the time; here they never leave the registers. Two small programs
share a streaming multiprocessor, so that one multiplies while the other stores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from segue.kernels.fp8 import FP8Tokens
from segue.kernels.gemm_plan import MAX_GATED_ROWS
from segue.kernels.triton import gemm
from segue.kernels.triton.fp8_tokens import empty_tokens, store_quantized
from segue.kernels.triton.gemm import grouped_tile, load_split_k, silu_mul_tile
from segue.kernels.triton.launch import is_hopper, launch_options, num_sms, pdl_launch_dependents, pdl_wait
from segue.sizes import ceil_div, next_power_of_2

_COLUMNS = tl.constexpr(1024)  # per program of the activation
MAX_FP8_COLUMNS = 16384  # that a program's registers hold
_BM, _BN, _BK = tl.constexpr(128), tl.constexpr(64), tl.constexpr(64)
_STAGES, _GROUP_M, _WARPS = tl.constexpr(3), tl.constexpr(16), 4
_MIN_LARGE_M = 2048  # fewer rows give too few tiles for the programs that run at once
ROW_STEPS = {MAX_GATED_ROWS, _MIN_LARGE_M - 1}  # up to these rows a GEMM has one kernel, above another one
_MAX_K = 1024  # with a larger K the time is that of the multiplications, which cuBLAS does faster


@triton.jit(do_not_specialize=["num_rows"])
def _silu_mul(gate_up, output, num_rows, size, SPLITS: tl.constexpr, PDL: tl.constexpr):
    """Writes `silu(gate) * up` of one row's columns, after adding up the split-K partials of both."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
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
    _silu_mul[(num_rows, ceil_div(size, _COLUMNS.value))](
        gate_up=gate_up,
        output=output,
        num_rows=num_rows,
        size=size,
        SPLITS=gate_up.shape[0] if gate_up.dim() == 3 else 1,
        **launch_options(4, num_rows),
    )
    return output


@triton.jit(do_not_specialize=["stride"])
def _silu_mul_fp8(
    gate_up, output, scales, stride, size, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr
):
    """Writes `silu(gate) * up` of one row by `store_quantized`: what quantizing the result would give."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < size
    pdl_wait(PDL)
    gate = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    pdl_launch_dependents(PDL)
    result = silu_mul_tile(gate, up).to(gate_up.dtype.element_ty).to(tl.float32)
    store_quantized(result, output + row * size, scales + row, stride, inside, BLOCK, GROUP)


def silu_mul_fp8(gate_up: Tensor, group: int) -> FP8Tokens:
    """Returns `silu_mul` of `gate_up` `[T, 2 * I]`, quantized: `[T, I]`. I is at most `MAX_FP8_COLUMNS`.

    For `group` see `block` of `segue.kernels.fp8`.
    """
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    tokens = empty_tokens(num_rows, size, group, gate_up.dtype, gate_up.device)
    block = max(next_power_of_2(size), group)
    _silu_mul_fp8[(num_rows,)](
        gate_up=gate_up,
        output=tokens.values,
        scales=tokens.scales,
        stride=num_rows,
        size=size,
        BLOCK=block,
        GROUP=group,
        **launch_options(min(16, max(1, block // 1024)), num_rows),
    )
    return tokens


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_silu(x, weight, out, num_rows, size, depth, PDL: tl.constexpr):
    """Compute tiles of `silu(gate) * up` of `x @ weight.T`, for many rows; see `run_large_m`.

    `x`, `weight` and `out` are TMA descriptors, `size` is I and `depth` K. At most two programs per SM share
    the tiles. The gate and the up projection have an accumulator each.
    """
    pdl_wait(PDL)
    num_tiles = tl.cdiv(num_rows, _BM) * tl.cdiv(size, _BN)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        m, n = grouped_tile(tile, num_rows, size, _BM, _BN, _GROUP_M)
        gate = tl.zeros((_BM, _BN), tl.float32)
        up = tl.zeros((_BM, _BN), tl.float32)
        for k in tl.range(0, depth, _BK, num_stages=_STAGES):
            rows = x.load([m, k])
            gate = tl.dot(rows, weight.load([n, k]).T, gate)
            up = tl.dot(rows, weight.load([size + n, k]).T, up)
        out.store([m, n], silu_mul_tile(gate, up).to(out.dtype))
    pdl_launch_dependents(PDL)


def gate_up_silu(x: Tensor, weight: Tensor) -> Tensor | None:
    """Returns `silu(gate) * up` of `x @ weight.T`, `[M, I]`; None where one kernel is not faster.

    `x` is `[M, K]`, `weight` is `[2 * I, K]`, gate rows first. Up to `MAX_GATED_ROWS` rows use the kernel and
    the plans of `gemm.py`; the kernel here is for many rows on Hopper.
    """
    (num_rows, depth), size = x.shape, weight.shape[0] // 2
    if num_rows <= MAX_GATED_ROWS:
        # The plan may not split K, because the activation needs the whole sums.
        plan = gemm.choose(num_rows, depth, 2 * size, x.dtype, "gated")
        return None if plan is None else gemm.run(plan, x, weight, None, x.dtype, gated=True)
    if num_rows < _MIN_LARGE_M or depth > _MAX_K or not is_hopper():
        return None
    if x.dtype == torch.float32 or depth % _BK.value or size % _BN.value:
        return None
    return run_large_m(x, weight)


def run_large_m(x: Tensor, weight: Tensor) -> Tensor:
    """Run the kernel for many rows regardless of its speed; K and I have to be multiples of 64.

    Arguments and result are those of `gate_up_silu`. Tests call it with any number of rows.
    """
    (num_rows, depth), size = x.shape, weight.shape[0] // 2
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    tiles = ceil_div(num_rows, _BM.value) * (size // _BN.value)
    _gate_up_silu[(min(tiles, 2 * num_sms(x.device)),)](
        x=TensorDescriptor.from_tensor(x, [_BM.value, _BK.value]),
        weight=TensorDescriptor.from_tensor(weight, [_BN.value, _BK.value]),
        out=TensorDescriptor.from_tensor(out, [_BM.value, _BN.value]),
        num_rows=num_rows,
        size=size,
        depth=depth,
        **launch_options(_WARPS, num_rows),
    )
    return out
