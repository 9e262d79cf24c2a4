"""The tensor-parallel blocks of a decoder: norm and linear layers."""

from typing import Any

import torch
from torch import Tensor, nn

from segue.distributed.collectives import Collectives
from segue.kernels.activations import Activations, Unnormed
from segue.kernels.batch_invariant import Gemm
from segue.kernels.fp8 import FP8
from segue.kernels.ops import (
    DequantizingGemm,
    FP8Gemm,
    add_rms_norm,
    can_stream,
    linear,
    may_copy,
    pack,
    pack_fp8,
)
from segue.sizes import ceil_div


class Layer(nn.Module):
    """A module whose call is its `forward`: looking for hooks takes 2 % of a decode step on the CPU."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Bind the subclass's `__call__` to its own `forward`."""
        super().__init_subclass__(**kwargs)
        cls.__call__ = cls.forward  # type: ignore[method-assign]


class RMSNorm(Layer):
    """Adds its input to the residual stream, and divides the sum by its root mean square (and scales it).

    Its input may be the summands of a `RowParallelLinear`, one per rank, which it sums over the ranks first.
    So one kernel can do the all-reduce, the addition and the norm.
    """

    def __init__(self, size: int, eps: float, collectives: Collectives | None = None) -> None:
        """Make a norm of `size` channels, which sums its input over the ranks of `collectives`.

        With None the input is the sum already.
        """
        super().__init__()
        self.eps = eps
        self.collectives = collectives or Collectives()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.weight_float32: Tensor | None = None

    def build_derived(self) -> int:
        """Copy the weight to float32 on CPUs, which multiply by that; returns the bytes of the copy."""
        self.weight_float32 = self.weight.float() if self.weight.device.type == "cpu" else None
        return 0 if self.weight_float32 is None else self.weight_float32.nbytes

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, reader: "Linear | None" = None
    ) -> tuple[Activations, Tensor]:
        """Sums `x` over the ranks and adds `residual`: returns the sum normalised, and the sum.

        `x` is `[T, N]`, or split-K partials, float32 `[S, T, N]`. `residual` is `[T, N]`; None stands for 0.
        May overwrite both. Few rows take the fused all-reduce, if there is one. Otherwise the result may be
        what only its `reader` understands, the layer that reads it: one token is left to it, and many
        tokens are quantized for it.
        """
        weight = self.weight if self.weight_float32 is None else self.weight_float32
        fused_all_reduce = self.collectives.fused_all_reduce
        if fused_all_reduce is not None and x.shape[-2] <= fused_all_reduce.max_rows:
            return fused_all_reduce.add_rms_norm(x, residual, weight, self.eps)
        x = self.collectives.all_reduce(x)
        if reader is not None and reader.takes_unnormed(x):
            total = torch.empty_like(x)
            return Unnormed(x, residual, weight, self.eps, total), total
        fp8_block = None if reader is None else reader.fp8_block(x.shape[-2])
        return add_rms_norm(x, residual, weight, self.eps, fp8_block=fp8_block)


class Linear(Layer):
    """One rank's shard of a column-parallel layer: takes the whole input, computes its own outputs.

    `packed` is the weight in the layout of a GEMM (`kernels.ops.pack`), or None where the weight itself is
    used. It has to be built again after each change of the weight. A weight in FP8 has it always.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        may_split: bool = False,
        float32_output: bool = False,
    ) -> None:
        """Allocate the weight; `out_features` is this rank's number of outputs.

        `may_split` lets the result be split-K partials, which the caller adds up, and `float32_output` makes
        it float32; see `kernels.ops.linear`.
        """
        super().__init__()
        self.may_split = may_split
        self.float32_output = float32_output
        self.weight: Tensor = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.scale: Tensor | None = None  # of a weight in FP8
        self.block = 0
        self.dtype = torch.float32  # of the activations of a weight in FP8
        self.packed: Gemm | None = None

    def make_fp8(self, block: int) -> None:
        """Have the weight in FP8, of undefined values, with a scale for each `block` of a row; 0: per row."""
        rows, columns = self.weight.shape
        self.block, self.dtype = block, self.weight.dtype
        self.weight = nn.Parameter(torch.empty_like(self.weight, dtype=FP8), requires_grad=False)
        scales = torch.empty(rows, ceil_div(columns, block or columns), device=self.weight.device)
        self.scale = nn.Parameter(scales, requires_grad=False)

    def build_derived(self, packed: Gemm | None = None, *, deterministic: bool = False) -> int:
        """Pack the weight again, as a batch-invariant GEMM with `deterministic`; returns the copy's bytes.

        If the weight is `packed` already, by :meth:`pack`, that is used.
        """
        self.packed = None  # frees its memory first
        self.packed = packed or self._pack(self.weight, self.scale, deterministic)
        return 0 if self.packed is None else self.packed.num_bytes

    def drop_packed(self) -> None:
        """Free the packed copy; a weight in FP8 is dequantized in each call until there is one again."""
        scale = self.scale
        self.packed = None if scale is None else DequantizingGemm(self.weight, scale, self.block)

    @property
    def may_copy(self) -> bool:
        """Whether :meth:`pack` may return a copy, on a CPU."""
        return self.scale is not None or may_copy(self.weight)

    def pack(
        self, weight: Tensor, scale: Tensor | None = None, *, deterministic: bool = False
    ) -> Gemm | None:
        """Return the packed copy of another weight for this layer; None if it would use the weight itself.

        `scale` are the scales of a weight in FP8.
        """
        packed = self._pack(weight, scale, deterministic)
        return packed if packed is not None and packed.num_bytes else None

    def _pack(self, weight: Tensor, scale: Tensor | None, deterministic: bool) -> Gemm | None:
        if scale is not None:
            return pack_fp8(weight, scale, self.block, self.dtype, deterministic=deterministic)
        return pack(weight, deterministic=deterministic, float32_output=self.float32_output)

    def takes_unnormed(self, x: Tensor) -> bool:
        """Whether the layer takes `x`, which may be split-K partials, before its norm, and computes that."""
        return x.dim() == 2 and can_stream(x, self.weight, self.packed)

    def fp8_block(self, num_rows: int) -> int | None:
        """The columns per scale (0: all) if so many tokens are multiplied in FP8, else None.

        The kernel before this layer may quantize them then.
        """
        packed = self.packed
        return packed.fp8_block(num_rows, self.dtype) if isinstance(packed, FP8Gemm) else None

    def forward(self, x: Activations) -> Tensor:
        """Returns `x @ weight.T + bias`, `[T, in] -> [T, out]`."""
        return linear(
            x,
            self.weight,
            self.bias,
            self.packed,
            may_split=self.may_split,
            float32_output=self.float32_output,
        )


class RowParallelLinear(Linear):
    """One rank's shard of a row-parallel layer: `RMSNorm` sums the results over the ranks.

    Every rank holds the whole bias, and the first rank adds it.
    """

    def __init__(
        self, in_features: int, out_features: int, *, collectives: Collectives, bias: bool = False
    ) -> None:
        """Allocate the weight; `in_features` is this rank's number of inputs."""
        super().__init__(in_features, out_features, bias=bias)
        self.collectives = collectives

    def forward(self, x: Activations) -> Tensor:
        """`[T, in] -> [T, out]`, this rank's summand, or its split-K partials, which `RMSNorm` takes.

        Partials are allowed unless the sum over the ranks is by `Collectives.all_reduce`, which cannot add
        them up.
        """
        bias = self.bias if self.collectives.tp.is_first else None
        return linear(x, self.weight, bias, self.packed, may_split=len(x) <= self.max_split_rows)

    @property
    def max_split_rows(self) -> int:
        """The most rows whose results may be split-K partials; 0: none may."""
        if self.collectives.tp.size == 1:
            return 1 << 30
        fused_all_reduce = self.collectives.fused_all_reduce
        return 0 if fused_all_reduce is None else fused_all_reduce.max_rows
