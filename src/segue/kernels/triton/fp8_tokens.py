"""GEMMs of many tokens by a large weight in FP8: the tokens are quantized, too, and multiplied in FP8.

Their time is that of the multiplications, which the tensor cores do twice as fast in FP8. Scales of tokens
are like those of the weight:

- A weight with a scale per row: each token has a scale, and `torch._scaled_mm` multiplies.
- A weight with a scale per 128 columns: so have tokens. The kernel here multiplies the sum of the products of
  128 columns by both scales, and adds these up in float32.

Norms and activations write tokens in FP8 themselves (`store_quantized`), so that of most models only the
output of attention is quantized by a kernel of its own.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.dtypes import FP8_BLOCK
from segue.kernels.fp8 import FP8, MAX, MAX_INVERSE, SMALLEST_SCALE, FP8Tokens
from segue.kernels.fp8_plan import MAX_FEW_ROWS, many_rows_tile
from segue.kernels.triton.gemm import grouped_tile
from segue.kernels.triton.launch import launch_options, num_sms, pdl_launch_dependents, pdl_wait
from segue.sizes import ceil_div

_MIN_WEIGHTS = 1 << 22  # of a smaller weight the GEMM is too short to be worth a kernel that quantizes tokens
_COLUMNS = tl.constexpr(4096)  # per step of a program that quantizes a token
_MAX, _MAX_INVERSE, _SMALLEST_SCALE = (tl.constexpr(each) for each in (MAX, MAX_INVERSE, SMALLEST_SCALE))
_BM, _BK, _STAGES, _GROUP_M = (tl.constexpr(each) for each in (128, FP8_BLOCK, 4, 8))


@triton.jit
def _scale_of(most):
    """Returns the scale of values of which `most` is the greatest absolute one."""
    return tl.maximum(most * _MAX_INVERSE, _SMALLEST_SCALE)


@triton.jit
def _quantized(values, scale):
    """Returns float32 values in FP8, divided by their scale; NaN stays NaN."""
    scaled = tl.div_rn(values, scale)
    return tl.clamp(scaled, -_MAX, _MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def store_quantized(values, out, scales, stride, inside, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Store float32 `values` `[BLOCK]` in FP8 at `out`, where `inside`; elsewhere they are 0.

    Their scale is stored at `scales`, or with GROUP those of as many values each, which are `stride` apart.
    """
    columns = tl.arange(0, BLOCK)
    if GROUP:
        groups = tl.reshape(values, (BLOCK // GROUP, GROUP))
        scale = _scale_of(tl.max(tl.abs(groups), 1))
        first = tl.arange(0, BLOCK // GROUP)
        is_there = tl.max(tl.reshape(inside.to(tl.int32), (BLOCK // GROUP, GROUP)), 1) > 0
        tl.store(scales + first * stride, scale, mask=is_there)
        values = tl.reshape(_quantized(groups, scale[:, None]), (BLOCK,))
    else:
        scale = _scale_of(tl.max(tl.abs(values)))
        tl.store(scales, scale)
        values = _quantized(values, scale)
    tl.store(out + columns, values, mask=inside)


@triton.jit(do_not_specialize=["stride"])
def _quantize_tokens(x, out, scales, stride, depth, GROUP: tl.constexpr, PDL: tl.constexpr):
    """Write one row of `x` in FP8, and its scale; with GROUP, a part of the row, and its scales."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, _COLUMNS)
    x += row * depth
    out += row * depth
    pdl_wait(PDL)
    if GROUP:
        start = tl.program_id(1) * _COLUMNS
        inside = start + columns < depth
        values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        pdl_launch_dependents(PDL)
        at = scales + row + tl.program_id(1) * (_COLUMNS // GROUP) * stride
        store_quantized(values, out + start, at, stride, inside, _COLUMNS, GROUP)
    else:
        most = tl.zeros((_COLUMNS,), tl.float32)
        for start in range(0, depth, _COLUMNS):
            i = start + columns
            most = tl.maximum(most, tl.abs(tl.load(x + i, mask=i < depth, other=0.0).to(tl.float32)))
        scale = _scale_of(tl.max(most))
        for start in range(0, depth, _COLUMNS):
            i = start + columns
            values = tl.load(x + i, mask=i < depth, other=0.0).to(tl.float32)
            tl.store(out + i, _quantized(values, scale), mask=i < depth)
        pdl_launch_dependents(PDL)
        tl.store(scales + row, scale)


def empty_tokens(
    num_rows: int, depth: int, block: int, dtype: torch.dtype, device: torch.device
) -> FP8Tokens:
    """Returns tokens `[num_rows, depth]` that a kernel is to write; for `block` see `segue.kernels.fp8`.

    Scales of the same columns are adjacent.
    """
    values = torch.empty((num_rows, depth), dtype=FP8, device=device)
    scales = torch.empty((ceil_div(depth, block or depth), num_rows), dtype=torch.float32, device=device)
    return FP8Tokens(values, scales.T, dtype)


def quantize_tokens(x: Tensor, block: int) -> FP8Tokens:
    """Returns `x` `[M, K]` in FP8, with a scale for each row, or for each `block` of it."""
    (num_rows, depth) = x.shape
    tokens = empty_tokens(num_rows, depth, block, x.dtype, x.device)
    _quantize_tokens[(num_rows, ceil_div(depth, _COLUMNS.value) if block else 1)](
        x=x.contiguous(),
        out=tokens.values,
        scales=tokens.scales,
        stride=num_rows,
        depth=depth,
        GROUP=block,
        **launch_options(4, num_rows),
    )
    return tokens


@triton.jit(do_not_specialize=["num_rows"])
def _block_gemm(
    x, of_tokens, weight, scales, bias, out, num_rows, size, depth, BN: tl.constexpr, PDL: tl.constexpr
):
    """Compute one tile of `x @ weight.T`, where both have a scale for each _BK columns of a row."""
    first_m, first_n = grouped_tile(tl.program_id(0), num_rows, size, _BM, BN, _GROUP_M)
    m, n, k = first_m + tl.arange(0, _BM), first_n + tl.arange(0, BN), tl.arange(0, _BK)
    is_token, is_row = m < num_rows, n < size
    num_blocks = depth // _BK
    tokens = x + m[:, None].to(tl.int64) * depth + k[None, :]
    weights = weight + n[:, None].to(tl.int64) * depth + k[None, :]
    pdl_wait(PDL)
    acc = tl.zeros((_BM, BN), tl.float32)
    for block in tl.range(0, num_blocks, num_stages=_STAGES):
        t = tl.load(tokens + block * _BK, mask=is_token[:, None], other=0.0)
        w = tl.load(weights + block * _BK, mask=is_row[:, None], other=0.0)
        of_t = tl.load(of_tokens + block * num_rows + m, mask=is_token, other=0.0)
        of_w = tl.load(scales + n * num_blocks + block, mask=is_row, other=0.0)
        acc += tl.dot(t, w.T) * (of_t[:, None] * of_w[None, :])
    pdl_launch_dependents(PDL)
    if bias is not None:
        acc += tl.load(bias + n, mask=is_row, other=0.0).to(tl.float32)[None, :]
    at = out + m[:, None].to(tl.int64) * size + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])


def takes_fp8(num_rows: int, weight: Tensor, block: int, dtype: torch.dtype) -> bool:
    """Returns whether a GEMM of so many tokens is `multiply_in_fp8`."""
    return num_rows > MAX_FEW_ROWS and can_multiply_in_fp8(*weight.shape, block, dtype)


def multiply_in_fp8(x: FP8Tokens, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `x @ weight.T + bias`, `[M, K] -> [M, N]`; see `segue.kernels.triton.fp8_gemm.fp8_linear`."""
    if scales.shape[1] == 1:
        return torch._scaled_mm(
            x.values, weight.T, scale_a=x.scales, scale_b=scales.view(1, -1), bias=bias, out_dtype=x.dtype
        )
    (num_rows, depth), size = x.values.shape, len(weight)
    blocks = ceil_div(num_rows, _BM.value)
    block_n = many_rows_tile(num_rows, size, num_sms(weight.device))
    out = torch.empty((num_rows, size), dtype=x.dtype, device=weight.device)
    _block_gemm[(blocks * ceil_div(size, block_n),)](
        x=x.values,
        of_tokens=x.scales,
        weight=weight,
        scales=scales,
        bias=bias,
        out=out,
        num_rows=num_rows,
        size=size,
        depth=depth,
        BN=block_n,
        **launch_options(8, num_rows),
    )
    return out


@cache
def can_multiply_in_fp8(size: int, depth: int, block: int, dtype: torch.dtype) -> bool:
    """Returns whether this device multiplies many tokens by a weight `[size, depth]` in FP8."""
    if size * depth < _MIN_WEIGHTS or block not in (0, FP8_BLOCK) or dtype != torch.bfloat16:
        return False
    fits = size % 16 == 0 and depth % (block or 16) == 0
    return fits and torch.cuda.get_device_capability() >= (9, 0)
