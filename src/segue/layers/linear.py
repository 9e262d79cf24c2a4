"""Linear layers cut over tensor-parallel ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segue.distributed.collectives import Collectives


class Linear(nn.Module):
    """One rank's rows of a linear layer (column parallel); every rank sees the whole input, nothing is exchanged."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        """`out_features` are this rank's."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`[T, in] -> [T, out]`."""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """One rank's columns of a linear layer; the ranks' partial results are summed.

    Every rank holds the whole bias and the first adds it.
    """

    def __init__(self, in_features: int, out_features: int, *, collectives: Collectives, bias: bool = False) -> None:
        """`in_features` are this rank's."""
        super().__init__()
        self.collectives = collectives
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`[T, in] -> [T, out]`, equal on every rank."""
        bias = self.bias if self.collectives.tp.is_first else None
        return self.collectives.all_reduce(F.linear(x, self.weight, bias))
