"""What a rank says of its start."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from segue.messages.control import InitStep, StartStep
from segue.worker import start_reports
from segue.worker.start_reports import StartReports


class Outbox:
    def __init__(self) -> None:
        self.messages: list[StartStep] = []

    def send(self, data: bytes) -> None:
        self.messages.append(msgspec.msgpack.decode(data, type=StartStep))


@pytest.mark.parametrize("is_shown", [True, False])
def test_steps_are_reported_as_they_begin_and_logged_unless_they_are_shown(
    is_shown: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_reports, "BYTES_EVERY_S", 1000.0)
    outbox: Any = Outbox()
    reports = StartReports(0, outbox, is_shown=is_shown)
    with caplog.at_level(logging.INFO, logger="segue"):
        reports.begin("device", 2)
        reports.end(InitStep("device", 0.5, 0), 2)
        reports.begin("weights", 2)
        reports.loaded(1, 10)  # nobody could see this one
        reports.loaded(10, 10)
        reports.end(InitStep("weights", 1.0, 3 << 20, "much"), 2)
    assert outbox.messages == [
        StartStep(0, "device", 1, 2),
        StartStep(0, "weights", 2, 2),
        StartStep(0, "weights", 2, 2, 10, 10),
    ]
    assert [step.name for step in reports.steps] == ["device", "weights"]
    lines = ["start  1/2 device: 0.50 s", "start  2/2 weights: 1.00 s, 3 MiB (much)"]
    assert caplog.messages == ([] if is_shown else lines)


def test_the_number_of_compiled_kernels_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_reports, "BYTES_EVERY_S", 1000.0)
    outbox: Any = Outbox()
    reports = StartReports(0, outbox, is_shown=True)
    reports.begin("kernels", 12)
    for number in (1, 2, 3):
        reports.compiled(number, 3)
    assert [message.detail for message in outbox.messages] == ["", "3 of 3"]
