"""Makes pages that have landed ready for use: puts heads in order, and compares checksums."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from segue.disagg.checksums import PageChecksums
from segue.disagg.transports.pieces import HeadMover
from segue.logs import logger
from segue.messages.kv import HeadSums, KVEvent, PagesPrepared, PreparePages


class PagePreparer:
    """What a decode rank does to pages of its pool once all of them are written."""

    def __init__(
        self, heads: HeadMover, checksums: PageChecksums, send: Callable[[KVEvent], None], *, rank: int
    ) -> None:
        """Prepare pages of the rank with this number.

        Args:
            heads: moves heads within the rank's pool; nobody else uses it.
            checksums: takes checksums of the pool's pages.
            send: takes events, from a thread.
            rank: this rank's number.
        """
        self._heads, self._checksums, self._send, self._rank = heads, checksums, send, rank
        self._thread = ThreadPoolExecutor(1, "segue-kv-prepare")  # starts a thread when it is first needed

    def prepare(self, command: PreparePages) -> None:
        """Make pages ready, in a thread: `PagesPrepared` follows."""
        self._thread.submit(self._prepare, command)

    def _prepare(self, command: PreparePages) -> None:
        try:
            mine = [piece for piece in command.pieces if piece.target_rank == self._rank]
            if mine:
                self._heads.spread(command.pages, [(piece.head, piece.num_heads) for piece in mine])
        except Exception as failure:
            logger.exception("the heads of %d KV pages cannot be put in order", len(command.pages))
            error = f"the heads of its pages cannot be put in order: {failure!r}"
            self._send(PagesPrepared(ticket=command.ticket, error=error))
            return
        try:
            error = next(filter(None, (self._difference(command.pages, each) for each in command.sums)), "")
        except Exception as failure:  # the heads may be none that this rank has
            error = f"checksums cannot be compared: {failure!r}"
        if error:
            logger.error("KV that was handed over is not used: %s", error)
        self._send(PagesPrepared(ticket=command.ticket, error=error, reason="checksum"))

    def _difference(self, pages: list[int], sums: HeadSums) -> str:
        """Returns which page differs from its checksum, and how; empty: none."""
        if sums.target_rank != self._rank:
            return ""
        found = np.frombuffer(self._checksums(pages, sums.head, sums.num_heads), np.uint32)
        expected = np.frombuffer(sums.crcs, np.uint32)
        if len(found) != len(expected):
            raise ValueError(f"{len(expected)} checksums came for {len(found)} pages")
        for index in np.flatnonzero(found != expected):
            return (
                f"page {pages[index]} of rank {self._rank}, KV heads {sums.head} to "
                f"{sums.head + sums.num_heads - 1}, has the checksum {found[index]:08x} here, and had "
                f"{expected[index]:08x} at the prefill engine; look for faulty memory on this host"
            )
        return ""

    def close(self) -> None:
        """Wait until all pages are ready, or have failed."""
        self._thread.shutdown()
