"""What requests hold while they run: rows, KV pages and locks in the prefix cache.

While a launched step may still use what was given up, it waits in ``limbo``, tagged with that step, and
becomes free when the step is applied.
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
    row: int | None
    pages: list[int]
    node: Node | None


class Resources:
    """The free ones, the cached ones, and those in limbo."""

    def __init__(self, *, num_rows: int, num_pages: int, page_size: int) -> None:
        self.num_rows = num_rows
        self.num_pages = num_pages
        self.allocator = PageAllocator(num_pages)
        self.prefix = PrefixCache(page_size)
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.limbo: deque[Released] = deque()

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
        self, step: int, *, row: int | None = None, pages: list[int], node: Node | None = None
    ) -> None:
        """Give up what ``step``, the last one launched, may still use."""
        self.limbo.append(Released(step, row, pages, node))

    def settle(self, oldest: int) -> None:
        """Free what only steps before ``oldest`` use."""
        while self.limbo and self.limbo[0].step < oldest:
            released = self.limbo.popleft()
            if released.row is not None:
                self.free_rows.append(released.row)
            self.allocator.release(released.pages)
            if released.node is not None:
                self.prefix.unlock(released.node)
