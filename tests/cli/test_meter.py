"""Rates and percentiles from metrics."""

from __future__ import annotations

import math

import pytest

from segue.cli.meter import EngineSample, Meter, quantile, samples_of, state_of

TEXT = """# TYPE segue:engine_steps_total counter
segue:engine_steps_total{worker="a:1",model_name="m"} %(steps)d
# TYPE segue:generation_tokens_total counter
segue:generation_tokens_total{worker="a:1",model_name="m"} %(tokens)d
# TYPE segue:num_requests_running gauge
segue:num_requests_running{worker="a:1",model_name="m"} 2
# TYPE segue:engine_state gauge
segue:engine_state{worker="a:1",model_name="m",state="active"} 1
segue:engine_state{worker="a:1",model_name="m",state="dead"} 0
# TYPE segue:paused gauge
segue:paused{worker="a:1",model_name="m",mode="wait"} %(paused)d
# TYPE segue:time_to_first_token_seconds histogram
segue:time_to_first_token_seconds_bucket{worker="a:1",model_name="m",le="0.1"} %(fast)d
segue:time_to_first_token_seconds_bucket{worker="a:1",model_name="m",le="0.2"} %(all)d
segue:time_to_first_token_seconds_bucket{worker="a:1",model_name="m",le="+Inf"} %(all)d
# TYPE segue:router_worker_scraped gauge
segue:router_worker_scraped{worker="a:1"} 1
segue:router_worker_scraped{worker="b:2"} 0
# TYPE other gauge
other 1
"""


def samples(
    steps: int, tokens: int, fast: int = 0, all_: int = 0, paused: int = 0
) -> dict[str, EngineSample]:
    values = {"steps": steps, "tokens": tokens, "fast": fast, "all": all_, "paused": paused}
    return samples_of(TEXT % values)


def test_rates_and_percentiles_are_those_of_the_window() -> None:
    meter = Meter(10.0)
    assert meter.add(0.0, samples(1, 100, fast=4, all_=4))["a:1"].ttft_s == (0.05, pytest.approx(0.099))
    reading = meter.add(2.0, samples(2, 300, fast=4, all_=8))["a:1"]
    assert (reading.state, reading.running, reading.waiting, reading.tokens_per_s) == ("active", 2, None, 100)
    assert reading.ttft_s == (pytest.approx(0.15), pytest.approx(0.199))  # of the four new values
    assert meter.add(14.0, samples(3, 300, fast=4, all_=8))["a:1"].tokens_per_s == 0
    meter.forget()
    assert meter.add(15.0, samples(4, 900))["a:1"].tokens_per_s is None


def test_an_engine_that_has_started_anew_begins_anew() -> None:
    meter = Meter(10.0)
    meter.add(0.0, samples(50, 1000))
    assert meter.add(1.0, samples(1, 5))["a:1"].tokens_per_s is None
    assert meter.add(2.0, samples(2, 10))["a:1"].tokens_per_s == 5


def test_a_worker_that_has_not_answered_is_there() -> None:
    found = samples(1, 1)
    assert set(found) == {"a:1", "b:2"}
    assert state_of(found["b:2"]) == "no answer"


@pytest.mark.parametrize(
    ("values", "states", "expected"),
    [
        ({}, {"engine_state": "draining"}, "draining"),
        ({}, {"engine_state": "active", "paused": "retract"}, "paused (retract)"),
        ({"weights_poisoned": 1.0}, {"engine_state": "active"}, "poisoned"),
        ({"engine_hung": 1.0, "weights_poisoned": 1.0}, {"engine_state": "active"}, "hung"),
    ],
)
def test_the_state_says_what_keeps_an_engine_from_generating(
    values: dict[str, float], states: dict[str, str], expected: str
) -> None:
    assert state_of(EngineSample(values=values, states=states)) == expected


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ({}, 0.5, None),
        ({1.0: 0, math.inf: 0}, 0.5, None),
        ({1.0: 0, 2.0: 10, math.inf: 10}, 0.5, 1.5),
        ({1.0: 5, 2.0: 10, math.inf: 10}, 0.99, 1.98),
        ({1.0: 0, 2.0: 0, math.inf: 3}, 0.5, 2.0),  # above the last bound
    ],
)
def test_a_quantile_is_a_straight_line_within_a_bucket(
    buckets: dict[float, float], share: float, expected: float | None
) -> None:
    assert quantile(buckets, share) == (None if expected is None else pytest.approx(expected))
