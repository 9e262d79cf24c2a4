"""top-k, top-p and min-p: which tokens may be drawn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.sampling.gumbel_max import largest

_FIRST_TRY = 64  # candidates: enough for most rows with a filter
_GROWTH = 4


def candidates(
    logits: Tensor,
    *,
    inverse_temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    max_top_k: int,
) -> tuple[Tensor, Tensor]:
    """Weights, float32 `[n, K]`, and ids, int64 `[n, K]`, of tokens that may be drawn; weight 0: it may not.

    After the temperature, as transformers does it: top-k keeps the k likeliest; of these top-p keeps the
    least number that holds a share of at least `top_p`; min-p keeps what has at least `min_p` times the
    probability of the likeliest. What is as likely as the last one kept is kept too. The likeliest always is.

    Args:
        logits: float32 `[n, V]`.
        inverse_temperatures: float32 `[n]`.
        top_k: int64 `[n]`, 0: off.
        top_p: float32 `[n]`, 1: off.
        min_p: float32 `[n]`, 0: off.
        max_top_k: the largest `top_k`, known on the host.
    """
    weights = (logits * inverse_temperatures[:, None]).softmax(-1)
    return _candidates(weights, top_k, top_p, min_p, max(_FIRST_TRY, max_top_k + 1))


def _candidates(
    weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Look at the `count` likeliest, and in rows where that is not enough, at more."""
    values, ids = largest(weights, count)
    kept, undecided = _kept(values, top_k, top_p, min_p)
    values = values * kept
    if count >= weights.shape[1]:
        return values, ids
    short = undecided.nonzero().squeeze(1)
    if not len(short):
        return values, ids
    more, more_ids = _candidates(weights[short], top_k[short], top_p[short], min_p[short], count * _GROWTH)
    missing = (0, more.shape[1] - values.shape[1])
    values, ids = F.pad(values, missing), F.pad(ids, missing)
    values[short], ids[short] = more, more_ids
    return values, ids


def _kept(values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the likeliest, `values` `[n, K]` in descending order with a sum of at most 1, stay.

    And for which rows more of them have to be known to tell, bool `[n]`.
    """
    count = values.shape[1]
    last = torch.where(top_k > 0, top_k, count).clamp(max=count) - 1
    in_top_k = values >= values.gather(1, last[:, None])
    shares = values.to(torch.float64) * in_top_k
    cumulated = shares.cumsum(-1)  # from left to right, so that zeros behind the last one add nothing
    total = torch.where(top_k > 0, cumulated[:, -1], 1.0)
    in_top_p = (cumulated - shares < (top_p * total)[:, None]) | (top_p >= 1.0)[:, None]
    in_top_p[:, 0] = True
    lowest = values.masked_fill(~(in_top_k & in_top_p), 1.0).amin(-1)
    lowest = torch.maximum(lowest, min_p * values[:, 0])
    kept = (values >= lowest[:, None]) & (values > 0)  # no use to look for more of no weight
    # It is enough once one is ruled out: all that follow are less likely. But equals of top-k's last one that
    # follow belong to the total that top-p takes its share of.
    adds_up = (top_k > 0) & (top_p < 1.0) & in_top_k[:, -1] & (values[:, -1] > 0)
    return kept, kept[:, -1] | adds_up
