"""The prefix index: what it predicts, what it forgets, and what it costs."""

from __future__ import annotations

import time
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.router.index import BLOCK, MOST_BLOCKS, MOST_RETIRED, PrefixIndex, keys_of


def prompt(*blocks: int, rest: int = 1) -> bytes:
    """Bytes of which each block is one number, repeated; ``rest``: bytes behind the last block."""
    return b"".join(block.to_bytes(4, "little") * (BLOCK // 4) for block in blocks) + b"]" * rest


def index_with(**chains: bytes) -> PrefixIndex:
    index = PrefixIndex()
    for worker, text in chains.items():
        index.observe(worker, "cache")
        index.add(keys_of(text), worker, "cache")
    return index


def test_a_worker_has_the_blocks_that_it_was_given_up_to_the_first_difference() -> None:
    index = index_with(a=prompt(1, 2, 3), b=prompt(1, 9, 3), c=prompt(5))
    assert index.match(keys_of(prompt(1, 2, 3, 4))) == {"a": 3 * BLOCK, "b": BLOCK}
    assert index.match(keys_of(prompt(4, 2, 3))) == {}
    assert index.match(keys_of(prompt(1, 2, 3, 4), b'"salt"')) == {}
    assert index.match([]) == {}


def test_a_block_counts_only_where_it_stood() -> None:
    index = index_with(a=prompt(1, 2))
    assert index.match(keys_of(prompt(2))) == {} and index.match(keys_of(prompt(2, 1))) == {}


def test_bytes_behind_the_last_full_block_are_left_out() -> None:
    assert keys_of(prompt(1, rest=BLOCK)) == keys_of(prompt(1)) and keys_of(prompt(rest=3)) == []


def test_the_last_byte_is_no_part_of_what_a_longer_prompt_begins_with() -> None:
    assert keys_of(prompt(1, rest=0)) == [] and len(keys_of(prompt(1, 2, rest=0))) == 1


def test_only_the_beginning_of_a_huge_prompt_is_compared() -> None:
    assert len(keys_of(bytes(BLOCK * (MOST_BLOCKS + 5)))) == MOST_BLOCKS


def test_another_cache_of_a_worker_holds_nothing() -> None:
    index = index_with(a=prompt(1), b=prompt(1))
    index.observe("a", "cache")
    assert index.match(keys_of(prompt(1))) == {"a": BLOCK, "b": BLOCK}
    index.observe("a", "flushed")
    assert index.match(keys_of(prompt(1))) == {"b": BLOCK}


def test_what_was_sent_to_the_earlier_cache_is_not_noted() -> None:
    index = index_with(a=b"")
    index.observe("a", "flushed")
    index.add(keys_of(prompt(1)), "a", "cache")
    index.add(keys_of(prompt(1)), "unknown", "cache")
    assert index.match(keys_of(prompt(1))) == {} and len(index) == 0


def test_a_worker_that_left_has_nothing_when_it_returns() -> None:
    index = index_with(a=prompt(1))
    index.forget("a")
    index.forget("a")
    index.observe("a", "cache")
    assert index.match(keys_of(prompt(1))) == {}


def test_less_than_predicted_takes_back_the_rest_of_the_prompt() -> None:
    keys = keys_of(prompt(1, 2, 3))
    index = index_with(a=prompt(1, 2, 3), b=prompt(1, 2, 3))
    index.correct(keys, "a", predicted=3 * BLOCK, cached=BLOCK + 5)
    assert index.match(keys) == {"a": BLOCK, "b": 3 * BLOCK}


def test_as_much_as_predicted_takes_nothing_back() -> None:
    """The rest of the prompt was not predicted: it was noted when the prompt was sent."""
    index = index_with(a=prompt(1, 2, 3))
    index.correct(keys_of(prompt(1, 2, 3)), "a", predicted=BLOCK, cached=BLOCK)
    index.correct(keys_of(prompt(1, 2, 3)), "unknown", predicted=BLOCK, cached=0)
    assert index.match(keys_of(prompt(1, 2, 3))) == {"a": 3 * BLOCK}


def test_a_correction_reaches_both_generations() -> None:
    index = PrefixIndex(capacity=4)
    index.observe("a", 0)
    keys = keys_of(prompt(1, 2))
    index.add(keys, "a", 0)
    index.add(keys_of(prompt(7, 8)), "a", 0)  # the generations turn
    index.correct(keys, "a", predicted=2 * BLOCK, cached=0)
    assert index.match(keys) == {}


def test_blocks_that_are_used_outlive_those_that_are_not() -> None:
    index = PrefixIndex(capacity=8)
    index.observe("a", 0)
    hot, cold = keys_of(prompt(1, 2)), keys_of(prompt(3, 4))
    index.add(cold, "a", 0)
    for number in range(10, 60):
        index.add(hot, "a", 0)
        index.add(keys_of(prompt(number)), "a", 0)
        assert len(index) <= 2 * 8 + 2
    assert index.match(hot) == {"a": 2 * BLOCK} and index.match(cold) == {}


def test_caches_that_change_often_do_not_make_the_sets_grow() -> None:
    index = PrefixIndex()
    for number in range(1000):
        index.observe("a", number)
        index.add(keys_of(prompt(1)), "a", number)
        assert index.match(keys_of(prompt(1))) == {"a": BLOCK}
    assert index._num_bits <= 3 * MOST_RETIRED


def test_a_bit_that_is_used_again_brings_nothing_along() -> None:
    """The block is used all the time, so that it passes from generation to generation."""
    index, keys = index_with(a=prompt(1), b=prompt(1)), keys_of(prompt(1))
    for number in range(10 * MOST_RETIRED):
        index.observe("a", number)
        index.add(keys, "b", "cache")
        assert index.match(keys) == {"b": BLOCK}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "observe", "forget", "correct"]),
        st.integers(0, 2),  # worker
        st.lists(st.integers(0, 2), max_size=4).map(tuple),  # blocks
        st.integers(0, 4),  # cached blocks
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.integers(0, 2**32))
def test_it_claims_only_what_a_worker_was_given_since_its_cache_is_this_one(
    events: list[tuple[str, int, tuple[int, ...], int]], seed: int
) -> None:
    """The truth is sets of prefixes. A large index knows the same, a small one may know less."""
    random = Random(seed)
    small, large = PrefixIndex(capacity=6), PrefixIndex()
    truth: dict[str, set[tuple[int, ...]]] = {}
    caches: dict[str, int] = {}
    for number, (event, which, blocks, cached) in enumerate(events):
        worker, keys = f"w{which}", keys_of(prompt(*blocks))
        prefixes = [blocks[: n + 1] for n in range(len(blocks))]
        if event == "add" and worker in truth:
            truth[worker] |= set(prefixes)
        elif event == "observe":
            truth[worker], caches[worker] = set(), number
        elif event == "forget":
            truth.pop(worker, None)
        elif event == "correct" and worker in truth and cached < len(blocks):
            truth[worker] -= set(prefixes[cached:])
        for index in (small, large):
            if event == "add":
                index.add(keys, worker, caches.get(worker))
            elif event == "observe":
                index.observe(worker, number)
            elif event == "forget":
                index.forget(worker)
            else:
                index.correct(keys, worker, len(blocks) * BLOCK, cached * BLOCK)
        if random.random() < 0.3:
            for _ in range(3 * random.choice([0, 1, MOST_RETIRED])):  # bits of others come and go
                small.observe("churn", random.random())
        wanted = tuple(random.choices(range(3), k=random.randrange(5)))
        expected = {}
        for name, has in truth.items():
            count = 0
            while count < len(wanted) and wanted[: count + 1] in has:
                count += 1
            if count:
                expected[name] = count * BLOCK
        assert large.match(keys_of(prompt(*wanted))) == expected
        found = small.match(keys_of(prompt(*wanted)))
        assert all(found[name] <= expected.get(name, 0) for name in found)


@pytest.mark.alone
def test_a_look_up_of_32_kib_costs_tens_of_microseconds() -> None:
    random, index = Random(0), PrefixIndex()
    workers = [f"w{n}" for n in range(64)]
    text = random.randbytes(32 << 10)
    for worker in workers:
        index.observe(worker, 0)
        index.add(keys_of(text)[: random.randrange(129)], worker, 0)
    best = 1.0
    for _ in range(200):
        began = time.perf_counter()
        index.match(keys_of(text))
        best = min(best, time.perf_counter() - began)
    assert best < 300e-6, f"{best * 1e6:.0f} us"
