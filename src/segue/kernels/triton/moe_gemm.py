"""The kernels of the two grouped GEMMs of a mixture of experts. See `segue.kernels.triton.moe`."""

import triton
import triton.language as tl

from segue.kernels.triton.launch import pdl_launch_dependents, pdl_wait


@triton.jit
def _silu_mul(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gate_up_by_pair(
    x,
    weight,
    experts,
    factors,
    inner,
    hidden,
    size,
    num_experts,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute some rows of one pair, for so few tokens that they rarely share an expert."""
    pair = tl.program_id(1)
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    pdl_wait(PDL)
    expert = tl.load(experts + pair)
    if expert < num_experts:
        factor = tl.load(factors + pair)
        token = x + (pair // K).to(tl.int64) * hidden
        gates = weight + (expert.to(tl.int64) * 2 * size + n[:, None]) * hidden + k[None, :]
        gate, up = tl.zeros((BN, BK), tl.float32), tl.zeros((BN, BK), tl.float32)
        for i in tl.range(0, hidden, BK, num_stages=STAGES):
            mask = (n < size)[:, None] & (i + k < hidden)[None, :]
            g = tl.load(gates + i, mask=mask, other=0.0)
            u = tl.load(gates + size.to(tl.int64) * hidden + i, mask=mask, other=0.0)
            t = tl.load(token + i + k, mask=i + k < hidden, other=0.0).to(tl.float32)[None, :]
            gate += g.to(tl.float32) * t
            up += u.to(tl.float32) * t
        pdl_launch_dependents(PDL)
        result = _silu_mul(tl.sum(gate, 1), tl.sum(up, 1)) * factor
        tl.store(inner + pair.to(tl.int64) * size + n, result, mask=n < size)


@triton.jit
def down_by_token(
    inner,
    weight,
    experts,
    out,
    size,
    hidden,
    num_experts,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute some rows of one token, summed over its pairs."""
    token = tl.program_id(1)
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    pdl_wait(PDL)
    steps = tl.cdiv(size, BK)
    acc = tl.zeros((BN, BK), tl.float32)
    for step in tl.range(0, K * steps, num_stages=STAGES):
        pair, i = token * K + step // steps, step % steps * BK + k
        expert = tl.load(experts + pair)
        known = (i < size) & (expert < num_experts)
        t = tl.load(inner + pair.to(tl.int64) * size + i, mask=known, other=0.0).to(tl.float32)
        at = weight + (expert.to(tl.int64) * hidden + n[:, None]) * size + i[None, :]
        acc += tl.load(at, mask=(n < hidden)[:, None] & known[None, :], other=0.0).to(tl.float32) * t[None, :]
    pdl_launch_dependents(PDL)
    tl.store(out + token.to(tl.int64) * hidden + n, tl.sum(acc, 1), mask=n < hidden)


@triton.jit(do_not_specialize=["num_tiles"])
def gate_up_by_tile(
    x,
    weight,
    order,
    tiles,
    factors,
    inner,
    num_tiles,
    hidden,
    size,
    K: tl.constexpr,
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
    """Compute the first GEMM of a tile of one expert's pairs."""
    blocks = tl.cdiv(size, BN)
    tile, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BN
    pdl_wait(PDL)
    expert = tl.load(tiles + tile)
    if expert >= 0:
        start = tl.load(tiles + num_tiles + tile)
        rows = tl.load(tiles + 2 * num_tiles + tile)
        # fmt: off
        if HALVES and rows <= BM // 2:
            _gate_up(x, weight, order, factors, inner, expert, start, rows, first, hidden, size,
                     K, BM // 2, BN, BK, STAGES, TMA, EVEN, PRECISION, PDL)
        else:
            _gate_up(x, weight, order, factors, inner, expert, start, rows, first, hidden, size,
                     K, BM, BN, BK, STAGES, TMA, EVEN, PRECISION, PDL)
        # fmt: on


@triton.jit
def _gate_up(
    x,
    weight,
    order,
    factors,
    inner,
    expert,
    start,
    rows,
    first,
    hidden,
    size,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # With 64 pairs or more, pairs are the rows of one GEMM and rows of both projections its columns. With
    # fewer, pairs are the columns of two GEMMs.
    m, n, k, r = tl.arange(0, BM), first + tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, 2 * BN)
    inside = m < rows
    pair = tl.load(order + start + m, mask=inside, other=0)
    factor = tl.load(factors + pair, mask=inside, other=0.0)
    tokens = x + (pair // K)[:, None].to(tl.int64) * hidden + k[None, :]
    if not TMA:
        row = expert.to(tl.int64) * 2 * size + first + r % BN + (r // BN) * size
        both = weight + row[:, None] * hidden + k[None, :]
        gates = weight + (expert.to(tl.int64) * 2 * size + n[:, None]) * hidden + k[None, :]
        ups = gates + size.to(tl.int64) * hidden
    gate = tl.zeros((BN, BM), tl.float32)
    up = gate
    acc = tl.zeros((BM, 2 * BN), tl.float32)
    for i in tl.range(0, hidden, BK, num_stages=STAGES):
        if EVEN:
            t = tl.load(tokens + i, mask=inside[:, None], other=0.0)
        else:
            t = tl.load(tokens + i, mask=inside[:, None] & (i + k < hidden)[None, :], other=0.0)
        if BM < 64:
            if TMA:
                g = weight.load([expert * 2 * size + first, i])
                u = weight.load([expert * 2 * size + first + size, i])
            else:
                g = tl.load(gates + i, mask=(n < size)[:, None] & (i + k < hidden)[None, :], other=0.0)
                u = tl.load(ups + i, mask=(n < size)[:, None] & (i + k < hidden)[None, :], other=0.0)
            gate = tl.dot(g, t.T, gate, input_precision=PRECISION)
            up = tl.dot(u, t.T, up, input_precision=PRECISION)
        else:
            if TMA:
                w = weight.load([2 * expert, first, i]).reshape(2 * BN, BK)
            else:
                there = (first + r % BN < size)[:, None] & (i + k < hidden)[None, :]
                w = tl.load(both + i, mask=there, other=0.0)
            acc = tl.dot(t, w.T, acc, input_precision=PRECISION)
    pdl_launch_dependents(PDL)
    if BM < 64:
        gate, up = gate.T, up.T
    else:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN)), (0, 2, 1)))
    result = (_silu_mul(gate, up) * factor[:, None]).to(inner.dtype.element_ty)
    at = inner + (start + m)[:, None].to(tl.int64) * size + n[None, :]
    tl.store(at, result, mask=inside[:, None] & (n < size)[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def down_by_tile(
    inner,
    half_inner,
    weight,
    order,
    tiles,
    out,
    num_tiles,
    size,
    hidden,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    HALVES: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the second GEMM of a tile; stores pairs in the order of tokens."""
    blocks = tl.cdiv(hidden, BN)
    tile, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BN
    pdl_wait(PDL)
    expert = tl.load(tiles + tile)
    if expert >= 0:
        start = tl.load(tiles + num_tiles + tile)
        rows = tl.load(tiles + 2 * num_tiles + tile)
        # fmt: off
        if HALVES and rows <= BM // 2:
            _down(half_inner, weight, order, out, expert, start, rows, first, size, hidden,
                  BM // 2, BN, BK, STAGES, TMA, PRECISION, PDL)
        else:
            _down(inner, weight, order, out, expert, start, rows, first, size, hidden,
                  BM, BN, BK, STAGES, TMA, PRECISION, PDL)
        # fmt: on


@triton.jit
def _down(
    inner,
    weight,
    order,
    out,
    expert,
    start,
    rows,
    first,
    size,
    hidden,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    m, n, k = tl.arange(0, BM), first + tl.arange(0, BN), tl.arange(0, BK)
    inside = m < rows
    pair = tl.load(order + start + m, mask=inside, other=0)
    if not TMA:
        tokens = inner + (start + m)[:, None].to(tl.int64) * size + k[None, :]
        weights = weight + (expert.to(tl.int64) * hidden + n[:, None]) * size + k[None, :]
    acc = tl.zeros((BN, BM) if BM < 64 else (BM, BN), tl.float32)
    for i in tl.range(0, size, BK, num_stages=STAGES):
        if TMA:  # also loads rows of other pairs and experts, whose results are not stored
            t = inner.load([start, i])
            w = weight.load([expert * hidden + first, i])
        else:
            t = tl.load(tokens + i, mask=inside[:, None] & (i + k < size)[None, :], other=0.0)
            w = tl.load(weights + i, mask=(n < hidden)[:, None] & (i + k < size)[None, :], other=0.0)
        if BM < 64:
            acc = tl.dot(w, t.T, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(t, w.T, acc, input_precision=PRECISION)
    pdl_launch_dependents(PDL)
    if BM < 64:
        acc = acc.T
    at = out + pair[:, None].to(tl.int64) * hidden + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside[:, None] & (n < hidden)[None, :])


@triton.jit
def sum_pairs(
    parts,
    experts,
    out,
    hidden,
    num_experts,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum over each token's pairs, in order; skips pairs of no expert."""
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        pair = token * K + j
        known = (n < hidden) & (tl.load(experts + pair) < num_experts)
        at = parts + pair.to(tl.int64) * hidden + n
        total += tl.load(at, mask=known, other=0.0).to(tl.float32)
    pdl_launch_dependents(PDL)
    tl.store(out + token.to(tl.int64) * hidden + n, total, mask=n < hidden)
