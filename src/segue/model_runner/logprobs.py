"""Log-probabilities that are given to the client.

They are of the model's own distribution: log-softmax of the raw logits, before penalties, bias, temperature
and filters, as vLLM does by default. So a greedy and a sampled request see the same numbers for the same
text, and a trainer can recompute them from the weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from segue.kernels.normalizer import log_sum_exp
from segue.model_runner.categorical import largest
from segue.protocol.messages import TokenLogprob


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
    total = log_sum_exp(logits)[:, None]
    values, ids = largest(logits, min(max(num_top), logits.shape[-1]))
    return Logprobs(
        tokens=tokens,
        chosen=(logits.gather(-1, tokens[:, None]) - total).squeeze(-1),
        top_ids=ids,
        top_values=values - total,
        num_top=num_top,
    )
