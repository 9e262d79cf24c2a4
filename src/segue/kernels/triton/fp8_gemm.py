"""GEMMs of few rows by a weight in FP8, which stream the weight; one row takes `gemv.py`.

For few rows the time is that of reading the weight, which takes half as long as in bfloat16. One kernel has
two ways to multiply, and the start of an engine times both (`plan_timing.py`):

- It turns the weight to the dtype of the activations in registers (`from_fp8`).
- The tensor cores multiply in FP8, and each number of a token is the sum of two in FP8, which together have
  the 8 significant bits of bfloat16 (`split_tokens`). So nothing is done to the weight, and twice as much is
  multiplied.

Both multiply by the scales once products are summed, and give results as precise as bfloat16.

For many rows and a large weight `fp8_tokens.py` multiplies in FP8. What that does not support, and with many
rows small weights, takes the kernel here.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.fp8 import FP8
from segue.kernels.fp8_plan import MAX_FEW_ROWS, SPLIT_BLOCK, FP8Plan, FP8Shape, default_plan
from segue.kernels.plan_store import found_plans, lookup
from segue.kernels.triton.fp8_tokens import multiply_in_fp8, quantize_tokens, takes_fp8
from segue.kernels.triton.gemm import silu_mul_tile
from segue.kernels.triton.launch import launch_options, num_sms, pdl_launch_dependents, pdl_wait
from segue.sizes import ceil_div

_SPLIT_AT_ONCE = 8  # blocks of a token per program of `_split_tokens`

# Four numbers in FP8 (e4m3) to bfloat16. Two bytes each are put into the upper halves of 16 bits, and all but
# the sign is shifted to where bfloat16 has the lowest 4 bits of its exponent and the highest 3 of its
# mantissa. That is the number times 2**-120, subnormal or not, so its product with 2**120 is exact. NaN,
# which no weight has, becomes 480. By the device's own conversions it would take four times as long.
_FP8_TO_BFLOAT16 = tl.constexpr("""
{
.reg .b32 a, b, c, d, e, f;
mov.b32 e, 0x7b807b80;
mov.b32 f, 0x80008000;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
lop3.b32 a, a, c, 0x80008000, 0xe4;
lop3.b32 b, b, d, 0x80008000, 0xe4;
and.b32 a, a, 0x87f087f0;
and.b32 b, b, 0x87f087f0;
fma.rn.bf16x2 $0, a, e, f;
fma.rn.bf16x2 $1, b, e, f;
}
""")


@triton.jit
def from_fp8(w, dtype: tl.constexpr):
    """Returns numbers in FP8 in `dtype`, exactly."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_FP8_TO_BFLOAT16, "=r,=r,r", [w], tl.bfloat16, is_pure=True, pack=4)
    return w.to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _split_tokens(
    x, halves, factors, num_rows, depth, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Write BLOCKS blocks of a token as `high * factor + low * (factor / 16)`.

    A block is BLOCK numbers with one factor. For the shapes of the tensors see `split_tokens`.
    """
    m, num_blocks = tl.program_id(0).to(tl.int64), tl.cdiv(depth, BLOCK)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    k = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    pdl_wait(PDL)
    t = tl.load(x + m * depth + k, mask=k < depth, other=0.0).to(tl.float32)
    pdl_launch_dependents(PDL)
    exponents = tl.max(tl.abs(t), 1).to(tl.int32, bitcast=True) & 0x7F800000
    exponents = tl.maximum(exponents, 0x10000000)  # for blocks of zeros
    t *= (0x7F000000 - exponents + 0x03800000).to(tl.float32, bitcast=True)[:, None]  # now below 256
    high = t.to(tl.float8e4nv)
    # Not `high.to(tl.float32)`: the ptxas of CUDA 12.8 then reads a wrong register for every other pair.
    low = ((t - from_fp8(high, tl.bfloat16)) * 16.0).to(tl.float8e4nv)
    factor = exponents.to(tl.float32, bitcast=True) * 0.0078125
    at, of_low = m * depth + k, num_rows.to(tl.int64) * depth
    tl.store(halves + at, high, mask=k < depth)
    tl.store(halves + of_low + at, low, mask=k < depth)
    at, of_low = m * num_blocks + block, num_rows.to(tl.int64) * num_blocks
    tl.store(factors + at, factor, mask=block < num_blocks)
    tl.store(factors + of_low + at, factor * 0.0625, mask=block < num_blocks)


def split_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of tokens `[M, K]` as sums of two in FP8, which keep bfloat16's 8 significant bits.

    Returns:
        The high and the low numbers, FP8 `[2, M, K]`, and the factor of each 128 columns of them, float32
        `[2, M, ceil(K / 128)]`. A token is the sum of its high and its low numbers, times their factors.
    """
    num_rows, depth = x.shape
    num_blocks = ceil_div(depth, SPLIT_BLOCK)
    halves = torch.empty((2, num_rows, depth), dtype=FP8, device=x.device)
    factors = torch.empty((2, num_rows, num_blocks), device=x.device)
    _split_tokens[(num_rows, ceil_div(num_blocks, _SPLIT_AT_ONCE))](
        x=x.contiguous(),
        halves=halves,
        factors=factors,
        num_rows=num_rows,
        depth=depth,
        BLOCKS=_SPLIT_AT_ONCE,
        BLOCK=SPLIT_BLOCK,
        **launch_options(4, num_rows),
    )
    return halves, factors


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_gemm(
    x,
    token_factors,
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
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one tile of `x @ weight.T`, or one of its split-K partials, if the grid splits K.

    With BLOCK, as many columns of a row of the weight have a scale: it is a multiple of BK, or divides it.
    EVEN: tiles divide the weight. With `token_factors`, those of `split_tokens`, `x` is the `[2, M, K]` of
    that function and is multiplied like twice as many tokens, whose results are added up in the end; BK is
    its 128 columns. The accumulator is transposed then: rows of the weight fill the tensor cores' 64 rows,
    as FP8 needs it. GATED: rows of the gate and of the up projection alternate in a tile, and half as many
    columns, `size`, are stored.
    """
    r, split = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1)
    m, k = tl.program_id(2) * BM + tl.arange(0, BM), tl.arange(0, BK)
    if GATED:
        n, is_row = r // 2 + (r % 2) * size, r < 2 * size
    else:
        n, is_row = r, r < size
    IN_FP8: tl.constexpr = token_factors is not None
    row = m
    if IN_FP8:
        half = tl.arange(0, 2 * BM)
        m = tl.program_id(2) * BM + half % BM
        row = half // BM * num_rows + m
        token_factors += row * tl.cdiv(depth, BK)
    is_token = m < num_rows
    weights = weight + n[:, None].to(tl.int64) * depth + k[None, :]
    tokens = x + row[:, None].to(tl.int64) * depth + k[None, :]
    num_scales = tl.cdiv(depth, BLOCK) if BLOCK else 1
    scale = scales + n.to(tl.int64) * num_scales
    share = tl.cdiv(tl.cdiv(depth, BK), tl.num_programs(1)) * BK
    pdl_wait(PDL)
    acc = tl.zeros((BN, 2 * BM) if IN_FP8 else (BM, BN), tl.float32)
    for start in tl.range(split * share, tl.minimum((split + 1) * share, depth), BK, num_stages=STAGES):
        if EVEN:
            w = tl.load(weights + start)
            t = tl.load(tokens + start, mask=is_token[:, None], other=0.0)
        else:
            inside = start + k < depth
            w = tl.load(weights + start, mask=is_row[:, None] & inside[None, :], other=0.0)
            t = tl.load(tokens + start, mask=is_token[:, None] & inside[None, :], other=0.0)
        if BLOCK and BLOCK % BK:  # short blocks
            block = start // BLOCK + tl.arange(0, BK // BLOCK)
            here = is_row[:, None] & (block < num_scales)[None, :]
            factor = tl.load(scale[:, None] + block[None, :], mask=here, other=0.0)
            wide = tl.reshape(w.to(tl.float32), (BN, BK // BLOCK, BLOCK)) * factor[:, :, None]
            acc = tl.dot(t, tl.reshape(wide, (BN, BK)).to(t.dtype).T, acc)
        elif IN_FP8:
            product = tl.dot(w, t.T) * tl.load(token_factors + start // BK, mask=is_token, other=0.0)[None, :]
            if BLOCK:
                product *= tl.load(scale + start // BLOCK, mask=is_row, other=0.0)[:, None]
            acc += product
        elif BLOCK:
            factor = tl.load(scale + start // BLOCK, mask=is_row, other=0.0)
            acc += tl.dot(t, from_fp8(w, t.dtype).T) * factor[None, :]
        else:
            acc = tl.dot(t, from_fp8(w, t.dtype).T, acc)
    pdl_launch_dependents(PDL)
    if not BLOCK:
        scale = tl.load(scales + n, mask=is_row, other=0.0)
        acc *= scale[:, None] if IN_FP8 else scale[None, :]
    if IN_FP8:
        acc = tl.sum(tl.reshape(acc, (BN, 2, BM)), 1)
        m = tl.program_id(2) * BM + tl.arange(0, BM)
    if GATED:
        n = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        if IN_FP8:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BN // 2, 2, BM)), (0, 2, 1)))
        else:
            gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        acc = silu_mul_tile(gate, up)
    elif bias is not None:
        if split == 0:
            b = tl.load(bias + n, mask=is_row, other=0.0).to(tl.float32)
            acc += b[:, None] if IN_FP8 else b[None, :]
    m, n = (m[None, :], n[:, None]) if IN_FP8 else (m[:, None], n[None, :])
    at = out + (split * num_rows + m).to(tl.int64) * size + n
    tl.store(at, acc.to(out.dtype.element_ty), mask=(n < size) & (m < num_rows))


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
    if takes_fp8(len(x), weight, block, x.dtype):
        return multiply_in_fp8(quantize_tokens(x, block), weight, scales, bias)
    (rows, depth), size = x.shape, len(weight)
    shape = FP8Shape(rows, size, depth, block, "split" if may_split else "whole")
    plan = choose_fp8(shape, x.dtype) or default_plan(shape, num_sms(x.device))
    return run_fp8(plan, x, weight, scales, block, bias)


def fp8_gate_up_silu(x: Tensor, weight: Tensor, scales: Tensor, block: int) -> Tensor | None:
    """Returns `silu(gate) * up` of `x @ weight.T`, `[M, I]`; None where one kernel is not faster.

    `weight` is `[2 * I, K]`, gate rows first; for the other arguments see `fp8_linear`.
    """
    (rows, depth), size = x.shape, len(weight)
    plan = choose_fp8(FP8Shape(rows, size, depth, block, "gated"), x.dtype)
    return None if plan is None else run_fp8(plan, x, weight, scales, block, None, gated=True)


@cache
def choose_fp8(shape: FP8Shape, dtype: torch.dtype) -> FP8Plan | None:
    """Returns the plan that the start found for a GEMM of activations in `dtype`, or None."""
    if shape.rows > MAX_FEW_ROWS or dtype != torch.bfloat16:
        return None
    plan = lookup([(found_plans(), shape.kind)], shape.key, shape.rows)
    return FP8Plan(**plan) if plan else None


def run_fp8(
    plan: FP8Plan,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    block: int,
    bias: Tensor | None,
    *,
    gated: bool = False,
) -> Tensor:
    """Run the kernel with `plan`; returns split-K partials, float32 `[splits, M, N]`, if it splits K.

    With `gated` see `fp8_gate_up_silu`: the plan does not split K, and there is no bias. For the other
    arguments see `fp8_linear`.
    """
    (num_rows, depth), num_columns = x.shape, len(weight)
    size = num_columns // 2 if gated else num_columns
    shape = (plan.splits, num_rows, size) if plan.splits > 1 else (num_rows, size)
    out = torch.empty(shape, dtype=torch.float32 if plan.splits > 1 else x.dtype, device=x.device)
    grid = (ceil_div(num_columns, plan.block_n), plan.splits, ceil_div(num_rows, plan.block_m))
    token_factors = None
    if plan.fp8_tokens:
        x, token_factors = split_tokens(x)
    _fp8_gemm[grid](
        x=x.contiguous(),
        token_factors=token_factors,
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
        STAGES=plan.stages,
        BLOCK=block,
        EVEN=num_columns % plan.block_n == 0 and depth % plan.block_k == 0,
        GATED=gated,
        **launch_options(plan.warps, num_rows),
    )
    return out
