"""The arena: all weights of one rank in a few contiguous slabs. Each parameter is a view of a slab."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from segue.memory.checksum import MASK, digest
from segue.sizes import round_up

ALIGNMENT = 256  # bytes: enough for any vector load, TMA and NCCL
SLAB_BYTES = 1 << 30
SLAB_ALIGNMENT = 2 << 20  # bytes: a huge page of the host, and the granularity of a device's memory mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor to lay out in an arena."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, without the gap behind it."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(TensorSpec):
    """A tensor and its position in an arena."""

    slab: int  # index into `Layout.sizes` and `Arena.slabs`
    offset: int  # bytes from the slab's start, a multiple of ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The position of each tensor in slabs, and the sizes of the slabs; it has no memory.

    It depends on the specs alone, so arenas of equal specs can be copied slab by slab.
    """

    table: dict[str, Entry]
    sizes: list[int]  # bytes of each slab
    gaps: list[tuple[int, int, int]]  # (slab, start, end): the bytes that belong to no tensor

    @classmethod
    def of(
        cls, specs: Iterable[TensorSpec], slab_bytes: int = SLAB_BYTES, align: int = SLAB_ALIGNMENT
    ) -> Layout:
        """Lay out `specs` in their order, in slabs of up to `slab_bytes` that are multiples of `align`.

        A tensor larger than `slab_bytes` gets its own slab.
        """
        table: dict[str, Entry] = {}
        sizes: list[int] = []
        gaps: list[tuple[int, int, int]] = []
        for spec in specs:
            assert spec.name not in table, f"two tensors are called {spec.name!r}"
            needed = round_up(spec.num_bytes, ALIGNMENT)
            if not sizes or 0 < sizes[-1] > slab_bytes - needed:  # the last slab is in use and has no room
                sizes.append(0)
            slab, offset = len(sizes) - 1, sizes[-1]
            table[spec.name] = Entry(
                name=spec.name, shape=spec.shape, dtype=spec.dtype, slab=slab, offset=offset
            )
            sizes[-1] += needed
            if needed != spec.num_bytes:
                gaps.append((slab, offset + spec.num_bytes, offset + needed))
        for slab, size in enumerate(sizes):
            sizes[slab] = round_up(size, align)
            if sizes[slab] != size:
                gaps.append((slab, size, sizes[slab]))
        return cls(table=table, sizes=sizes, gaps=gaps)

    @property
    def num_bytes(self) -> int:
        """The bytes of all slabs together."""
        return sum(self.sizes)


class Arena:
    """The memory of a layout."""

    def __init__(self, layout: Layout, slabs: Sequence[Tensor]) -> None:
        """Hold `slabs`: one `uint8` tensor per size of `layout`, each at a multiple of ALIGNMENT."""
        assert [slab.numel() for slab in slabs] == layout.sizes, "slabs and layout disagree"
        self.layout = layout
        self.slabs = slabs

    @classmethod
    def take(cls, layout: Layout, take: Callable[[int], Tensor]) -> Arena:
        """Take the memory of each slab by `take`, which gets the number of bytes."""
        return cls(layout, [take(size) for size in layout.sizes])

    @property
    def num_bytes(self) -> int:
        """The bytes of all slabs together."""
        return self.layout.num_bytes

    def zero_gaps(self, slabs: Collection[int] | None = None) -> None:
        """Zero what belongs to no tensor; whoever fills the arena must, since the checksum covers it.

        Only these slabs are touched; None: all of them.
        """
        for slab, start, end in self.layout.gaps:
            if slabs is None or slab in slabs:
                self.slabs[slab][start:end].zero_()

    def view(self, name: str) -> Tensor:
        """Return the tensor `name` as a view of the arena's memory."""
        entry = self.layout.table[name]
        raw = self.slabs[entry.slab][entry.offset : entry.offset + entry.num_bytes]
        return raw.view(entry.dtype).view(entry.shape)

    def checksum(self) -> tuple[int, ...]:
        """Return one 64-bit number per slab: it depends on values and positions, and not on the device."""
        return tuple(int(digest(slab)) & MASK for slab in self.slabs)


def bind(model: nn.Module, arena: Arena) -> None:
    """Replace every parameter of `model`, usually on meta, by its view of `arena`.

    Tied parameters have one entry in the arena, under the name that torch lists first, and share its view.
    """
    primary = {id(parameter): name for name, parameter in model.named_parameters()}
    views = {name: nn.Parameter(arena.view(name), requires_grad=False) for name in primary.values()}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        view = views[primary[id(parameter)]]
        assert view.shape == parameter.shape and view.dtype == parameter.dtype, name
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, view)
