"""LAPS under load, on a simulated H200 with Qwen3-8B: what short prompts gain, and what that costs."""

from __future__ import annotations

import json
import random
from functools import lru_cache

import pytest

from bench.report import RESULTS
from bench.simulate import (
    HOST_OF_H200,
    NO_LAUNCHES,
    QWEN3_8B_H200,
    Arrival,
    Fate,
    HostCost,
    Simulation,
    arrival,
    saturation,
)
from segue.bench.load import Mixture, arrivals, percentile
from segue.config import EngineConfig
from segue.laps.cost import NO_WORK, StepWork, seconds_of
from segue.laps.limits import laps_limits
from segue.messages.control import EngineLimits, LapsLimits

LAPS = laps_limits(EngineConfig(enable_laps_scheduler=True), on_cpu=False)
REQUESTS = 1500


def simulation(laps: LapsLimits | None, seed: int = 0, host: HostCost = NO_LAUNCHES) -> Simulation:
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
    return Simulation(limits=limits, truth=QWEN3_8B_H200, host=host, noise=lambda: rng.uniform(0.95, 1.05))


def load(rate: float, seed: int = 1) -> list[Arrival]:
    """A load with Poisson arrivals; with an infinite rate all are there at once."""
    rng, mixture, now, found = random.Random(seed), Mixture(), 0.0, []
    for number in range(REQUESTS):
        now += rng.expovariate(rate) if rate < float("inf") else 0.0
        found.append(arrival(mixture, rng, now, number))
    return found


@lru_cache
def saturated(laps: LapsLimits | None) -> float:
    """Requests per second when all are there from the start."""
    return REQUESTS / max(fate.end for fate in simulation(laps).run(load(float("inf"))))


def p99(fates: list[Fate], *, is_short: bool) -> float:
    return percentile([f.first for f in fates if (len(f.arrival.prompt) <= 256) == is_short], 0.99)


def makespan(fates: list[Fate]) -> float:
    return max(fate.arrival.at + fate.end for fate in fates)


def prompts(*lengths: int) -> StepWork:
    work = NO_WORK
    for length in lengths:
        work = work.plus(length, 0)
    return work


def test_the_device_takes_as_long_as_was_measured() -> None:
    offline = json.loads((RESULTS / "gpu_offline_8b_simulated.json").read_text())["figures"]
    chunk = json.loads((RESULTS / "gpu_pause.json").read_text())["prefilling"]
    half = chunk["tokens"] // 2
    measured = {
        prompts(1024): offline["first_token prompt=1024"] / 1e3,
        prompts(3500): offline["first_token prompt=3500"] / 1e3,
        prompts(*[2048] * 4): 4 * 2048 / offline["prefill 64x2048"],
        NO_WORK.plus(half, half): chunk["chunk"] / 1e3,
    }
    for work, seconds in measured.items():
        assert seconds_of(QWEN3_8B_H200, work) == pytest.approx(seconds, rel=0.03), work


def test_first_come_first_served_has_the_times_that_were_measured() -> None:
    run = next(
        run
        for run in json.loads((RESULTS / "gpu_laps.json").read_text())["runs"]
        if run["arm"] == "first come"
    )
    rng, mixture = random.Random(0), Mixture()  # the load of the first repeat
    due = arrivals(run["rate"], 60.0, 1.0, rng)
    jobs = [mixture.job(rng, at) for at in due]
    requests = [Arrival(at=job.due, prompt=[i] * len(job.prompt), outputs=1) for i, job in enumerate(jobs)]
    fates = [f for f in simulation(None, host=HOST_OF_H200).run(requests) if f.arrival.at >= 9.0]
    measured = run["repeats"][0]
    for name in ("short", "long"):
        times = [f.first for f in fates if (len(f.arrival.prompt) <= 256) == (name == "short")]
        for which, share in (("p50", 0.5), ("p99", 0.99)):
            assert percentile(times, share) == pytest.approx(measured[name]["ttft_s"][which], rel=0.15)


@pytest.mark.parametrize("host", [NO_LAUNCHES, HOST_OF_H200])
@pytest.mark.parametrize("seed", range(2))
def test_at_four_fifths_of_the_saturation(seed: int, host: HostCost) -> None:
    requests = load(0.8 * saturated(None), seed)
    before, after = (simulation(laps, seed, host).run(requests) for laps in (None, LAPS))
    assert p99(after, is_short=True) <= 0.25 * p99(before, is_short=True)
    assert p99(after, is_short=False) <= 1.25 * p99(before, is_short=False)
    assert makespan(after) <= 1.08 * makespan(before)


def test_the_saturation_stays() -> None:
    assert saturated(LAPS) >= 0.93 * saturated(None)


def test_the_saturation_stays_with_so_many_clients_that_short_prompts_always_wait() -> None:
    before, after = (
        saturation(simulation(laps, host=HOST_OF_H200), Mixture(), concurrency=128, seconds=30.0)
        for laps in (None, LAPS)
    )
    assert after >= 0.96 * before


def test_the_device_hardly_ever_waits_for_a_launch() -> None:
    run = simulation(LAPS, host=HOST_OF_H200)
    saturation(run, Mixture(), concurrency=128, seconds=30.0)
    assert run.idle < 0.01 * 30.0


@pytest.mark.parametrize("tokens", [1, 256, 257, 16_000])
def test_a_lone_request_is_as_fast_as_before(tokens: int) -> None:
    lone = [Arrival(at=1.0, prompt=[1] * tokens, outputs=2)]
    before, after = (simulation(laps).run(lone)[0] for laps in (None, LAPS))
    assert (after.first, after.end) == (before.first, before.end)


def test_the_scheduler_learns_how_long_steps_take() -> None:
    run = simulation(LAPS)
    run.run(load(0.8 * saturated(None)))
    assert run.scheduler.cost.error_p50 < 0.15 and run.scheduler.cost.error_p90 < 0.4
