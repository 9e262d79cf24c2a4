"""The handle of a step lets other work come behind it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from segue.model_runner.executor import DeviceStepResult, ForwardOutput


class Event:
    """An event of a device, in the place of torch's."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wait(self) -> None:
        self.calls.append("wait")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def launched(event: Any) -> ForwardOutput:
    pending: Future[DeviceStepResult] = Future()
    tokens = torch.zeros(1)
    pending.set_result(DeviceStepResult(step=1, started=0.0, next_tokens_host=tokens, copy_done=event))
    return ForwardOutput(pending)


def test_a_stream_waits_for_a_step_on_a_device_and_the_thread_does_not() -> None:
    event = Event()
    launched(event).queue_behind()
    assert event.calls == ["wait"]


def test_nothing_waits_for_a_step_on_a_cpu_that_has_ended() -> None:
    launched(None).queue_behind()


def test_nothing_comes_behind_a_step_that_failed() -> None:
    pending: Future[DeviceStepResult] = Future()
    pending.set_exception(ValueError("step 1 broke"))
    with pytest.raises(ValueError, match="step 1 broke"):
        ForwardOutput(pending).queue_behind()
