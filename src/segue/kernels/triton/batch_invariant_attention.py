"""Batch-invariant attention, for `--deterministic`: a query's bits depend only on the query and its keys.

Keys are divided into spans at fixed positions. Each span has a softmax of its own, over blocks of keys at
fixed positions, and the spans are combined from the first to the last in float32. A program of prefill goes
through all spans of its queries; the spans of a decode row may be split over several programs, and the
program that ends last combines them in the same order. All programs run the same instructions on a tile of
the same size, of which a decode row fills one query's rows, so neither the other tokens of the step nor a
token's index among them changes the bits. The kernel has to be launched with `enable_fp_fusion=False`:
otherwise the compiler fuses multiplications with additions in some places and not in others.
"""

import triton
import triton.language as tl

from segue.kernels.triton.attention import attend_keys
from segue.kernels.triton.launch import pdl_launch_dependents, pdl_wait


@triton.jit
def _join(top, total, acc, span_top, span_total, span_acc):
    """Combine a span's softmax with that of the spans before it."""
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
    TMA: tl.constexpr,
    DECODE: tl.constexpr,
    COUNTED: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    h, split = tl.program_id(0), tl.program_id(2)
    pdl_wait(PDL)
    if DECODE:
        sequence = tl.program_id(1)
        if COUNTED:
            sequence = tl.where(sequence < tl.load(num_decode), sequence, -1)
    else:
        block = tl.num_programs(1) - 1 - tl.program_id(1)  # last blocks have the most keys and start first
        sequence = tl.load(blocks + 2 * block)
    if sequence >= 0:
        if DECODE:
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
        q = tl.load(query + at[:, None] * D + d[None, :], mask=valid, other=0.0)
        last = token + kv_len - q_len
        common = tl.maximum(first + kv_len - q_len + 1, 0) // BN * BN  # all queries here attend to these keys
        end = tl.minimum(first + per_block, q_len) + kv_len - q_len
        top = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, DP), tl.float32)
        for start in tl.range(split * SPAN, end, SPLITS * SPAN):
            stop = tl.minimum(start + SPAN, end)
            masked_from = tl.minimum(tl.maximum(common, start), stop)
            span_top = tl.full((BM,), float("-inf"), tl.float32)
            span_total = tl.zeros((BM,), tl.float32)
            span_acc = tl.zeros((BM, DP), tl.float32)
            span_top, span_total, span_acc = attend_keys(
                q, keys, values, pool, layer_row, table_row, last, kv_len, start, masked_from, h, span_top,
                span_total, span_acc, scale, page_rows, KV_HEADS, D, DP, PAGE, BN, STAGES, False, TMA, "tf32",
            )  # fmt: skip
            span_top, span_total, span_acc = attend_keys(
                q, keys, values, pool, layer_row, table_row, last, kv_len, masked_from, stop, h, span_top,
                span_total, span_acc, scale, page_rows, KV_HEADS, D, DP, PAGE, BN, STAGES, True, TMA, "tf32",
            )  # fmt: skip
            if SPLITS == 1:
                top, total, acc = _join(top, total, acc, span_top, span_total, span_acc)
            else:
                to = ((sequence * KV_HEADS + h) * max_spans + start // SPAN).to(tl.int64) * G + r
                tl.store(partial + to[:, None] * D + d[None, :], span_acc, mask=valid)
                tl.store(maxima + to * 2, span_top, mask=used)
                tl.store(maxima + to * 2 + 1, span_total, mask=used)
        if SPLITS == 1:
            total = tl.where(total == 0.0, 1.0, total)
            out = output + at[:, None] * D + d[None, :]
            tl.store(out, (acc / total[:, None]).to(output.dtype.element_ty), mask=valid)
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
                total = tl.where(total == 0.0, 1.0, total)
                out = output + at[:, None] * D + d[None, :]
                tl.store(out, (acc / total[:, None]).to(output.dtype.element_ty), mask=valid)
                tl.store(counters + sequence * KV_HEADS + h, 0)
    pdl_launch_dependents(PDL)
