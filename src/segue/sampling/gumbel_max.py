"""Chooses one token per row of logits: the most likely one, or a draw keyed by seed and position.

The random numbers are stateless: each one is a hash of (seed, position, counter). The position is that of the
token in its sequence; counters tell apart the numbers that one token needs. Gumbel-max draws from a
distribution by taking the argmax of the log-weights plus noise (`gumbel`).

Shapes: B rows, V tokens of the vocabulary, N blocks of the vocabulary, K candidates. A row that has NaN or
plus infinity, or nothing but minus infinity, gets `NON_FINITE` instead of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.messages.steps import NON_FINITE

_BLOCK = 128  # divides the vocabulary size of most models, so that the blocks are a view
_SMALL_BLOCK = 32


def _signed(value: int) -> int:
    """Returns the int64 with the bits of an unsigned `value`: torch's integers of 64 bits are signed."""
    return value - (1 << 64) if value >= 1 << 63 else value


# SplitMix64 (Steele, Lea, Flood 2014): a Weyl sequence with this increment, hashed with these multipliers.
_INCREMENT = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1, _MULTIPLIER_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def argmax(logits: Tensor) -> Tensor:
    """Return the most likely token of each row of `[B, V]`, the lowest id among equals: int64 `[B]`.

    The maxima of blocks come first, because torch's argmax is ten times slower on a CPU than its amax.
    """
    blocks = _in_blocks(logits, _BLOCK, -torch.inf)
    largest, block = blocks.amax(-1).max(-1)  # both propagate NaN
    return _or_non_finite(block * _BLOCK + _gather_block(blocks, block).argmax(-1), largest)


def draw(logits: Tensor, inverse_temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token per row: int64 `[B]`.

    First a block of the vocabulary is drawn by its total weight, then a token within the block, each by
    Gumbel-max. This takes a few hundred random numbers per row instead of V, and gives the same distribution.
    Small changes of the logits seldom change the token.

    Args:
        logits: float32 `[B, V]`.
        inverse_temperatures: float32 `[B]`, above 0.
        seeds: int64 `[B]`.
        positions: int64 `[B]`, of the tokens to draw.
    """
    # The counters of the blocks' noise come first, then those of the tokens within the block.
    weights = _in_blocks((logits * inverse_temperatures[:, None]).softmax(-1), _BLOCK, 0.0)
    num_blocks = weights.shape[1]
    counters = torch.arange(num_blocks + _BLOCK, device=logits.device)
    noise = gumbel(seeds[:, None], positions[:, None], counters)
    totals = weights.sum(-1).to(torch.float64)
    block = (totals.log() + noise[:, :num_blocks]).argmax(-1)
    within = _gather_block(weights, block).to(torch.float64)
    tokens = block * _BLOCK + (within.log() + noise[:, num_blocks:]).argmax(-1)
    return _or_non_finite(tokens, totals[:, 0])  # one non-finite logit makes every weight of its row NaN


def draw_candidates(weights: Tensor, tokens: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token per row from the candidates `tokens` (int64 `[B, K]`): int64 `[B]`.

    `weights` are `[B, K]`, not necessarily normalised; 0 rules a candidate out. The noise depends on the
    token id, so the order of the candidates and the number of those ruled out do not matter. `seeds` and
    `positions` are int64 `[B]`, as for `draw`.
    """
    noise = gumbel(seeds[:, None], positions[:, None], tokens)
    best = (weights.to(torch.float64).log() + noise).argmax(-1, keepdim=True)
    return _or_non_finite(tokens.gather(-1, best).squeeze(-1), weights[:, 0])


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the `k` largest values of each row of `[B, V]`, descending, and their ids; equals in any order.

    All of them are in the `k` blocks with the largest maxima, so most of the vocabulary is read only once.
    Values are `[B, K]` and ids int64 `[B, K]`, with K = min(k, V).
    """
    if k * _SMALL_BLOCK * 2 > logits.shape[-1]:  # those blocks would be more than half of the vocabulary
        top = logits.topk(min(k, logits.shape[-1]), dim=-1)
        return top.values, top.indices
    blocks = _in_blocks(logits, _SMALL_BLOCK, -torch.inf)
    block = blocks.amax(-1).topk(k, dim=-1, sorted=False).indices
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _SMALL_BLOCK))
    top = inside.flatten(1).topk(k, dim=-1)
    ids = block.gather(1, top.indices // _SMALL_BLOCK) * _SMALL_BLOCK + top.indices % _SMALL_BLOCK
    return top.values, ids


def _or_non_finite(tokens: Tensor, values: Tensor) -> Tensor:
    """Replace the tokens of rows with non-finite `values` (float `[B]`) by `NON_FINITE`, in place."""
    return tokens.masked_fill_(~values.isfinite(), NON_FINITE)


def _in_blocks(x: Tensor, size: int, filler: float) -> Tensor:
    """Divide the rows of `[B, V]` into blocks, `[B, N, size]`; `filler` fills the last one up."""
    missing = -x.shape[-1] % size
    if missing:
        x = F.pad(x, (0, missing), value=filler)
    return x.view(x.shape[0], -1, size)


def _gather_block(blocks: Tensor, block: Tensor) -> Tensor:
    """Return each row's block number `block` (int64 `[B]`) of `blocks` `[B, N, size]`: `[B, size]`."""
    index = block[:, None, None].expand(-1, 1, blocks.shape[-1])
    return blocks.gather(1, index).squeeze(1)


def hash64(seeds: Tensor, positions: Tensor, counters: Tensor) -> Tensor:
    """Return 64 random bits, int64 `[B, N]`, for each key.

    A key is a seed and a position (int64 `[B, 1]`), and a counter (int64 `[N]` or `[B, N]`); here N is the
    number of counters per row.
    """
    keys = _mix(_mix(seeds) + positions * _INCREMENT)
    return _mix(keys + (counters + 1) * _INCREMENT)


def gumbel(seeds: Tensor, positions: Tensor, counters: Tensor) -> Tensor:
    """Return standard Gumbel noise, float64 `[B, N]`, with the same key as `hash64`.

    The argmax of log-weights plus this noise is a draw from the distribution with these weights.
    """
    bits = _shift_right(hash64(seeds, positions, counters), 12)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-52  # never 0 or 1
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """Return SplitMix64's hash of each int64, in which every bit of the result depends on all bits of `x`."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Shift int64 values as if they were unsigned: zeros come in at the top."""
    return (x >> count) & ((1 << (64 - count)) - 1)  # the mask clears the copies of the sign bit
