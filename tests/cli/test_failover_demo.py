"""The demonstration waits as long as something comes, and has the reply long enough to be cut."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from rich.console import Console

from segue.cli import failover_demo as demo
from segue.errors import SegueError


def test_a_slow_reply_is_waited_for_as_long_as_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "QUIET_S", 1.0)

    def slowly() -> Iterator[str]:
        for _ in range(8):
            time.sleep(0.15)
            yield "x"

    stream = demo.WatchedStream()
    threading.Thread(target=stream.read, args=(slowly(),), daemon=True).start()
    for _ in demo._progress(stream):
        pass
    assert stream.text == "x" * 8, "it took longer than the limit for one piece"


def test_a_reply_that_stops_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "QUIET_S", 0.05)
    stream = demo.WatchedStream(pieces=[(0.0, "x")])
    with pytest.raises(SegueError, match=r"nothing came for 0\.05 s behind 1 pieces of the reply"):
        list(demo._progress(stream))


@dataclass
class FakePod:
    """A pod whose replies are there at once, up to a length from which on a kill comes in time."""

    slow_from: int
    asked: list[int] = field(default_factory=list)
    num_kills: int = 0
    num_waits: int = 0

    def wait_for_standby(self) -> None:
        self.num_waits += 1

    def ask(self, pod: Any, tokens: int) -> demo.WatchedStream:
        self.asked.append(tokens)
        stream = demo.WatchedStream([(time.monotonic(), "x")] * tokens)
        stream.has_ended = tokens < self.slow_from
        return stream

    def kill(self, pod: Any, show: demo._Picture) -> None:
        self.num_kills += 1
        now = time.monotonic()
        record: Any = None
        show.killed_at = now
        show.times = demo.TakeoverTimes(
            victim=record, successor=record, killed_at=now, dead_s=0, lock_s=0, awake_s=0, record_s=0
        )
        show.stream.pieces.append((now + 1.0, "y"))
        show.stream.has_ended = True


def test_a_reply_that_ended_before_the_kill_is_asked_for_again_with_more_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pod: Any = FakePod(slow_from=300)
    monkeypatch.setattr(demo, "_ask", pod.ask)
    monkeypatch.setattr(demo, "_kill", pod.kill)
    show = demo._Picture(Console())
    assert demo._kill_in_the_middle(pod, show, 80) == 320
    assert (pod.asked, pod.num_kills, pod.num_waits) == ([80, 160, 320], 1, 2)
    assert show.goes_on
