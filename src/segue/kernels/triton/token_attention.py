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

from segue.kernels.triton.attention import combine, normalised, number, query_for, widened
from segue.kernels.triton.launch import launch_options, pdl_launch_dependents, pdl_wait
from segue.kernels.triton.norm import as_stored


@triton.jit
def _cache_rows(table_row, position, is_there, h, page_rows, KV_HEADS: tl.constexpr, PAGE: tl.constexpr):
    """Returns the rows `[*, D]` of the pool that hold the keys of a head at some positions."""
    page = tl.load(table_row + position // PAGE, mask=is_there, other=0).to(tl.int64)
    return (page * page_rows + position % PAGE) * KV_HEADS + h


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
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Returns the keys and values at BLOCK positions from `start` on, those at `end` and later as zeros."""
    position = start + tl.arange(0, BLOCK)
    is_there = position < end
    row = _cache_rows(table_row, position, is_there, h, page_rows, KV_HEADS, PAGE)
    d = tl.arange(0, DP)
    inside = is_there[:, None] & (d < D)[None, :]
    k = tl.load(keys + row[:, None] * D + d[None, :], mask=inside, other=0.0)
    if WORDS:
        w = tl.arange(0, DP // 4)
        inside = is_there[:, None] & (w < D // 4)[None, :]
        words = values.to(tl.pointer_type(tl.int32))
        v = tl.load(words + row[:, None] * (D // 4) + w[None, :], mask=inside, other=0)
    else:
        v = tl.load(values + row[:, None] * D + d[None, :], mask=inside, other=0.0)
    return k, v


@triton.jit
def _no_keys(ROWS: tl.constexpr, DP: tl.constexpr, WORDS: tl.constexpr):
    """Returns the softmax over no keys: its maxima, its sums and the weighted values, for `_attend_block`."""
    if WORDS:
        zeros = tl.zeros((ROWS, DP // 4), tl.float32)
        acc = (zeros, zeros, zeros, zeros)
    else:
        acc = (tl.zeros((ROWS, DP), tl.float32),)  # type: ignore[assignment]
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
def _rotated(qkv, head, is_head, qk_weight, cosines, sines, position, eps, D: tl.constexpr, DP: tl.constexpr):
    """Returns heads of the token after the QK-norm, if there is a weight, and RoPE: float32 `[*, DP]`."""
    d, half = tl.arange(0, DP), D // 2
    other = tl.where(d < half, d + half, d - half)  # what RoPE rotates an element with
    inside = is_head[:, None] & (d < D)[None, :]
    at = head[:, None] * D
    x = tl.load(qkv + at + d[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(qkv + at + other[None, :], mask=inside, other=0.0).to(tl.float32)
    if qk_weight is not None:
        rms = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x *= rms * tl.load(qk_weight + at + d[None, :], mask=inside, other=0.0)
        y *= rms * tl.load(qk_weight + at + other[None, :], mask=inside, other=0.0)
    angle = position * half + tl.where(d < half, d, d - half)
    cos = tl.load(cosines + angle, mask=d < D, other=0.0)
    sin = tl.load(sines + angle, mask=d < D, other=0.0)
    return x * cos[None, :] + y * tl.where(d < half, -sin, sin)[None, :]


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
    DP: tl.constexpr,
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
    split, h = tl.program_id(0), tl.program_id(1)
    active = True
    if num_decode is not None:
        active = tl.load(num_decode) > 0
    kv_len = tl.load(kv_lens, mask=active, other=0)
    per_split = tl.maximum(tl.cdiv(tl.cdiv(kv_len, SPLITS), BLOCK), 1) * BLOCK
    splits, first = tl.cdiv(kv_len, per_split), split * per_split
    if split < splits:
        old = kv_len - 1  # keys in the cache
        end = tl.minimum(first + per_split, old)
        has_new = splits - 1 == split
        table_row = page_table + tl.load(slots).to(tl.int64) * table_stride
        k, v = _load_block(
            keys, values, table_row, first, end, h, page_rows, KV_HEADS, D, DP, PAGE, BLOCK, WORDS
        )
        new_row = _cache_rows(table_row, old, True, h, page_rows, KV_HEADS, PAGE)
        pdl_wait(PDL)
        g, d, j = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BLOCK)
        q = _rotated(qkv, h * G + g, g < G, qk_weight, cosines, sines, old, eps, D, DP)
        dtype: tl.constexpr = output.dtype.element_ty
        q = query_for(q.to(dtype), value_scale)
        one = tl.arange(0, 1)
        new_k = _rotated(
            qkv, KV_HEADS * G + h + one, has_new & (one < 1), qk_weight, cosines, sines, old, eps, D, DP
        )
        is_new = has_new & (d < D)[None, :]
        of_value = qkv + ((KV_HEADS * (G + 1) + h) * D + d)[None, :]
        new_v = tl.load(of_value, mask=is_new, other=0.0)
        new_k, new_v = as_stored(new_k, dtype, key_inverse), as_stored(new_v, dtype, value_inverse)
        tl.store(keys + new_row * D + d[None, :], new_k, mask=is_new)
        tl.store(values + new_row * D + d[None, :], new_v, mask=is_new)
        softmax = _no_keys(GP, DP, WORDS)
        softmax = _attend_block(q, k, v, first + j < end, scale, softmax, WORDS, PRECISION)
        for start in tl.range(first + BLOCK, end, BLOCK, num_stages=STAGES):
            k, v = _load_block(
                keys, values, table_row, start, end, h, page_rows, KV_HEADS, D, DP, PAGE, BLOCK, WORDS
            )
            softmax = _attend_block(q, k, v, start + j < end, scale, softmax, WORDS, PRECISION)
        top, total, acc = softmax
        if WORDS:  # the last dimension of a join counts first
            joined = tl.join(tl.join(acc[0], acc[2]), tl.join(acc[1], acc[3]))
            weighted = tl.reshape(joined, (GP, DP))
        else:
            weighted = acc[0]
        if has_new:
            score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale
            new_top = tl.maximum(top, score)
            shrink, weight = tl.exp2(top - new_top), tl.exp2(score - new_top)
            weighted = weighted * shrink[:, None] + weight[:, None] * new_v.to(tl.float32)
            total, top = total * shrink + weight, new_top
        head = h * G + g
        inside = (g < G)[:, None] & (d < D)[None, :]
        if splits == 1:
            result = normalised(weighted, total[:, None], value_scale)
            tl.store(output + head[:, None] * D + d[None, :], result.to(dtype), mask=inside)
        else:
            at = (split * KV_HEADS + h) * G + g
            tl.store(partial + at[:, None] * D + d[None, :], weighted, mask=inside)
            tl.store(maxima + at * 2, top, mask=g < G)
            tl.store(maxima + at * 2 + 1, total, mask=g < G)
            tl.debug_barrier()
            done = tl.atomic_add(counters + h, 1, sem="acq_rel")
            if done == splits - 1:
                if SPLITS <= 4 or splits > 4:
                    combine(
                        output, partial, maxima, 0, h, 0, splits, per_split, kv_len, value_scale,
                        KV_HEADS, G, D, DP, SPLITS,
                    )  # fmt: skip
                else:
                    combine(
                        output, partial, maxima, 0, h, 0, splits, per_split, kv_len, value_scale,
                        KV_HEADS, G, D, DP, 4,
                    )  # fmt: skip
                tl.store(counters + h, 0)
    else:
        pdl_wait(PDL)
    pdl_launch_dependents(PDL)


def attend_token(
    qkv: Tensor,
    qk_weight: Tensor | None,
    eps: float,
    cosines: Tensor,
    sines: Tensor,
    *,
    output: Tensor,
    scales: tuple[float, float] | None,
    splits: int,
    num_decode: Tensor | None,
    arguments: dict[str, object],
) -> None:
    """Attend for the only token of a step, which decodes, and store its key and value.

    Args:
        qkv: `[1, (num_heads + 2 * num_kv_heads) * head_dim]`; for it and the next four see
            `segue.kernels.triton.norm.qk_norm_rope_store`.
        qk_weight: float32 `[num_heads + num_kv_heads, head_dim]`.
        eps: the epsilon of the QK-norm.
        cosines: float32 `[max_position, head_dim / 2]`.
        sines: float32 `[max_position, head_dim / 2]`.
        output: `[1, num_heads, head_dim]`.
        scales: those of keys and values of a pool in FP8, else None.
        splits: into how many parts the keys are split at most.
        num_decode: int `[1]`: 0 if the token is padding, else 1; None: it is not.
        arguments: the others, as for `segue.kernels.triton.attention.decode`.
    """
    _attend_token[(splits, arguments["KV_HEADS"])](
        qkv=qkv,
        qk_weight=qk_weight,
        cosines=cosines,
        sines=sines,
        eps=eps,
        num_decode=num_decode,
        output=output,
        key_inverse=None if scales is None else 1 / scales[0],
        value_inverse=None if scales is None else 1 / scales[1],
        SPLITS=splits,
        **arguments,
        **launch_options(2, 1),
    )
