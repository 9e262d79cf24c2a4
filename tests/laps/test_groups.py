"""LAPS groups: who is in which, and when a worker moves."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.laps.groups import (
    PrefillGroups,
    Pressure,
    RebalanceRules,
    follow,
    other,
    rebalance,
    split,
)

RULES = RebalanceRules()
SIX = ("a", "b", "c", "d", "e", "f")


def queues(**seconds: float) -> Pressure:
    pressure = Pressure()
    for worker, queued_s in seconds.items():
        pressure.note(worker, queued_s, 0.0)
    return pressure


def checked(
    groups: PrefillGroups, pressure: Pressure, start: float, seconds: float, rules: RebalanceRules = RULES
) -> list[PrefillGroups]:
    """The groups after each call, ten per second, if the queues stay as they are."""
    history = [groups]
    for tick in range(int(seconds * 10) + 1):
        history.append(rebalance(history[-1], pressure, rules, start + tick / 10))
    return history


def test_the_first_half_is_for_short_prompts() -> None:
    groups = split(("a", "b", "c"), RULES, 0.0)
    assert (groups.short, groups.long, groups.off) == (("a",), ("b", "c"), "")
    assert [groups.of(worker) for worker in ("a", "c", "z")] == ["short", "long", None]


def test_one_worker_makes_no_groups_and_the_reason_says_so() -> None:
    assert "at least 2 prefill workers, and there is only a" in split(("a",), RULES, 0.0).off
    assert "there is none" in split((), RULES, 0.0).off


def test_groups_begin_when_a_second_worker_joins_and_end_when_it_leaves() -> None:
    alone = split(("a",), RULES, 0.0)
    both = follow(alone, ("a", "b"), Pressure(), RULES, 1.0)
    assert (both.short, both.long) == (("a",), ("b",))
    again = follow(both, ("b",), Pressure(), RULES, 2.0)
    assert again.off and not again.short and not again.long


def test_a_worker_that_joins_goes_to_the_smaller_group() -> None:
    groups = split(("a", "b"), RULES, 0.0)
    groups = follow(groups, ("a", "b", "c"), Pressure(), RULES, 1.0)
    assert (groups.short, groups.long) == (("a",), ("b", "c"))
    groups = follow(groups, ("a", "b", "c", "d"), Pressure(), RULES, 1.0)
    assert (groups.short, groups.long) == (("a", "d"), ("b", "c"))


def test_a_worker_that_joins_goes_to_the_group_that_has_too_much_to_do() -> None:
    groups = follow(split(SIX[:3], RULES, 0.0), SIX[:4], queues(b=3.0, c=3.0), RULES, 1.0)
    assert (groups.short, groups.long) == (("a",), ("b", "c", "d"))


def test_an_empty_group_gets_the_least_loaded_worker_of_the_other_at_once() -> None:
    groups = follow(split(SIX[:4], RULES, 0.0), ("c", "d"), queues(c=2.0, d=1.0), RULES, 0.1)
    assert (groups.short, groups.long) == (("d",), ("c",))
    assert groups.last_move is not None and groups.last_move.reason == "the short group was empty"


def test_groups_stay_the_same_object_while_nobody_joins_or_leaves() -> None:
    groups = split(SIX, RULES, 0.0)
    assert follow(groups, SIX, Pressure(), RULES, 1.0) is groups


def test_a_queue_counts_as_its_average_over_a_second() -> None:
    pressure = queues(a=1.0)
    pressure.note("a", 0.0, 1.0)
    assert pressure.of("a") == pytest.approx(exp(-1))
    pressure.forget("a")
    assert pressure.of("a") == 0.0


def test_the_pressure_of_few_workers_is_near_the_most_loaded_one() -> None:
    pressure = queues(a=1.0, b=2.0)
    assert pressure.of_group(()) == 0.0
    assert pressure.of_group("a") == 1.0
    assert pressure.of_group("ab") == pytest.approx(1.9)
    assert pressure.of_group("abc") == pytest.approx(1.8)  # c is idle
    many = queues(**{f"w{n}": float(n) for n in range(11)})
    assert many.of_group(f"w{n}" for n in range(11)) == pytest.approx(9.0)


@pytest.mark.parametrize("busy", ["short", "long"])
def test_skew_moves_exactly_the_least_loaded_worker_of_the_other_group(busy: str) -> None:
    groups = split(SIX, RULES, 0.0)
    loads = dict.fromkeys(groups.members("short" if busy == "short" else "long"), 4.0)
    idle = [worker for worker in SIX if worker not in loads]
    loads |= {idle[0]: 1.0, idle[1]: 0.2, idle[2]: 0.5}
    moved = checked(groups, queues(**loads), 10.0, 4.0)[-1]
    move = moved.last_move
    assert move is not None and (moved.num_moves, move.worker, move.to) == (1, idle[1], busy)
    assert moved.of(idle[1]) == busy and f"the {busy} group had 4.00 s" in move.reason


def test_one_check_is_not_enough() -> None:
    groups, skewed, even = split(SIX, RULES, 0.0), queues(a=5.0, b=5.0), queues()
    for second in range(10, 30):
        groups = rebalance(groups, skewed if second % 2 else even, RULES, float(second))
    assert groups.num_moves == 0


def test_two_groups_that_are_pressed_in_turn_do_not_count_as_one() -> None:
    groups, short, long = split(SIX, RULES, 0.0), queues(a=5.0, b=5.0), queues(e=5.0, f=5.0)
    for second in range(10, 30):
        groups = rebalance(groups, short if second % 2 else long, RULES, float(second))
    assert groups.num_moves == 0


def test_checks_are_a_second_apart_however_often_they_are_asked_for() -> None:
    history = checked(split(SIX, RULES, 0.0), queues(a=5.0, b=5.0), 10.0, 0.9)
    assert history[-1].num_moves == 0
    assert checked(history[-1], queues(a=5.0, b=5.0), 11.0, 0.0)[-1].num_moves == 1


def test_the_last_worker_of_a_group_stays() -> None:
    groups = checked(split(SIX, RULES, 0.0), queues(a=9.0, b=9.0, c=9.0), 10.0, 60.0)[-1]
    assert len(groups.long) == 1 and groups.num_moves == 2


def test_little_work_moves_nobody_however_skewed_it_is() -> None:
    assert checked(split(SIX, RULES, 0.0), queues(a=0.04, b=0.04, c=0.04), 10.0, 30.0)[-1].num_moves == 0


def test_an_interval_passes_after_the_split_too() -> None:
    moves = [groups.num_moves for groups in checked(split(SIX, RULES, 0.0), queues(a=9.0, b=9.0), 0.0, 5.0)]
    assert moves[-2:] == [0, 1]


def test_no_groups_are_not_rebalanced() -> None:
    off = split(("a",), RULES, 0.0)
    assert rebalance(off, queues(a=9.0), RULES, 100.0) is off


SECONDS = st.floats(0.0, 10.0)


@settings(max_examples=100, deadline=None)
@given(
    loads=st.lists(st.lists(SECONDS, min_size=7, max_size=7), min_size=1, max_size=25),
    interval=st.sampled_from([0.5, 2.0, 5.0]),
    ratio=st.sampled_from([1.0, 2.0, 4.0]),
    present=st.lists(st.integers(0, 7), max_size=25),
)
def test_whatever_happens_each_group_keeps_a_worker_and_moves_keep_their_interval(
    loads: list[list[float]], interval: float, ratio: float, present: list[int]
) -> None:
    rules = RebalanceRules(interval_s=interval, ratio=ratio)
    workers = [f"w{n}" for n in range(7)]
    groups, pressure, moved_at = split(workers, rules, 0.0), Pressure(), 0.0
    for tick in range(100):
        now = tick * 0.3
        for worker, queued_s in zip(workers, loads[tick % len(loads)], strict=True):
            pressure.note(worker, queued_s, now)
        if tick % 10 == 9 and present:
            there = workers[: present[tick % len(present)]]
            groups = follow(groups, there, pressure, rules, now)
            assert {*groups.short, *groups.long} == (set() if len(there) < 2 else set(there))
            if groups.last_move is not None and groups.last_move.at == now:
                moved_at = now
        before = groups
        groups = rebalance(before, pressure, rules, now)
        if groups.off:
            continue
        assert groups.short and groups.long and not set(groups.short) & set(groups.long)
        if groups.num_moves != before.num_moves:
            move = groups.last_move
            assert move is not None and groups.num_moves == before.num_moves + 1
            assert now - moved_at >= interval - 1e-9
            moved_at = now
            assert {*groups.members(move.to)} == {*before.members(move.to), move.worker}
            assert {*before.members(other(move.to))} == {*groups.members(other(move.to)), move.worker}


@settings(max_examples=50, deadline=None)
@given(loads=st.lists(st.lists(st.floats(1.0, 1.9), min_size=6, max_size=6), min_size=1, max_size=20))
def test_symmetric_load_moves_nobody(loads: list[list[float]]) -> None:
    """All queues differ by less than the ratio."""
    groups, pressure = split(SIX, RULES, 0.0), Pressure()
    for tick in range(300):
        for worker, queued_s in zip(SIX, loads[tick % len(loads)], strict=True):
            pressure.note(worker, queued_s, tick / 10)
        groups = rebalance(groups, pressure, RULES, tick / 10)
    assert groups.num_moves == 0
