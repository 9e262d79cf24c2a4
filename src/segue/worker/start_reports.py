"""What a rank says of its start: to the frontend, and in the log."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
import zmq

from segue.logs import logger
from segue.messages.control import InitStep, StartStep

BYTES_EVERY_S = 0.1  # between two reports of loaded bytes


class StartReports:
    """Reports the steps of a start, and keeps those that have ended.

    With ``is_shown`` the frontend shows how the start gets on: then it is told of loaded bytes too, and the
    log has ended steps at the level "debug" alone.
    """

    def __init__(self, rank: int, outbox: zmq.Socket[Any], *, is_shown: bool) -> None:
        self.steps: list[InitStep] = []
        self.is_shown = is_shown
        self._rank = rank
        self._outbox = outbox
        self._current = StartStep(rank, "", 0, 0)
        self._sent_at = float("-inf")

    def begin(self, name: str, num_steps: int) -> None:
        """Report that a step begins."""
        self._current = StartStep(self._rank, name, len(self.steps) + 1, num_steps)
        self._send(self._current)

    def loaded(self, num_bytes: int, total_bytes: int) -> None:
        """Report how many bytes of weights are there; not more often than anybody can see."""
        if num_bytes < total_bytes and time.monotonic() - self._sent_at < BYTES_EVERY_S:
            return
        self._send(msgspec.structs.replace(self._current, num_bytes=num_bytes, total_bytes=total_bytes))

    def compiled(self, num_kernels: int, total: int) -> None:
        """Report how many kernels are compiled; not more often than anybody can see."""
        if num_kernels == total or time.monotonic() - self._sent_at >= BYTES_EVERY_S:
            self._send(msgspec.structs.replace(self._current, detail=f"{num_kernels} of {total}"))

    def end(self, step: InitStep, num_steps: int) -> None:
        """Log a step that has ended, and keep it for the result."""
        self.steps.append(step)
        size = f", {step.num_bytes / 2**20:.0f} MiB" if step.num_bytes else ""
        detail = f" ({step.detail})" if step.detail else ""
        level = logging.DEBUG if self.is_shown else logging.INFO
        text = "start %2d/%d %s: %.2f s%s%s"
        logger.log(level, text, len(self.steps), num_steps, step.name, step.seconds, size, detail)

    def _send(self, message: StartStep) -> None:
        self._sent_at = time.monotonic()
        self._outbox.send(msgspec.msgpack.encode(message))
