"""OpenTelemetry's exporter, where a collector does not take spans."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from segue.tracing import batches
from segue.tracing.opening import tracer_of
from segue.tracing.spans import EndedSpan
from segue.tracing.tracer import Tracer
from tests.support.collector import Collector, only


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "GATHER_S", 0.0)
    monkeypatch.setattr(batches, "FLUSH_S", 0.3)


@pytest.fixture
def port() -> Iterator[int]:
    """A port that takes connections, and never answers."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


class Lines(logging.Handler):
    """Keeps lines of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def opened(url: str) -> Tracer:
    tracer = tracer_of(url, "segue", "me")
    assert tracer is not None
    return tracer


def record(tracer: Tracer) -> None:
    now = time.monotonic()
    tracer.record([EndedSpan("x", tracer.begin(None, "x"), 0, now - 0.5, now)])


def test_a_collector_that_never_answers_holds_up_neither_work_nor_the_end(port: int) -> None:
    def holds_up_nothing() -> bool:
        tracer = opened(f"http://127.0.0.1:{port}")
        began = time.monotonic()
        record(tracer)
        recorded = time.monotonic()
        tracer.close()
        return recorded - began < 0.1 and time.monotonic() - began < 0.3 + batches.STOP_S + 1.0

    assert any(holds_up_nothing() for _ in range(3)), "a stall of the machine does not come with each try"


def test_a_collector_that_is_not_there_is_one_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = Lines()
    monkeypatch.setattr(logging.getLogger(), "handlers", [lines])  # where lines of all loggers arrive
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.1")  # then it is not tried again
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    tracer = opened(url)
    for count in (1, 2, 3):
        record(tracer)
        deadline = time.monotonic() + 10
        while tracer.batches.num_lost < count:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    tracer.close()
    assert {line.name for line in lines.records} == {"segue"}
    (text,) = [text for line in lines.records if url in (text := line.getMessage())]  # others: earlier tests'
    assert f"spans cannot be sent to {url}/v1/traces" in text


def test_opentelemetrys_variables_choose_the_sampler_and_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=named,zone=a")
        tracer = opened(collector.url)
        record(tracer)
        tracer.close()
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        tracer = opened(collector.url)
        record(tracer)
        parent = tracer.begin(None, "x")
        assert not parent.is_sampled and not tracer.child(parent).is_sampled
        tracer.close()
        span = only(collector.spans)
    assert span.service == "named" and span.parent == ""
    assert abs(span.end - time.time_ns()) < 60e9 and span.end - span.start == pytest.approx(5e8, abs=1e3)
