"""The probes of one container, as the kubelet runs them: when each is due, and what its results lead to.

:class:`Prober` is pure: times and results go in, and what to do comes out. :func:`keep_probing` runs it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from segue.failover.pod import Execution, HttpGet, Probe, ProbeKind
from segue.tls import unverified

LOOPBACK = "127.0.0.1"
HEAD_BYTES = 1 << 12  # the most of an answer that is read: a probe looks at the status alone

Execute = Callable[[tuple[str, ...]], Awaitable[str | None]]  # returns why a command failed, or None


@dataclass(slots=True)
class _Result:
    """The state of one probe."""

    probe: Probe
    passes: bool  # what it says now: until its thresholds are reached, what the kubelet assumes
    due: float | None = None  # when it runs next; None: it runs now, or waits for the startup probe
    successes: int = 0  # in a row
    failures: int = 0  # in a row


class Prober:
    """The probes of one process of a container. Times are monotonic, in seconds."""

    def __init__(self, probes: Mapping[ProbeKind, Probe], now: float) -> None:
        """Begin with the start of the process, at ``now``."""
        self._began = now
        # As for the kubelet: until its probes say otherwise, a process is alive, not started and not ready.
        self._results = {kind: _Result(probe, kind is ProbeKind.LIVENESS) for kind, probe in probes.items()}
        self.verdict: str | None = None  # why the process must be killed
        if (startup := self._results.get(ProbeKind.STARTUP)) is not None:
            startup.due = now + startup.probe.initial_delay_s
        else:
            self._begin_others(now)

    @property
    def has_started(self) -> bool:
        """Whether the startup probe has succeeded, or there is none."""
        startup = self._results.get(ProbeKind.STARTUP)
        return startup is None or startup.passes

    @property
    def is_ready(self) -> bool:
        """Whether the process has started, and the readiness probe succeeds if there is one."""
        readiness = self._results.get(ProbeKind.READINESS)
        return self.has_started and (readiness is None or readiness.passes)

    @property
    def wake_at(self) -> float | None:
        """When a probe is due next; None: not before the next answer."""
        return min((each.due for each in self._results.values() if each.due is not None), default=None)

    def take_due(self, now: float) -> list[tuple[ProbeKind, Probe]]:
        """Return the probes that must run now; none of them runs again before its answer."""
        due = [(kind, each) for kind, each in self._results.items() if each.due is not None]
        now_due = [(kind, each) for kind, each in due if each.due is not None and each.due <= now]
        for _, each in now_due:
            each.due = None
        return [(kind, each.probe) for kind, each in now_due]

    def answered(self, kind: ProbeKind, failure: str | None, asked_at: float, now: float) -> None:
        """Take the result of a probe that began at ``asked_at``; ``failure``: why it failed, or None."""
        each = self._results[kind]
        each.successes, each.failures = (0, each.failures + 1) if failure else (each.successes + 1, 0)
        if failure and each.failures >= each.probe.failure_threshold:
            each.passes = False
            if kind is not ProbeKind.READINESS:
                times = "once" if each.failures == 1 else f"{each.failures} times in a row"
                self.verdict = self.verdict or f"its {kind.value} failed {times} ({failure})"
        elif not failure and each.successes >= each.probe.success_threshold:
            had_passed, each.passes = each.passes, True
            if kind is ProbeKind.STARTUP and not had_passed:
                self._begin_others(now)
        if not (kind is ProbeKind.STARTUP and each.passes):
            each.due = max(now, asked_at + each.probe.period_s)

    def _begin_others(self, now: float) -> None:
        for kind, each in self._results.items():
            if kind is not ProbeKind.STARTUP:
                each.due = max(now, self._began + each.probe.initial_delay_s)


async def keep_probing(
    prober: Prober, ports: Mapping[str, int], execute: Execute, *, host: str = LOOPBACK
) -> str:
    """Run the probes of a process until one of them wants it killed; returns why.

    Args:
        prober: of the process.
        ports: the ports of this machine that stand for the container's, by their names.
        execute: runs the command of an exec probe.
        host: the address of this machine that stands for the container's.
    """
    changed = asyncio.Event()

    async def run(kind: ProbeKind, probe: Probe) -> None:
        asked_at = time.monotonic()
        failure = await ask(probe, ports, execute, host=host)
        prober.answered(kind, failure, asked_at, time.monotonic())
        changed.set()

    async with asyncio.TaskGroup() as tasks:
        running: set[asyncio.Task[None]] = set()
        while prober.verdict is None:
            changed.clear()
            for kind, probe in prober.take_due(time.monotonic()):
                task = tasks.create_task(run(kind, probe))
                running.add(task)
                task.add_done_callback(running.discard)
            wake_at = prober.wake_at
            timeout = None if wake_at is None else max(0.0, wake_at - time.monotonic())
            try:
                await asyncio.wait_for(changed.wait(), timeout)
            except TimeoutError:
                continue
        for task in running:
            task.cancel()
    return prober.verdict


async def ask(
    probe: Probe, ports: Mapping[str, int], execute: Execute, *, host: str = LOOPBACK
) -> str | None:
    """Run a probe once; returns why it failed, or None."""
    try:
        async with asyncio.timeout(probe.timeout_s):
            match probe.action:
                case HttpGet(path=path, port=port, scheme=scheme):
                    number = ports[port] if isinstance(port, str) else port
                    return await _get(path, host, number, is_https=scheme == "HTTPS")
                case Execution(command=command):
                    return await execute(command)
    except TimeoutError:
        return f"no answer within {probe.timeout_s:g} s"
    except OSError as error:
        return error.strerror or str(error)


async def _get(path: str, host: str, port: int, *, is_https: bool) -> str | None:
    """Return why a GET of this machine failed, or None."""
    reader, writer = await asyncio.open_connection(host, port, ssl=unverified() if is_https else None)
    try:
        # The Host is one that servers with --allowed-hosts take too.
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {LOOPBACK}:{port}\r\nConnection: close\r\n\r\n".encode())
        status = (await reader.read(HEAD_BYTES)).split(b" ", 2)[1:2]
    finally:
        writer.close()
    if not status or not status[0].isdigit():
        return "the answer is not HTTP"
    code = int(status[0])
    return None if 200 <= code < 400 else f"HTTP status {code}"
