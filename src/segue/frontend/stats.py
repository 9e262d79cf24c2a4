"""The frontend's statistics, without a metrics library. Steps update them, and ``/metrics`` reads them."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate

from segue.messages.control import Counters

FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
)
BETWEEN_TOKENS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
)
REQUEST_S = (
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
STEP_S = (
    0.0005,
    0.001,
    0.002,
    0.004,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.2,
    0.4,
    0.8,
    1.6,
)


class Histogram:
    """Counts of values by upper bound, in seconds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
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
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(BETWEEN_TOKENS_S))
    request: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    step: Histogram = field(default_factory=lambda: Histogram(STEP_S))
