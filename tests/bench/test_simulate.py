"""LAPS under load, on a simulated H200 with Qwen3-8B: what short prompts gain, and what that costs."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest

from bench.load import Mixture, percentile
from bench.simulate import QWEN3_8B_H200, Arrival, Fate, Simulation, arrival
from segue.messages.control import EngineLimits, LapsLimits

LAPS = LapsLimits(threshold=256, long_share=0.2, slo_s=0.4, blocking_s=0.03, window_s=0.006)
REQUESTS = 1500


def simulation(laps: LapsLimits | None, seed: int = 0) -> Simulation:
    rng = random.Random(seed)
    limits = EngineLimits(
        num_pages=10_000,
        page_size=64,
        max_seq_len=32_768,
        max_running_requests=256,
        chunked_prefill_size=8192,
        step_sizes=list(range(64, 1025, 64)),
        laps=laps,
    )
    return Simulation(limits=limits, truth=QWEN3_8B_H200, noise=lambda: rng.uniform(0.95, 1.05))


def load(rate: float, seed: int = 1) -> list[Arrival]:
    """A load with Poisson arrivals; with an infinite rate all are there at once."""
    rng, mixture, now, found = random.Random(seed), Mixture(), 0.0, []
    for number in range(REQUESTS):
        now += rng.expovariate(rate) if rate < float("inf") else 0.0
        found.append(arrival(mixture, rng, now, number))
    return found


@lru_cache
def saturation(laps: LapsLimits | None) -> float:
    """Requests per second when all are there from the start."""
    return REQUESTS / max(fate.end for fate in simulation(laps).run(load(float("inf"))))


def p99(fates: list[Fate], *, is_short: bool) -> float:
    return percentile([f.first for f in fates if (len(f.arrival.prompt) <= 256) == is_short], 0.99)


def makespan(fates: list[Fate]) -> float:
    return max(fate.arrival.at + fate.end for fate in fates)


@pytest.mark.parametrize("seed", range(2))
def test_at_four_fifths_of_the_saturation(seed: int) -> None:
    before, after = (simulation(laps, seed).run(load(0.8 * saturation(None), seed)) for laps in (None, LAPS))
    assert p99(after, is_short=True) <= 0.25 * p99(before, is_short=True)
    assert p99(after, is_short=False) <= 1.25 * p99(before, is_short=False)
    assert makespan(after) <= 1.08 * makespan(before)


def test_the_saturation_stays() -> None:
    assert saturation(LAPS) >= 0.93 * saturation(None)


@pytest.mark.parametrize("tokens", [1, 256, 257, 16_000])
def test_a_lone_request_is_as_fast_as_before(tokens: int) -> None:
    lone = [Arrival(at=1.0, prompt=[1] * tokens, outputs=2)]
    before, after = (simulation(laps).run(lone)[0] for laps in (None, LAPS))
    assert (after.first, after.end) == (before.first, before.end)


def test_the_scheduler_learns_how_long_steps_take() -> None:
    run = simulation(LAPS)
    run.run(load(0.8 * saturation(None)))
    assert run.scheduler.cost.error_p50 < 0.15 and run.scheduler.cost.error_p90 < 0.4
