"""What requests hold while they run: slots, KV pages and locks in the prefix cache.

While a launched step may still use what was given up, it waits in ``pending_free``, tagged with that step,
and becomes free when the step is applied.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from segue.kvcache.allocator import PageAllocator
from segue.kvcache.prefix_cache import Node, PrefixCache


@dataclass(frozen=True, slots=True)
class Released:
    """Given up; free once ``step`` is applied."""

    step: int
    slot: int | None
    pages: list[int]
    node: Node | None


class Resources:
    """The free ones, the cached ones, and those that are pending free."""

    def __init__(self, *, num_slots: int, num_pages: int, page_size: int) -> None:
        self.num_slots = num_slots
        self.num_pages = num_pages
        self.allocator = PageAllocator(num_pages)
        self.prefix = PrefixCache(page_size)
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.pending_free: deque[Released] = deque()

    @property
    def num_available(self) -> int:
        """Pages that :meth:`take_pages` could give now."""
        return self.allocator.num_free + self.prefix.num_evictable

    def take_pages(self, count: int) -> list[int]:
        """``count`` pages, evicted from the prefix cache where too few are free; see ``num_available``."""
        missing = count - self.allocator.num_free
        if missing > 0:
            self.allocator.release(self.prefix.evict(missing))
        return self.allocator.allocate(count)

    def release(
        self, step: int, *, slot: int | None = None, pages: list[int], node: Node | None = None
    ) -> None:
        """Give up what ``step``, the last one launched, may still use."""
        self.pending_free.append(Released(step, slot, pages, node))

    def settle(self, oldest: int) -> None:
        """Free what only steps before ``oldest`` use."""
        while self.pending_free and self.pending_free[0].step < oldest:
            released = self.pending_free.popleft()
            if released.slot is not None:
                self.free_slots.append(released.slot)
            self.allocator.release(released.pages)
            if released.node is not None:
                self.prefix.unlock(released.node)
