"""Starts engines that stand by for each other as a process, kills one, and tells what a takeover took."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

from segue.children import import_path
from segue.cluster.children import SEGUE
from segue.cluster.processes import die_with
from segue.discovery.file import FileDiscovery
from segue.discovery.record import EngineRecord
from segue.errors import ChildStartError
from segue.failover.lock import CohortLock
from segue.failover.standby import count_standbys

COHORT = "worker-0"
EnginePart = Literal["front", "workers", "engine"]  # `engine`: both
START_S = 600.0  # until all engines have loaded their model
TAKEOVER_S = 60.0
STOP_S = 20.0
POLL_S = 0.002
LOG_LINES = 200  # the last ones, which are kept
_READY = re.compile(r"Ready\S* at \S*?(https?://[^\s\x1b]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeoverTimes:
    """When each step of a takeover came, in seconds from the kill."""

    victim: EngineRecord
    successor: EngineRecord
    killed_at: float  # on the monotonic clock
    dead_s: float  # the killed processes had ended, and the kernel had closed their connections
    lock_s: float  # the successor had the lock, and began to wake
    awake_s: float  # it had its memory, and had generated its test tokens
    record_s: float  # it accepted connections, and routers could find it


class PodProcess:
    """One running pod: a router, and engines of which one serves. It ends with the ``with`` block.

    It is killed if the thread that has started it ends without having left the block. A cluster has several
    workers; then `cohort` is the one that the methods are about.
    """

    def __init__(
        self,
        options: Sequence[str] = (),
        *,
        shadows: int = 1,
        command: Literal["serve", "cluster"] = "serve",
        cohort: str = COHORT,
        variables: Mapping[str, str] | None = None,
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Start it, and wait until it serves.

        Args:
            options: further ones of the command.
            shadows: how many engines stand by, behind each worker.
            command: of ``segue``.
            cohort: the worker whose engines the methods are about.
            variables: of the environment, in which no other variable of Segue is.
            on_progress: called by a thread with each line about the start of a process.

        Raises:
            ChildStartError: it has ended, or does not serve in time; the message has the end of its log.
        """
        self.cohort = cohort
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self._on_progress = on_progress
        self._directory = tempfile.TemporaryDirectory(prefix="sg-")
        environment = {name: text for name, text in os.environ.items() if not name.startswith("SEGUE_")}
        environment |= import_path(environment) | {"TMPDIR": self._directory.name, "NO_COLOR": "1"}
        environment |= variables or {}
        self.process = subprocess.Popen(
            [*SEGUE, command, f"--shadows={shadows}", "--port=0", *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is for this process
            preexec_fn=partial(die_with, os.getpid()),
        )
        self._url = ""
        self._has_started = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._has_started.wait(START_S) or not self._url:
            lines = "\n".join(list(self.log)[-12:])
            self.close()
            raise ChildStartError(f"segue {command} --shadows {shadows} did not start:\n{lines}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where clients find the router."""
        return self._url

    @property
    def directory(self) -> Path:
        """What it uses for temporary files; nothing is left in it at the end."""
        return Path(self._directory.name)

    @property
    def failover_dir(self) -> Path:
        """The directory with the lock and the records of its engines."""
        return next(self.directory.glob("segue-*/failover"))

    @property
    def gms_dir(self) -> Path:
        """The directory of the memory service that keeps the weights of its engines."""
        return next(self.directory.glob("segue-*/gms"))

    def serving(self) -> EngineRecord | None:
        """Return the record of the engine that serves; None: none does at the moment."""
        records = asyncio.run(FileDiscovery(self.failover_dir).list())
        own = (record for record in records if record.cohort == self.cohort)
        return max(own, key=lambda record: record.epoch, default=None)

    def pid(self) -> int:
        """Return the process id of the engine that has the lock."""
        note = CohortLock(self.failover_dir, self.cohort).note()
        assert note is not None, "no engine has ever served"
        return note.pid

    def processes(self, part: EnginePart) -> list[int]:
        """Return the processes of the engine that serves: its front, its workers, or all of them."""
        front = self.pid()
        workers = [int(pid) for pid in Path(f"/proc/{front}/task/{front}/children").read_text().split()]
        return {"front": [front], "workers": workers, "engine": [*workers, front]}[part]

    def kill_serving(self, part: EnginePart = "front") -> TakeoverTimes:
        """Kill the engine that serves, or a part of it, with SIGKILL; wait until another one serves.

        Raises:
            ChildStartError: none does in time.
        """
        victim = self.serving()
        assert victim is not None, "no engine serves"
        pids = self.processes(part)
        with ExitStack() as stack:
            files = [os.pidfd_open(pid) for pid in pids]
            for file in files:
                stack.callback(os.close, file)
            killed_at = time.monotonic()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for file in files:
                select.select([file], [], [], TAKEOVER_S)
            dead_at = time.monotonic()
        successor = self.wait_for_epoch(victim.epoch + 1)
        record_at = time.monotonic()
        phases = wake_phases(successor)
        return TakeoverTimes(
            victim=victim,
            successor=successor,
            killed_at=killed_at,
            dead_s=dead_at - killed_at,
            lock_s=record_at - phases["total"] - killed_at,
            awake_s=record_at - phases["serve"] - killed_at,
            record_s=record_at - killed_at,
        )

    def wait_for_epoch(self, epoch: int, timeout_s: float = TAKEOVER_S) -> EngineRecord:
        """Wait until an engine serves with this epoch, or a higher one.

        Raises:
            ChildStartError: none does in time.
        """
        deadline = time.monotonic() + timeout_s
        while (record := self.serving()) is None or record.epoch < epoch:
            if time.monotonic() >= deadline:
                lines = "\n".join(list(self.log)[-12:])
                raise ChildStartError(f"no engine has taken over within {timeout_s:g} s:\n{lines}")
            time.sleep(POLL_S)
        return record

    def wait_for_standby(self, timeout_s: float = START_S, *, count: int = 1) -> None:
        """Wait until so many engines stand by.

        Raises:
            ChildStartError: they do not in time.
        """
        deadline = time.monotonic() + timeout_s
        while (found := count_standbys(self.failover_dir, self.cohort)) < count:
            if time.monotonic() >= deadline:
                raise ChildStartError(f"{found} of {count} engines stand by after {timeout_s:g} s")
            time.sleep(10 * POLL_S)

    def close(self) -> None:
        """End it; what does not end in time is killed, and its children with it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(STOP_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._directory.cleanup()

    def _read(self) -> None:
        """Keep the last lines, and note when the pod serves."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line.rstrip("\n"))
            if " | " in line:  # a process's own
                continue
            if found := _READY.search(line):
                self._url = found[1]
                self._has_started.set()
            elif not self._has_started.is_set():
                self._on_progress(line.rstrip("\n"))
        self._has_started.set()


def wake_phases(record: EngineRecord) -> dict[str, float]:
    """Return the seconds that each phase of an engine's wake took, and ``total``."""
    parts = urlsplit(record.system_url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=TAKEOVER_S)
    try:
        connection.request("GET", "/health")
        timings: dict[str, float] = json.loads(connection.getresponse().read())["timings"]
    finally:
        connection.close()
    return {"serve": 0.0, "total": 0.0} | timings
