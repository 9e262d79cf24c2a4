from __future__ import annotations

import statistics
import time

import pytest

from bench.host_cost import BAR_MS, measure
from segue.config import EngineConfig
from segue.messages.control import EngineLimits, LapsLimits
from segue.messages.requests import AddRequest, SamplingParams, pack_ids
from segue.messages.steps import StepResult
from segue.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.alone

PATIENCE_S = 60.0  # a thread's own time also counts while a shared core serves another machine


def test_a_decode_step_of_256_requests_stays_below_the_host_cost_limit() -> None:
    deadline = time.monotonic() + PATIENCE_S
    best = BAR_MS + 1.0
    while best > BAR_MS and time.monotonic() < deadline:
        figures = measure(num_requests=256, num_steps=64, page_size=16, clock=time.thread_time)
        best = min(best, figures["total"])
    assert best <= BAR_MS, f"the best run took {best:.3f} ms per step"


def plan_seconds(laps: LapsLimits | None) -> float:
    """The time of a plan with 4,096 waiting requests, 128 that decode, and room for the next prompts."""
    limits = EngineLimits(
        num_pages=100_000, page_size=64, max_seq_len=32_768, max_running_requests=256,
        chunked_prefill_size=8192, laps=laps,
    )  # fmt: skip
    scheduler, now = Scheduler(limits, EngineConfig(max_queued_requests=8192)), 1.0

    def add(rid: str, tokens: int, outputs: int) -> None:
        params = SamplingParams(max_new_tokens=outputs)
        scheduler.add(AddRequest(rid=rid, prompt=pack_ids([1] * tokens), params=params), now)

    def step() -> float:
        nonlocal now
        began = time.thread_time()
        plan = scheduler.plan(now)
        took = time.thread_time() - began
        assert plan is not None
        now += 0.02
        scheduler.apply(StepResult(plan.step, [2] * sum(plan.samples), 0.02, graph="decode", eager=None), now)
        return took

    for index in range(128):
        add(f"r{index}", 10, 4000)
    while scheduler.waiting:
        step()
    for index in range(4096):
        add(f"w{index}", 3000 if index % 20 == 0 else 100, 1)
    return statistics.median(step() for _ in range(40))


def test_length_aware_prefill_costs_a_plan_little() -> None:
    laps = LapsLimits(threshold=256, long_share=0.2, slo_s=0.4, blocking_s=0.03, window_s=0.006)
    deadline = time.monotonic() + PATIENCE_S
    differences: list[float] = []
    while time.monotonic() < deadline:
        differences.append(plan_seconds(laps) - plan_seconds(None))
        if len(differences) >= 5 and min(differences) <= 20e-6:
            break
    print(f"a plan takes {1e6 * statistics.median(differences):+.0f} us with LAPS")
    assert min(differences) <= 20e-6
