"""The picture of one request that is handed over: what begins when, and what the terminal shows of it."""

from __future__ import annotations

from typing import Any

import pytest

from bench.pd_timeline import WIDTH, RequestTimes, lanes, text, times_of
from bench.plot import Lane, LaneSpan


def entry(part: str, *events: tuple[str, float] | tuple[str, float, int]) -> dict[str, Any]:
    """What an engine reports of a request, with times in seconds."""
    return {
        "part": part,
        "handoff": 7,
        "rid": "r",
        "num_tokens": 40,
        "events": [
            {"event": name, "at": at, **({"count": count[0]} if count else {})} for name, at, *count in events
        ],
    }


PREFILL = entry(
    "prefill",
    ("begin", 10.010),
    ("launched", 10.011, 16),
    ("ready", 10.012),
    ("grant", 10.013),
    ("posted", 10.013, 1),
    ("launched", 10.020, 32),  # while the first chunk runs
    ("posted", 10.021, 2),
    ("computed", 10.030, 16),
    ("pushed", 10.032),
    ("launched", 10.035, 40),
    ("posted", 10.035, 3),
    ("computed", 10.050, 32),
    ("pushed", 10.053),
    ("computed", 10.060, 40),
    ("first", 10.061),
    ("pushed", 10.062),
    ("complete", 10.062),
)
DECODE = entry(
    "decode",
    ("claim", 10.009),
    ("reserve", 10.012),
    ("room", 10.013),
    ("first", 10.062),
    ("sent", 10.063),
    ("adopted", 10.064),
)


@pytest.fixture
def times() -> RequestTimes:
    return times_of(PREFILL, DECODE, begin=10.0, tokens=[10.062, 10.070, 10.075])


@pytest.fixture
def found(times: RequestTimes) -> dict[str, Lane]:
    return {lane.label: lane for lane in lanes(times)}


def spans(lane: Lane) -> list[tuple[int, int]]:
    """The begin and the end of each span in milliseconds."""
    return [(round(span.begin), round(span.end)) for span in lane.spans]


def test_times_are_milliseconds_since_the_client_sent_the_request(times: RequestTimes) -> None:
    assert times.at("prefill", "begin") == pytest.approx(10)
    assert times.at("decode", "adopted") == pytest.approx(64)
    assert times.tokens == pytest.approx([62, 70, 75])


def test_a_chunk_begins_when_it_is_launched_and_the_one_before_it_has_ended(found: dict[str, Lane]) -> None:
    assert spans(found["prefill engine: queued"]) == [(10, 11)]
    assert spans(found["prefill engine: prompt"]) == [(11, 30), (30, 50), (50, 60)]
    assert "40 tokens in 3 chunks, 49 ms" in found["prefill engine: prompt"].text


def test_a_push_begins_when_its_last_chunk_is_computed(found: dict[str, Lane]) -> None:
    assert spans(found["pages pushed"]) == [(30, 32), (50, 53), (60, 62)]
    assert found["pages pushed"].text == "3 pages, 7.0 ms"


def test_the_decode_engine_waits_for_pages_and_for_the_kv_and_then_adopts_it(found: dict[str, Lane]) -> None:
    assert spans(found["decode engine: waits"]) == [(9, 13), (13, 63), (63, 64)]
    assert spans(found["decode engine: tokens"]) == [(64, 70), (70, 75)]
    assert "the first of them 9.0 ms after token 1" in found["decode engine: tokens"].text


def test_the_terminal_shows_each_span_in_proportion() -> None:
    drawn = text(
        [
            Lane("a", "#000", [LaneSpan(0.0, 50.0, 0), LaneSpan(50.0, 100.0, 2)], "one"),
            Lane("bcd", "#000", [LaneSpan(100.0, 100.0, 1)], "two"),
        ]
    )
    half = WIDTH // 2
    assert drawn.splitlines() == [
        f"a   |{'█' * half}{'░' * half}| one",
        f"bcd |{' ' * (WIDTH - 1)}▓| two",
    ]
