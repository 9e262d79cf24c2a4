"""The free list of KV pages."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Allocates the page ids ``0 … num_pages - 1``; it does not record who holds them.

    The page released last is allocated next, so that a small working set stays in the hardware caches.
    """

    def __init__(self, num_pages: int) -> None:
        self.free_pages = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        """The number of pages that can be allocated now."""
        return len(self.free_pages)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` pages; the caller has checked ``num_free``."""
        assert count <= len(self.free_pages), f"asked for {count} pages, {len(self.free_pages)} are free"
        pages = [self.free_pages.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Make allocated pages free again."""
        for page in pages:
            assert not self._is_free[page], f"page {page} was freed twice"
            self._is_free[page] = 1
            self.free_pages.append(page)
