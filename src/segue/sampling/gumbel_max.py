"""Choosing one token a row from logits: the likeliest, or a draw keyed by seed and position.

B rows, V tokens of the vocabulary, N blocks of the vocabulary, K candidates. A row that has NaN or plus
infinity, or nothing but minus infinity, gets `NON_FINITE` in place of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.messages.steps import NON_FINITE
from segue.sampling.rng import gumbel

_BLOCK = 128  # divides the vocabulary of most models, so that blocks are a view
_SMALL_BLOCK = 32


def argmax(logits: Tensor) -> Tensor:
    """The likeliest token of each row of `[B, V]`, the lowest id among equals: int64 `[B]`.

    Block maxima first: torch's own argmax is ten times slower on a CPU than its amax.
    """
    blocks = _in_blocks(logits, _BLOCK, -torch.inf)
    largest, block = blocks.amax(-1).max(-1)  # both propagate NaN
    return _or_non_finite(block * _BLOCK + _pick(blocks, block).argmax(-1), largest)


def draw(logits: Tensor, inverse_temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a token of each row: int64 `[B]`.

    A block of the vocabulary is drawn by its total weight, then a token within it, each by Gumbel-max, which
    makes a few hundred random numbers a row instead of V and gives the same distribution. Small
    changes of the logits seldom change the token.

    Args:
        logits: float32 `[B, V]`.
        inverse_temperatures: float32 `[B]`.
        seeds: int64 `[B]`.
        positions: int64 `[B]`, of the tokens drawn.
    """
    weights = _in_blocks((logits * inverse_temperatures[:, None]).softmax(-1), _BLOCK, 0.0)
    num_blocks = weights.shape[1]
    counters = torch.arange(num_blocks + _BLOCK, device=logits.device)
    noise = gumbel(seeds[:, None], positions[:, None], counters)
    totals = weights.sum(-1).to(torch.float64)
    block = (totals.log() + noise[:, :num_blocks]).argmax(-1)
    within = _pick(weights, block).to(torch.float64)
    tokens = block * _BLOCK + (within.log() + noise[:, num_blocks:]).argmax(-1)
    return _or_non_finite(tokens, totals[:, 0])  # one such logit makes every weight of its row NaN


def draw_candidates(weights: Tensor, tokens: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one of few by `weights` `[B, K]` (0: not a candidate) from `tokens` (int64 `[B, K]`): int64 `[B]`.

    Noise goes by token id, so neither the order of the candidates nor how many were ruled out matters.
    """
    noise = gumbel(seeds[:, None], positions[:, None], tokens)
    best = (weights.to(torch.float64).log() + noise).argmax(-1, keepdim=True)
    return _or_non_finite(tokens.gather(-1, best).squeeze(-1), weights[:, 0])


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of each row of `[B, V]`, descending, and their ids; equals in any order.

    They all lie in the `k` blocks of the largest maxima, so most of the vocabulary is only looked at once.
    """
    if k * _SMALL_BLOCK * 2 > logits.shape[-1]:
        found = logits.topk(min(k, logits.shape[-1]), dim=-1)
        return found.values, found.indices
    blocks = _in_blocks(logits, _SMALL_BLOCK, -torch.inf)
    block = blocks.amax(-1).topk(k, dim=-1, sorted=False).indices
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _SMALL_BLOCK))
    found = inside.flatten(1).topk(k, dim=-1)
    ids = block.gather(1, found.indices // _SMALL_BLOCK) * _SMALL_BLOCK + found.indices % _SMALL_BLOCK
    return found.values, ids


def _or_non_finite(tokens: Tensor, values: Tensor) -> Tensor:
    """`tokens`, but `NON_FINITE` where a row's value, float `[B]`, says that its logits were not finite."""
    return tokens.masked_fill_(~values.isfinite(), NON_FINITE)


def _in_blocks(x: Tensor, size: int, filler: float) -> Tensor:
    missing = -x.shape[-1] % size
    if missing:
        x = F.pad(x, (0, missing), value=filler)
    return x.view(x.shape[0], -1, size)


def _pick(blocks: Tensor, block: Tensor) -> Tensor:
    index = block[:, None, None].expand(-1, 1, blocks.shape[-1])
    return blocks.gather(1, index).squeeze(1)
