"""A reader and a writer whose pages move by NIXL, in the test's process and in processes of their own."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from segue.disagg.transports.base import Done, Failed, PagePair, Peer
from segue.disagg.transports.nixl import NixlTransport
from segue.disagg.transports.nixl_export import NixlExport
from segue.disagg.transports.pieces import head_mover
from segue.kvcache.pool import KVPool, KVShape
from tests.disagg.transports.ranks import WHOLE, Sender, filled_pool, shape_of_pool


class NixlReader:
    """A pool that is exported by NIXL."""

    def __init__(self, shape: KVShape | None = None, device: str = "cpu") -> None:
        shape = shape or shape_of_pool()
        self.pool = KVPool(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8, device=device))
        self.export = NixlExport(self.pool)

    @property
    def pages(self) -> Tensor:
        """The first byte of each page, the scratch page included."""
        return self.pool.data.flatten(1)[:, 0]


class NixlReaderRank:
    """What a reader's process does."""

    def __init__(self, shape: KVShape, device: str) -> None:
        self._reader = NixlReader(shape, device)

    def blob(self) -> bytes:
        return self._reader.export.blob

    def pages(self) -> list[int]:
        found: list[int] = self._reader.pages.tolist()
        return found


class NixlReadersRank:
    """What a process with several readers does."""

    def __init__(self, shape: KVShape, device: str) -> None:
        self._device = device
        self._readers: list[NixlReader] = []

    def add(self, shape: KVShape) -> bytes:
        """Make a pool of zeroes; returns its blob."""
        self._readers.append(NixlReader(shape, self._device))
        return self._readers[-1].export.blob

    def spread(self, index: int, pages: list[int], pieces: list[tuple[int, int]]) -> None:
        head_mover(self._readers[index].pool).spread(pages, pieces)

    def data(self, index: int) -> bytes:
        """All bytes of a pool."""
        return self._readers[index].pool.data.cpu().numpy().tobytes()

    def end_all(self) -> None:
        for reader in self._readers:
            reader.export.close()
        self._readers = []


class NixlWriterRank:
    """What a writer's process does."""

    def __init__(self, shape: KVShape, device: str) -> None:
        self._sender = Sender(filled_pool(shape, device=device), make=NixlTransport)

    def connect(self, blob: bytes) -> Peer:
        return self._sender.transport.connect("", blob, WHOLE, "s", time.monotonic())

    def push(self, peer: Peer, pages: list[PagePair]) -> Done | Failed:
        return self._sender.push(peer, pages)
