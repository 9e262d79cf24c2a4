"""The plain tail: the likeliest token, or a draw keyed by seed and position, and the writes of it.

The arithmetic is that of `segue.model_runner.categorical`: a block of 128 tokens is drawn by its total
weight, then a token within it, each by Gumbel-max.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.cuda.launch import begin, launch_options, let_next_start

_BLOCK = 128  # as in segue.model_runner.categorical
_BLOCKS = 32  # a program; 128 took 229 instead of 141 µs for 256 rows of 151,936


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _gumbel(seed, position, counters):
    """As `segue.model_runner.noise.gumbel`."""
    increment = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    key = _mix(_mix(seed.to(tl.uint64, bitcast=True)) + position.to(tl.uint64) * increment)
    bits = _mix(key + (counters.to(tl.uint64) + 1) * increment) >> 12
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _choose_block(
    logits,
    rows,
    positions,
    temperatures,
    inverse_temperatures,
    seeds,
    scores,
    choices,
    vocab_size,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    begin(PDL)
    row = tl.load(rows + i).to(tl.int64)
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + i * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
    largest = tl.max(x, 1)
    out = i * tl.num_programs(0) + chunk
    if tl.load(temperatures + row) == 0.0:
        top = tl.max(largest, 0)
        first = tl.min(tl.min(tl.where(x == top, token, vocab_size), 1), 0)
        tl.store(scores + out, top.to(tl.float64))
        tl.store(choices + out, first)
    else:
        inverse = tl.load(inverse_temperatures + row)
        shift = tl.where(largest == float("-inf"), 0.0, largest * inverse)
        total = tl.sum(tl.exp(x * inverse - shift[:, None]), 1).to(tl.float64)
        position = tl.load(positions + i).to(tl.int64)
        noise = _gumbel(tl.load(seeds + row), position, block)
        score = tl.log(total) + shift.to(tl.float64) + noise
        best = tl.max(score, 0)
        tl.store(scores + out, best)
        tl.store(choices + out, tl.min(tl.where(score == best, block, 2147483647), 0))
    let_next_start(PDL)


@triton.jit
def _choose_token(
    logits,
    rows,
    positions,
    temperatures,
    inverse_temperatures,
    seeds,
    scores,
    choices,
    token_pool,
    pool_stride,
    ring,
    slot,
    ring_stride,
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    begin(PDL)
    row = tl.load(rows + i).to(tl.int64)
    position = tl.load(positions + i).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    here = chunk < num_chunks
    score = tl.load(scores + i * num_chunks + chunk, mask=here, other=float("-inf"))
    choice = tl.load(choices + i * num_chunks + chunk, mask=here, other=2147483647)
    best = tl.max(score, 0)
    chosen = tl.min(tl.where(score == best, choice, 2147483647), 0)
    if tl.load(temperatures + row) > 0.0:
        num_blocks = tl.cdiv(vocab_size, BLOCK)
        lane = tl.arange(0, BLOCK)
        token = tl.minimum(chosen, num_blocks - 1) * BLOCK + lane
        x = tl.load(logits + i * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
        x = (x * tl.load(inverse_temperatures + row)).to(tl.float64)
        x += _gumbel(tl.load(seeds + row), position, num_blocks + lane)
        chosen = tl.min(tl.where(x == tl.max(x, 0), token, 2147483647), 0)
    chosen = tl.minimum(chosen, vocab_size - 1)  # logits that are all NaN choose nothing
    tl.store(token_pool + row * pool_stride + position, chosen)
    tl.store(ring + tl.load(slot).to(tl.int64) * ring_stride + i, chosen)
    let_next_start(PDL)


def sample_plain(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    temperatures: Tensor,
    inverse_temperatures: Tensor,
    seeds: Tensor,
    token_pool: Tensor,
    ring: Tensor,
    slot: Tensor,
) -> None:
    """Sample one token for each of B rows; write it to the token pool and to a line of `ring`.

    Args:
        logits: float32 `[B, V]`.
        rows: int32 `[B]`, batch rows.
        positions: int32 `[B]`, of the tokens sampled.
        temperatures: float32, by batch row; 0: the likeliest token, the lowest id among equals.
        inverse_temperatures: float32, by batch row.
        seeds: int64, by batch row.
        token_pool: int32 `[rows, max_seq_len + 1]`.
        ring: int32 `[slots, at least B]`, may be pinned memory of the host.
        slot: int32 `[1]`, the line to write.
    """
    count, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, _BLOCK * _BLOCKS)
    scores = torch.empty((count, num_chunks), dtype=torch.float64, device=logits.device)
    choices = torch.empty((count, num_chunks), dtype=torch.int32, device=logits.device)
    common = (logits, rows, positions, temperatures, inverse_temperatures, seeds, scores, choices)
    _choose_block[(num_chunks, count)](
        *common, vocab_size, BLOCK=_BLOCK, BLOCKS=_BLOCKS, **launch_options(4, count)
    )
    _choose_token[(count,)](
        *common,
        token_pool,
        token_pool.stride(0),
        ring,
        slot,
        ring.stride(0),
        vocab_size,
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        BLOCK=_BLOCK,
        **launch_options(1, count),
    )
