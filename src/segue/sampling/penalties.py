"""Penalties: changes of the logits that depend on what a row already says."""

from __future__ import annotations

import torch
from torch import Tensor


def penalise(
    logits: Tensor,
    tokens: Tensor,
    *,
    prompt_lens: Tensor,
    lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Penalised logits of n rows, a new tensor `[n, V]`.

    The repetition penalty divides positive and multiplies negative logits of every token in prompt or output
    (Keskar et al. 2019, as in transformers and vLLM). The presence penalty is then taken off once for every
    token in the output, the frequency penalty once for each time it is there (as OpenAI defines them).

    Args:
        logits: float32 `[n, V]`.
        tokens: int64 `[n, L]`: prompt, then output; anything, but valid ids, from `lengths` on.
        prompt_lens: int64 `[n]`.
        lengths: int64 `[n]`, tokens that count, at least one.
        repetition: float32 `[n]`, 1: off.
        presence: float32 `[n]`.
        frequency: float32 `[n]`.
    """
    position = torch.arange(tokens.shape[1], device=tokens.device)
    known = position < lengths[:, None]
    in_output = known & (position >= prompt_lens[:, None])
    # Only tokens that are there change. The first one stands in for those that are not, and as often as
    # a token is there it gets the same value.
    tokens = torch.where(known, tokens, tokens[:, :1])
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, in_output.to(logits.dtype)).gather(1, tokens)
    factor, picked = repetition[:, None], logits.gather(1, tokens)
    picked = torch.where(picked > 0, picked / factor, picked * factor)
    picked -= frequency[:, None] * counts + presence[:, None] * (counts > 0)
    return logits.scatter(1, tokens, picked)
