"""Attention over the paged cache: split-KV decode, ragged prefill, and both batch-invariant.

See `segue.attention.triton`. A softmax over some keys is kept as three values per row: the maximum of the
scores (`top`), the sum of their exponentials relative to it (`total`), and the values weighted by these
exponentials (`acc`). Softmaxes over other keys can be joined to it. Exponentials are to base 2: `scale`
includes log2(e).

Keys and values in FP8 are widened in registers (`widened`). The scale of keys is a part of `scale`, and that
of values, `value_scale`, is applied to the result; it is None for a pool in the type of the model.

G query heads share a key-value head; D is the size of a head. GP and DP are powers of two that hold G and D.
The programs of a sequence and head count themselves in `counters`, and the one that ends last, which combines
the splits, sets the counter back to 0. `partial` and `maxima` hold the splits' results until then.

`plan_decode` divides the keys of a decode batch among programs by the lengths of its rows.
"""

import triton
import triton.language as tl

from segue.kernels.triton.launch import pdl_launch_dependents, pdl_wait

_FEW_SPLITS = tl.constexpr(4)  # a row with no more of them is combined with a smaller tile


@triton.jit
def _no_keys(ROWS: tl.constexpr, DP: tl.constexpr):
    """Returns the softmax over no keys: its maxima, its sums and the weighted values."""
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    return top, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, DP), tl.float32)


@triton.jit
def widened(x, like):
    """Returns keys or values in the type of the queries, if they are in FP8."""
    if x.dtype == tl.float8e4nv:
        x = x.to(like.dtype)
    return x


@triton.jit
def number(word, BYTE: tl.constexpr, like):
    """Returns one of the four numbers in FP8 of each word, in the type of the queries."""
    byte = (word >> (8 * BYTE)).to(tl.uint8, bitcast=False)
    return byte.to(tl.float8e4nv, bitcast=True).to(like.dtype)


@triton.jit
def query_for(q, value_scale):
    """Returns queries in the type in which they are multiplied by keys: float16 for keys in FP8.

    All of FP8 is in float16 and in bfloat16, but only the conversion to float16 is a single instruction.
    """
    if value_scale is not None and q.dtype == tl.bfloat16:
        q = q.to(tl.float16)
    return q


@triton.jit
def normalised(acc, total, value_scale):
    """Returns the result of a softmax from its weighted values and its sums."""
    result = acc / tl.where(total == 0.0, 1.0, total)
    if value_scale is not None:
        result *= value_scale
    return result


@triton.jit
def _splits_of(lens, is_row, share, MAX_SPLITS: tl.constexpr):
    """Return how many splits rows of these lengths have; 0 where there is no row."""
    return tl.where(is_row, tl.minimum(tl.maximum(tl.cdiv(lens, share), 1), MAX_SPLITS), 0)


@triton.jit(do_not_specialize=["rows", "max_items"])
def plan_decode(
    kv_lens,
    slots,
    num_decode,
    items,
    counters,
    rows,
    max_items,
    MAX_SPLITS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    ALL: tl.constexpr,
):
    """Plan `decode` for `rows` rows, of which each program plans ROWS.

    ALL is a power of two, at least `rows`; `max_items` is more than `rows`.

    A row whose keys are more than an equal share of all is split, so that no program works much longer than
    the others. Each split is an item of `items`, int32 `[max_items, 4]`: its row; the number of the row's
    splits times 256, plus its index among them; the row's length; the row's slot. So a program reads
    all of it in one place. Items of long rows come first, since what starts last should end soon; unused
    items are last and have row -1. A share is the keys of all rows divided by `max_items - rows`, but at
    least MIN_KEYS: so there are never more than `max_items`. The counters of the rows, one per head, are set
    to 0.
    """
    count = rows
    if num_decode is not None:
        count = tl.minimum(tl.load(num_decode), rows)
    j = tl.arange(0, ALL)
    lens = tl.load(kv_lens + j, mask=j < count, other=0)
    share = tl.maximum(tl.cdiv(tl.sum(lens, 0), max_items - rows), MIN_KEYS)
    splits = _splits_of(lens, j < count, share, MAX_SPLITS)
    used = tl.sum(splits, 0)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own_len = tl.load(kv_lens + i, mask=i < count, other=0)
    own_slot = tl.load(slots + i, mask=i < count, other=0).to(tl.int32)
    own = _splits_of(own_len, i < count, share, MAX_SPLITS)
    before = (lens[None, :] > own_len[:, None]) | (
        (lens[None, :] == own_len[:, None]) & (j[None, :] < i[:, None])
    )
    first = tl.sum(tl.where(before, splits[None, :], 0), 1)
    for split in tl.range(0, tl.max(own, 0)):
        item = items + (first + split) * 4
        tl.store(item, i, mask=split < own)
        tl.store(item + 1, own * 256 + split, mask=split < own)
        tl.store(item + 2, own_len, mask=split < own)
        tl.store(item + 3, own_slot, mask=split < own)
    for start in tl.range(used + tl.program_id(0) * ROWS, max_items, tl.num_programs(0) * ROWS):
        item = start + tl.arange(0, ROWS)
        tl.store(items + item * 4, tl.full((ROWS,), -1, tl.int32), mask=item < max_items)
    for head in tl.static_range(HEADS):
        tl.store(counters + i * HEADS + head, tl.zeros((ROWS,), tl.int32), mask=i < rows)


@triton.jit
def combine(
    output,
    partial,
    maxima,
    b,
    h,
    first_part,
    splits,
    per_split,
    kv_len,
    value_scale,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Combine the results of a row's and head's `splits` splits, at most SPLITS, into its output."""
    s, d = tl.arange(0, SPLITS), tl.arange(0, DP)
    used = (s < splits) & (s * per_split < kv_len)
    for i in range(G):
        at = ((first_part + s) * KV_HEADS + h) * G + i
        tops = tl.load(maxima + at * 2, mask=used, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(maxima + at * 2 + 1, mask=used, other=0.0, cache_modifier=".cg")
        sums = tl.load(
            partial + at[:, None] * D + d[None, :],
            mask=used[:, None] & (d[None, :] < D),
            other=0.0,
            cache_modifier=".cg",
        )
        highest = tl.max(tops, 0)
        share = tl.where(used, tl.exp2(tops - tl.where(kv_len > 0, highest, 0.0)), 0.0)
        summed = tl.sum(totals * share, 0)
        result = normalised(tl.sum(sums * share[:, None], 0), summed, value_scale)
        to = output + ((b * KV_HEADS + h) * G + i).to(tl.int64) * D + d
        tl.store(to, result.to(output.dtype.element_ty), mask=d < D)


@triton.jit
def decode(
    query,
    keys,
    values,
    page_table,
    slots,
    kv_lens,
    num_decode,
    items,
    output,
    partial,
    maxima,
    counters,
    scale,
    value_scale,
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
    """Attend for one decode row (`b`) and key-value head (`h`), over one of the parts of its keys.

    There are SPLITS parts. With `items`, which `plan_decode` explains, there are as many as the program's
    item says, at most SPLITS.

    The key and value of token `position` are in row `page * page_rows + position % PAGE` of `keys` and
    `values`, which are this layer's views of the pool. `num_decode` holds the number of rows that are not
    padding; None: no row is padding. `cache_modifier=".cg"` reads from the L2 cache what programs on other
    SMs have written.

    With WORDS, values in FP8 are read from shared memory as words of four, which four GEMMs share, and D is
    a multiple of 4. Otherwise they are read one by one, because neighbours in the operand of a GEMM are
    values of different keys.
    """
    if items is not None:  # the heads of a sequence, which share its pages, are consecutive programs
        h, item = tl.program_id(0), tl.program_id(1)
        b = tl.load(items + item * 4)
        which = tl.load(items + item * 4 + 1)
        kv_len = tl.load(items + item * 4 + 2)
        slot = tl.load(items + item * 4 + 3).to(tl.int64)
        split, splits = which % 256, which // 256
        first_part = item - split
        active = b >= 0
    else:
        split, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        splits, first_part = SPLITS, b * SPLITS
        active = True
        if num_decode is not None:
            active = b < tl.load(num_decode)
        kv_len = tl.load(kv_lens + b, mask=active, other=0)
        slot = tl.load(slots + b, mask=active, other=0).to(tl.int64)
    pdl_wait(PDL)
    if active:
        per_split = tl.cdiv(tl.cdiv(kv_len, splits), BLOCK) * BLOCK
        g, d, j = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BLOCK)
        in_head = d[None, :] < D
        valid = (g[:, None] < G) & in_head
        head = (b * KV_HEADS + h) * G + g
        q = tl.load(query + head[:, None].to(tl.int64) * D + d[None, :], mask=valid, other=0.0)
        q = query_for(q, value_scale)
        top, total, acc = _no_keys(GP, DP)
        if WORDS:
            words, w = values.to(tl.pointer_type(tl.int32)), tl.arange(0, DP // 4)
            acc0 = tl.zeros((GP, DP // 4), tl.float32)
            acc1, acc2, acc3 = acc0, acc0, acc0
        table_row, first = page_table + slot * table_stride, split * per_split
        for i in tl.range(first, tl.minimum(first + per_split, kv_len), BLOCK, num_stages=STAGES):
            position = i + j
            seen = position < kv_len
            page = tl.load(table_row + position // PAGE, mask=seen, other=0).to(tl.int64)
            head_row = (page * page_rows + position % PAGE) * KV_HEADS + h
            at = head_row * D
            k = tl.load(keys + at[:, None] + d[None, :], mask=seen[:, None] & in_head, other=0.0)
            k = widened(k, q)
            scores = tl.dot(q, k.T, input_precision=PRECISION) * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            top = new_top
            if WORDS:
                part = words + head_row[:, None] * (D // 4) + w[None, :]
                word = tl.load(part, mask=seen[:, None] & (w[None, :] < D // 4), other=0)
                p = weights.to(q.dtype)
                acc0 = acc0 * shrink[:, None] + tl.dot(p, number(word, 0, q), input_precision=PRECISION)
                acc1 = acc1 * shrink[:, None] + tl.dot(p, number(word, 1, q), input_precision=PRECISION)
                acc2 = acc2 * shrink[:, None] + tl.dot(p, number(word, 2, q), input_precision=PRECISION)
                acc3 = acc3 * shrink[:, None] + tl.dot(p, number(word, 3, q), input_precision=PRECISION)
            else:
                v = tl.load(values + at[:, None] + d[None, :], mask=seen[:, None] & in_head, other=0.0)
                v = widened(v, q)
                acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        if WORDS:  # the last dimension of a join counts first
            acc = tl.reshape(tl.join(tl.join(acc0, acc2), tl.join(acc1, acc3)), (GP, DP))
        pdl_launch_dependents(PDL)
        out = output + head[:, None].to(tl.int64) * D + d[None, :]
        if splits == 1:
            result = normalised(acc, total[:, None], value_scale)
            tl.store(out, result.to(output.dtype.element_ty), mask=valid)
        else:
            split_at = ((first_part + split) * KV_HEADS + h) * G + g
            if first < kv_len:
                tl.store(partial + split_at[:, None] * D + d[None, :], acc, mask=valid)
                tl.store(maxima + split_at * 2, top, mask=g < G)
                tl.store(maxima + split_at * 2 + 1, total, mask=g < G)
            tl.debug_barrier()
            done = tl.atomic_add(counters + b * KV_HEADS + h, 1, sem="acq_rel")
            if done == splits - 1:
                if SPLITS <= _FEW_SPLITS or splits > _FEW_SPLITS:
                    combine(
                        output, partial, maxima, b, h, first_part, splits, per_split, kv_len, value_scale,
                        KV_HEADS, G, D, DP, SPLITS,
                    )  # fmt: skip
                else:
                    combine(
                        output, partial, maxima, b, h, first_part, splits, per_split, kv_len, value_scale,
                        KV_HEADS, G, D, DP, _FEW_SPLITS,
                    )  # fmt: skip
                tl.store(counters + b * KV_HEADS + h, 0)


@triton.jit
def _attend_keys(
    q,
    keys,
    values,
    pool,
    layer_row,
    table_row,
    last,
    kv_len,
    start,
    masked_from,
    end,
    h,
    scale,
    page_rows,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns the softmax over the keys from `start` to `end`: its maxima, its sums and the weighted values.

    All queries attend to the keys before `masked_from`, which therefore need no mask; row i of `q` attends to
    keys up to index `last[i]`. `pool` is a TMA descriptor of the whole pool, in which `layer_row` is the
    layer's first row of a page; with None, threads load from `keys` and `values`.
    """
    d, j = tl.arange(0, DP), tl.arange(0, BLOCK)
    in_head = d[None, :] < D
    top, total, acc = _no_keys(q.shape[0], DP)
    for masked in tl.static_range(2):
        for i in tl.range(
            masked_from if masked else start, end if masked else masked_from, BLOCK, num_stages=STAGES
        ):
            position = i + j
            if pool is not None:  # a block of keys lies within one page
                page = tl.load(table_row + i // PAGE)
                row = page * page_rows + layer_row + i % PAGE
                k = widened(pool.load([row, h * D]), q)
            else:
                exists = position < kv_len
                page = tl.load(table_row + position // PAGE, mask=exists, other=0).to(tl.int64)
                at = (page * page_rows + position % PAGE) * (KV_HEADS * D) + h * D
                in_bounds = exists[:, None] & in_head
                k = widened(tl.load(keys + at[:, None] + d[None, :], mask=in_bounds, other=0.0), q)
            scores = tl.dot(q, k.T, input_precision=PRECISION) * scale
            if masked:
                scores = tl.where(position[None, :] <= last[:, None], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top) if masked else new_top
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(weights, 1)
            top = new_top
            if pool is not None:
                v = widened(pool.load([row + PAGE, h * D]), q)
                if masked:
                    v = tl.where((position < kv_len)[:, None], v, 0.0)
            else:
                v = widened(tl.load(values + at[:, None] + d[None, :], mask=in_bounds, other=0.0), q)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return top, total, acc


@triton.jit
def _join(top, total, acc, span_top, span_total, span_acc):
    """Returns the softmax over the keys of a span and of the spans before it, from both softmaxes."""
    new_top = tl.maximum(top, span_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink, share = tl.exp2(top - base), tl.exp2(span_top - base)
    total = total * shrink + span_total * share
    acc = acc * shrink[:, None] + span_acc * share[:, None]
    return new_top, total, acc


@triton.jit(do_not_specialize=["layer_row"])
def attend(
    query,
    keys,
    values,
    pool,
    layer_row,
    page_table,
    slots,
    cu_seqlens_q,
    kv_lens,
    blocks,
    num_decode,
    output,
    partial,
    maxima,
    counters,
    max_spans,
    scale,
    value_scale,
    page_rows,
    table_stride,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Prefill: attends for a block of queries and a key-value head. With `SPAN` it is batch-invariant.

    A row of `blocks` (see `segue.attention.base.query_blocks`) names the program's sequence, or is -1 if
    there is no block, and its first query. A tile has BM rows, one per query and query head of the group.

    With `SPAN`, keys are divided into spans at fixed positions. Each span has a softmax of its own, over
    blocks of keys at fixed positions, and the spans are combined from the first to the last in float32.
    Without `blocks` the sequences have one query each (decode), and their spans may be split over several
    programs; the program that ends last combines them in the same order. All programs run the same
    instructions on a tile of the same size, of which a decode row fills one query's rows. So neither the
    other tokens of the step nor a token's index among them changes the bits. The kernel has to be launched
    with `enable_fp_fusion=False` then: otherwise the compiler fuses multiplications with additions in some
    places and not in others.
    """
    h, split = tl.program_id(0), tl.program_id(2)
    pdl_wait(PDL)
    if blocks is None:
        sequence = tl.program_id(1)
        if num_decode is not None:
            sequence = tl.where(sequence < tl.load(num_decode), sequence, -1)
    else:
        block = tl.num_programs(1) - 1 - tl.program_id(1)  # last blocks have the most keys and start first
        sequence = tl.load(blocks + 2 * block)
    if sequence >= 0:
        if blocks is None:
            first, q_start, q_len = 0, sequence, 1
        else:
            first = tl.load(blocks + 2 * block + 1)
            q_start = tl.load(cu_seqlens_q + sequence)
            q_len = tl.load(cu_seqlens_q + sequence + 1) - q_start
        kv_len = tl.load(kv_lens + sequence)
        table_row = page_table + tl.load(slots + sequence).to(tl.int64) * table_stride
        per_block: tl.constexpr = BM // G
        r, d = tl.arange(0, BM), tl.arange(0, DP)
        token = first + r // G
        used = (token < q_len) & (r < per_block * G)
        valid = used[:, None] & (d[None, :] < D)
        at = ((q_start + token) * KV_HEADS + h).to(tl.int64) * G + r % G
        q = query_for(tl.load(query + at[:, None] * D + d[None, :], mask=valid, other=0.0), value_scale)
        last = token + kv_len - q_len
        common = tl.maximum(first + kv_len - q_len + 1, 0) // BN * BN  # all queries here attend to these keys
        end = tl.minimum(first + per_block, q_len) + kv_len - q_len
        if SPAN is None:
            top, total, acc = _attend_keys(
                q, keys, values, pool, layer_row, table_row, last, kv_len, 0, common, end, h, scale,
                page_rows, KV_HEADS, D, DP, PAGE, BN, STAGES, PRECISION,
            )  # fmt: skip
        else:
            top, total, acc = _no_keys(BM, DP)
            for start in tl.range(split * SPAN, end, SPLITS * SPAN):
                stop = tl.minimum(start + SPAN, end)
                masked_from = tl.minimum(tl.maximum(common, start), stop)
                span_top, span_total, span_acc = _attend_keys(
                    q, keys, values, pool, layer_row, table_row, last, kv_len, start, masked_from, stop, h,
                    scale, page_rows, KV_HEADS, D, DP, PAGE, BN, STAGES, PRECISION,
                )  # fmt: skip
                if SPLITS == 1:
                    top, total, acc = _join(top, total, acc, span_top, span_total, span_acc)
                else:
                    to = ((sequence * KV_HEADS + h) * max_spans + start // SPAN).to(tl.int64) * G + r
                    tl.store(partial + to[:, None] * D + d[None, :], span_acc, mask=valid)
                    tl.store(maxima + to * 2, span_top, mask=used)
                    tl.store(maxima + to * 2 + 1, span_total, mask=used)
        out = output + at[:, None] * D + d[None, :]
        if SPLITS == 1:
            result = normalised(acc, total[:, None], value_scale)
            tl.store(out, result.to(output.dtype.element_ty), mask=valid)
        else:
            tl.debug_barrier()
            done = tl.atomic_add(counters + sequence * KV_HEADS + h, 1, sem="acq_rel")
            if done == SPLITS - 1:
                for span in tl.range(0, tl.cdiv(end, SPAN)):
                    to = ((sequence * KV_HEADS + h) * max_spans + span).to(tl.int64) * G + r
                    span_acc = tl.load(
                        partial + to[:, None] * D + d[None, :], mask=valid, other=0.0, cache_modifier=".cg"
                    )
                    span_top = tl.load(maxima + to * 2, mask=used, other=0.0, cache_modifier=".cg")
                    span_total = tl.load(maxima + to * 2 + 1, mask=used, other=0.0, cache_modifier=".cg")
                    top, total, acc = _join(top, total, acc, span_top, span_total, span_acc)
                result = normalised(acc, total[:, None], value_scale)
                tl.store(out, result.to(output.dtype.element_ty), mask=valid)
                tl.store(counters + sequence * KV_HEADS + h, 0)
    pdl_launch_dependents(PDL)
