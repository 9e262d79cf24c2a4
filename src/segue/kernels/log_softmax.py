"""Log-probabilities of given tokens."""

import torch
from torch import Tensor


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Returns the log-probabilities, float32 `[n, k]`, of `ids` (int64 `[n, k]`) under float32 `[n, V]`."""
    if logits.is_cuda:
        from segue.kernels.triton.sampling import log_sum_exp

        return logits.gather(-1, ids) - log_sum_exp(logits)[:, None]
    # torch.log_softmax computes each row in one thread, unlike torch.logsumexp, and takes half as long.
    return torch.log_softmax(logits, dim=-1).gather(-1, ids)
