"""Runs the holder and the memory service as children: either starts what dies again, or ends with it.

A child that does not answer any more, because it hangs or was stopped, is killed.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Literal

from segue.children import RestartRule, describe_exit, import_path
from segue.gms.config import GmsConfig
from segue.gms.readiness import check_holder, check_service, failure_of
from segue.host import end_with_parent
from segue.logs import logger

STOP_S = 5.0
FIRST_S = 5.0  # a child that fails so soon after its first start would fail again
RESTARTS = RestartRule()
# -P: files in the user's directory must not shadow modules of the standard library.
GMS_COMMAND = (sys.executable, "-P", "-m", "segue", "gms")
_COMMANDS = ("hold", "serve")  # the holder first, so that the service finds it


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """When a child counts as one that does not answer any more."""

    period_s: float = 10.0  # between two looks
    answer_s: float = 2.0  # for an answer
    max_failures: int = 2  # in a row; then it is killed
    start_s: float = 60.0  # that it may take until it answers for the first time


@dataclass(slots=True)
class GmsChild:
    """A child, and how often it has died in a row."""

    process: subprocess.Popen[bytes]
    started_at: float
    num_deaths: int = 0
    has_answered: bool = False
    num_failures: int = 0  # in a row, of looks whether it answers


class GmsSupervisor:
    """Starts the children and waits for them."""

    def __init__(
        self,
        config: GmsConfig,
        policy: Literal["exit", "restart"],
        rules: AnswerRules = AnswerRules(),
    ) -> None:
        """Give the children their options, as environment variables."""
        self._environment = {**os.environ, **import_path(os.environ), **config.child_environment}
        self._policy = policy
        self._rules = rules
        self._checks: dict[str, Callable[[], object]] = {
            "hold": partial(check_holder, config.gms_dir, rules.answer_s),
            "serve": partial(check_service, config.gms_dir, config.gms_token, rules.answer_s),
        }
        self._children: dict[str, GmsChild] = {}
        self._is_ending = False

    def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until a child ends where that ends all; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        for command in _COMMANDS:
            self._children[command] = GmsChild(self._start(command), time.monotonic())
        code, probe_at = 0, time.monotonic() + self._rules.period_s
        while not self._is_ending and code == 0:
            if (ended := self._wait(probe_at - time.monotonic())) is not None:
                code = self._ended(ended)
                probe_at = time.monotonic() + self._rules.period_s
            elif time.monotonic() >= probe_at:
                self._probe()
                probe_at = time.monotonic() + self._rules.period_s
        self._stop()
        return code

    def _wait(self, seconds: float) -> str | None:
        """Return the command of a child that has ended; None: none has within so many seconds."""
        for command, child in self._children.items():
            if child.process.returncode is not None:  # it had ended when it was to be killed
                return command
        poll = select.poll()
        files = {os.pidfd_open(child.process.pid): command for command, child in self._children.items()}
        try:
            for file in files:
                poll.register(file, select.POLLIN)
            found = poll.poll(max(0.0, seconds) * 1e3)
        finally:
            for file in files:
                os.close(file)
        return files[found[0][0]] if found else None

    def _probe(self) -> None:
        """Kill a child that has not answered for some time."""
        for command, check in self._checks.items():
            child, why = self._children[command], failure_of(check)
            child.has_answered |= why is None
            may_start = not child.has_answered and time.monotonic() < child.started_at + self._rules.start_s
            child.num_failures = 0 if why is None or may_start else child.num_failures + 1
            if child.num_failures >= self._rules.max_failures and not self._is_ending:
                logger.warning("segue gms %s is killed, as it does not answer: %s", command, why)
                child.process.kill()

    def _ended(self, command: str) -> int:
        """Deal with the end of a child; returns the exit code with which everything ends, or 0."""
        child = self._children[command]
        status = child.process.wait()
        if self._is_ending:
            return 0
        logger.warning("segue gms %s ended %s", command, describe_exit(status))
        seconds = time.monotonic() - child.started_at
        if self._policy == "exit" or (status > 0 and child.num_deaths == 0 and seconds < FIRST_S):
            return 1
        child.num_deaths = RESTARTS.count(child.num_deaths, 0.0, seconds)
        until = time.monotonic() + RESTARTS.pause_s(child.num_deaths)
        while not self._is_ending and time.monotonic() < until:
            time.sleep(0.05)
        if not self._is_ending:
            started = GmsChild(self._start(command), time.monotonic(), num_deaths=child.num_deaths)
            self._children[command] = started
        return 0

    def _start(self, command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*GMS_COMMAND, command], env=self._environment, preexec_fn=end_with_parent)

    def _end(self, number: int, frame: FrameType | None) -> None:
        """End the children, which ends the wait for them."""
        self._is_ending = True
        for child in self._children.values():
            child.process.terminate()

    def _stop(self) -> None:
        """End the service, and then the holder."""
        for command in reversed(_COMMANDS):
            process = self._children[command].process
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
