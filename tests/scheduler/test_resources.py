"""The free list of KV pages."""

import pytest

from segue.messages.control import EngineLimits
from segue.scheduler.resources import Resources


def make(num_pages: int) -> Resources:
    return Resources(
        EngineLimits(
            num_pages=num_pages,
            page_size=4,
            max_seq_len=20,
            max_running_requests=2,
            chunked_prefill_size=16,
        )
    )


def test_every_page_is_taken_once() -> None:
    resources = make(5)
    assert sorted(resources.take_pages(3) + resources.take_pages(2)) == [0, 1, 2, 3, 4]
    assert resources.num_available == 0


def test_a_page_that_was_freed_is_taken_next() -> None:
    resources = make(5)
    pages = resources.take_pages(4)
    resources.free([pages[1]])
    assert resources.take_pages(1) == [pages[1]]


def test_freeing_a_page_twice_is_an_error() -> None:
    resources = make(2)
    pages = resources.take_pages(1)
    resources.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        resources.free(pages)


def test_taking_more_pages_than_are_free_or_evictable_is_an_error() -> None:
    with pytest.raises(AssertionError, match="asked to evict 1 pages of 0"):
        make(2).take_pages(3)


def test_cached_pages_are_evicted_when_too_few_are_free() -> None:
    resources = make(2)
    pages = resources.take_pages(2)
    root = resources.prefix.root(0)
    resources.prefix.lock(root)
    node = resources.prefix.extend(root, (1, 2, 3, 4), pages[0])
    resources.prefix.unlock(node)
    assert (len(resources.free_pages), resources.num_available) == (0, 1)
    assert resources.take_pages(1) == [pages[0]]
