"""Spans are sent beside the work, and a collector that fails costs spans alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import pytest

from segue.tracing import batches
from segue.tracing.batches import MOST_BATCH, MOST_WAITING, SpanBatches
from segue.tracing.context import TraceContext
from segue.tracing.spans import EndedSpan

SPAN = EndedSpan("x", TraceContext(1, 2, 1), 0, 0.0, 1.0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "GATHER_S", 0.0)


class Place:
    """What sends batches, as a test says."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.failure: str | None = None
        self.lets_go = threading.Event()
        self.lets_go.set()
        self.asked = threading.Semaphore(0)

    def send(self, spans: Sequence[EndedSpan]) -> str | None:
        self.asked.release()
        self.lets_go.wait(20)
        failure = self.failure  # a test may say another one as soon as it sees the size
        self.sizes.append(len(spans))
        return failure


def test_a_close_sends_what_is_there_in_batches() -> None:
    place = Place()
    place.lets_go.clear()
    spans = SpanBatches("there", place.send, lambda: None)
    spans.put([SPAN])
    assert place.asked.acquire(timeout=10)
    spans.put([SPAN] * (MOST_BATCH + 1))
    place.lets_go.set()
    spans.close()
    assert place.sizes == [1, MOST_BATCH, 1] and spans.num_lost == 0
    spans.close()


def test_a_collector_that_hangs_costs_spans_and_no_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batches, "FLUSH_S", 0.1)
    monkeypatch.setattr(batches, "STOP_S", 10.0)
    place = Place()
    place.lets_go.clear()
    spans = SpanBatches("there", place.send, place.lets_go.set)
    spans.put([SPAN])
    assert place.asked.acquire(timeout=10)
    began = time.monotonic()
    for _ in range(MOST_WAITING + 7):
        spans.put([SPAN])
    assert time.monotonic() - began < 1.0  # 0.01 s alone
    assert spans.num_lost == 7
    spans.close()
    assert place.sizes == [1], "what is left is not sent, once the time is over"
    assert f"{MOST_WAITING} spans were not sent to there" in caplog.text
    spans.put([SPAN])
    assert spans.num_lost == 8


def test_a_collector_that_fails_is_logged_once_until_it_works_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    place = Place()
    spans = SpanBatches("there", place.send, lambda: None)

    def send(failure: str | None) -> None:
        place.failure = failure
        number = len(place.sizes)
        spans.put([SPAN, SPAN])
        deadline = time.monotonic() + 10
        while len(place.sizes) == number or spans._waiting:
            assert time.monotonic() < deadline

    for failure in ("refused", "refused", "gone", None, None):
        send(failure)
    spans.close()
    assert [record.getMessage() for record in caplog.records] == [
        "spans cannot be sent to there, and are lost until that works again: refused",
        "spans are sent to there again; 6 were lost",
    ]
