"""Output tokens per second."""

from __future__ import annotations

from segue.worker.throughput import Throughput


def test_throughput_is_that_of_the_last_window_and_becomes_zero() -> None:
    throughput = Throughput(0.0)
    throughput.add(100, 0.5)
    throughput.add(100, 1.0)
    assert throughput.per_second(1.0) == 200
    assert throughput.per_second(3.5) == 0
