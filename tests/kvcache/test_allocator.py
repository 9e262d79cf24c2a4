"""The page allocator."""

import pytest

from segue.kvcache.allocator import PageAllocator


def test_every_page_is_allocated_once() -> None:
    allocator = PageAllocator(5)
    assert sorted(allocator.allocate(3) + allocator.allocate(2)) == [0, 1, 2, 3, 4]
    assert allocator.num_free == 0


def test_a_released_page_is_allocated_next() -> None:
    allocator = PageAllocator(5)
    pages = allocator.allocate(4)
    allocator.release([pages[1]])
    assert allocator.allocate(1) == [pages[1]]


def test_freeing_a_page_twice_is_an_error() -> None:
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.release(pages)


def test_allocating_more_pages_than_are_free_is_an_error() -> None:
    with pytest.raises(AssertionError, match="asked for 3 pages, 2 are free"):
        PageAllocator(2).allocate(3)
