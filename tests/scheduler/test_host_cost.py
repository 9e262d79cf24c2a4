from __future__ import annotations

import time

import pytest

from bench.host_cost import BAR_MS, measure

pytestmark = pytest.mark.alone

PATIENCE_S = 60.0  # a thread's own time also counts while a shared core serves another machine


def test_a_decode_step_of_256_requests_stays_below_the_host_cost_limit() -> None:
    deadline = time.monotonic() + PATIENCE_S
    best = BAR_MS + 1.0
    while best > BAR_MS and time.monotonic() < deadline:
        figures = measure(num_requests=256, num_steps=64, page_size=16, clock=time.thread_time)
        best = min(best, figures["total"])
    assert best <= BAR_MS, f"the best run took {best:.3f} ms per step"
