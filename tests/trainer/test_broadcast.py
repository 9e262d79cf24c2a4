"""The pace of broadcasts that leave an engine most of the time."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from segue.trainer.broadcast import Broadcast, Pace


def test_the_quickest_broadcast_tells_how_long_one_takes() -> None:
    pace = Pace()
    pace.took(1000, 0.6)
    pace.took(0, 0.0)
    assert pace.rest_s(1000, 0.01) == 0.0, "the first may have connected"
    pace.took(1000, 0.5)
    assert pace.rest_s(1000, 1.0) == pace.rest_s(0, 0.01) == 0.0
    assert pace.rest_s(1000, 0.5) == pytest.approx(0.5)
    assert pace.rest_s(500, 1 / 8) == pytest.approx(7 * 0.25)
    pace.took(1000, 0.9)
    assert pace.rest_s(1000, 0.5) == pytest.approx(0.5)
    pace.took(2000, 0.2)
    assert pace.rest_s(1000, 0.5) == pytest.approx(0.1)


def under_way(num_bytes: int, seconds: float) -> Any:
    """A bucket that has just been sent."""
    sent = SimpleNamespace(query=lambda: True)
    return SimpleNamespace(
        bucket=SimpleNamespace(num_bytes=num_bytes), began=time.monotonic() - seconds, sent=sent
    )


def resting(share: float) -> Any:
    broadcast: Any = object.__new__(Broadcast)
    broadcast.share, broadcast._pace, broadcast._stopped = share, Pace(), False
    broadcast.num_buckets = broadcast.num_bytes = 0
    broadcast._on_sent = lambda broadcast: None
    return broadcast


def test_a_broadcast_is_silent_behind_what_it_has_sent() -> None:
    broadcast = resting(1 / 4)
    began = time.monotonic()
    broadcast._rest(deque())
    assert time.monotonic() - began < 0.04
    sent = deque([under_way(100, 0.05), under_way(100, 0.02)])
    broadcast._rest(sent)
    assert time.monotonic() - began >= 3 * 2 * 0.02
    assert not sent and (broadcast.num_buckets, broadcast.num_bytes) == (2, 200)


def test_one_that_is_stopped_rests_no_longer() -> None:
    broadcast = resting(1e-6)
    broadcast._on_sent = Broadcast.stop
    with pytest.raises(RuntimeError, match="was given up"):
        broadcast._rest(deque([under_way(100, 1.0), under_way(100, 1.0)]))
