"""Batch-invariant operations on a CPU: a row gets the same bits in any batch and at any index in it.

A library may choose another summation order for another shape. So GEMMs run only in a few shapes, which are
tested beforehand with inputs whose exact results are 0. Their computed results are rounding errors alone, and
another summation order changes nearly every element.

Here the size of a GEMM is its number of rows. Two sizes agree if a row gets the same bits from GEMMs of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.errors import ConfigError

_SIZES = (4, 8, 16, 32, 64, 128, 256)  # candidate numbers of rows per GEMM; those that agree are used
_REFERENCE = 16  # the number of rows that the others are compared with
_CALL_COST = 16  # a GEMM reads the whole weight, which takes as long as computing this many more rows


class Gemm(Protocol):
    """A weight in the layout of one implementation, callable as a GEMM."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns `x @ weight.T + bias`, `[M, in] -> [M, out]`."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes used in addition to the weight."""
        ...


@dataclass(frozen=True, slots=True)
class BatchInvariantGemm:
    """A batch-invariant GEMM: runs in blocks of rows whose sizes are known to give identical bits."""

    gemm: Gemm
    sizes: tuple[int, ...]  # the sizes that agree, ascending: every GEMM has one of them

    @classmethod
    def from_weight(cls, weight: Tensor, make: Callable[[Tensor], Gemm]) -> BatchInvariantGemm:
        """Make a batch-invariant GEMM by `weight` `[out, in]`, and find the sizes that agree for its shape.

        `make` lays a weight out as a GEMM. It is called for `weight`, and for the weight of the test.

        Raises:
            ConfigError: a row's bits depend on its index even among GEMMs of one size.
        """
        return cls(make(weight), _agreeing_sizes(weight.shape[0], weight.shape[1], weight.dtype, make))

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns `x @ weight.T + bias`, `[M, in] -> [M, out]`, computed by one GEMM per block of rows."""
        sizes = split_rows(len(x), self.sizes)
        if len(sizes) == 1:
            return self._block(x, bias, sizes[0])
        blocks = x.split_with_sizes([*sizes[:-1], len(x) - sum(sizes[:-1])])
        return torch.cat([self._block(block, bias, size) for block, size in zip(blocks, sizes, strict=True)])

    def _block(self, x: Tensor, bias: Tensor | None, size: int) -> Tensor:
        """Multiply at most `size` rows by a GEMM of that size: zero rows fill it up and are cut off again."""
        missing = size - len(x)
        return self.gemm(F.pad(x, (0, 0, 0, missing)), bias)[: len(x)] if missing else self.gemm(x, bias)

    @property
    def num_bytes(self) -> int:
        """Bytes used in addition to the weight."""
        return self.gemm.num_bytes


def split_rows(count: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the block sizes, in order, that process `count` rows at the least cost.

    The last block may be larger than the rows that remain for it; its input is padded. `sizes` are those to
    choose from, ascending. Many rows take whole blocks of the largest size first.
    """
    whole = max(0, count - 1) // sizes[-1]
    return (sizes[-1],) * whole + _cheapest_split(count - whole * sizes[-1], sizes)


@cache
def _cheapest_split(count: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns what `split_rows` does, for at most `sizes[-1]` rows, by trying each first block.

    The cost of a split is its number of rows with padding, and `_CALL_COST` per block.
    """
    splits: list[tuple[int, ...]] = [(min(size for size in sizes if size >= count),)]
    splits += [(size, *_cheapest_split(count - size, sizes)) for size in sizes if size < count]
    return min(splits, key=lambda split: sum(split) + _CALL_COST * len(split))


def silu_mul(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `silu(gate) * up` of `gate_up` `[T, 2 * I]`, like `kernels.ops.silu_mul`, but batch-invariant.

    It is made of operators that round an element alike wherever it is in a tensor. Silu is in float32.
    torch's own silu computes the exponential differently for the elements after the last full SIMD vector of
    each thread's share.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    divisor = wide.neg().exp_().add_(1.0)
    return torch.div(wide, divisor, out=divisor).to(dtype).mul_(up)


def cancelling_inputs(rows: int, inner: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns `a` `[rows, inner]` and `b` `[columns, inner]` with `a @ b.T == 0` except for rounding.

    The channels are paired at random: both of a pair have the same values in `a`, and opposite values in `b`.
    So what a GEMM returns shows the order in which it adds.
    """
    generator = torch.Generator().manual_seed(0)
    half = inner // 2
    first, second = torch.randperm(inner, generator=generator)[: 2 * half].view(2, half)
    a, b = torch.zeros(rows, inner, dtype=dtype), torch.zeros(columns, inner, dtype=dtype)
    a[:, first] = torch.randn(rows, half, generator=generator).to(dtype)
    b[:, first] = torch.randn(columns, half, generator=generator).to(dtype)
    a[:, second], b[:, second] = a[:, first], -b[:, first]
    return a, b


@cache
def _agreeing_sizes(
    columns: int, inner: int, dtype: torch.dtype, make: Callable[[Tensor], Gemm]
) -> tuple[int, ...]:
    """Returns the sizes, ascending, that agree with `_REFERENCE` for a weight `[columns, inner]`.

    The result is kept for each shape, since a model has many weights of one shape.

    Raises:
        ConfigError: equal rows of one GEMM get different bits.
    """
    rows, weight = cancelling_inputs(_REFERENCE, inner, columns, dtype)
    gemm = make(weight)
    expected = gemm(rows, None)

    def agrees(size: int) -> bool:
        """Whether rows of a GEMM of `size`, which repeats or shortens `rows`, have the expected bits."""
        index = torch.arange(size) % _REFERENCE
        return torch.equal(gemm(rows[index], None), expected[index])

    # One row, repeated, has to get the same bits at every index.
    one = gemm(rows[:1].expand(_REFERENCE, -1).contiguous(), None)
    if not torch.equal(one, expected[:1].expand_as(one)):
        raise ConfigError(
            f"deterministic=True: on this CPU, GEMMs of {_REFERENCE} rows by a weight [{columns}, {inner}] "
            f"in {dtype} give a row other bits at another index; use another --dtype",
            param="deterministic",
        )
    return tuple(size for size in _SIZES if size == _REFERENCE or agrees(size))
