"""One process of a child: how it is started and signalled, its log, and the processes that it leaves."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from segue.children import describe_exit
from segue.cluster.probe import ReadinessProbe, SocketProbe
from segue.failover.pod import Probe, ProbeKind
from segue.failover.prober import LOOPBACK

ORPHAN_S = 2.0  # for the processes of a dead child to end by themselves
LOG_END_S = 1.0  # for the rest of a dead child's log
POLL_S = 0.02
LINE_BYTES = 1 << 16  # of a log; a longer line is broken
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
_prctl = ctypes.CDLL(None).prctl


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthProbes:
    """The probes that watch a child, and where this machine has what its manifest names."""

    probes: Mapping[ProbeKind, Probe]
    ports: Mapping[str, int]  # by their names
    host: str = LOOPBACK  # that the child listens on


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What a child is."""

    name: str
    role: str  # for people, as in "2 prefill workers"
    stage: int  # children of a higher stage end before those of a lower one are asked to
    command: tuple[str, ...]
    environment: Mapping[str, str]  # all of it
    probe: ReadinessProbe | SocketProbe
    health: HealthProbes | None = None  # None: only its end has another process started
    restart_after_s: float = 0.0  # the least pause before it is started again


class ChildProcess:
    """One running process, from its start to its end. It belongs to a running event loop."""

    def __init__(self, spec: ChildSpec, on_line: Callable[[str], None]) -> None:
        """Start the process; ``on_line`` gets each line that it writes.

        It is killed when the thread that starts it ends, whatever the reason. It has a session of its own:
        Ctrl-C in the terminal reaches only this process.

        Raises:
            OSError: the program does not exist, or there is no memory or no process number for it.
        """
        self._process = subprocess.Popen(
            spec.command,
            env=dict(spec.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),
        )
        assert self._process.stdout is not None
        self._log = self._process.stdout
        self._on_line = on_line
        self._rest = b""  # of the log: a line without its end
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[None] = self._loop.create_future()
        self._log_end: asyncio.Future[None] = self._loop.create_future()
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._note_exit)
        os.set_blocking(self._log.fileno(), False)
        self._loop.add_reader(self._log, self._read)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        self._process.send_signal(number)

    async def wait(self) -> str:
        """Wait for the end of the process; returns how it ended, as the end of a sentence."""
        await self._exit
        return describe_exit(self._process.wait())

    async def close(self) -> None:
        """Kill the process if it runs, and read the rest of its log.

        Other processes may write to the log too: they have ``LOG_END_S`` seconds to end.
        """
        self.signal(signal.SIGKILL)
        self._process.wait()
        try:
            await asyncio.wait({self._log_end}, timeout=LOG_END_S)
        finally:  # also if this is cancelled
            self._loop.remove_reader(self._pidfd)
            self._loop.remove_reader(self._log)
            os.close(self._pidfd)
            self._log.close()

    def _note_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if not self._exit.done():  # else whoever waited for it was cancelled
            self._exit.set_result(None)

    def _read(self) -> None:
        """Hand over the lines that have arrived; at the end of the log also a line without its end."""
        data = os.read(self._log.fileno(), LINE_BYTES)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) >= LINE_BYTES):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._on_line(line.decode(errors="replace").rstrip("\r"))
        if not data:
            self._loop.remove_reader(self._log)
            self._log_end.set_result(None)


class Orphans:
    """Processes that dead children have left. While the ``with`` block runs, this process adopts them.

    Processes that it had started before the block stay as they are.
    """

    def __enter__(self) -> Orphans:
        self._others = _children()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    async def end(self, known: Callable[[], set[int]]) -> None:
        """Wait until there are none; kill those that stay.

        ``known`` returns the ids of the children that run. An engine's workers notice its death and end by
        themselves, in milliseconds, unless they hang.
        """
        deadline = asyncio.get_running_loop().time() + ORPHAN_S
        while orphans := _children() - known() - self._others:
            for pid in orphans:
                if asyncio.get_running_loop().time() >= deadline:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            await asyncio.sleep(POLL_S)


def _children() -> set[int]:
    """Return the ids of this process's children, those included that have ended and were not waited for."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found.update(map(int, file.read_text().split()))
    return found


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Runs between fork and exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)
