"""Plain sampling: chooses each row's token and log-probability and writes them.

The token is the likeliest one, or a draw keyed by seed and position. The arithmetic is that of
`segue.sampling.gumbel_max`: a block of 128 tokens is drawn by its total weight, then a token of the block,
each by Gumbel-max. Log-probabilities are those of the raw logits. All sampling modes sum in the same order,
so the other requests of a step do not change a request's bits.

A row whose logits contain NaN or plus infinity, or are all minus infinity, has no token: the host gets
`NON_FINITE`, and the device, which may already have the next step queued, continues with token 0. The first
kernel passes this to the second as a score of NaN or plus infinity, so that no further read or launch is
needed.

A chunk is the part of the vocabulary that one program reads: 32 blocks. The first kernel finds each chunk's
best block or token, the second the best one of the chunks. The second one also draws for the rows that have a
filter (`segue.kernels.triton.top_k_top_p`): a kernel of its own took time in steps where no row has one.

Each tensor-parallel rank draws from its own blocks of the vocabulary with the noise of those blocks; then the
ranks exchange one candidate each. (With several ranks, plain sampling computes a log-sum-exp per shard.)
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.triton.all_reduce import NO_RANKS, OneShotAllReduce, best_of_ranks
from segue.kernels.triton.gumbel_noise import gumbel
from segue.kernels.triton.launch import launch_options, pdl_launch_dependents, pdl_wait
from segue.kernels.triton.top_k_top_p import REGISTERS, WARPS, draw_filtered
from segue.messages.steps import NON_FINITE
from segue.sizes import ceil_div, next_power_of_2

_BLOCK = tl.constexpr(128)  # as in segue.sampling.gumbel_max
_BLOCKS = tl.constexpr(32)  # per program; 128 took 229 instead of 141 µs for 256 rows of 151,936
_WORDS = tl.constexpr(_BLOCK.value * _BLOCKS.value // 32)  # of a mask, per program
_NONE = tl.constexpr(NON_FINITE)
_CHUNK = _BLOCK.value * _BLOCKS.value  # tokens per program


@dataclass(frozen=True, slots=True)
class VocabShard:
    """One rank's shard of the vocabulary."""

    fused_all_reduce: OneShotAllReduce
    start: int  # first token of the shard; a multiple of 128
    vocab_size: int  # of all shards together


@triton.jit
def _partial_sum(x, maxima, sums, at):
    """Store at index `at` the maximum of a chunk of logits, and the sum of exponentials relative to it."""
    top = tl.max(tl.max(x, 1), 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(maxima + at, top)
    tl.store(sums + at, tl.sum(tl.sum(tl.exp(x - shift), 1), 0))


@triton.jit
def _log_sum_exp(maxima, sums, i, num_chunks, CHUNKS: tl.constexpr):
    """Returns the log-sum-exp of row `i` from what `_partial_sum` stored for its `num_chunks` chunks.

    CHUNKS is a power of two that holds them.
    """
    chunk = tl.arange(0, CHUNKS)
    here = chunk < num_chunks
    high = tl.load(maxima + i * num_chunks + chunk, mask=here, other=float("-inf"))
    total = tl.load(sums + i * num_chunks + chunk, mask=here, other=0.0)
    top = tl.max(high, 0)
    return top + tl.log(tl.sum(total * tl.exp(high - top), 0))


@triton.jit(do_not_specialize_on_alignment=["maxima", "sums"])
def _sum_chunk(logits, maxima, sums, vocab_size):
    """Store what `_log_sum_exp` needs of one chunk of one row."""
    i = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    block = chunk * _BLOCKS + tl.arange(0, _BLOCKS)
    token = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    x = tl.load(logits + i * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
    _partial_sum(x, maxima, sums, i * tl.num_programs(0) + chunk)


@triton.jit(do_not_specialize_on_alignment=["maxima", "sums"])
def _sum_row(maxima, sums, out, num_chunks, CHUNKS: tl.constexpr):
    """Store the log-sum-exp of one row, from what `_sum_chunk` stored."""
    i = tl.program_id(0).to(tl.int64)
    tl.store(out + i, _log_sum_exp(maxima, sums, i, num_chunks, CHUNKS))


def log_sum_exp(logits: Tensor) -> Tensor:
    """Returns the log-sum-exp, float32 `[n]`, of float32 `[n, V]`.

    It is added up as in `sample_plain` without `part`.
    """
    count, vocab_size = logits.shape
    num_chunks = ceil_div(vocab_size, _CHUNK)
    maxima, sums = torch.empty((2, count, num_chunks), device=logits.device)
    out = torch.empty(count, device=logits.device)
    if count:
        _sum_chunk[(num_chunks, count)](
            logits=logits.contiguous(), maxima=maxima, sums=sums, vocab_size=vocab_size
        )
        _sum_row[(count,)](
            maxima=maxima,
            sums=sums,
            out=out,
            num_chunks=num_chunks,
            CHUNKS=next_power_of_2(num_chunks),
            num_warps=WARPS,  # as in `_choose_token`, so that both add up in the same order
        )
    return out


@triton.jit
def _nan_max(a, b):
    """Returns the maximum of two values, NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize_on_alignment=["maxima", "sums"])
def _choose_block(
    logits,
    slots,
    positions,
    inverse_temperatures,
    seeds,
    num_top,
    scores,
    choices,
    maxima,
    sums,
    stride,
    start,
    size,
    masks,
    mask_stride,
    guided,
    PDL: tl.constexpr,
):
    """Choose from one chunk of one row: a block to draw from, or the likeliest token at temperature 0.

    See `sample_plain` for the arguments. `scores` and `choices` (`[B, chunks]`) get the winner's score and
    its number: a block's score is its log-weight plus noise, a token's is its logit. A score of NaN or plus
    infinity says that the row has no token. The row's request gets `maxima` and `sums` if it asks for
    log-probabilities. `stride` is the distance of two rows of logits, `start` and `size` say which tokens
    they cover. The logits of tokens that the row's mask does not allow become minus infinity in place, for
    the kernels that read them after this one; those that are not finite stay so.
    """
    i = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    pdl_wait(PDL)
    slot = tl.load(slots + i).to(tl.int64)
    block = chunk * _BLOCKS + tl.arange(0, _BLOCKS)
    token = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    x = tl.load(logits + i * stride + token, mask=token < size, other=float("-inf"))
    out = i * tl.num_programs(0) + chunk
    if num_top is not None:
        if tl.load(num_top + slot) >= 0:
            _partial_sum(x, maxima, sums, out)
    if masks is not None:
        if tl.load(guided + slot) != 0:
            # Each word is read once: the masks may be in memory of the host.
            index = chunk * _WORDS + tl.arange(0, _WORDS)
            word = tl.load(masks + slot * mask_stride + index, mask=index < mask_stride, other=0)
            word = tl.reshape(word, (_BLOCKS, _BLOCK // 32))
            bits = (word[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
            forbidden = (tl.reshape(bits, (_BLOCKS, _BLOCK)) == 0) & (token < size)
            x = tl.where(forbidden, x + float("-inf"), x)
            tl.store(logits + i * stride + token, x, mask=forbidden)
    largest = tl.reduce(x, 1, _nan_max)
    inverse = tl.load(inverse_temperatures + slot)
    if inverse == 0.0:
        top = tl.reduce(largest, 0, _nan_max)
        first = tl.min(tl.min(tl.where(x == top, token, size), 1), 0)
        tl.store(scores + out, top.to(tl.float64))
        tl.store(choices + out, first)
    else:
        shift = tl.where(largest == float("-inf"), 0.0, largest * inverse)
        total = tl.sum(tl.exp(x * inverse - shift[:, None]), 1).to(tl.float64)
        position = tl.load(positions + i).to(tl.int64)
        noise = gumbel(tl.load(seeds + slot), position, start // _BLOCK + block)
        score = tl.log(total) + shift.to(tl.float64) + noise
        best = tl.max(score, 0)
        non_finite = tl.max((score != score).to(tl.int32), 0) > 0
        tl.store(scores + out, tl.where(non_finite, float("inf"), best))
        tl.store(choices + out, tl.min(tl.where(score == best, block, 2147483647), 0))
    pdl_launch_dependents(PDL)


@triton.jit(do_not_specialize=["ring_stride"], do_not_specialize_on_alignment=["maxima", "sums"])
def _choose_token(
    logits,
    slots,
    positions,
    inverse_temperatures,
    seeds,
    num_top,
    scores,
    choices,
    maxima,
    sums,
    token_pool,
    pool_stride,
    ring,
    logprob_ring,
    ring_index,
    ring_stride,
    top_ks,
    top_ps,
    min_ps,
    inboxes,
    epochs,
    max_rows,
    stride,
    start,
    size,
    vocab_size,
    num_chunks,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose one row's token from what `_choose_block` stored, and write the token and its log-probability.

    The steps are: find the best chunk; draw a token of its block, unless the temperature is 0; draw among the
    tokens that the filters keep instead, if the row has a filter; exchange candidates with the other ranks
    (WORLD > 1); write. The noise of a block's tokens has the counters after those of all blocks. 2147483647
    is above every index, so that a minimum over the winners ignores the others. See `sample_plain` for the
    arguments.
    """
    i = tl.program_id(0).to(tl.int64)
    pdl_wait(PDL)
    slot = tl.load(slots + i).to(tl.int64)
    position = tl.load(positions + i).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    here = chunk < num_chunks
    score = tl.load(scores + i * num_chunks + chunk, mask=here, other=float("-inf"))
    choice = tl.load(choices + i * num_chunks + chunk, mask=here, other=2147483647)
    non_finite = tl.max(((score != score) | (score == float("inf"))).to(tl.int32), 0) > 0
    best = tl.where(non_finite, float("inf"), tl.max(score, 0))
    chosen = tl.min(tl.where(score == best, choice, 2147483647), 0)
    inverse, seed = tl.load(inverse_temperatures + slot), tl.load(seeds + slot)
    if inverse > 0.0:
        lane = tl.arange(0, _BLOCK)
        token = tl.maximum(tl.minimum(chosen, tl.cdiv(size, _BLOCK) - 1), 0) * _BLOCK + lane
        x = tl.load(logits + i * stride + token, mask=token < size, other=float("-inf"))
        x = (x * inverse).to(tl.float64)
        x += gumbel(seed, position, tl.cdiv(vocab_size, _BLOCK) + lane)
        chosen = tl.min(tl.where(x == tl.max(x, 0), token, 2147483647), 0)
    chosen = tl.maximum(tl.minimum(chosen, size - 1), 0)  # a row that is not finite has chosen nothing
    if top_ks is not None:
        top_k, top_p, min_p = tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot)
        drawn = draw_filtered(logits + i * stride, position, inverse, seed, top_k, top_p, min_p, size)
        chosen = tl.where(drawn >= 0, drawn, chosen)
    logit, total = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    if num_top is not None:
        if tl.load(num_top + slot) >= 0:
            logit = tl.load(logits + i * stride + chosen, mask=chosen < size, other=float("-inf"))
            total = _log_sum_exp(maxima, sums, i, num_chunks, CHUNKS)
    if WORLD > 1:
        total = tl.where(size > 0, total, float("-inf"))
        best, chosen, logit, total = best_of_ranks(
            best, start + chosen, logit, total, i, inboxes, epochs, max_rows, RANK, WORLD
        )
        chosen = tl.minimum(chosen, vocab_size - 1)
    is_finite = (best > float("-inf")) & (best < float("inf"))
    line = tl.load(ring_index).to(tl.int64) * ring_stride + i
    tl.store(ring + line, tl.where(is_finite, chosen, _NONE))
    if token_pool is not None:
        tl.store(token_pool + slot * pool_stride + position, tl.where(is_finite, chosen, 0))
    if num_top is not None:
        if tl.load(num_top + slot) >= 0:
            tl.store(logprob_ring + line, logit - total)
    pdl_launch_dependents(PDL)


def sample_plain(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    inverse_temperatures: Tensor,
    seeds: Tensor,
    ring: Tensor,
    ring_index: Tensor,
    token_pool: Tensor | None = None,
    num_top: Tensor | None = None,
    logprob_ring: Tensor | None = None,
    filters: tuple[Tensor, Tensor, Tensor] | None = None,
    masks: tuple[Tensor, Tensor] | None = None,
    part: VocabShard | None = None,
) -> None:
    """Sample one token for each of B rows; writes it to the token pool and to a line of `ring`.

    The host reads the tokens from the ring, which has a line for each step that is under way. The next step
    reads them from the token pool, without the host. For a row whose logits have no valid token, the ring
    gets `NON_FINITE` and the token pool 0.

    Args:
        logits: float32 `[B, V]`, or this rank's shard of them.
        slots: integers `[B]`, the rows' request slots.
        positions: integers `[B]`, the positions of the sampled tokens.
        inverse_temperatures: float32, by request slot; 0: the likeliest token, the lowest id among equals.
        seeds: int64, by request slot.
        ring: int32 `[lines, at least B]`; may be pinned host memory.
        ring_index: int32 `[1]`, the line to write.
        token_pool: int32 `[slots, max_seq_len + 1]`; None: not written.
        num_top: int64, by request slot; negative: the request asks for no log-probability and gets none.
            None: no request gets one.
        logprob_ring: float32, of the same shape and strides as `ring`; needed with `num_top`.
        filters: top-k (int64, 0: off), top-p (float32, 1: off) and min-p (float32, 0: off), by request slot;
            None: no request has a filter. Not allowed with `part`.
        masks: int32 `[slots, ceil(V / 32)]`, bit `t % 32` of word `t // 32` is set where token `t` is
            allowed, may be pinned host memory; and which request slots have one, int64, 0: it has none. The
            logits of other tokens become minus infinity in place; log-probabilities are those without a mask.
            None: no request has one. Not allowed with `part`.
        part: the shard of the vocabulary that `logits` cover; None: all of it. All ranks choose the same
            tokens, and each rank writes them.
    """
    assert (filters is None and masks is None) or part is None
    logits = logits.contiguous()  # they may be a slice without the vocabulary's padding
    count, width = logits.shape
    start, vocab_size = (part.start, part.vocab_size) if part else (0, width)
    size = max(0, min(width, vocab_size - start))  # the tokens that `logits` cover, without padding
    num_chunks = max(1, ceil_div(size, _CHUNK))
    maxima, sums = torch.empty((2, count, num_chunks), device=logits.device)
    rows = {
        "logits": logits,
        "slots": slots,
        "positions": positions,
        "inverse_temperatures": inverse_temperatures,
        "seeds": seeds,
        "stride": logits.stride(0),
        "num_top": num_top,
        "scores": torch.empty((count, num_chunks), dtype=torch.float64, device=logits.device),
        "choices": torch.empty((count, num_chunks), dtype=torch.int32, device=logits.device),
        "maxima": maxima,
        "sums": sums,
        "start": start,
        "size": size,
    }
    table, guided = masks or (None, None)
    _choose_block[(num_chunks, count)](
        **rows,
        masks=table,
        mask_stride=0 if table is None else table.stride(0),
        guided=guided,
        **launch_options(4, count),
    )
    top_ks, top_ps, min_ps = filters or (None, None, None)
    _choose_token[(count,)](
        **rows,
        token_pool=token_pool,
        pool_stride=0 if token_pool is None else token_pool.stride(0),
        ring=ring,
        logprob_ring=logprob_ring,
        ring_index=ring_index,
        ring_stride=ring.stride(0),
        top_ks=top_ks,
        top_ps=top_ps,
        min_ps=min_ps,
        vocab_size=vocab_size,
        num_chunks=num_chunks,
        CHUNKS=next_power_of_2(num_chunks),
        **(part.fused_all_reduce.candidates if part else NO_RANKS),
        maxnreg=None if part else REGISTERS,
        **launch_options(1 if part else WARPS, count),
    )
