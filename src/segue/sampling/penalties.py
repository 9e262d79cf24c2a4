"""Penalties: changes of the logits that depend on the tokens that a row already has."""

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
    """Return the penalised logits of n rows, a new tensor `[n, V]`.

    The repetition penalty divides the positive and multiplies the negative logits of every token in prompt or
    output (Keskar et al. 2019, as in transformers and vLLM). Then the presence penalty is subtracted once for
    every token in the output, and the frequency penalty once per occurrence (as OpenAI defines them).

    Args:
        logits: float32 `[n, V]`.
        tokens: int64 `[n, L]`: prompt, then output; from `lengths` on, any valid ids.
        prompt_lens: int64 `[n]`.
        lengths: int64 `[n]`, the number of tokens in prompt and output, at least one.
        repetition: float32 `[n]`, 1: off.
        presence: float32 `[n]`.
        frequency: float32 `[n]`.
    """
    # `known`, `in_output`, `counts` and `values` are [n, L]: they have a value per entry of `tokens`.
    position = torch.arange(tokens.shape[1], device=tokens.device)
    known = position < lengths[:, None]
    in_output = known & (position >= prompt_lens[:, None])
    # Only tokens in prompt or output change: positions from `lengths` on repeat the first token, and all
    # copies of a token scatter the same value.
    tokens = torch.where(known, tokens, tokens[:, :1])
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, in_output.to(logits.dtype)).gather(1, tokens)
    factor, values = repetition[:, None], logits.gather(1, tokens)
    values = torch.where(values > 0, values / factor, values * factor)
    values -= frequency[:, None] * counts + presence[:, None] * (counts > 0)
    return logits.scatter(1, tokens, values)
