"""Linear layers cut over tensor-parallel ranks."""

import torch
from torch import Tensor, nn

from segue.distributed.collectives import Collectives
from segue.kernels.batch_invariant import Gemm
from segue.kernels.linear import linear, pack
from segue.layers.base import Layer


class Linear(Layer):
    """One rank's rows of a linear layer (column parallel): whole input, own outputs, nothing exchanged."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        may_split: bool = False,
        deterministic: bool = False,
    ) -> None:
        """`out_features` are this rank's; `may_split`: see `kernels.linear.linear`."""
        super().__init__()
        self.may_split = may_split
        self.deterministic = deterministic
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.packed: Gemm | None = None

    def build_derived(self) -> int:
        """Pack the weight anew; bytes taken."""
        self.packed = None  # its memory first
        self.packed = pack(self.weight, deterministic=self.deterministic)
        return 0 if self.packed is None else self.packed.num_bytes

    def forward(self, x: Tensor) -> Tensor:
        """`[T, in] -> [T, out]`."""
        return linear(x, self.weight, self.bias, self.packed, may_split=self.may_split)


class RowParallelLinear(Layer):
    """One rank's columns of a linear layer, whose results are to be summed over the ranks: `RMSNorm.add`.

    Every rank holds the whole bias and the first adds it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        collectives: Collectives,
        bias: bool = False,
        deterministic: bool = False,
    ) -> None:
        """`in_features` are this rank's."""
        super().__init__()
        self.collectives = collectives
        self.deterministic = deterministic
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.packed: Gemm | None = None

    def build_derived(self) -> int:
        """Pack the weight anew; bytes taken."""
        self.packed = None  # its memory first
        self.packed = pack(self.weight, deterministic=self.deterministic)
        return 0 if self.packed is None else self.packed.num_bytes

    def forward(self, x: Tensor) -> Tensor:
        """`[T, in] -> [T, out]`, this rank's summand; perhaps split-K partials, which `RMSNorm.add` takes."""
        tp, one_shot = self.collectives.tp, self.collectives.one_shot
        may_split = tp.size == 1 or (one_shot is not None and len(x) <= one_shot.max_rows)
        return linear(x, self.weight, self.bias if tp.is_first else None, self.packed, may_split=may_split)
