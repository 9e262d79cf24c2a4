"""The frontend's statistics, without a metrics library. Steps update them, and ``/metrics`` reads them."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import get_args

from segue.messages.control import Counters
from segue.messages.requests import FinishReason, PhaseTimes

# Upper bounds of the histograms, in milliseconds and in seconds.
FIRST_TOKEN_MS = (1, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750, 1000, 2500, 5000, 7500, 10000, 20000, 40000)
BETWEEN_TOKENS_MS = (1, 2.5, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000, 2500)
REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480)
# Of a phase before the first token: waiting, or computing the prompt.
PHASE_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240)
STEP_MS = (0.5, 1, 2, 4, 6, 8, 10, 15, 20, 30, 50, 75, 100, 200, 400, 800, 1600)


class Histogram:
    """Counts of values by upper bound, in seconds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...], per_second: int = 1000) -> None:
        # `bounds` are given in units of which `per_second` make a second.
        self.bounds = [bound / per_second for bound in bounds]
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value, in seconds, under the first bound that is not below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, int]]:
        """Return (upper bound, number of values up to it) for every bound; the last bound is infinite."""
        return list(zip([*map(str, self.bounds), "+Inf"], accumulate(self.counts), strict=True))


@dataclass(slots=True)
class Stats:
    """Statistics since the start."""

    counters: Counters = field(default_factory=Counters)  # those of the scheduler's last output
    last_step_at: float = -math.inf  # when the last result of a step arrived, by the monotonic clock
    prompt_tokens: int = 0  # of requests that have a first token
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_MS))
    first_token_of: dict[str, Histogram] = field(  # by class of prompts, with LAPS
        default_factory=lambda: {name: Histogram(FIRST_TOKEN_MS) for name in ("short", "long")}
    )
    queue: Histogram = field(default_factory=lambda: Histogram(PHASE_S, per_second=1))
    prefill: Histogram = field(default_factory=lambda: Histogram(PHASE_S, per_second=1))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(BETWEEN_TOKENS_MS))
    request: Histogram = field(default_factory=lambda: Histogram(REQUEST_S, per_second=1))
    step: Histogram = field(default_factory=lambda: Histogram(STEP_MS))

    def note_times(self, times: PhaseTimes) -> None:
        """Count how long a request that has ended has waited, and how long its prompt took."""
        if times.admitted:
            self.queue.observe(times.admitted - times.added)
            if times.prefilled >= times.admitted:  # else the first token came from a prefill worker
                self.prefill.observe(times.prefilled - times.admitted)
