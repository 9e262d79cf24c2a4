"""Runs the holder and the memory service as children: either starts what dies again, or ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from segue.children import RestartRule, describe_exit, import_path
from segue.host import end_with_parent
from segue.logs import logger

STOP_S = 5.0
FIRST_S = 5.0  # a child that fails so soon after its first start would fail again
RESTARTS = RestartRule()
# `segue gms`, a second sooner than by the whole command line. -P: files in the user's directory must
# not shadow modules of the standard library.
GMS_COMMAND = (sys.executable, "-P", "-c", "from segue.cli.gms import gms_app; gms_app()")
_COMMANDS = ("hold", "serve")  # the holder first, so that the service finds it


@dataclass(slots=True)
class GmsChild:
    """A child, and how often it has died in a row."""

    process: subprocess.Popen[bytes]
    started_at: float
    num_deaths: int = 0


class GmsSupervisor:
    """Starts the children and waits for them."""

    def __init__(self, options: Mapping[str, str], policy: Literal["exit", "restart"]) -> None:
        """Give the children their options, as environment variables."""
        self._environment = {**os.environ, **import_path(os.environ), **options}
        self._policy = policy
        self._children: dict[str, GmsChild] = {}
        self._is_ending = False

    def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until a child ends where that ends all; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        for command in _COMMANDS:
            self._children[command] = GmsChild(self._start(command), time.monotonic())
        code = 0
        while not self._is_ending and code == 0:
            pid, status = os.waitpid(-1, 0)
            code = self._ended(pid, os.waitstatus_to_exitcode(status))
        self._stop()
        return code

    def _ended(self, pid: int, status: int) -> int:
        """Deal with the end of a child; returns the exit code with which everything ends, or 0."""
        found = (each for each in self._children.items() if each[1].process.pid == pid)
        command, child = next(found, (None, None))
        if command is None or child is None or self._is_ending:
            return 0
        child.process.returncode = status
        logger.warning("segue gms %s ended %s", command, describe_exit(status))
        seconds = time.monotonic() - child.started_at
        if self._policy == "exit" or (status > 0 and child.num_deaths == 0 and seconds < FIRST_S):
            return 1
        child.num_deaths = RESTARTS.count(child.num_deaths, 0.0, seconds)
        until = time.monotonic() + RESTARTS.pause_s(child.num_deaths)
        while not self._is_ending and time.monotonic() < until:
            time.sleep(0.05)
        if not self._is_ending:
            child.process, child.started_at = self._start(command), time.monotonic()
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
