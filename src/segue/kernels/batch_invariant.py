"""Operations on a CPU that give a row the same bits whatever other rows there are, and wherever it stands.

A library may add up a row's products in another order for another shape. So GEMMs run in a few shapes
alone, and those are tried beforehand: on sums that cancel, where all that is left is what rounding did, and
another order shows in nearly every element.
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

_SIZES = (4, 8, 16, 32, 64, 128, 256)  # rows of a gemm: those are used that agree with the reference
_REFERENCE = 16
_CALL_COST = 16  # reading the weight costs about as much as so many rows


class Gemm(Protocol):
    """A weight and how rows are multiplied by it."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`, `[M, in] -> [M, out]`."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes taken besides the weight."""
        ...


@dataclass(frozen=True, slots=True)
class BatchInvariantGemm:
    """A GEMM in blocks of so many rows as are known to agree bit for bit."""

    gemm: Gemm
    sizes: tuple[int, ...]  # ascending

    @classmethod
    def from_weight(cls, weight: Tensor, make: Callable[[Tensor], Gemm]) -> BatchInvariantGemm:
        """The GEMM that `make` makes of `weight` `[out, in]`.

        Raises:
            ConfigError: a row's bits depend on its place even in GEMMs of one size.
        """
        return cls(make(weight), _agreeing_sizes(weight.shape[0], weight.shape[1], weight.dtype, make))

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[M, in] -> [M, out]`."""
        sizes = split_rows(len(x), self.sizes)
        if len(sizes) == 1:
            return self._block(x, bias, sizes[0])
        parts, start = [], 0
        for size in sizes:
            parts.append(self._block(x[start : start + size], bias, size))
            start += size
        return torch.cat(parts)

    def _block(self, x: Tensor, bias: Tensor | None, size: int) -> Tensor:
        missing = size - len(x)
        return self.gemm(F.pad(x, (0, 0, 0, missing)), bias)[: len(x)] if missing else self.gemm(x, bias)

    @property
    def num_bytes(self) -> int:
        """Bytes taken besides the weight."""
        return self.gemm.num_bytes


def split_rows(count: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes, the last perhaps padded, of the blocks that hold `count` rows at the least cost."""
    whole = max(0, count - 1) // sizes[-1]
    return (sizes[-1],) * whole + _cheapest_split(count - whole * sizes[-1], sizes)


@cache
def _cheapest_split(count: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    splits: list[tuple[int, ...]] = [(min(size for size in sizes if size >= count),)]
    splits += [(size, *_cheapest_split(count - size, sizes)) for size in sizes if size < count]
    return min(splits, key=lambda split: sum(split) + _CALL_COST * len(split))


def silu_mul(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """`kernels.activation.silu_mul` of steps that round alike everywhere in a tensor.

    torch's own silu takes another exponential for what is left of a vector, wherever a thread's part ends.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    divisor = wide.neg().exp_().add_(1.0)
    return torch.div(wide, divisor, out=divisor).to(dtype).mul_(up)


def cancelling_inputs(rows: int, inner: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`a` `[rows, inner]` and `b` `[columns, inner]` whose every product is 0 but for rounding."""
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
    rows, weight = cancelling_inputs(_REFERENCE, inner, columns, dtype)
    gemm = make(weight)
    expected = gemm(rows, None)

    def agrees(size: int) -> bool:
        index = torch.arange(size) % _REFERENCE
        return torch.equal(gemm(rows[index], None), expected[index])

    one = gemm(rows[:1].expand(_REFERENCE, -1).contiguous(), None)
    if not torch.equal(one, expected[:1].expand_as(one)):
        raise ConfigError(
            f"deterministic=True: GEMMs of {_REFERENCE} rows by a weight [{columns}, {inner}] in {dtype} "
            "give a row other bits in another place on this CPU; use another --dtype",
            param="deterministic",
        )
    return tuple(size for size in _SIZES if size == _REFERENCE or agrees(size))
