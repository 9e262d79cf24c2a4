"""What processes that start others need."""

from __future__ import annotations

import pytest

from segue.children import RestartRule, describe_exit


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL, perhaps"), (-11, "SIGSEGV"), (-40, "signal 40")],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert words in describe_exit(code)


def test_pauses_begin_with_the_second_death_in_a_row_and_grow_to_a_limit() -> None:
    rule = RestartRule(backoff_s=0.5, max_backoff_s=3.0)
    assert [rule.pause_s(deaths) for deaths in (1, 2, 3, 4, 5, 2000)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("start_s", "ready_s", "counted"),
    [
        (0.1, 0.0, 8),
        (0.1, 4.9, 8),
        (0.1, 5.0, 1),  # the least steady time
        (300.0, 299.0, 8),  # a start that takes longer asks for a longer time
        (300.0, 300.0, 1),
    ],
)
def test_which_death_makes_earlier_ones_forgotten(start_s: float, ready_s: float, counted: int) -> None:
    assert RestartRule(steady_s=5.0).count(7, start_s, ready_s) == counted
