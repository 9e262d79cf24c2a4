"""Log-probabilities that are given to the client.

They are of the model's own distribution: log-softmax of the raw logits, before penalties, bias, temperature
and filters, as vLLM does by default. So a greedy and a sampled request see the same numbers for the same
text, and a trainer can recompute them from the weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from segue.kernels.log_softmax import log_probabilities
from segue.memory.backing import to_device
from segue.messages.requests import TokenLogprob
from segue.sampling.gumbel_max import largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Of n tokens and of the m likeliest at each one's position (m may be 0)."""

    tokens: Tensor  # int64 [n]
    chosen: Tensor  # float32 [n]
    top_ids: Tensor  # int64 [n, m]
    top_values: Tensor  # float32 [n, m], descending
    num_top: Sequence[int]  # n: how many of the m each token wants; negative: nothing is wanted of this one

    def to_host(self) -> Logprobs:
        """A copy on the host; from a device it is under way until the step's event."""
        return Logprobs(
            tokens=self.tokens.to("cpu", non_blocking=True),
            chosen=self.chosen.to("cpu", non_blocking=True),
            top_ids=self.top_ids.to("cpu", non_blocking=True),
            top_values=self.top_values.to("cpu", non_blocking=True),
            num_top=self.num_top,
        )

    def messages(self) -> list[TokenLogprob | None]:
        """For the scheduler, one a token that wants it."""
        return [
            None
            if count < 0
            else TokenLogprob(token, value, list(zip(ids[:count], values[:count], strict=True)))
            for token, value, ids, values, count in zip(
                self.tokens.tolist(),
                self.chosen.tolist(),
                self.top_ids.tolist(),
                self.top_values.tolist(),
                self.num_top,
                strict=True,
            )
        ]


def logprobs_of(logits: Tensor, tokens: Tensor, num_top: Sequence[int]) -> Logprobs:
    """Of `tokens` (int64 `[n]`) and each one's `num_top` likeliest alternatives under `logits` `[n, V]`."""
    ids = _alternatives(logits, num_top)
    values = log_probabilities(logits, torch.cat([tokens[:, None], ids], dim=-1))
    return Logprobs(
        tokens=tokens, chosen=values[:, 0], top_ids=ids, top_values=values[:, 1:], num_top=num_top
    )


def _alternatives(logits: Tensor, num_top: Sequence[int]) -> Tensor:
    """Ids of each row's `num_top` largest, int64 `[n, m]`.

    Which of equals are among them may depend on how many are looked for, so those who want as many look
    together.
    """
    wanted = np.clip(num_top, 0, logits.shape[-1])
    counts, widest = set(wanted.tolist()), int(wanted.max())
    if len(counts) == 1:
        return largest(logits, widest)[1]
    ids = torch.zeros(len(logits), widest, dtype=torch.int64, device=logits.device)
    for count in counts - {0}:
        rows = to_device((wanted == count).nonzero()[0], logits.device)
        ids[rows, :count] = largest(logits[rows], count)[1]
    return ids
