"""The arena: all weights of one rank in a few contiguous slabs. Each parameter is a view of a slab."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from segue.memory.checksum import MASK, digest
from segue.sizes import round_up

ALIGNMENT = 256  # bytes: enough for any vector load, TMA and NCCL
SLAB_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor to allocate in an arena."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, without the gap behind it."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The position of one tensor in an arena."""

    slab: int  # index into `Arena.slabs`
    offset: int  # bytes from the slab's start, a multiple of ALIGNMENT
    shape: tuple[int, ...]
    dtype: torch.dtype


class Arena:
    """Slabs of raw bytes, and a table with the position of each tensor.

    The layout depends on the specs alone, so arenas made from equal specs can be copied slab by slab.
    """

    def __init__(self, slabs: list[Tensor], table: dict[str, Entry]) -> None:
        """Hold `slabs`: 1-dimensional uint8 tensors, with sizes that are multiples of ALIGNMENT."""
        self.slabs = slabs
        self.table = table

    @classmethod
    def allocate(
        cls,
        specs: Iterable[TensorSpec],
        device: torch.device | str,
        slab_bytes: int = SLAB_BYTES,
        empty: Callable[[int], Tensor] | None = None,
    ) -> "Arena":
        """Allocate all `specs`. The tensors' contents are undefined; the gaps between them are zero.

        A tensor larger than `slab_bytes` gets its own slab. `empty` allocates a slab of the given size; None:
        torch's memory of `device`.
        """
        table: dict[str, Entry] = {}
        sizes: list[int] = []
        gaps: list[tuple[int, int, int]] = []  # slab, start, end
        for spec in specs:
            assert spec.name not in table, f"two tensors are called {spec.name!r}"
            needed = round_up(spec.num_bytes, ALIGNMENT)
            if not sizes or 0 < sizes[-1] > slab_bytes - needed:
                sizes.append(0)
            slab, offset = len(sizes) - 1, sizes[-1]
            table[spec.name] = Entry(slab=slab, offset=offset, shape=spec.shape, dtype=spec.dtype)
            sizes[-1] += needed
            if needed != spec.num_bytes:
                gaps.append((slab, offset + spec.num_bytes, offset + needed))
        slabs = [(empty or partial(_aligned, device=torch.device(device)))(size) for size in sizes]
        for slab, start, end in gaps:
            slabs[slab][start:end].zero_()
        return cls(slabs, table)

    @property
    def num_bytes(self) -> int:
        """The bytes of all slabs together."""
        return sum(slab.numel() for slab in self.slabs)

    def view(self, name: str) -> Tensor:
        """Return the tensor `name` as a view of the arena's memory."""
        entry = self.table[name]
        num_bytes = prod(entry.shape) * entry.dtype.itemsize
        raw = self.slabs[entry.slab][entry.offset : entry.offset + num_bytes]
        return raw.view(entry.dtype).view(entry.shape)

    def checksum(self) -> tuple[int, ...]:
        """Return one 64-bit number per slab: it depends on values and positions, and not on the device."""
        return tuple(int(digest(slab)) & MASK for slab in self.slabs)


def bind(model: nn.Module, arena: Arena) -> None:
    """Replace every parameter of `model`, usually on meta, by its view of `arena`. Tied ones share a view."""
    primary = {id(parameter): name for name, parameter in model.named_parameters()}
    views = {name: nn.Parameter(arena.view(name), requires_grad=False) for name in primary.values()}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        view = views[primary[id(parameter)]]
        assert view.shape == parameter.shape and view.dtype == parameter.dtype, name
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, view)


def _aligned(size: int, device: torch.device) -> Tensor:
    # The CPU allocator guarantees an alignment of 64 bytes only.
    raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size]
