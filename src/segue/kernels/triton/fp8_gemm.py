"""GEMMs of few rows by a weight in FP8, which stream the weight; one row takes `gemv.py`.

For few rows the time is that of reading the weight, which takes half as long as in bfloat16. One kernel has
two ways to multiply, and the start of an engine times both (`plan_timing.py`):

- It turns the weight to the dtype of the activations in registers (`from_fp8`).
- The tensor cores multiply in FP8, and each token is the sum of two numbers in FP8, which together have the
  8 significant bits of bfloat16. So nothing is done to the weight, and twice as much is multiplied.

Both multiply by the scales once products are summed, and give results as precise as bfloat16.

For many rows and a large weight `fp8_tokens.py` multiplies in FP8. What that does not support, and with many
rows small weights, takes the kernel here.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.fp8_plan import MAX_FEW_ROWS, FP8Plan, FP8Shape, default_plan
from segue.kernels.plan_store import found_plans, lookup
from segue.kernels.triton.fp8_tokens import multiply_in_fp8, quantize_tokens, takes_fp8
from segue.kernels.triton.gemm import silu_mul_tile
from segue.kernels.triton.launch import launch_options, num_sms, pdl_launch_dependents, pdl_wait

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


@triton.jit
def _split_tokens(t):
    """Returns tokens `[BM, BK]` as `(high + low / 16) * scale`: both in FP8, and `[BM]` powers of two."""
    t = t.to(tl.float32)
    exponents = tl.max(tl.abs(t), 1).to(tl.int32, bitcast=True) & 0x7F800000
    exponents = tl.maximum(exponents, 0x10000000)  # of zeros
    up = (0x7F000000 - exponents + 0x03800000).to(tl.float32, bitcast=True)  # the inverse of the scale
    t *= up[:, None]
    high = t.to(tl.float8e4nv)
    low = ((t - high.to(tl.float32)) * 16.0).to(tl.float8e4nv)
    return high, low, exponents.to(tl.float32, bitcast=True) * 0.0078125


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
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    FP8_TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one tile of `x @ weight.T`, or one of its split-K partials, if the grid splits K.

    With BLOCK, as many columns of a row of the weight have a scale: it is a multiple of BK, or divides it.
    EVEN: tiles divide the weight. With FP8_TOKENS the accumulator is transposed: rows of the weight fill the
    tensor cores' 64 rows, as FP8 needs it. GATED: rows of the gate and of the up projection alternate in a
    tile, and half as many columns, `size`, are stored.
    """
    r, split = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1)
    m, k = tl.program_id(2) * BM + tl.arange(0, BM), tl.arange(0, BK)
    if GATED:
        n, is_row = r // 2 + (r % 2) * size, r < 2 * size
    else:
        n, is_row = r, r < size
    is_token = m < num_rows
    weights = weight + n[:, None].to(tl.int64) * depth + k[None, :]
    tokens = x + m[:, None].to(tl.int64) * depth + k[None, :]
    num_scales = tl.cdiv(depth, BLOCK) if BLOCK else 1
    scale = scales + n.to(tl.int64) * num_scales
    share = tl.cdiv(tl.cdiv(depth, BK), tl.num_programs(1)) * BK
    pdl_wait(PDL)
    acc = tl.zeros((BN, BM) if FP8_TOKENS else (BM, BN), tl.float32)
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
        elif FP8_TOKENS:
            high, low, of_tokens = _split_tokens(t)
            product = (tl.dot(w, high.T) + tl.dot(w, low.T) * 0.0625) * of_tokens[None, :]
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
        acc *= scale[:, None] if FP8_TOKENS else scale[None, :]
    if GATED:
        n = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        if FP8_TOKENS:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BN // 2, 2, BM)), (0, 2, 1)))
        else:
            gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        acc = silu_mul_tile(gate, up)
    elif bias is not None:
        if split == 0:
            b = tl.load(bias + n, mask=is_row, other=0.0).to(tl.float32)
            acc += b[:, None] if FP8_TOKENS else b[None, :]
    m, n = (m[None, :], n[:, None]) if FP8_TOKENS else (m[:, None], n[None, :])
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
    grid = (triton.cdiv(num_columns, plan.block_n), plan.splits, triton.cdiv(num_rows, plan.block_m))
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
        STAGES=plan.stages,
        BLOCK=block,
        EVEN=num_columns % plan.block_n == 0 and depth % plan.block_k == 0,
        FP8_TOKENS=plan.fp8_tokens,
        GATED=gated,
        **launch_options(plan.warps, num_rows),
    )
    return out
