"""The pure scheduler on a device that takes as long as a cost model says: no model, no clock, no luck.

A turn is that of `segue.worker.loop`, with overlap: messages, a plan, then the oldest result. So what LAPS
does to the latencies of a load is known within seconds, on any machine, and the same each time.

While the host launches a step it does nothing else: it sees requests and ends of steps afterwards. The device
begins with the first kernels meanwhile.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from segue.bench.load import Mixture
from segue.config import EngineConfig
from segue.laps.cost import Coefficients, seconds_of
from segue.messages.control import EngineLimits
from segue.messages.requests import AddRequest, SamplingParams, pack_ids
from segue.messages.steps import StepResult
from segue.scheduler.request import Step
from segue.scheduler.scheduler import Scheduler

# Those of Qwen3-8B on an H200: within 1.5 % of the prompts of 1,024 and 3,500 tokens and the 64 of 2,048 in
# bench/results/gpu_offline_8b_simulated.json, which is an older run of `bench.offline 8b`, and of the second
# chunk of 16,384 tokens in gpu_pause.json. Other hosts and days took up to 5 % longer.
QWEN3_8B_H200 = Coefficients(floor=0.0052, start=0.0018, per_token=2.16e-5, per_pair=1.1e-9, per_kv=4.0e-8)


class HostCost(NamedTuple):
    """What the host does beside the device, in seconds."""

    turn: float = 0.0003  # to plan a step, and again to take its result
    first: float = 0.0  # from the begin of a launch until the device has its first kernel
    graph: float = 0.0  # to launch a step that fits a captured one
    eager: float = 0.0  # to launch another step
    poll: float = (
        0.0  # between two looks whether a step has ended, while the next one may not be launched yet
    )


NO_LAUNCHES = HostCost()  # a host that only plans
HOST_OF_H200 = HostCost(first=0.001, graph=0.0012, eager=0.013, poll=0.001)  # with Qwen3-8B


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
    host: HostCost = NO_LAUNCHES
    noise: Callable[[], float] = lambda: 1.0  # what a step's time is multiplied by
    overlap: bool = True

    def __post_init__(self) -> None:
        """Make the scheduler."""
        self.scheduler = Scheduler(self.limits, self.config)
        self.fates: dict[str, Fate] = {}
        self.free = 0.0  # when the device has done all that was launched
        self.idle = 0.0  # seconds that the device has waited for a launch

    def run(
        self,
        load: Iterable[Arrival],
        *,
        until: float = inf,
        follow: Callable[[float], Arrival] | None = None,
    ) -> list[Fate]:
        """Send a load, which is in the order of arrival; returns the fates of its requests.

        Args:
            load: the requests.
            until: seconds after which nothing more is computed.
            follow: makes the request that comes at a time because another one has ended; None: none comes.
        """
        scheduler, waiting, now = self.scheduler, deque(load), 0.0
        in_flight: deque[tuple[float, StepResult]] = deque()

        def next_arrival() -> float:
            return waiting[0].at if waiting else inf

        def deliver() -> None:
            while next_arrival() <= now:
                self.add(waiting.popleft(), now)

        while (waiting or in_flight or scheduler.requests) and now < until:
            deliver()
            while in_flight and (turn := scheduler.launch_at(now)) > now < in_flight[0][0]:
                now = min(turn, in_flight[0][0] + self.host.poll / 2, next_arrival())
                deliver()
            plan = scheduler.plan(now)
            if plan is not None:
                now = self.launch(scheduler.in_flight[-1], now + self.host.turn)
                scheduler.launched(now)
                in_flight.append((self.free, StepResult(plan.step, [1] * sum(plan.samples), 0.001)))
            if in_flight and (plan is None or len(in_flight) == 1 + self.overlap):
                end, result = in_flight.popleft()
                now = max(now, end) + self.host.turn
                rids = scheduler.apply(result, now).rids
                self._note(rids, now)
                waiting.extend(follow(now) for rid in rids if follow and rid not in scheduler.requests)
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

    def launch(self, step: Step, now: float) -> float:
        """Give a step to the device; returns when the host has launched all of it."""
        sizes = self.limits.step_sizes
        launched = now + (self.host.graph if sizes and step.work.tokens <= sizes[-1] else self.host.eager)
        begin = max(self.free, now + self.host.first)
        self.idle += begin - self.free
        self.free = max(begin + self.noise() * seconds_of(self.truth, step.work), launched)
        return launched

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


def saturation(simulation: Simulation, workload: Mixture, concurrency: int, seconds: float) -> float:
    """Return the requests per second with so many at any time, if all were of the mean length.

    It counts the prompt tokens of the requests that end in the last 70 % of ``seconds``: how many requests
    these are depends on how many long ones happen to be among them.
    """
    rng, number = random.Random(99), itertools.count()

    def one(now: float) -> Arrival:
        return arrival(workload, rng, now, next(number))

    since, fates = 0.3 * seconds, simulation.run(map(one, [0.0] * concurrency), until=seconds, follow=one)
    tokens = sum(len(f.arrival.prompt) for f in fates if since <= f.arrival.at + f.end < seconds)
    return tokens / (seconds - since) / workload.mean_prompt
