"""Routing of a mixture of experts: each token's experts and their weights."""

import torch
import torch.nn.functional as F
from torch import Tensor


def route(
    logits: Tensor, per_token: int, *, renormalise: bool, num_unpadded: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the most probable experts of each token.

    Args:
        logits: `[T, E]`, the router's output.
        per_token: k, the number of experts per token.
        renormalise: whether the weights of a token are scaled to sum to 1; otherwise they are the softmax
            over all experts.
        num_unpadded: int32 `[1]`, on CUDA only: the tokens after this many are padding. They are routed to
            expert E, which does not exist, whatever their logits are.

    Returns:
        The weights, float32, and the experts, of an integer dtype, both `[T, k]`.
    """
    if logits.is_cuda:
        from segue.kernels.triton.moe_routing import route as fused

        return fused(logits, per_token, renormalise=renormalise, num_unpadded=num_unpadded)
    assert num_unpadded is None, "steps are padded on CUDA only"
    weights, experts = F.softmax(logits, dim=-1, dtype=torch.float32).topk(per_token, dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True) if renormalise else weights), experts
