"""Keeps tokens from being drawn that a grammar does not allow."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def forbid(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Add minus infinity to the logits of tokens that are not allowed, in place.

    Logits that are not finite stay so, for whoever looks for them.

    Args:
        logits: float32 `[B, V]`.
        rows: int64 `[G]`, the rows that have a mask, each once, in their order.
        masks: int32 `[G, ceil(V / 32)]`; bit `t % 32` of word `t // 32` is set where token `t` is allowed.
    """
    count, vocab_size = len(rows), logits.shape[1]
    # The words' bytes from the lowest to the highest, as hosts and GPUs are little-endian.
    octets = masks.contiguous().view(torch.uint8).view(-1).to(torch.int32)
    penalties = torch.index_select(_penalties(logits.device), 0, octets)
    penalties = penalties.view(count, 32 * masks.shape[1])[:, :vocab_size]
    if count == len(logits):
        logits.add_(penalties)
    else:
        logits.index_add_(0, rows, penalties)


@lru_cache
def _penalties(device: torch.device) -> Tensor:
    """Return what each byte of a mask adds to the logits of its eight tokens: float32 `[256, 8]`."""
    byte, bit = torch.arange(256, device=device), torch.arange(8, device=device)
    is_allowed = (byte[:, None] >> bit) & 1 == 1
    return torch.where(is_allowed, 0.0, -torch.inf)
