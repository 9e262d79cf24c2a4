"""Moves KV heads between pages and pieces (`segue.disagg.layout`), for transports that send runs of bytes.

A writer gathers some heads of its pages into pieces. A reader gets the pieces of a page one behind the other,
in the page itself, and spreads them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from segue.disagg.layout import HeadRoute, PageShape
from segue.disagg.transports.cuda_ipc import SideStream
from segue.disagg.transports.export import shape_of
from segue.disagg.transports.page_copy import copy_pages
from segue.kvcache.pool import KVPool

SCRATCH_BYTES = 16 << 20  # of a GPU: pages are spread in groups of this size, and one page at least
Heads = tuple[int, int]
"""A range of a rank's KV heads: the first one, and their number."""


class HeadMover(Protocol):
    """Moves heads of one pool's pages. One thread calls it; when a call returns, all is in its place."""

    def gather(self, pages: Sequence[int], heads: Heads, pieces: Tensor, slots: Sequence[int]) -> None:
        """Copy heads of each page to the piece at the same index; `pieces` is uint8 `[slot, piece_bytes]`."""
        ...

    def spread(self, pages: Sequence[int], pieces: Sequence[Heads]) -> None:
        """Put the heads of pages in order, whose pieces fill them, one behind the other by their heads."""
        ...


def head_mover(pool: KVPool) -> HeadMover:
    """Return what moves heads of a pool's pages, in the memory of the CPU or of a GPU."""
    return DeviceHeads(pool) if pool.data.is_cuda else HostHeads(pool)


class HostHeads:
    """Pages in the memory of the CPU (`HeadMover`): numpy copies in the calling thread, as in `page_copy`."""

    def __init__(self, pool: KVPool) -> None:
        self._shape = shape_of(pool)
        self._bytes = pool.data.view(torch.uint8).numpy().reshape(-1)

    def gather(self, pages: Sequence[int], heads: Heads, pieces: Tensor, slots: Sequence[int]) -> None:
        """Copy heads of each page to the piece at the same index."""
        first, num = heads
        route = HeadRoute(source_rank=0, target_rank=0, source_head=first, target_head=0, num_heads=num)
        shape = self._shape
        target = PageShape(
            num_layers=shape.num_layers,
            page_size=shape.page_size,
            num_heads=num,
            head_bytes=shape.head_bytes,
        )
        copy_pages(self._bytes, shape, pages, pieces.numpy().reshape(-1), target, slots, route)

    def spread(self, pages: Sequence[int], pieces: Sequence[Heads]) -> None:
        """Put the heads of pages in order, one page after the other."""
        shape = self._shape
        raw = self._bytes.reshape(-1, shape.page_bytes)
        ordered = self._bytes.reshape(-1, shape.num_rows, shape.num_heads, shape.head_bytes)
        for page in pages:
            arrived = raw[page].copy()
            for first, num in pieces:
                start, stop = (shape.num_rows * shape.head_bytes * head for head in (first, first + num))
                piece = arrived[start:stop].reshape(shape.num_rows, num, shape.head_bytes)
                np.copyto(ordered[page, :, first : first + num], piece)


class DeviceHeads:
    """Pages in the memory of a GPU (`HeadMover`): copies on a stream beside that of the steps."""

    def __init__(self, pool: KVPool) -> None:
        self._heads = DeviceHeadCopies(pool)
        self._side = SideStream(pool.data.device)

    def gather(self, pages: Sequence[int], heads: Heads, pieces: Tensor, slots: Sequence[int]) -> None:
        """Copy heads of each page to the piece at the same index."""
        self._side.run(lambda: None, lambda stream: self._heads.gather(pages, heads, pieces, slots))

    def spread(self, pages: Sequence[int], pieces: Sequence[Heads]) -> None:
        """Put the heads of pages in order."""
        self._side.run(lambda: None, lambda stream: self._heads.spread(pages, pieces))


class DeviceHeadCopies:
    """What `DeviceHeads` queues on the current stream; it works on any device."""

    def __init__(self, pool: KVPool, scratch_bytes: int = SCRATCH_BYTES) -> None:
        shape = self._shape = shape_of(pool)
        # the widest words of which a head consists: the copies take one thread per element
        self._word = torch.uint8 if shape.head_bytes % 8 else torch.int64
        words = pool.data.view(self._word)
        self._raw = words.view(len(words), -1)  # [page, words of a page]
        self._ordered = words.view(len(words), shape.num_rows, shape.num_heads, -1)
        self._group = max(1, scratch_bytes // shape.page_bytes)

    def gather(self, pages: Sequence[int], heads: Heads, pieces: Tensor, slots: Sequence[int]) -> None:
        """Copy heads of each page to the piece at the same index."""
        first, num = heads
        target = pieces.view(self._word).view(len(pieces), self._shape.num_rows, num, -1)
        found = self._ordered[:, :, first : first + num].index_select(0, self._index(pages))
        target.index_copy_(0, self._index(slots), found)

    def spread(self, pages: Sequence[int], pieces: Sequence[Heads]) -> None:
        """Put the heads of pages in order, a group of pages at a time."""
        shape = self._shape
        per_head = self._raw.shape[1] // shape.num_heads
        for begin in range(0, len(pages), self._group):
            index = self._index(pages[begin : begin + self._group])
            arrived = self._raw.index_select(0, index)
            for first, num in pieces:
                piece = arrived[:, per_head * first : per_head * (first + num)]
                piece = piece.reshape(len(index), shape.num_rows, num, -1)
                self._ordered[:, :, first : first + num].index_copy_(0, index, piece)

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(list(pages), dtype=torch.int64, device=self._raw.device)
