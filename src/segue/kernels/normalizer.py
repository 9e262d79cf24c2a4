"""What logits are normalised by."""

import torch
from torch import Tensor


def log_sum_exp(logits: Tensor) -> Tensor:
    """float32 `[n]` of float32 `[n, V]`."""
    if logits.is_cuda:
        from segue.kernels.cuda.sampling import log_sum_exp as on_cuda

        return on_cuda(logits)
    return torch.logsumexp(logits, dim=-1)
