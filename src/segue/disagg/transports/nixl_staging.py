"""Pieces that wait to be sent by NIXL: heads of a writer's pages, gathered in memory of their own.

NIXL sends runs of bytes, and some heads of a page are thousands of short ones. Measured over TCP on one host
of two cores, each costs 3 µs: runs of 64 bytes to 1 KiB go at 20 to 300 MB/s, and whole pieces at 1.5 GB/s.
Each peer has memory of its own, so a peer that hangs takes none from the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from segue.disagg.layout import HeadRoute, PageShape, piece_span
from segue.disagg.transports.nixl_agent import NixlAgent, StagedPieces
from segue.disagg.transports.pieces import HeadMover

STAGING_BYTES = 8 << 20  # per peer; at least two pieces


class Staging:
    """The pieces of one peer. A slot belongs to one transfer until that has ended.

    Only the agent's thread calls its methods.
    """

    def __init__(
        self, agent: NixlAgent, heads: HeadMover, route: HeadRoute, target: PageShape, most: int
    ) -> None:
        """Register memory for up to `most` pieces of a route to pages of the shape `target`.

        Raises:
            TransportError: there is no such memory, or NIXL refuses.
        """
        size = piece_span(route, target).num_bytes
        num_slots = max(2, min(STAGING_BYTES // size, most))
        self._agent, self._heads = agent, heads
        self._route = route.source_head, route.num_heads
        self.staged: StagedPieces = agent.stage(num_slots, size)
        self._free = list(range(num_slots))
        self._batch = num_slots // 2  # so that pieces are gathered while others are under way

    def gather(self, pages: Sequence[int]) -> list[int]:
        """Gather the heads of some pages, the first ones; returns their slots, or none if all are in use.

        The steps that compute the pages must have ended.
        """
        count = min(len(pages), len(self._free), self._batch)
        if not count:
            return []
        slots = self._free[:count]
        self._heads.gather(pages[:count], self._route, self.staged.data, slots)
        self._free = self._free[count:]
        return slots

    def give_back(self, slots: Sequence[int]) -> None:
        """Use slots again, whose transfer has ended."""
        self._free += slots

    def close(self) -> None:
        """Give the memory up; no transfer may be under way.

        Raises:
            TransportError: NIXL refuses.
        """
        self._agent.unstage(self.staged)
