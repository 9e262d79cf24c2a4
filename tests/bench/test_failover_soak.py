"""What a soak takes for a leak."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from bench.failover_soak import ProcessSize, Sizes, late_growth, late_leaks, leaks
from bench.report import RESULTS

NUM_SAMPLES = 19


def samples(kib: Callable[[int], int], mappings: Callable[[int], int] = lambda number: 350) -> list[Sizes]:
    """Samples of a router, by the memory and the mappings of each."""
    return [
        {
            "router": ProcessSize(
                descriptors=18, mappings=mappings(number), pss_kib=kib(number), pss_file_kib=1800
            )
        }
        for number in range(NUM_SAMPLES)
    ]


@pytest.mark.parametrize(
    ("found", "leaks"),
    [
        (samples(lambda number: 45_000 + min(number, 5) * 300), 0),  # it is taken once
        (samples(lambda number: 45_000 + number * 40), 1),
        (samples(lambda number: 45_000, lambda number: 350 + number // 8), 1),
        (samples(lambda number: 45_000, lambda number: 350 + (number > 1)), 0),
    ],
)
def test_what_still_grows_behind_the_middle_is_a_leak(found: list[Sizes], leaks: int) -> None:
    assert len(late_leaks(late_growth(found, 3))) == leaks


def test_few_samples_have_no_middle() -> None:
    assert late_growth(samples(lambda number: number << 20)[:11], 3) == {}


def test_the_stored_soak_has_no_leak() -> None:
    figures = json.loads((RESULTS / "cpu_failover_soak.json").read_text())
    fields = ProcessSize.__dataclass_fields__
    found = [
        {row["process"]: ProcessSize(**{name: row[name] for name in fields}) for row in sample}
        for sample in figures["samples"]
    ]
    assert late_leaks(late_growth(found, 3)) == []
    grown = {name: ProcessSize(**size) for name, size in figures["growth"].items()}
    assert leaks(found[0], grown) == figures["leaks"] == []
