"""The resources of running requests: slots, KV pages and locks in the prefix cache.

A launched step may still use resources that its request has released. They stay in ``pending_free``, tagged
with that step, and become free when the step is applied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from segue.kvcache.journal import FoundPages
from segue.kvcache.prefix_cache import Node, PrefixCache
from segue.messages.control import EngineLimits
from segue.scheduler.publisher import PagePublisher


@dataclass(frozen=True, slots=True)
class Released:
    """Resources that steps up to ``step`` may still use; they become free once that step is applied."""

    step: int
    slot: int | None
    pages: list[int]
    node: Node | None


class Resources:
    """Tracks free, cached and pending free slots and pages; running requests hold the others."""

    def __init__(self, limits: EngineLimits, *, publishes: bool = False) -> None:
        """With ``publishes``, an engine that takes over is told which pages are cached."""
        self.free_pages = list(range(limits.num_pages - 1, -1, -1))  # the page released last is taken next
        self._is_free = bytearray(b"\x01" * limits.num_pages)  # by page, to notice a page that is freed twice
        self.prefix = PrefixCache(limits.page_size)
        self.free_slots = list(range(limits.max_running_requests - 1, -1, -1))
        self.pending_free: deque[Released] = deque()
        self.settled_slots: list[int] = []  # that became free since `take_settled` was called last
        self.publisher = PagePublisher(self.prefix) if publishes else None

    @property
    def num_available(self) -> int:
        """Pages that :meth:`take_pages` can give now: the free ones and the evictable ones."""
        return len(self.free_pages) + self.prefix.num_evictable

    def is_free(self, page: int) -> bool:
        """Whether a page is on the free list."""
        return bool(self._is_free[page])

    def take_pages(self, count: int) -> list[int]:
        """Take ``count`` pages, at most ``num_available``; evicts cached pages if too few are free."""
        missing = count - len(self.free_pages)
        if missing > 0:
            self.free(self.prefix.evict(missing))
        pages = [self.free_pages.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Make pages that were taken, or evicted from the prefix cache, free again."""
        if self.publisher is not None:
            self.publisher.forget(pages)
        for page in pages:
            assert not self._is_free[page], f"page {page} was freed twice"
            self._is_free[page] = 1
            self.free_pages.append(page)

    def adopt(self, found: FoundPages, epoch: int) -> None:
        """Take pages into the prefix cache that another engine has computed; all pages must be free."""
        assert self.publisher is not None and len(self.free_pages) == len(self._is_free)
        for record in found.records:
            self._is_free[record.page] = 0
        self.free_pages = [page for page in self.free_pages if self._is_free[page]]
        self.prefix.adopt(epoch, found.records)
        self.publisher.adopted(found.records, found.next_seq)

    def settle(self, oldest: int) -> None:
        """Free the pending resources that only steps before step number ``oldest`` use."""
        while self.pending_free and self.pending_free[0].step < oldest:
            released = self.pending_free.popleft()
            if released.slot is not None:
                self.free_slots.append(released.slot)
                self.settled_slots.append(released.slot)
            self.free(released.pages)
            if released.node is not None:
                self.prefix.unlock(released.node)

    def take_settled(self) -> list[int]:
        """Return the slots that became free since the last call; they may have been taken again."""
        slots, self.settled_slots = self.settled_slots, []
        return slots
