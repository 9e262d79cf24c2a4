"""The prefix cache."""

from random import Random

import pytest

from segue.kvcache.journal import ROOT, PageRecord
from segue.kvcache.prefix_cache import Node, PrefixCache


def insert(cache: PrefixCache, tokens: list[int], pages: list[int], epoch: int = 0, salt: str = "") -> Node:
    """Insert ``tokens`` page by page, and return the deepest node, which is locked."""
    node, size = cache.root(epoch, salt), cache.page_size
    cache.lock(node)
    for index, page in enumerate(pages):
        node = cache.extend(node, tuple(tokens[index * size : (index + 1) * size]), page)
    return node


def test_only_whole_pages_of_the_same_tokens_match() -> None:
    cache = PrefixCache(2)
    insert(cache, [1, 2, 3, 4], [10, 11])
    assert cache.pages(cache.match(0, [1, 2, 3, 4, 5], 5)) == [10, 11]
    assert cache.pages(cache.match(0, [1, 2, 3, 9], 4)) == [10]
    assert cache.pages(cache.match(0, [1, 2, 3, 4], 3)) == [10]
    assert cache.pages(cache.match(0, [2, 1], 2)) == []


def test_pages_of_another_epoch_never_match() -> None:
    cache = PrefixCache(2)
    insert(cache, [1, 2], [10], epoch=0)
    assert cache.pages(cache.match(1, [1, 2, 3], 3)) == []


def test_salts_never_share_pages() -> None:
    cache = PrefixCache(2)
    insert(cache, [1, 2], [10])
    insert(cache, [1, 2], [11], salt="one")
    assert cache.pages(cache.match(0, [1, 2, 3], 3)) == [10]
    assert cache.pages(cache.match(0, [1, 2, 3], 3, "one")) == [11]
    assert cache.pages(cache.match(0, [1, 2, 3], 3, "other")) == []
    assert cache.pages(cache.match(1, [1, 2, 3], 3, "one")) == []


def test_roots_that_nobody_needs_are_dropped_and_others_stay() -> None:
    cache = PrefixCache(1)
    cache.unlock(insert(cache, [1], [10], salt="pages"))
    held = cache.root(0, "held")  # by a request that has no page yet
    cache.lock(held)
    hidden = insert(cache, [2], [11], salt="hidden")
    cache.hide(hidden)
    for number in range(10_000):
        cache.match(0, [1], 1, f"salt {number}")
    assert len(list(cache.roots())) < 200
    assert cache.pages(cache.match(0, [1], 1, "pages")) == [10]
    assert cache.root(0, "held") is held
    cache.unlock(held)
    cache.unlock(hidden)
    assert all(root.locks == 0 for root in cache.roots()) and cache.num_evictable == 2


def test_of_two_pages_with_equal_tokens_the_first_stays() -> None:
    cache = PrefixCache(1)
    first = insert(cache, [1], [10])
    assert cache.extend(cache.root(0), (1,), 20) is first
    assert first.page == 10 and cache.num_pages == 1


def test_locked_pages_are_not_evictable() -> None:
    cache = PrefixCache(1)
    node = insert(cache, [1, 2, 3], [10, 11, 12])
    assert cache.num_evictable == 0
    cache.unlock(node)
    assert cache.num_evictable == 3


def test_a_page_locked_again_after_it_became_a_leaf_is_not_evicted() -> None:
    cache = PrefixCache(1)
    cache.unlock(insert(cache, [1], [10]))
    cache.unlock(insert(cache, [2], [20]))
    cache.extend(cache.root(0), (1,), 30)  # another request holds page 10
    assert cache.evict(1) == [20]


def test_leaves_are_evicted_before_their_parents_and_the_least_recently_used_first() -> None:
    cache = PrefixCache(1)
    cache.unlock(insert(cache, [1, 2], [10, 11]))
    cache.unlock(insert(cache, [3], [20]))
    recent = cache.match(0, [1], 1)
    cache.lock(recent)
    cache.unlock(recent)
    assert cache.evict(3) == [11, 20, 10]
    assert cache.num_pages == 0


def test_stale_leaf_entries_are_removed() -> None:
    cache = PrefixCache(1)
    node = insert(cache, [1], [10])
    cache.unlock(node)
    for _ in range(1000):
        cache.lock(node)
        cache.unlock(node)
    assert len(cache._leaves) < 100
    assert cache.evict(1) == [10]


@pytest.mark.parametrize("seed", range(8))
def test_held_pages_are_never_evicted_and_counts_are_right_after_any_operations(seed: int) -> None:
    random = Random(seed)
    cache, holders, free = PrefixCache(1), list[Node](), list(range(12))
    for _ in range(1000):
        match random.choice(["hold", "extend", "extend", "release", "discard", "evict"]):
            case "hold":
                tokens = random.choices([0, 1], k=random.randrange(4))
                holders.append(cache.match(0, tokens, len(tokens)))
                cache.lock(holders[-1])
            case "extend" if free and holders:
                which = random.randrange(len(holders))
                holders[which] = cache.extend(holders[which], (random.randrange(2),), free[-1])
                if holders[which].page == free[-1]:
                    free.pop()
            case "release" if holders:
                cache.unlock(holders.pop(random.randrange(len(holders))))
            case "discard" if holders:
                node = holders.pop(random.randrange(len(holders)))
                cache.unlock(node)
                free += cache.discard(node)
            case "evict" if cache.num_evictable:
                free += cache.evict(random.randint(1, min(3, cache.num_evictable)))
        held = {page for node in holders for page in cache.pages(node)}
        cached = [node.page for node in cache.nodes()]
        assert held <= set(cached)
        assert sorted(cached + free) == list(range(12))
        assert (cache.num_pages, cache.num_evictable) == (len(cached), len(cached) - len(held))


def test_discard_frees_a_path_up_to_a_node_that_others_use() -> None:
    cache = PrefixCache(1)
    root = cache.root(0)
    cache.lock(root)
    shared = cache.extend(root, (1,), 10)
    left = cache.extend(shared, (2,), 11)
    left = cache.extend(left, (3,), 12)
    cache.lock(shared)  # a second holder extends the same path
    right = cache.extend(shared, (4,), 13)
    cache.unlock(left)
    assert cache.discard(left) == [12, 11]
    assert cache.discard(right) == []  # locked
    cache.unlock(right)
    assert cache.discard(right) == [13, 10]
    assert cache.num_pages == 0 and list(cache.nodes()) == []


def test_a_hidden_path_never_matches() -> None:
    cache = PrefixCache(1)
    deep = insert(cache, [1, 2], [10, 11])
    cache.unlock(insert(cache, [1, 3], [10, 12]))  # with the same first page
    cache.unlock(insert(cache, [4], [13]))
    for _ in range(2):
        cache.hide(deep)
        assert cache.pages(cache.match(0, [1, 2, 3], 3)) == cache.pages(cache.match(0, [1, 3], 2)) == []
        assert cache.pages(cache.match(0, [4, 5], 2)) == [13]
    assert cache.pages(deep) == [10, 11]  # its holder keeps the pages
    assert sorted(node.page for node in cache.nodes()) == [10, 11, 12, 13]


def test_hidden_pages_are_evicted_as_usual() -> None:
    cache = PrefixCache(1)
    for page in (10, 20):  # the same tokens twice
        node = insert(cache, [1, 2], [page, page + 1])
        cache.hide(node)
        cache.unlock(node)
    assert cache.num_evictable == 4
    assert sorted(cache.evict(4)) == [10, 11, 20, 21]
    assert (cache.num_pages, list(cache.nodes())) == (0, [])


def test_the_root_cannot_be_hidden() -> None:
    cache = PrefixCache(1)
    cache.hide(cache.root(0))
    insert(cache, [1], [10])
    assert cache.pages(cache.match(0, [1, 2], 2)) == [10]


def test_adopted_pages_match_and_are_evicted_leaves_first_in_their_order() -> None:
    cache = PrefixCache(2)
    records = [
        PageRecord(5, 1, ROOT, 0, (1, 2)),
        PageRecord(3, 2, 5, 1, (3, 4)),
        PageRecord(9, 3, ROOT, 0, (7, 7)),
        PageRecord(4, 4, 5, 1, (5, 6)),
    ]
    cache.adopt(2, records)
    assert cache.num_pages == cache.num_evictable == 4
    assert cache.pages(cache.match(2, [1, 2, 3, 4, 9], 5)) == [5, 3]
    assert cache.pages(cache.match(0, [1, 2, 3, 4, 9], 5)) == []
    deepest = cache.match(2, [1, 2, 5, 6, 9], 5)
    cache.lock(deepest)
    assert cache.evict(2) == [3, 9]
    cache.unlock(deepest)
    assert cache.evict(2) == [4, 5] and cache.num_pages == 0


def test_hiding_a_page_names_all_that_goes_with_it_once() -> None:
    cache = PrefixCache(1)
    deepest, other = insert(cache, [1, 2, 3], [10, 11, 12]), insert(cache, [1, 4], [10, 13])
    insert(cache, [9], [14])
    assert cache.is_shared(cache.match(0, [1], 1)) and cache.is_shared(deepest)
    assert sorted(cache.hide(deepest)) == [10, 11, 12, 13]
    assert cache.hide(other) == []
    top = next(iter([*other.path()][::-1]))
    assert not cache.is_shared(top) and cache.is_shared(cache.match(0, [9], 1))
