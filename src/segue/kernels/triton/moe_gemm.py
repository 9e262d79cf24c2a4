"""The kernels of the two grouped GEMMs of a mixture of experts. See `segue.kernels.triton.moe`.

A pair is a token and one of its K experts: pair p is token p // K with its (p % K)-th expert, `experts[p]`.
Expert `num_experts` does not exist: its pairs are padding. The first GEMM computes `silu(gate) * up` of each
pair, times the pair's routing weight (`factors`), into `inner`; the second one multiplies that by the
expert's down projection. `hidden` is the model's width, `size` in the pair kernels is the width of an
expert's MLP. A tile has BM pairs, BN rows of the weight and BK of the inner dimension.

A weight in FP8 has `scales`, float32: one per row, or one for each BLOCK columns of a row. BLOCK is 0 for one
per row; else it is a multiple of BK, or divides it.
"""

import triton
import triton.language as tl

from segue.kernels.triton.fp8_gemm import from_fp8
from segue.kernels.triton.gemm import silu_mul_tile
from segue.kernels.triton.launch import pdl_launch_dependents, pdl_wait

SUM_BLOCK = tl.constexpr(1024)  # columns per program of `sum_pairs`


@triton.jit
def _scale_of_rows(scales, row, inside, start, depth, BLOCK: tl.constexpr):
    """Returns the one scale that each `row` `[BN]` of a weight has for a tile from column `start` on.

    `depth` is the number of columns of the weight. Rows that are not `inside` get 0.
    """
    at = scales + row if not BLOCK else scales + row * tl.cdiv(depth, BLOCK) + start // BLOCK
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _times_scales(
    w, scales, row, inside, start, depth, BLOCK: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Returns the tile `w` `[BN, BK]` times its scales, float32; for the arguments see `_scale_of_rows`."""
    if BLOCK % BK == 0:
        result = w.to(tl.float32) * _scale_of_rows(scales, row, inside, start, depth, BLOCK)[:, None]
    else:
        block, num_scales = start // BLOCK + tl.arange(0, BK // BLOCK), tl.cdiv(depth, BLOCK)
        here = inside[:, None] & (block < num_scales)[None, :]
        scale = tl.load(scales + row[:, None] * num_scales + block[None, :], mask=here, other=0.0)
        wide = tl.reshape(w.to(tl.float32), (BN, BK // BLOCK, BLOCK)) * scale[:, :, None]
        result = tl.reshape(wide, (BN, BK))
    return result


@triton.jit
def gate_up_by_pair(
    x,
    weight,
    scales,
    experts,
    factors,
    inner,
    hidden,
    size,
    num_experts,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BN columns of one pair's `inner`, for so few tokens that they rarely share an expert.

    The columns of a pair without an expert stay undefined; `down_by_token` skips them.
    """
    pair = tl.program_id(1)
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    pdl_wait(PDL)
    expert = tl.load(experts + pair)
    if expert < num_experts:
        factor = tl.load(factors + pair)
        token = x + (pair // K).to(tl.int64) * hidden
        row = expert.to(tl.int64) * 2 * size + n
        gates = weight + row[:, None] * hidden + k[None, :]
        gate, up = tl.zeros((BN, BK), tl.float32), tl.zeros((BN, BK), tl.float32)
        for i in tl.range(0, hidden, BK, num_stages=STAGES):
            mask = (n < size)[:, None] & (i + k < hidden)[None, :]
            g = tl.load(gates + i, mask=mask, other=0.0)
            u = tl.load(gates + size.to(tl.int64) * hidden + i, mask=mask, other=0.0)
            t = tl.load(token + i + k, mask=i + k < hidden, other=0.0).to(tl.float32)[None, :]
            if BLOCK:
                g = _times_scales(g, scales, row, n < size, i, hidden, BLOCK, BN, BK)
                u = _times_scales(u, scales, row + size, n < size, i, hidden, BLOCK, BN, BK)
            gate += g.to(tl.float32) * t
            up += u.to(tl.float32) * t
        pdl_launch_dependents(PDL)
        of_gate, of_up = tl.sum(gate, 1), tl.sum(up, 1)
        if scales is not None and not BLOCK:
            of_gate *= _scale_of_rows(scales, row, n < size, 0, hidden, BLOCK)
            of_up *= _scale_of_rows(scales, row + size, n < size, 0, hidden, BLOCK)
        result = silu_mul_tile(of_gate, of_up) * factor
        tl.store(inner + pair.to(tl.int64) * size + n, result, mask=n < size)


@triton.jit
def down_by_token(
    inner,
    weight,
    scales,
    experts,
    out,
    size,
    hidden,
    num_experts,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BN columns of one token's output from `inner`, summed over its K pairs in order."""
    token = tl.program_id(1)
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    pdl_wait(PDL)
    steps = tl.cdiv(size, BK)
    acc = tl.zeros((BN, BK), tl.float32)
    for step in tl.range(0, K * steps, num_stages=STAGES):
        pair, start = token * K + step // steps, step % steps * BK
        i, expert = start + k, tl.load(experts + pair)
        known = (i < size) & (expert < num_experts)
        t = tl.load(inner + pair.to(tl.int64) * size + i, mask=known, other=0.0).to(tl.float32)
        row = expert.to(tl.int64) * hidden + n
        w = tl.load(
            weight + row[:, None] * size + i[None, :], mask=(n < hidden)[:, None] & known[None, :], other=0.0
        )
        if scales is not None:
            there = (n < hidden) & (expert < num_experts)
            w = _times_scales(w, scales, row, there, start, size, BLOCK, BN, BK)
        acc += w.to(tl.float32) * t[None, :]
    pdl_launch_dependents(PDL)
    tl.store(out + token.to(tl.int64) * hidden + n, tl.sum(acc, 1), mask=n < hidden)


@triton.jit(do_not_specialize=["num_tiles"])
def gemm_by_tile(
    x,
    half_x,
    weight,
    scales,
    order,
    tiles,
    factors,
    out,
    num_tiles,
    depth,
    size,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    HALVES: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one of the GEMMs of a tile of one expert's pairs.

    With `factors` it is the first one: `x` are the tokens, and the results are in the order of the pairs.
    Without, it is the second: `x` are the results of the first, and the results are in the order of tokens.
    `order` and `tiles` are those of `moe_routing.sort`. `depth` is the inner dimension and `size` the columns
    of the result. With HALVES a tile that is at most half full runs with half of BM; `half_x` is `x` for
    that. TMA: `weight`, and in the second GEMM `x`, are TMA descriptors. EVEN: BK divides `depth`, so it
    needs no mask.
    """
    blocks = tl.cdiv(size, BN)
    tile, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BN
    pdl_wait(PDL)
    expert = tl.load(tiles + tile)
    if expert >= 0:
        start = tl.load(tiles + num_tiles + tile)
        rows = tl.load(tiles + 2 * num_tiles + tile)
        # fmt: off
        if HALVES and rows <= BM // 2:
            _gemm(half_x, weight, scales, order, factors, out, expert, start, rows, first, depth, size,
                  K, BLOCK, BM // 2, BN, BK, STAGES, TMA, EVEN, PRECISION, PDL)
        else:
            _gemm(x, weight, scales, order, factors, out, expert, start, rows, first, depth, size,
                  K, BLOCK, BM, BN, BK, STAGES, TMA, EVEN, PRECISION, PDL)
        # fmt: on


@triton.jit
def _multiply(
    acc,
    w,
    t,
    scales,
    row,
    inside,
    start,
    depth,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns `acc` plus the tile `w` of a weight, with the scales of its blocks, times `t` `[BK, BM]`.

    The scales of whole rows are left out. For the other arguments see `_scale_of_rows`.
    """
    if scales is None:
        acc = tl.dot(w, t, acc, input_precision=PRECISION)
    elif not BLOCK:
        acc = tl.dot(from_fp8(w, t.dtype), t, acc, input_precision=PRECISION)
    elif BLOCK % BK == 0:
        product = tl.dot(from_fp8(w, t.dtype), t, input_precision=PRECISION)
        acc += product * _scale_of_rows(scales, row, inside, start, depth, BLOCK)[:, None]
    else:
        scaled = _times_scales(w, scales, row, inside, start, depth, BLOCK, BN, BK).to(t.dtype)
        acc = tl.dot(scaled, t, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _gemm(
    x,
    weight,
    scales,
    order,
    factors,
    out,
    expert,
    start,
    rows,
    first,
    depth,
    size,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the columns from `first` on of a tile: `rows` pairs of `expert` from `order[start]` on.

    The other arguments are those of `gemm_by_tile`. The first GEMM multiplies by two weights at once, the
    gate's rows and the up projection's, and combines both results.
    """
    # With 64 pairs or more, pairs are the rows of one GEMM, and rows of the weight (of both projections, if
    # there is a gate) its columns. With fewer, pairs are the columns: of two GEMMs, if there is a gate. With
    # weights in FP8 they always are: tensor cores take only rows from registers, where these are converted.
    GATED: tl.constexpr = factors is not None
    PARTS: tl.constexpr = 2 if GATED else 1
    WEIGHT_FIRST: tl.constexpr = BM < 64 or scales is not None
    m, n, k, r = tl.arange(0, BM), first + tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, PARTS * BN)
    inside = m < rows
    pair = tl.load(order + start + m, mask=inside, other=0)
    if GATED:
        factor = tl.load(factors + pair, mask=inside, other=0.0)
        tokens = x + (pair // K)[:, None].to(tl.int64) * depth + k[None, :]
    elif not TMA:
        tokens = x + (start + m)[:, None].to(tl.int64) * depth + k[None, :]
    expert_row = expert.to(tl.int64) * PARTS * size
    if not TMA:
        all_parts = weight + (expert_row + first + r % BN + (r // BN) * size)[:, None] * depth + k[None, :]
        gates = weight + (expert_row + n[:, None]) * depth + k[None, :]
        ups = gates + size.to(tl.int64) * depth
    acc = tl.zeros((BN, BM) if WEIGHT_FIRST else (BM, PARTS * BN), tl.float32)
    up = acc
    for i in tl.range(0, depth, BK, num_stages=STAGES):
        if not GATED and TMA:  # also loads rows of other pairs and experts, whose results are not stored
            t = x.load([start, i])
        else:
            here = inside[:, None] if EVEN else inside[:, None] & (i + k < depth)[None, :]
            t = tl.load(tokens + i, mask=here, other=0.0)
        if WEIGHT_FIRST:
            there = (n < size)[:, None] & (i + k < depth)[None, :]
            row = expert * PARTS * size + first
            w = weight.load([row, i]) if TMA else tl.load(gates + i, mask=there, other=0.0)
            if GATED:
                u = weight.load([row + size, i]) if TMA else tl.load(ups + i, mask=there, other=0.0)
            # fmt: off
            acc = _multiply(acc, w, t.T, scales, expert_row + n, n < size, i, depth,
                            BLOCK, BN, BK, PRECISION)
            if GATED:
                up = _multiply(up, u, t.T, scales, expert_row + size + n, n < size, i, depth,
                               BLOCK, BN, BK, PRECISION)
            # fmt: on
        else:
            if not TMA:
                there = (first + r % BN < size)[:, None] & (i + k < depth)[None, :]
                w = tl.load(all_parts + i, mask=there, other=0.0)
            elif GATED:
                w = weight.load([2 * expert, first, i]).reshape(2 * BN, BK)
            else:
                w = weight.load([expert * size + first, i])
            acc = tl.dot(t, w.T, acc, input_precision=PRECISION)
    pdl_launch_dependents(PDL)
    if scales is not None and not BLOCK:
        acc *= tl.load(scales + expert_row + n, mask=n < size, other=0.0)[:, None]
        if GATED:
            up *= tl.load(scales + expert_row + size + n, mask=n < size, other=0.0)[:, None]
    if WEIGHT_FIRST:
        acc, up = acc.T, up.T
    elif GATED:
        acc, up = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN)), (0, 2, 1)))
    if GATED:
        acc = silu_mul_tile(acc, up) * factor[:, None]
        row = start + m
    else:
        row = pair
    at = out + row[:, None].to(tl.int64) * size + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside[:, None] & (n < size)[None, :])


@triton.jit
def sum_pairs(parts, experts, out, hidden, num_experts, K: tl.constexpr, PDL: tl.constexpr):
    """Sum `parts` `[T * K, hidden]` over one token's pairs, in order; skips pairs of no expert."""
    token = tl.program_id(0)
    n = tl.program_id(1) * SUM_BLOCK + tl.arange(0, SUM_BLOCK)
    pdl_wait(PDL)
    total = tl.zeros((SUM_BLOCK,), tl.float32)
    for j in tl.static_range(K):
        pair = token * K + j
        known = (n < hidden) & (tl.load(experts + pair) < num_experts)
        at = parts + pair.to(tl.int64) * hidden + n
        total += tl.load(at, mask=known, other=0.0).to(tl.float32)
    pdl_launch_dependents(PDL)
    tl.store(out + token.to(tl.int64) * hidden + n, total, mask=n < hidden)
