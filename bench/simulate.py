"""The pure scheduler on a device that takes as long as a cost model says: no model, no clock, no luck.

A turn is that of `segue.worker.loop`, with overlap: messages, a plan, then the oldest result. So what LAPS
does to the latencies of a load is known within seconds, on any machine, and the same each time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from bench.load import Mixture
from segue.config import EngineConfig
from segue.laps.cost import Coefficients, seconds_of
from segue.messages.control import EngineLimits
from segue.messages.requests import AddRequest, SamplingParams, pack_ids
from segue.messages.steps import StepResult
from segue.scheduler.request import Step
from segue.scheduler.scheduler import Scheduler

# About those of Qwen3-8B on an H200: 43,300 prompt tokens per second in chunks of 8,192.
QWEN3_8B_H200 = Coefficients(floor=0.0052, start=0.0012, per_token=2.2e-5, per_pair=1.6e-10, per_kv=4.0e-8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a load."""

    at: float  # seconds
    prompt: Sequence[int]
    outputs: int  # tokens


@dataclass(slots=True, kw_only=True)
class Fate:
    """What became of a request: its times in seconds after its arrival."""

    arrival: Arrival
    first: float = inf  # to its first token
    end: float = inf  # to its last token, or the last one so far
    gaps: list[float] = field(default_factory=list)  # between its tokens


@dataclass(eq=False)
class Simulation:
    """One scheduler and one device, for one load."""

    limits: EngineLimits
    truth: Coefficients
    config: EngineConfig = field(default_factory=EngineConfig)
    host_s: float = 0.0003  # that the host takes for a turn
    noise: Callable[[], float] = lambda: 1.0  # what a step's time is multiplied by
    overlap: bool = True

    def __post_init__(self) -> None:
        """Make the scheduler."""
        self.scheduler = Scheduler(self.limits, self.config)
        self.fates: dict[str, Fate] = {}
        self.free = 0.0  # when the device has done all that was launched

    def run(self, load: Sequence[Arrival]) -> list[Fate]:
        """Send a load, which is in the order of arrival; returns the fates of its requests."""
        scheduler, waiting, now = self.scheduler, deque(load), 0.0
        in_flight: deque[tuple[float, StepResult]] = deque()

        def next_arrival() -> float:
            return waiting[0].at if waiting else inf

        def deliver() -> None:
            while next_arrival() <= now:
                self.add(waiting.popleft(), now)

        while waiting or in_flight or scheduler.requests:
            deliver()
            while in_flight and (until := min(scheduler.launch_at(now), in_flight[0][0])) > now:
                now = min(until, next_arrival())
                deliver()
            plan = scheduler.plan(now)
            if plan is not None:
                now += self.host_s
                self.launch(scheduler.in_flight[-1], now)
                in_flight.append((self.free, StepResult(plan.step, [1] * sum(plan.samples), 0.001)))
            if in_flight and (plan is None or len(in_flight) == 1 + self.overlap):
                end, result = in_flight.popleft()
                now = max(now, end)
                self._note(scheduler.apply(result, now).rids, now)
            elif not in_flight:
                now = min(next_arrival(), scheduler.wake_at or inf)
        return list(self.fates.values())

    def add(self, arrival: Arrival, now: float) -> None:
        """Give a request to the scheduler."""
        rid = str(len(self.fates))
        self.fates[rid] = Fate(arrival=arrival)
        params = SamplingParams(max_new_tokens=arrival.outputs)
        message = AddRequest(rid=rid, prompt=pack_ids(arrival.prompt), params=params)
        assert self.scheduler.add(message, now) is None

    def launch(self, step: Step, now: float) -> None:
        """Give a step to the device."""
        self.free = max(self.free, now) + self.noise() * seconds_of(self.truth, step.work)

    def _note(self, rids: Sequence[str], now: float) -> None:
        for rid in rids:
            fate = self.fates[rid]
            since = now - fate.arrival.at
            if fate.first == inf:
                fate.first = since
            else:
                fate.gaps.append(since - fate.end)
            fate.end = since


def arrival(workload: Mixture, rng: random.Random, at: float, number: int) -> Arrival:
    """Draw request ``number`` of a load, whose prompt has no page in common with another one's."""
    length, outputs, _ = workload.draw(rng)
    return Arrival(at=at, prompt=[number] * length, outputs=outputs)
