"""top-k, top-p and min-p: filters that choose the tokens that may be drawn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.sampling.gumbel_max import largest

_FIRST_COUNT = 64  # candidates: enough for most rows with a filter
_GROWTH = 4  # the factor of candidates when they were not enough


def candidates(
    logits: Tensor,
    *,
    inverse_temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    max_top_k: int,
) -> tuple[Tensor, Tensor]:
    """Return candidates: weights, float32 `[n, K]`, and ids, int64 `[n, K]`; weight 0 rules a token out.

    The filters follow the temperature, as in transformers: top-k keeps the k most likely tokens; top-p keeps
    the smallest number of these that has a share of at least `top_p`; min-p keeps tokens with at least
    `min_p` times the probability of the most likely one. Tokens as likely as the last one kept are kept too.
    The most likely token is always kept.

    Args:
        logits: float32 `[n, V]`.
        inverse_temperatures: float32 `[n]`.
        top_k: int64 `[n]`, 0: off.
        top_p: float32 `[n]`, 1: off.
        min_p: float32 `[n]`, 0: off.
        max_top_k: the largest `top_k`, known on the host.

    K is the same for all rows, and grows until no row needs more tokens.
    """
    weights = (logits * inverse_temperatures[:, None]).softmax(-1)
    return _candidates(weights, top_k, top_p, min_p, max(_FIRST_COUNT, max_top_k + 1))


def _candidates(
    weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Filter the `count` most likely tokens, and more of them in rows where these are not enough.

    This avoids sorting the vocabulary. `weights` are probabilities, `[n, V]`; the rest is as for
    `candidates`. Undecided rows are filtered again with `_GROWTH` times as many tokens, and the other rows
    are filled up with weights of 0.
    """
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
    """Return which tokens are kept, bool `[n, K]`, and which rows are undecided, bool `[n]`.

    `values` are the weights of the most likely tokens, `[n, K]` in descending order, with a sum of at most 1.
    A row is undecided if more of its tokens are needed to apply the filters.
    """
    count = values.shape[1]
    last = torch.where(top_k > 0, top_k, count).clamp(max=count) - 1
    in_top_k = values >= values.gather(1, last[:, None])
    shares = values.to(torch.float64) * in_top_k
    cumulated = shares.cumsum(-1)  # from left to right, so that trailing zeros add nothing
    total = torch.where(top_k > 0, cumulated[:, -1], 1.0)
    in_top_p = (cumulated - shares < (top_p * total)[:, None]) | (top_p >= 1.0)[:, None]
    in_top_p[:, 0] = True
    lowest = values.masked_fill(~(in_top_k & in_top_p), 1.0).amin(-1)
    lowest = torch.maximum(lowest, min_p * values[:, 0])
    kept = (values >= lowest[:, None]) & (values > 0)  # tokens of weight 0 leave no row undecided
    # A row is decided once one token is ruled out, because all later tokens are less likely. But top-p takes
    # its share of a total that includes later tokens as likely as the last one of top-k.
    total_unknown = (top_k > 0) & (top_p < 1.0) & in_top_k[:, -1] & (values[:, -1] > 0)
    return kept, kept[:, -1] | total_unknown
