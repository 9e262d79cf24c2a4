"""The log-probabilities that a client gets.

They describe the distribution of the model: the log-softmax of the raw logits, before penalties, bias,
temperature and filters, as in vLLM by default. So a greedy and a sampled request get the same values for the
same text, and a trainer can recompute them from the weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from segue.kernels.ops import log_probabilities
from segue.memory.backing import to_device
from segue.messages.requests import TokenLogprob
from segue.sampling.gumbel_max import largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """The log-probabilities of n tokens, and of the m most likely tokens at each position (m may be 0)."""

    tokens: Tensor  # int64 [n]
    chosen: Tensor  # float32 [n]
    top_ids: Tensor  # int64 [n, m]
    top_values: Tensor  # float32 [n, m], descending
    num_top: Sequence[int]  # n: alternatives that each token reports; negative: it reports nothing
    ranks: Tensor | None = None  # int64 [n]: 1 is the likeliest; equal logits have equal ranks

    def to_host(self) -> Logprobs:
        """Return a copy on the host; from a device it is valid once the event of the step has completed."""
        return Logprobs(
            tokens=self.tokens.to("cpu", non_blocking=True),
            chosen=self.chosen.to("cpu", non_blocking=True),
            top_ids=self.top_ids.to("cpu", non_blocking=True),
            top_values=self.top_values.to("cpu", non_blocking=True),
            num_top=self.num_top,
            ranks=None if self.ranks is None else self.ranks.to("cpu", non_blocking=True),
        )

    def messages(self) -> list[TokenLogprob | None]:
        """Return one message per token for the scheduler; None for a token that reports nothing."""
        ranks = [0] * len(self.num_top) if self.ranks is None else self.ranks.tolist()
        return [
            None
            if count < 0
            else TokenLogprob(token, value, list(zip(ids[:count], values[:count], strict=True)), rank)
            for token, value, ids, values, count, rank in zip(
                self.tokens.tolist(),
                self.chosen.tolist(),
                self.top_ids.tolist(),
                self.top_values.tolist(),
                self.num_top,
                ranks,
                strict=True,
            )
        ]


def logprobs_of(
    logits: Tensor, tokens: Tensor, num_top: Sequence[int], *, with_ranks: bool = False
) -> Logprobs:
    """Return the log-probabilities of `tokens` (int64 `[n]`) under the raw `logits`, float32 `[n, V]`.

    Each token comes with those of the `num_top` most likely tokens at its position; negative: it reports
    nothing. There has to be at least one row. A token's rank is 1 and the number of logits that are
    larger than its own.
    """
    ids = _alternatives(logits, num_top)
    values = log_probabilities(logits, torch.cat([tokens[:, None], ids], dim=-1))
    ranks = None
    if with_ranks:
        ranks = (logits > logits.gather(-1, tokens[:, None])).sum(dim=-1) + 1
    return Logprobs(
        tokens=tokens,
        chosen=values[:, 0],
        top_ids=ids,
        top_values=values[:, 1:],
        num_top=num_top,
        ranks=ranks,
    )


def _alternatives(logits: Tensor, num_top: Sequence[int]) -> Tensor:
    """Return the ids of the `num_top` largest logits of each row, int64 `[n, m]`.

    Here m is the largest count; a row with fewer has zeros after its ids. Which ones of equal logits are
    returned may depend on the count. Therefore each row is searched with its own count, all rows of one count
    together, and the other rows of the step do not change a row's alternatives.
    """
    row_counts = np.clip(num_top, 0, logits.shape[-1])
    counts, max_count = set(row_counts.tolist()), int(row_counts.max())
    if len(counts) == 1:
        return largest(logits, max_count)[1]
    ids = torch.zeros(len(logits), max_count, dtype=torch.int64, device=logits.device)
    for count in counts - {0}:
        rows = to_device((row_counts == count).nonzero()[0], logits.device)
        ids[rows, :count] = largest(logits[rows], count)[1]
    return ids
