"""Arrivals, and the figures computed from the times that clients recorded."""

import math
import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.launch import free_port
from segue.bench.client import Timeline
from segue.bench.load import SLO, Clients, Lengths, Mixture, Run, arrivals, keeps, percentile


@pytest.mark.parametrize("lengths", [Mixture().short, Mixture().long])
def test_the_mean_of_log_normal_lengths_is_that_of_drawn_ones(lengths):
    rng = random.Random(1)
    drawn = [lengths.draw(rng) for _ in range(40_000)]
    assert lengths.mean == pytest.approx(statistics.fmean(drawn), rel=0.02)


def test_the_mean_prompt_of_a_mixture_weighs_its_classes():
    mixture = Mixture(long_share=0.25)
    assert mixture.mean_prompt == 0.25 * mixture.long.mean + 0.75 * mixture.short.mean


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_requested_rate_and_burstiness(burstiness):
    times = arrivals(50.0, 400.0, burstiness, random.Random(1))
    gaps = [b - a for a, b in pairwise(times)]
    assert times == sorted(times)
    assert times[0] > 0 and times[-1] < 400
    assert len(times) == pytest.approx(50 * 400, rel=0.05)
    assert statistics.stdev(gaps) * 50 == pytest.approx(burstiness**-0.5, rel=0.05)  # of a Gamma


def test_the_same_seed_gives_the_same_requests():
    def jobs():
        rng = random.Random(3)
        return [Lengths(prompt=(3, 9), output=(1, 5)).job(rng, due) for due in arrivals(9, 2, 1.0, rng)]

    assert jobs() == jobs()
    assert all(3 <= len(job.prompt) <= 9 and 1 <= job.max_tokens <= 5 for job in jobs())


@pytest.mark.parametrize(
    ("share", "expected"), [(0.01, 1), (0.5, 5), (0.51, 6), (0.9, 9), (0.99, 10), (1.0, 10)]
)
def test_a_percentile_is_the_smallest_value_that_covers_the_share(share, expected):
    assert percentile([10, 3, 1, 2, 4, 9, 8, 5, 7, 6], share) == expected


def test_the_percentile_of_no_values_is_nan():
    assert math.isnan(percentile([], 0.5))


def timeline(due, *times, sent=None, error=None, given_up=False):
    return Timeline(
        due=due,
        sent=due if sent is None else sent,
        times=list(times),
        tokens=len(times),
        max_tokens=len(times),
        given_up=given_up,
        error=error,
    )


def test_a_summary_counts_the_events_within_its_time():
    run = Run(
        begin=100.0,
        timelines=[
            timeline(100.5, 100.9, 101.9, sent=101.0),  # due before the time; its second gap ends within
            timeline(101.0, 101.2, 101.3, 101.5, sent=101.01),
            timeline(102.0, 102.4, 103.1),  # its gap ends after the time
            timeline(102.5, error="HTTP/1.1 503"),
            timeline(102.6, given_up=True),
            timeline(103.0, 103.1),  # due after the time
        ],
        client_cpu=0.25,
    )
    found = run.summary(since=1.0, until=3.0, slo=SLO(ttft=0.3, gap=0.25))
    assert (found["requests"], found["failed"], found["unfinished"]) == (4, 1, 1)
    assert found["errors"] == ["HTTP/1.1 503"]
    assert found["ttft_s"]["max"] == pytest.approx(0.4)
    assert found["gap_s"]["max"] == pytest.approx(1.0)
    assert found["gap_s"]["p50"] == pytest.approx(0.2)
    assert found["end_s"]["max"] == pytest.approx(1.1)
    assert found["events_per_s"] == 5 / 2
    assert found["good_per_s"] == 1 / 2
    assert found["good_share"] == 1 / 4
    assert found["send_lag_p99_s"] == pytest.approx(0.01)


def test_prompt_tokens_are_those_of_the_requests_that_ended_in_time():
    timelines = [
        timeline(100.5, 101.0),  # one ended at the begin of the time, and counts
        timeline(101.0, 101.5, 102.5),
        timeline(101.0, 103.0),  # at its end
        timeline(102.5, 102.6, error="the stream was cut"),
        timeline(102.6, 102.7, given_up=True),
    ]
    with_prompts = [replace(each, prompt_tokens=10**i) for i, each in enumerate(timelines)]
    run = Run(begin=100.0, timelines=with_prompts, client_cpu=0.0)
    assert run.prompt_tokens_per_s(1.0, 3.0) == 11 / 2


@pytest.mark.parametrize(
    ("times", "good"),
    [
        ([0.1], True),
        ([0.3], False),
        ([0.1, 0.2, 0.3], True),
        ([0.1, 0.2, 0.5], False),
        ([0.1 + 0.01 * i for i in range(200)] + [9.0], True),  # one long gap in 200
    ],
)
def test_a_request_is_good_if_its_first_token_and_its_gaps_keep_the_slo(times, good):
    assert keeps(timeline(0.0, *times), SLO(ttft=0.2, gap=0.15)) is good


def test_a_closed_loop_that_ran_out_of_requests_is_an_error():
    url = f"http://127.0.0.1:{free_port()}"
    with (
        Clients(url, "m", 1) as clients,
        pytest.raises(RuntimeError, match="all 6 requests were sent before"),
    ):
        clients.closed_loop(2, 1.0, lengths=Lengths(prompt=(1, 1), output=(1, 1)), max_requests=6, seed=0)
