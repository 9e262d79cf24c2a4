"""When buckets are announced in broadcasts on CUDA, with fake streams that only count time."""

from __future__ import annotations

import itertools
import time
from collections import deque
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from segue.trainer.buckets import plan, tensors
from segue.trainer.group import BroadcastSender

COUNT, SIZE = 6, 4000  # buckets, and bytes of each


class Event:
    """An event that happens at a given time."""

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return time.monotonic() >= self.at


class Stream:
    """A stream that is busy until a given time."""

    def __init__(self) -> None:
        self.end = 0.0

    def wait_event(self, event: Event) -> None:
        self.end = max(self.end, event.at)

    def record_event(self) -> Event:
        return Event(max(self.end, time.monotonic()))


class Group:
    """A group whose broadcasts take ``seconds``; records when each bucket was announced."""

    device = torch.device("cpu")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.streams = [Stream(), Stream()]
        self.announced: list[float] = []

    def announce(self) -> None:
        self.announced.append(time.monotonic())

    def broadcast(self, piece: object) -> None:
        sending = self.streams[1]
        sending.end = max(sending.end, time.monotonic()) + self.seconds

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.announced)]


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def run(group: Group, seconds_a_bucket: float, pack_s: float = 0.0, on_sent: Any = None) -> None:
    """Send all buckets at that speed limit; packing a bucket takes ``pack_s``."""
    weights = {f"tensor {index}": torch.full((SIZE // 4,), float(index)) for index in range(COUNT)}

    def packed() -> Any:
        for each in tensors(weights):
            time.sleep(pack_s)
            yield each

    broadcast: Any = object.__new__(BroadcastSender)
    broadcast.num_buckets = broadcast.num_bytes = 0
    broadcast.group, broadcast.buckets, broadcast.tensors = group, plan(weights, SIZE), packed()
    broadcast.flattened, broadcast.on_sent = False, on_sent or (lambda broadcast: None)
    broadcast._stopped, broadcast._in_flight = False, deque()
    broadcast.gb_per_s = SIZE / 1e9 / seconds_a_bucket
    broadcast._send_cuda(Event(0.0))
    assert (broadcast.num_buckets, broadcast.num_bytes) == (COUNT, COUNT * SIZE)


def test_buckets_are_spaced_by_the_speed_limit() -> None:
    group = Group(0.001)
    run(group, 0.04)
    assert len(group.gaps) == COUNT - 1 and min(group.gaps) >= 0.04
    assert min(group.gaps) < 0.06, "the gap is not longer than needed"


def test_the_gap_includes_packing() -> None:
    group = Group(0.001)
    run(group, 0.04, pack_s=0.03)
    assert 0.04 <= min(group.gaps) < 0.06


def test_a_group_slower_than_the_limit_sends_without_pauses() -> None:
    groups = [Group(0.1) for _ in range(3)]
    for group in groups:
        run(group, 0.001)
    # A stall of the machine does not come with each of them.
    assert min(group.gaps[0] for group in groups) < 0.09, "two buckets are in flight"
    assert min(groups[0].gaps[1:]) < 0.15


def test_a_pause_ends_when_the_limit_is_lifted() -> None:
    group = Group(0.001)
    began = time.monotonic()

    def lift_limit(broadcast: BroadcastSender) -> None:
        broadcast.gb_per_s = float("inf")

    run(group, 20.0, on_sent=lift_limit)
    assert time.monotonic() - began < 15


def test_a_sent_bucket_is_reported_during_the_pause_after_it_and_a_stop_ends_the_pause() -> None:
    group = Group(0.001)
    with pytest.raises(RuntimeError, match="was stopped"):
        run(group, 60.0, on_sent=BroadcastSender.stop)
    assert len(group.announced) == 1
