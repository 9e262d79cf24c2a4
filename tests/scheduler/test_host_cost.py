from __future__ import annotations

import time

from bench.host_cost import BAR_MS, measure


def test_a_decode_step_of_256_requests_costs_the_host_little() -> None:
    runs = (  # the thread's own time: others may use the machine
        measure(num_requests=256, num_steps=64, page_size=16, clock=time.thread_time)["total"]
        for _ in range(8)
    )
    assert any(total <= BAR_MS for total in runs), "not even the best of eight runs meets the bar"
