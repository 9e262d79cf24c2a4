"""A sparse mixture of experts, which replaces a decoder layer's MLP."""

import torch
from torch import Tensor, nn

from segue.kernels.ops import route
from segue.layers.blocks import Layer, Linear
from segue.layers.moe_backend import MoEBackend


class Experts(nn.Module):
    """The weights of all experts, each sharded over the ranks like an MLP."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        """`intermediate_size` is one expert's share on this rank."""
        super().__init__()
        self.gate_up = nn.Parameter(
            torch.empty(num_experts, 2 * intermediate_size, hidden_size), requires_grad=False
        )
        self.down = nn.Parameter(
            torch.empty(num_experts, hidden_size, intermediate_size), requires_grad=False
        )


class MoE(Layer):
    """Sums the outputs of each token's most probable experts, weighted by the router's probabilities."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        intermediate_size: int,
        norm_topk_prob: bool,
        backend: MoEBackend,
        deterministic: bool = False,
    ) -> None:
        """`intermediate_size` is one expert's share on this rank."""
        super().__init__()
        self.num_experts_per_tok = num_experts_per_tok
        self.norm_topk_prob = norm_topk_prob
        self.backend = backend
        self.router = Linear(hidden_size, num_experts, deterministic=deterministic)
        self.experts = Experts(num_experts, hidden_size, intermediate_size)

    def forward(self, x: Tensor, num_unpadded: Tensor | None = None) -> Tensor:
        """`[T, hidden] -> [T, hidden]`; this rank's summand, which `RMSNorm` sums over the ranks.

        Tokens after the first `num_unpadded` (int32 `[1]`) are routed to no expert.
        """
        weights, experts = route(
            self.router(x),
            self.num_experts_per_tok,
            renormalise=self.norm_topk_prob,
            num_unpadded=num_unpadded,
        )
        return self.backend(x, self.experts.gate_up, self.experts.down, weights, experts)
