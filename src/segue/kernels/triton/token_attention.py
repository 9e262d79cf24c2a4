"""Decode attention of one token, with what precedes it: QK-norm, RoPE, and the store of its key and value.

A step of one token consists of short waits, one after the other, so each of its kernels does as much as it
can before it waits for its predecessor. No kernel of the step writes the keys and values in the cache: every
program loads the first block of its own early. The new token's key and value stay in registers, in the
program that has the last keys.

For a softmax over some keys, splits, and the names of sizes see `segue.kernels.triton.attention`.
"""

import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.activations import TokenQKV
from segue.kernels.triton.attention import normalised, number, query_for, widened
from segue.kernels.triton.launch import launch_options, pdl_launch_dependents, pdl_wait
from segue.kernels.triton.norm import as_stored
from segue.sizes import next_power_of_2

_AT_ONCE = tl.constexpr(8)  # splits that are combined at a time
_WARPS = 4
_BLOCK, _STAGES = 128, 1  # keys at a time; blocks on their way
_WIDE_BLOCK, _WIDE_STAGES = 64, 2  # for heads of more than 128 numbers: larger blocks do not fit registers


@triton.jit
def _load_block(
    keys,
    values,
    table_row,
    start,
    end,
    h,
    page_rows,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Returns the keys and values at BLOCK positions from `start` on, those at `end` and later as zeros."""
    j = tl.arange(0, BLOCK)
    is_there = start + j < end
    if PAGE % BLOCK == 0:  # the block lies within one page
        page = tl.load(table_row + start // PAGE, mask=start < end, other=0).to(tl.int64)
        first = (page * page_rows + start % PAGE) * (KV_HEADS * D) + h * D
        keys, values = keys + first, values + first
        at = j * (KV_HEADS * D)
    else:
        page = tl.load(table_row + (start + j) // PAGE, mask=is_there, other=0).to(tl.int64)
        at = (page * page_rows + (start + j) % PAGE) * (KV_HEADS * D) + h * D
    d = tl.arange(0, D)
    inside = is_there[:, None]
    k = tl.load(keys + (at[:, None] + d[None, :]), mask=inside, other=0.0)
    if WORDS:
        w = tl.arange(0, D // 4)
        words = values.to(tl.pointer_type(tl.int32))
        v = tl.load(words + ((at // 4)[:, None] + w[None, :]), mask=inside, other=0)
    else:
        v = tl.load(values + (at[:, None] + d[None, :]), mask=inside, other=0.0)
    return k, v


@triton.jit
def _no_keys(ROWS: tl.constexpr, D: tl.constexpr, WORDS: tl.constexpr):
    """Returns the softmax over no keys: its maxima, its sums and the weighted values, for `_attend_block`."""
    WIDTH: tl.constexpr = D // 4 if WORDS else D
    zeros = tl.zeros((ROWS, WIDTH), tl.float32)
    acc = (zeros, zeros, zeros, zeros) if WORDS else (zeros,)
    return tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32), acc


@triton.jit
def _weigh(acc, shrink, p, v, PRECISION: tl.constexpr):
    """Returns weighted values after those of a block are added."""
    return acc * shrink[:, None] + tl.dot(p, v, input_precision=PRECISION)


@triton.jit
def _attend_block(q, k, v, is_there, scale, softmax, WORDS: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the softmax `(top, total, weighted values)` after a block of keys is added to it.

    With WORDS there are four weighted values, of every fourth number each.
    """
    top, total, acc = softmax
    scores = tl.dot(q, widened(k, q).T, input_precision=PRECISION) * scale
    scores = tl.where(is_there[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights, shrink = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    if WORDS:
        p = weights.to(q.dtype)
        acc = (
            _weigh(acc[0], shrink, p, number(v, 0, q), PRECISION),
            _weigh(acc[1], shrink, p, number(v, 1, q), PRECISION),
            _weigh(acc[2], shrink, p, number(v, 2, q), PRECISION),
            _weigh(acc[3], shrink, p, number(v, 3, q), PRECISION),
        )
    else:
        v = widened(v, q)
        acc = (_weigh(acc[0], shrink, weights.to(v.dtype), v, PRECISION),)
    return new_top, total, acc


@triton.jit
def _halves(pointer, at, is_there, D: tl.constexpr):
    """Returns both halves of rows of D numbers, in float32, as `[*, D / 2]` each."""
    d = tl.arange(0, D // 2)
    inside = is_there[:, None]
    low = tl.load(pointer + at[:, None] + d[None, :], mask=inside, other=0.0)
    high = tl.load(pointer + at[:, None] + (D // 2 + d)[None, :], mask=inside, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _rotated(halves, of_norm, angle, eps, D: tl.constexpr):
    """Returns both halves of heads after the QK-norm, whose weights are `of_norm` or None, and RoPE."""
    low, high = halves
    cos, sin = angle
    if of_norm is not None:
        rms = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
        low *= rms * of_norm[0]
        high *= rms * of_norm[1]
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _combine(
    output, partial, maxima, h, splits, value_scale, KV_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr
):
    """Combine the results of a key-value head's splits into its output."""
    WIDTH: tl.constexpr = triton.next_power_of_2(G * D)
    i = tl.arange(0, WIDTH)  # of G query heads of D numbers
    top = tl.full((WIDTH,), float("-inf"), tl.float32)
    total, acc = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    for start in range(0, splits, _AT_ONCE):
        for split in tl.static_range(_AT_ONCE):
            inside = (i < G * D) & (start + split < splits)
            head = ((start + split) * KV_HEADS + h) * G
            of_head = maxima + 2 * (head + i // D)
            new = tl.load(of_head, mask=inside, other=float("-inf"), cache_modifier=".cg")
            new_total = tl.load(of_head + 1, mask=inside, other=0.0, cache_modifier=".cg")
            new_acc = tl.load(partial + head * D + i, mask=inside, other=0.0, cache_modifier=".cg")
            highest = tl.maximum(top, new)
            base = tl.where(highest == float("-inf"), 0.0, highest)
            shrink, share = tl.exp2(top - base), tl.exp2(new - base)
            total, acc, top = total * shrink + new_total * share, acc * shrink + new_acc * share, highest
    result = normalised(acc, total, value_scale)
    tl.store(output + h * (G * D) + i, result.to(output.dtype.element_ty), mask=i < G * D)


@triton.jit
def _attend_token(
    qkv,
    qk_weight,
    cosines,
    sines,
    eps,
    keys,
    values,
    page_table,
    slots,
    kv_lens,
    num_decode,
    output,
    partial,
    maxima,
    counters,
    scale,
    value_scale,
    key_inverse,
    value_inverse,
    page_rows,
    table_stride,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    WORDS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend for key-value head `h`, over one of at most SPLITS parts of the keys.

    `key_inverse` and `value_inverse` are 1 / scale of a pool in FP8, else None; for other arguments see
    `segue.kernels.triton.attention.decode`.
    """
    h, split = tl.program_id(0), tl.program_id(1)  # the first splits of all heads, those in use, start first
    # None of these loads waits for another one, so together they take about as long as one.
    kv_len, slot = tl.load(kv_lens), tl.load(slots)
    if num_decode is not None:
        kv_len = tl.where(tl.load(num_decode) > 0, kv_len, 0)
    per_split = tl.maximum(tl.cdiv(tl.cdiv(kv_len, SPLITS), BLOCK), 1) * BLOCK
    splits, first = tl.cdiv(kv_len, per_split), split * per_split
    if split < splits:
        old = kv_len - 1  # keys in the cache
        end = tl.minimum(first + per_split, old)
        has_new = splits - 1 == split
        table_row = page_table + slot.to(tl.int64) * table_stride
        k, v = _load_block(keys, values, table_row, first, end, h, page_rows, KV_HEADS, D, PAGE, BLOCK, WORDS)
        page = tl.load(table_row + old // PAGE).to(tl.int64)
        new_row = (page * page_rows + old % PAGE) * (KV_HEADS * D) + h * D
        g, d, j, i = tl.arange(0, GP), tl.arange(0, D), tl.arange(0, BLOCK), tl.arange(0, D // 2)
        one = tl.arange(0, 1)
        of_queries, of_key = (h * G + g) * D, (KV_HEADS * G + h + one) * D
        is_query, is_key = g < G, has_new & (one < 1)
        of_norm, of_key_norm = None, None
        if qk_weight is not None:
            of_norm = _halves(qk_weight, of_queries, is_query, D)
            of_key_norm = _halves(qk_weight, of_key, is_key, D)
        cos = tl.load(cosines + old * (D // 2) + i)[None, :]
        sin = tl.load(sines + old * (D // 2) + i)[None, :]
        pdl_wait(PDL)
        queries = _halves(qkv, of_queries, is_query, D)
        new_key = _halves(qkv, of_key, is_key, D)
        new_v = tl.load(qkv + of_key[:, None] + (KV_HEADS * D + d)[None, :], mask=is_key[:, None], other=0.0)
        dtype: tl.constexpr = output.dtype.element_ty
        low, high = _rotated(queries, of_norm, (cos, sin), eps, D)
        q = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (GP, D))
        q = query_for(q.to(dtype), value_scale)
        low, high = _rotated(new_key, of_key_norm, (cos, sin), eps, D)
        new_k = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (1, D))
        new_k, new_v = as_stored(new_k, dtype, key_inverse), as_stored(new_v, dtype, value_inverse)
        tl.store(keys + new_row + d[None, :], new_k, mask=is_key[:, None])
        tl.store(values + new_row + d[None, :], new_v, mask=is_key[:, None])
        softmax = _no_keys(GP, D, WORDS)
        softmax = _attend_block(q, k, v, first + j < end, scale, softmax, WORDS, PRECISION)
        for start in tl.range(first + BLOCK, end, BLOCK, num_stages=STAGES):
            k, v = _load_block(
                keys, values, table_row, start, end, h, page_rows, KV_HEADS, D, PAGE, BLOCK, WORDS
            )
            softmax = _attend_block(q, k, v, start + j < end, scale, softmax, WORDS, PRECISION)
        top, total, acc = softmax
        if WORDS:  # the last dimension of a join counts first
            joined = tl.join(tl.join(acc[0], acc[2]), tl.join(acc[1], acc[3]))
            weighted = tl.reshape(joined, (GP, D))
        else:
            weighted = acc[0]
        if has_new:
            score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale
            new_top = tl.maximum(top, score)
            shrink, weight = tl.exp2(top - new_top), tl.exp2(score - new_top)
            weighted = weighted * shrink[:, None] + weight[:, None] * new_v.to(tl.float32)
            total, top = total * shrink + weight, new_top
        head = h * G + g
        inside = is_query[:, None]
        if splits == 1:
            result = normalised(weighted, total[:, None], value_scale)
            tl.store(output + head[:, None] * D + d[None, :], result.to(dtype), mask=inside)
        else:
            at = split * (KV_HEADS * G) + head
            tl.store(partial + at[:, None] * D + d[None, :], weighted, mask=inside)
            tl.store(maxima + at * 2, top, mask=g < G)
            tl.store(maxima + at * 2 + 1, total, mask=g < G)
            tl.debug_barrier()
            done = tl.atomic_add(counters + h, 1, sem="acq_rel")
            if done == splits - 1:
                _combine(output, partial, maxima, h, splits, value_scale, KV_HEADS, G, D)
                tl.store(counters + h, 0)
    else:
        pdl_wait(PDL)
    pdl_launch_dependents(PDL)


def attend_token(
    token: TokenQKV,
    *,
    output: Tensor,
    scales: tuple[float, float] | None,
    splits: int,
    num_decode: Tensor | None,
    num_kv_heads: int,
    arguments: dict[str, object],
) -> None:
    """Attend for the only token of a step, which decodes, and store its key and value.

    Args:
        token: the output of its QKV projection, and what QK-norm and RoPE need.
        output: `[1, num_heads, head_dim]`, with a head_dim of a power of two, at least 16.
        scales: those of keys and values of a pool in FP8, else None.
        splits: into how many parts the keys are split at most.
        num_decode: int `[1]`: 0 if the token is padding, else 1; None: it is not.
        num_kv_heads: number of key-value heads.
        arguments: the others, as for `segue.kernels.triton.attention.decode`.
    """
    _, num_heads, head_dim = output.shape
    group = num_heads // num_kv_heads
    block, stages = (_BLOCK, _STAGES) if head_dim <= 128 else (_WIDE_BLOCK, _WIDE_STAGES)
    _attend_token[(num_kv_heads, splits)](
        qkv=token.qkv,
        qk_weight=token.qk_weight,
        cosines=token.cosines,
        sines=token.sines,
        eps=token.eps,
        num_decode=num_decode,
        output=output,
        key_inverse=None if scales is None else 1 / scales[0],
        value_inverse=None if scales is None else 1 / scales[1],
        SPLITS=splits,
        GP=max(16, next_power_of_2(group)),
        BLOCK=block,
        STAGES=stages,
        WORDS=scales is not None and head_dim >= 64,
        **arguments,
        **launch_options(_WARPS, 1),
    )
