"""Four prefill workers under skewed traffic, with and without LAPS groups.

The workers are queues in order of arrival, without LAPS of their own, so that what is measured is the choice
of the router alone. Time is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

import numpy as np
import pytest

from segue.laps.cost import prompt_seconds
from segue.laps.groups import PrefillGroups, Pressure, RebalanceRules, rebalance, split
from segue.messages.fleet import REPORT_PERIOD_S
from segue.router.choice import Ask, Pair, RoutingRules
from segue.router.decide import decide
from segue.router.fleet import FleetSnapshot, Hold, Holds, WorkerView
from tests.router.workers import DEVICE, report, view

NAMES = ("p0", "p1", "p2", "p3")
THRESHOLD = 256


@dataclass(kw_only=True)
class RoutedFleet:
    """A router, its prefill workers and one decode worker."""

    rules: RoutingRules
    grouped: bool
    groups: PrefillGroups = field(default_factory=lambda: split(NAMES, RebalanceRules(), 0.0))
    pressure: Pressure = field(default_factory=Pressure)
    holds: Holds = field(default_factory=Holds)
    free_at: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    views: dict[str, WorkerView] = field(default_factory=dict)
    waits: dict[str, list[float]] = field(default_factory=lambda: {"short": [], "long": []})
    ends: list[tuple[float, Hold]] = field(default_factory=list)

    def report(self, now: float) -> None:
        """Every worker reports, and the groups follow."""
        for name, free_at in self.free_at.items():
            queued_s = max(0.0, free_at - now)
            self.pressure.note(name, queued_s, now)
            group = self.groups.of(name) if self.grouped else None
            self.views[name] = replace(view(name, "prefill", at=now, queued_s=queued_s), group=group)
            self.holds.reported(name, now)
        self.views["d"] = view("d", "decode").reported(report(num_pages=10**9), now)
        self.groups = rebalance(self.groups, self.pressure, RebalanceRules(), now)

    def arrive(self, number: int, tokens: int, now: float) -> None:
        """A prompt arrives, and waits for its turn on the worker that the router chooses."""
        for hold in [hold for end, hold in self.ends if end <= now]:
            self.holds.release(hold)
        self.ends = [(end, hold) for end, hold in self.ends if end > now]
        snapshot = FleetSnapshot(workers=list(self.views.values()), held=self.holds.by_worker())
        request = Ask(number=number, num_tokens=tokens, max_new_tokens=2)
        decision = decide(request, snapshot, now, self.rules, Random(number))
        assert isinstance(decision, Pair)
        name = decision.prefill.worker.id
        end = max(now, self.free_at[name]) + prompt_seconds(DEVICE, tokens, 0)
        self.free_at[name] = end
        self.ends.append((end, self.holds.take(decision.prefill, now)))
        self.waits["short" if tokens <= THRESHOLD else "long"].append(end - now)


@cache
def simulate(*, grouped: bool, seconds: float, load: float) -> RoutedFleet:
    """95 % short prompts, 5 % long ones, at ``load`` of what four workers can do."""
    random = Random(0)
    fleet = RoutedFleet(rules=RoutingRules(), grouped=grouped)

    def length() -> int:
        is_short = random.random() < 0.95
        return random.randint(4, THRESHOLD) if is_short else random.randint(4000, 16_000)

    mean_s = np.mean([prompt_seconds(DEVICE, length(), 0) for _ in range(2000)])
    rate = load * len(NAMES) / float(mean_s)
    now, report_at, number = 0.0, 0.0, 0
    while now < seconds:
        now += random.expovariate(rate)
        while report_at <= now:
            fleet.report(report_at)
            report_at += REPORT_PERIOD_S
        number += 1
        fleet.arrive(number, length(), now)
    return fleet


def p99(values: list[float]) -> float:
    return float(np.quantile(values, 0.99))


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_groups_keep_short_prompts_from_waiting_behind_long_ones(load: float) -> None:
    plain, grouped = (simulate(grouped=on, seconds=60.0, load=load) for on in (False, True))
    assert p99(grouped.waits["short"]) < 0.6 * p99(plain.waits["short"])
    assert np.mean(grouped.waits["long"]) < 1.25 * np.mean(plain.waits["long"])
    assert p99(grouped.waits["long"]) < 1.7 * p99(plain.waits["long"])


def test_groups_follow_the_load() -> None:
    """Two thirds of the work are long prompts."""
    groups = simulate(grouped=True, seconds=60.0, load=0.7).groups
    assert (len(groups.short), len(groups.long), groups.num_moves) == (1, 3, 1)


def test_all_holds_end() -> None:
    fleet = simulate(grouped=True, seconds=5.0, load=0.7)
    for _, hold in fleet.ends:
        fleet.holds.release(hold)
    assert all(held.num_requests == 0 for held in fleet.holds.by_worker().values())
