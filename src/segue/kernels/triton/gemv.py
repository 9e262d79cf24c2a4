"""GEMMs of one token by a weight: the token stays in registers, and rows of the weight stream past it.

Such a GEMM takes as long as reading the weight, if enough of it is on its way all the time. So a program
loads its first rows before it waits for its predecessor, and its next rows while it multiplies. The norm
before the GEMM needs nothing but the token, so each program computes it, instead of a kernel of its own.

For M, N, K and the names of sizes see `segue.kernels.triton.gemm`; here M is 1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.activations import Unnormed
from segue.kernels.fp8 import FP8
from segue.kernels.gemv_plan import choose_gemv
from segue.kernels.triton.gemm import silu_mul_tile
from segue.kernels.triton.launch import launch_options, num_sms, pdl_launch_dependents, pdl_wait
from segue.sizes import ceil_div, next_power_of_2


@triton.jit
def _load(weight, n, size, DEPTH: tl.constexpr, BK: tl.constexpr):
    """Returns rows `n` of the weight, `[BN, BK]`: 0 beyond the edges."""
    k = tl.arange(0, BK)
    inside = (n < size)[:, None] & (k < DEPTH)[None, :]
    return tl.load(weight + n[:, None].to(tl.int64) * DEPTH + k[None, :], mask=inside, other=0.0)


# Four numbers of the weight, $1, times the token's: $2 has the first and the third, $3 the second and the
# fourth. A byte moved to where float16 has its sign, the lowest 4 bits of its exponent and the highest 3 of
# its mantissa is the number times 2**-8, exactly, subnormal or not. NaN, which no weight has, becomes 480.
_MULTIPLY_FP8 = tl.constexpr("""
{
.reg .b32 a, b;
shl.b32 a, $1, 8;
shr.u32 b, a, 1;
and.b32 b, b, 0x3f803f80;
lop3.b32 a, a, 0x80008000, b, 0xea;
mul.rn.f16x2 a, a, $2;
shr.u32 b, $1, 1;
and.b32 b, b, 0x3f803f80;
lop3.b32 b, $1, 0x80008000, b, 0xea;
fma.rn.f16x2 $0, b, $3, a;
}
""")
_TO_PAIR = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_ADD_PAIRS = tl.constexpr("add.rn.f16x2 $0, $1, $2;")
_ADD_HALVES = tl.constexpr("""
{
.reg .f16 a, b;
.reg .f32 c, d;
mov.b32 {a, b}, $1;
cvt.f32.f16 c, a;
cvt.f32.f16 d, b;
add.f32 $0, c, d;
}
""")


@triton.jit
def _add_pairs(a, b):
    """Returns the sum of two pairs of float16."""
    return tl.inline_asm_elementwise(_ADD_PAIRS, "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _to_pairs(a, b):
    """Returns numbers `a` and `b` as pairs of float16."""
    return tl.inline_asm_elementwise(_TO_PAIR, "=r,f,f", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _pairs(token):
    """Returns a token `[BK]` as two operands of `_MULTIPLY_FP8`, and the factors that they lack, `[BK / 16]`.

    Each 16 numbers are divided by a power of two, so that the greatest one is between 2 and 4.
    """
    groups: tl.constexpr = token.shape[0] // 16
    token = tl.reshape(token, (groups, 16))
    exponents = tl.max(tl.abs(token), 1).to(tl.int32, bitcast=True) & 0x7F800000
    exponents = tl.maximum(exponents, 0x10000000)  # of zeros
    token *= (0x7F000000 - exponents + 0x00800000).to(tl.float32, bitcast=True)[:, None]
    even, odd = tl.split(tl.reshape(token, (8 * groups, 2)))
    first, third = tl.split(tl.reshape(even, (4 * groups, 2)))
    second, fourth = tl.split(tl.reshape(odd, (4 * groups, 2)))
    factors = (exponents - 0x00800000).to(tl.float32, bitcast=True) * 256.0
    return _to_pairs(first, third), _to_pairs(second, fourth), factors


@triton.jit
def _multiply_fp8(w, even, odd, factors, scales, n, size, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the products `[BN]` of rows in FP8, in words of four, and a token in `_pairs`.

    8 products each are added up in float16, at most 56 before `factors`. A rounding is an eighth of that of
    a token to bfloat16; the error of the result is about a quarter of what that would cause.
    """
    rows: tl.constexpr = w.shape[0]
    words: tl.constexpr = w.shape[1]
    even, odd = tl.broadcast_to(even[None, :], w.shape), tl.broadcast_to(odd[None, :], w.shape)
    pairs = tl.inline_asm_elementwise(
        _MULTIPLY_FP8, "=r,r,r,r", [w, even, odd], tl.int32, is_pure=True, pack=1
    )
    pairs = tl.reduce(tl.reshape(pairs, (rows, words // 4, 4)), 2, _add_pairs)
    sums = tl.inline_asm_elementwise(_ADD_HALVES, "=r,r", [pairs], tl.float32, is_pure=True, pack=1)
    sums *= factors[None, :]
    if BLOCK:
        blocks: tl.constexpr = words * 4 // BLOCK
        num_blocks: tl.constexpr = (DEPTH + BLOCK - 1) // BLOCK
        b = tl.arange(0, blocks)
        here = (n < size)[:, None] & (b < num_blocks)[None, :]
        scale = tl.load(scales + n[:, None] * num_blocks + b[None, :], mask=here, other=0.0)
        result = tl.sum(tl.sum(tl.reshape(sums, (rows, blocks, BLOCK // 16)), 2) * scale, 1)
    else:
        result = tl.sum(sums, 1) * tl.load(scales + n, mask=n < size, other=0.0)
    return result


@triton.jit
def _gemv(
    x,
    residual,
    norm_weight,
    total,
    weight,
    scales,
    bias,
    out,
    size,
    eps,
    DEPTH: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_WORD: tl.constexpr,
    GATED: tl.constexpr,
    SINGLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute `x @ weight.T`, BN columns at a time.

    With `norm_weight` the token is the norm of `x + residual`, and the first program stores that sum in
    `total`. GATED: `size` rows of the gate are followed by as many of the up projection, and the result is
    `silu(gate) * up`. SINGLE: no program has a second tile. BK is a power of two that holds the DEPTH columns
    of the weight, and a block. With `scales` the weight is in FP8, PER_WORD numbers each in an int32.
    """
    r, k = tl.arange(0, BN), tl.arange(0, BK)
    inside = k < DEPTH
    n = tl.program_id(0) * BN + r
    w = _load(weight, n, size, DEPTH // PER_WORD, BK // PER_WORD)
    up = w
    second = weight + size.to(tl.int64) * (DEPTH // PER_WORD)  # of the up projection
    if GATED:
        up = _load(second, n, size, DEPTH // PER_WORD, BK // PER_WORD)
    if norm_weight is not None:
        of_norm = tl.load(norm_weight + k, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    token = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    if norm_weight is not None:
        if residual is not None:
            token += tl.load(residual + k, mask=inside, other=0.0).to(tl.float32)
        if tl.program_id(0) == 0:
            tl.store(total + k, token.to(total.dtype.element_ty), mask=inside)
        token *= tl.rsqrt(tl.sum(token * token, 0) / DEPTH + eps) * of_norm
    if scales is not None:
        even, odd, factors = _pairs(token)
    for tile in tl.range(tl.program_id(0), tl.cdiv(size, BN), tl.num_programs(0), num_stages=1):
        n = tile * BN + r
        following = n + tl.num_programs(0) * BN
        next_w, next_up = w, up
        if not SINGLE:
            next_w = _load(weight, following, size, DEPTH // PER_WORD, BK // PER_WORD)
            next_up = next_w
            if GATED:
                next_up = _load(second, following, size, DEPTH // PER_WORD, BK // PER_WORD)
        if scales is None:
            result = tl.sum(w.to(tl.float32) * token[None, :], 1)
        else:
            result = _multiply_fp8(w, even, odd, factors, scales, n, size, DEPTH, BLOCK)
        if GATED:
            if scales is None:
                of_up = tl.sum(up.to(tl.float32) * token[None, :], 1)
            else:
                after = scales + size * (tl.cdiv(DEPTH, BLOCK) if BLOCK else 1)
                of_up = _multiply_fp8(up, even, odd, factors, after, n, size, DEPTH, BLOCK)
            result = silu_mul_tile(result, of_up)
        if bias is not None:
            result += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)
        tl.store(out + n, result.to(out.dtype.element_ty), mask=n < size)
        w, up = next_w, next_up
    pdl_launch_dependents(PDL)


def gemv(
    x: Tensor | Unnormed,
    weight: Tensor,
    scales: Tensor | None,
    block: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    gated: bool = False,
) -> Tensor:
    """Returns `x @ weight.T + bias`, `[1, N]`, or if gated `[1, I]`.

    Args:
        x: `[1, K]`, or what is `[1, K]` after the norm; then the sum before the norm is stored, too.
        weight: `[N, K]`, maybe in FP8.
        scales: float32 `[N, blocks]`, of a weight in FP8, else None.
        block: see `segue.kernels.fp8`.
        bias: `[N]`.
        dtype: of the result.
        gated: the weight is `[2 * I, K]`, gate rows first; the result is `silu(gate) * up`.
    """
    size, depth = weight.shape
    sms = num_sms(weight.device)
    plan = choose_gemv(size, depth, in_fp8=weight.dtype == FP8, gated=gated, num_sms=sms)
    size = size // 2 if gated else size
    unnormed = x if isinstance(x, Unnormed) else None
    out = torch.empty((1, size), dtype=dtype, device=weight.device)
    num_tiles, programs = ceil_div(size, plan.block_n), plan.per_sm * sms
    _gemv[(min(programs, num_tiles),)](
        x=(x.x if isinstance(x, Unnormed) else x).contiguous(),
        residual=None if unnormed is None else unnormed.residual,
        norm_weight=None if unnormed is None else unnormed.weight,
        total=None if unnormed is None else unnormed.total,
        weight=weight if scales is None else weight.view(torch.int32),
        scales=scales,
        bias=bias,
        out=out,
        size=size,
        eps=0.0 if unnormed is None else unnormed.eps,
        DEPTH=depth,
        BN=plan.block_n,
        BK=max(next_power_of_2(depth), block),
        BLOCK=block,
        PER_WORD=1 if scales is None else 4,
        GATED=gated,
        SINGLE=num_tiles <= programs,
        maxnreg=plan.registers,
        **launch_options(plan.warps, 1),
    )
    return out
