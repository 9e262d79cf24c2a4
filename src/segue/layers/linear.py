"""Linear layers sharded over tensor-parallel ranks."""

import torch
from torch import Tensor, nn

from segue.distributed.collectives import Collectives
from segue.kernels.batch_invariant import Gemm
from segue.kernels.linear import linear, pack
from segue.layers.base import Layer


class Linear(Layer):
    """One rank's shard of a column-parallel layer: takes the whole input, computes its own outputs."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        may_split: bool = False,
        deterministic: bool = False,
    ) -> None:
        """`out_features` is this rank's number; `may_split` is that of `kernels.linear.linear`."""
        super().__init__()
        self.may_split = may_split
        self.deterministic = deterministic
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.packed: Gemm | None = None

    def build_derived(self) -> int:
        """Pack the weight again; returns the bytes of the packed copy."""
        self.packed = None  # frees its memory first
        self.packed = pack(self.weight, deterministic=self.deterministic)
        return 0 if self.packed is None else self.packed.num_bytes

    def forward(self, x: Tensor) -> Tensor:
        """`[T, in] -> [T, out]`."""
        return linear(x, self.weight, self.bias, self.packed, may_split=self.may_split)


class RowParallelLinear(Layer):
    """One rank's shard of a row-parallel layer: `RMSNorm.add` sums the results over the ranks.

    Every rank holds the whole bias, and the first rank adds it.
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
        """`in_features` is this rank's number."""
        super().__init__()
        self.collectives = collectives
        self.deterministic = deterministic
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.packed: Gemm | None = None

    def build_derived(self) -> int:
        """Pack the weight again; returns the bytes of the packed copy."""
        self.packed = None  # frees its memory first
        self.packed = pack(self.weight, deterministic=self.deterministic)
        return 0 if self.packed is None else self.packed.num_bytes

    def forward(self, x: Tensor) -> Tensor:
        """`[T, in] -> [T, out]`, this rank's summand, or its split-K partials, which `RMSNorm.add` takes."""
        tp, fused_all_reduce = self.collectives.tp, self.collectives.fused_all_reduce
        may_split = tp.size == 1 or (fused_all_reduce is not None and len(x) <= fused_all_reduce.max_rows)
        return linear(x, self.weight, self.bias if tp.is_first else None, self.packed, may_split=may_split)
