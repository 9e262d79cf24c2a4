"""All weights of one rank in a few contiguous slabs; a parameter is a view of its place there."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from segue.memory.checksum import MASK, digest

ALIGNMENT = 256  # bytes: enough for any vector load, TMA and NCCL
SLAB_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor to find room for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor itself, without the gap to the next one."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where one tensor lives."""

    slab: int  # index into `Arena.slabs`
    offset: int  # bytes from the slab's start, a multiple of ALIGNMENT
    shape: tuple[int, ...]
    dtype: torch.dtype


class Arena:
    """Slabs of raw bytes and the table of what lies where.

    The layout follows from the specs alone, so two arenas made from equal specs can be copied slab by slab.
    """

    def __init__(self, slabs: list[Tensor], table: dict[str, Entry]) -> None:
        """`slabs` are uint8 and 1-dimensional, their sizes multiples of ALIGNMENT; see `allocate`."""
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
        """Take memory for all `specs`. The tensors' content is undefined, the gaps between them are zero.

        A tensor larger than `slab_bytes` gets a slab of its own. `empty` gives a slab of so many bytes, if it
        is to be of other memory than `device`'s usual.
        """
        table: dict[str, Entry] = {}
        sizes: list[int] = []
        gaps: list[tuple[int, int, int]] = []  # slab, start, end
        for spec in specs:
            assert spec.name not in table, f"two tensors are called {spec.name!r}"
            needed = -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
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
        """Bytes of all slabs."""
        return sum(slab.numel() for slab in self.slabs)

    def view(self, name: str) -> Tensor:
        """The tensor called `name`, sharing the arena's memory."""
        entry = self.table[name]
        num_bytes = prod(entry.shape) * entry.dtype.itemsize
        raw = self.slabs[entry.slab][entry.offset : entry.offset + num_bytes]
        return raw.view(entry.dtype).view(entry.shape)

    def checksum(self) -> tuple[int, ...]:
        """One 64-bit number a slab, sensitive to values and their places, and the same on every device."""
        return tuple(int(digest(slab)) & MASK for slab in self.slabs)


def bind(model: nn.Module, arena: Arena) -> None:
    """Replace every parameter of `model`, meta as a rule, by its view of `arena`; tied ones share one."""
    primary = {id(parameter): name for name, parameter in model.named_parameters()}
    views = {name: nn.Parameter(arena.view(name), requires_grad=False) for name in primary.values()}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        view = views[primary[id(parameter)]]
        assert view.shape == parameter.shape and view.dtype == parameter.dtype, name
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, view)


def _aligned(size: int, device: torch.device) -> Tensor:
    # The CPU allocator promises 64 bytes only.
    raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size]
