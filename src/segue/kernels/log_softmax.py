"""Normalising logits."""

import torch
from torch import Tensor


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Of `ids` (int64 `[n, k]`) under float32 `[n, V]`: float32 `[n, k]`."""
    if logits.is_cuda:
        from segue.kernels.triton.sampling import log_sum_exp

        return logits.gather(-1, ids) - log_sum_exp(logits)[:, None]
    # Each row is one thread's, as those of torch.logsumexp are not; and it takes half as long.
    return torch.log_softmax(logits, dim=-1).gather(-1, ids)
