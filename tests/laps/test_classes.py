"""Short and long prompts."""

from __future__ import annotations

import pytest

from segue.laps.classes import classify
from segue.laps.cost import Coefficients

NOTHING_KNOWN = Coefficients()
# 300 tokens are still hidden behind the reading of the weights.
DEVICE = Coefficients(floor=0.008, start=0.001, per_token=2e-5, per_pair=1e-9)


@pytest.mark.parametrize(
    "tokens, history, coefficients, expected",
    [
        (256, 0, NOTHING_KNOWN, "short"),
        (257, 0, NOTHING_KNOWN, "long"),
        (256, 100_000, DEVICE, "short"),
        (300, 0, DEVICE, "short"),
        (300, 10_000, DEVICE, "long"),
        (400, 0, DEVICE, "long"),
    ],
)
def test_the_class_of_a_prompt(tokens: int, history: int, coefficients: Coefficients, expected: str) -> None:
    assert classify(tokens, history, 256, coefficients) == expected
