"""Routing of a mixture of experts: which experts take a token, and with what weight."""

import torch
import torch.nn.functional as F
from torch import Tensor


def route(
    logits: Tensor, per_token: int, *, renormalise: bool, num_unpadded: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The most probable experts of each token.

    Args:
        logits: `[T, E]`, of the router.
        per_token: k, experts a token.
        renormalise: the weights of a token sum to 1; else they are its softmax over all experts.
        num_real: int32 `[1]`, on CUDA alone: tokens behind so many are padding, and go to expert E, which is
            none, whatever their logits are.

    Returns:
        Weights, float32, and experts, of an integer dtype, both `[T, k]`.
    """
    if logits.is_cuda:
        from segue.kernels.triton.moe_routing import route as fused

        return fused(logits, per_token, renormalise=renormalise, num_unpadded=num_unpadded)
    assert num_unpadded is None, "steps are padded on CUDA alone"
    weights, experts = F.softmax(logits, dim=-1, dtype=torch.float32).topk(per_token, dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True) if renormalise else weights), experts
