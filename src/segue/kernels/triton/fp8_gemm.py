"""GEMMs by a weight in FP8: few rows stream the weight, many rows use the tensor cores' FP8.

For few rows the time is that of reading the weight, which takes half as long as in bfloat16. The kernel here
turns the weight to the dtype of the activations in registers, and multiplies by the scales once the products
are summed. So activations are not quantized. Its tiles were not tuned.

For many rows and a large weight the time is that of the multiplications. There the tokens are quantized too,
each by its greatest value, and `torch._scaled_mm` multiplies in FP8. Devices, shapes and scales that it does
not support use the kernel here.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.fp8 import FP8, MAX, MAX_INVERSE, SMALLEST_SCALE
from segue.kernels.triton.launch import launch_options, num_sms, pdl_launch_dependents, pdl_wait

_MAX_SMALL_M = 64
_MIN_WEIGHTS = 1 << 22  # of a smaller weight the GEMM is too short to be worth a kernel that quantizes tokens
_COLUMNS = tl.constexpr(4096)  # per step of a program that quantizes a token
_MAX, _MAX_INVERSE, _SMALLEST_SCALE = (tl.constexpr(each) for each in (MAX, MAX_INVERSE, SMALLEST_SCALE))


@dataclass(frozen=True, slots=True)
class FP8Plan:
    """The tile, split and launch options of one GEMM; see `segue.kernels.triton.gemm.GemmPlan`."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    stages: int
    warps: int


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_gemm(
    x,
    weight,
    scales,
    bias,
    out,
    num_rows,
    size,
    depth,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one tile of `x @ weight.T`, or with SPLITS > 1 of one of its split-K partials.

    Rows of the weight, from registers, fill the tensor cores' rows. With BLOCK, as many columns of a row of
    the weight have a scale: it is a multiple of BK, or divides it.
    """
    n, split = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1)
    m, k = tl.program_id(2) * BM + tl.arange(0, BM), tl.arange(0, BK)
    is_row, is_token = n < size, m < num_rows
    weights = weight + n[:, None].to(tl.int64) * depth + k[None, :]
    tokens = x + m[None, :].to(tl.int64) * depth + k[:, None]
    num_scales = tl.cdiv(depth, BLOCK) if BLOCK else 1
    scale = scales + n.to(tl.int64) * num_scales
    share = tl.cdiv(tl.cdiv(depth, BK), SPLITS) * BK
    pdl_wait(PDL)
    acc = tl.zeros((BN, BM), tl.float32)
    for start in tl.range(split * share, tl.minimum((split + 1) * share, depth), BK, num_stages=STAGES):
        inside = k < BK if EVEN_K else start + k < depth
        w = tl.load(weights + start, mask=is_row[:, None] & inside[None, :], other=0.0)
        t = tl.load(tokens + start, mask=is_token[None, :] & inside[:, None], other=0.0)
        if not BLOCK:
            acc = tl.dot(w.to(t.dtype), t, acc)
        elif BLOCK % BK == 0:
            factor = tl.load(scale + start // BLOCK, mask=is_row, other=0.0)
            acc += tl.dot(w.to(t.dtype), t) * factor[:, None]
        else:
            block = start // BLOCK + tl.arange(0, BK // BLOCK)
            here = is_row[:, None] & (block < num_scales)[None, :]
            factor = tl.load(scale[:, None] + block[None, :], mask=here, other=0.0)
            wide = tl.reshape(w.to(tl.float32), (BN, BK // BLOCK, BLOCK)) * factor[:, :, None]
            acc = tl.dot(tl.reshape(wide, (BN, BK)).to(t.dtype), t, acc)
    pdl_launch_dependents(PDL)
    if not BLOCK:
        acc *= tl.load(scale, mask=is_row, other=0.0)[:, None]
    if bias is not None:
        if split == 0:
            acc += tl.load(bias + n, mask=is_row, other=0.0).to(tl.float32)[:, None]
    at = out + (split * num_rows + m[None, :]).to(tl.int64) * size + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_token[None, :])


@triton.jit
def _quantize_tokens(x, out, scales, depth, PDL: tl.constexpr):
    """Write one row of `x` in FP8, and its scale; see `segue.kernels.fp8.quantize`."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, _COLUMNS)
    x += row * depth
    out += row * depth
    pdl_wait(PDL)
    most = tl.zeros((_COLUMNS,), tl.float32)
    for start in range(0, depth, _COLUMNS):
        i = start + columns
        most = tl.maximum(most, tl.abs(tl.load(x + i, mask=i < depth, other=0.0).to(tl.float32)))
    scale = tl.maximum(tl.max(most) * _MAX_INVERSE, _SMALLEST_SCALE)
    for start in range(0, depth, _COLUMNS):
        i = start + columns
        values = tl.div_rn(tl.load(x + i, mask=i < depth, other=0.0).to(tl.float32), scale)
        values = tl.minimum(tl.maximum(values, -_MAX), _MAX)
        tl.store(out + i, values.to(out.dtype.element_ty), mask=i < depth)
    pdl_launch_dependents(PDL)
    tl.store(scales + row, scale)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `x` `[M, K]` in FP8, and the scale of each row, float32 `[M, 1]`."""
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    _quantize_tokens[(len(x),)](
        x=x.contiguous(), out=out, scales=scales, depth=x.shape[1], **launch_options(4, len(x))
    )
    return out, scales


def fp8_linear(
    x: Tensor, weight: Tensor, scales: Tensor, block: int, bias: Tensor | None, *, may_split: bool
) -> Tensor:
    """Returns `x @ weight.T + bias`, `[M, K] -> [M, N]`, or split-K partials; see `segue.kernels.ops.linear`.

    Args:
        x: `[M, K]`.
        weight: `[N, K]`, in FP8.
        scales: float32 `[N, blocks]`.
        block: see `segue.kernels.fp8`.
        bias: `[N]`.
        may_split: whether the result may be split-K partials.
    """
    if len(x) > _MAX_SMALL_M and not block and can_multiply_in_fp8(*weight.shape, x.dtype):
        tokens, of_tokens = quantize_tokens(x)
        return torch._scaled_mm(
            tokens, weight.T, scale_a=of_tokens, scale_b=scales.view(1, -1), bias=bias, out_dtype=x.dtype
        )
    plan = choose_fp8(len(x), x.shape[1], len(weight), num_sms(x.device), may_split)
    return run_fp8(plan, x, weight, scales, block, bias)


@cache
def can_multiply_in_fp8(size: int, depth: int, dtype: torch.dtype) -> bool:
    """Returns whether `torch._scaled_mm` is to multiply by a weight `[size, depth]` with a scale per row."""
    if size * depth < _MIN_WEIGHTS:
        return False
    fits = size % 16 == 0 and depth % 16 == 0 and dtype == torch.bfloat16
    return fits and torch.cuda.get_device_capability() >= (9, 0)


@cache
def choose_fp8(num_rows: int, depth: int, size: int, num_sms: int, may_split: bool) -> FP8Plan:
    """Returns the plan of a GEMM `[num_rows, depth]` by `[size, depth]`; K is split to keep all SMs busy."""
    is_small, splits = num_rows <= _MAX_SMALL_M, 1
    block_m = max(16, triton.next_power_of_2(num_rows)) if is_small else 128
    block_n = 64 if is_small or triton.cdiv(num_rows, 128) * triton.cdiv(size, 128) < num_sms else 128
    programs = triton.cdiv(num_rows, block_m) * triton.cdiv(size, block_n)
    while may_split and programs * splits < 2 * num_sms and depth >= 2 * splits * 512:
        splits *= 2
    if is_small:
        return FP8Plan(block_m, block_n, block_k=128, splits=splits, stages=4, warps=4)
    return FP8Plan(block_m, block_n, block_k=64, splits=splits, stages=3, warps=8)


def row_steps() -> set[int]:
    """Returns the numbers of rows up to which the kernels of a GEMM are the same."""
    return {16, 32, _MAX_SMALL_M}


def run_fp8(
    plan: FP8Plan, x: Tensor, weight: Tensor, scales: Tensor, block: int, bias: Tensor | None
) -> Tensor:
    """Run the kernel with `plan`; returns split-K partials, float32 `[splits, M, N]`, if it splits K.

    For the other arguments see `fp8_linear`.
    """
    (num_rows, depth), size = x.shape, len(weight)
    shape = (plan.splits, num_rows, size) if plan.splits > 1 else (num_rows, size)
    out = torch.empty(shape, dtype=torch.float32 if plan.splits > 1 else x.dtype, device=x.device)
    grid = (triton.cdiv(size, plan.block_n), plan.splits, triton.cdiv(num_rows, plan.block_m))
    _fp8_gemm[grid](
        x=x.contiguous(),
        weight=weight,
        scales=scales,
        bias=bias,
        out=out,
        num_rows=num_rows,
        size=size,
        depth=depth,
        BM=plan.block_m,
        BN=plan.block_n,
        BK=plan.block_k,
        SPLITS=plan.splits,
        STAGES=plan.stages,
        BLOCK=block,
        EVEN_K=depth % plan.block_k == 0,
        **launch_options(plan.warps, num_rows),
    )
    return out
