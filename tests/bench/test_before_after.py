from __future__ import annotations

import pytest

from bench.before_after import ORDER, compared


def blocks(name: str, before: float, after: float, again: float) -> list[list[tuple[str, dict[str, float]]]]:
    value = {"before": before, "after": after, "before again": again}
    return [[(side, {name: value[side]}) for side in ORDER] for _ in range(3)]


@pytest.mark.parametrize(
    ("name", "after", "worse"),
    [
        ("page size 16, ms", 1.03, True),
        ("page size 16, ms", 0.9, False),
        ("page size 16, ms", 1.019, False),
        ("tokens/s", 0.97, True),
        ("tokens/s", 1.1, False),
        ("tokens/s", 0.985, False),
    ],
)
def test_a_loss_above_two_percent_counts_in_either_direction(name: str, after: float, worse: bool) -> None:
    found = compared(blocks(name, 1.0, after, 1.0), name)
    assert found["worse"] is worse
    assert found["change"] == pytest.approx(after - 1)
    assert found["spread"] == 0


def test_a_loss_within_the_spread_of_the_same_commit_does_not_count() -> None:
    assert not compared(blocks("tokens/s", 1.0, 0.95, 1.06), "tokens/s")["worse"]
    assert compared(blocks("tokens/s", 1.0, 0.93, 1.06), "tokens/s")["worse"]


def test_a_drift_of_the_machine_within_a_block_cancels_out() -> None:
    drifting = [[(side, {"ms": 1.0 + 0.1 * place}) for place, side in enumerate(ORDER)]]
    found = compared(drifting, "ms")
    assert found["change"] == pytest.approx(0)
    assert found["spread"] == pytest.approx(0)
