"""Runs the children of a supervisor: carries out its commands, and tells it what happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from segue.children import describe_exit
from segue.cluster.probe import is_ready
from segue.cluster.processes import ChildProcess, ChildSpec, HealthProbes, Orphans
from segue.cluster.supervisor import (
    SIGNALS,
    ChildAction,
    ChildCommand,
    ChildState,
    Supervisor,
    SupervisorRules,
)
from segue.failover.prober import Prober, keep_probing
from segue.logs import logger

PROBE_S = 0.1  # between two probes


class ChildRunner:
    """The children of one process. It lives on one event loop, that of the main thread.

    The children die with the thread that starts them, which must therefore be the main one.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        rules: SupervisorRules,
        on_line: Callable[[str, str], None],
        on_ready: Callable[[str], None],
    ) -> None:
        """Take the children's descriptions; :meth:`run` starts them.

        Args:
            specs: the children; their names differ.
            rules: the times of the supervisor.
            on_line: called with a child's name and a line that it has written.
            on_ready: called with a child's name each time that it has become ready.
        """
        stages = {spec.name: spec.stage for spec in specs}
        pauses = {spec.name: spec.restart_after_s for spec in specs}
        self.supervisor = Supervisor(stages, rules, time.monotonic(), pauses)
        self._specs = {spec.name: spec for spec in specs}
        self._on_line = on_line
        self._on_ready = on_ready
        self._processes: dict[str, ChildProcess] = {}  # those that run
        self._commands: set[ChildProcess] = set()  # of probes
        self._orphans = Orphans()
        self._changed = asyncio.Event()
        self._tasks = asyncio.TaskGroup()  # one task per process

    async def run(self) -> None:
        """Return when all children have ended, as :meth:`drain` and :meth:`stop` ask them to.

        If this is cancelled or fails, all children are killed.
        """
        with self._orphans:
            try:
                async with self._tasks:
                    while not self.supervisor.is_over:
                        self._changed.clear()
                        self._do(self.supervisor.advance(time.monotonic()))
                        wake_at = self.supervisor.wake_at
                        timeout = None if wake_at is None else max(0.0, wake_at - time.monotonic())
                        with suppress(TimeoutError):
                            await asyncio.wait_for(self._changed.wait(), timeout)
            finally:
                for process in self._processes.values():  # their tasks were cancelled before they began
                    await process.close()

    def drain(self) -> None:
        """Let all children end when their work is done."""
        self._do(self.supervisor.drain(time.monotonic()))
        self._changed.set()

    def stop(self) -> None:
        """End all children at once."""
        self._do(self.supervisor.stop(time.monotonic()))
        self._changed.set()

    def _do(self, commands: Sequence[ChildCommand]) -> None:
        """Carry out commands."""
        for name, action in commands:
            if action is ChildAction.START:
                self._start(self._specs[name])
            elif name in self._processes:  # else it has just ended, which the supervisor hears next
                self._processes[name].signal(SIGNALS[action])

    def _start(self, spec: ChildSpec) -> None:
        """Start a process of a child."""
        try:
            process = ChildProcess(spec, partial(self._on_line, spec.name))
        except OSError as error:
            reason = f"because it could not be started ({error.strerror})"
            asyncio.get_running_loop().call_soon(self._exited, spec.name, reason)
            return
        self._processes[spec.name] = process
        self._tasks.create_task(self._live(spec, process))

    async def _live(self, spec: ChildSpec, process: ChildProcess) -> None:
        """Accompany a process to its end."""
        probing = [self._tasks.create_task(self._probe(spec))]
        if spec.health is not None:
            probing.append(self._tasks.create_task(self._watch(spec, spec.health)))
        try:
            reason = await process.wait()
            del self._processes[spec.name]
            for task in probing:
                task.cancel()
            await self._orphans.end(self._known)
        finally:
            self._processes.pop(spec.name, None)
            for task in probing:
                task.cancel()
            await process.close()
        self._exited(spec.name, reason)

    async def _probe(self, spec: ChildSpec) -> None:
        """Note when a process is ready."""
        while not await is_ready(spec.probe):
            await asyncio.sleep(PROBE_S)
        self._do(self.supervisor.probed(spec.name, time.monotonic()))
        self._on_ready(spec.name)

    async def _watch(self, spec: ChildSpec, health: HealthProbes) -> None:
        """Have a process killed when its probes want it."""
        prober = Prober(health.probes, time.monotonic())
        execute = partial(self._execute, spec)
        reason = await keep_probing(prober, health.ports, execute, host=health.host)
        if commands := self.supervisor.unhealthy(spec.name, time.monotonic()):
            logger.warning("%s is killed: %s", spec.name, reason)
            self._do(commands)

    async def _execute(self, spec: ChildSpec, command: tuple[str, ...]) -> str | None:
        """Run the command of a child's probe; returns why it failed, or None."""
        lines: list[str] = []
        process = ChildProcess(replace(spec, command=command), lines.append)
        self._commands.add(process)
        try:
            ending = await process.wait()
        finally:
            await process.close()
            self._commands.discard(process)
        return None if ending == describe_exit(0) else f"it ended {ending}: {lines[-1] if lines else ''}"

    def _known(self) -> set[int]:
        """Return the processes that are no orphans."""
        return {each.pid for each in (*self._processes.values(), *self._commands)}

    def _exited(self, name: str, reason: str) -> None:
        """Note the end of a process."""
        self._do(self.supervisor.exited(name, reason, now := time.monotonic()))
        self._changed.set()
        child = self.supervisor.children[name]
        if child.state is ChildState.WAITING and child.due is not None:
            when = f"in {child.due - now:g} s" if child.due > now else "now"
            logger.warning("%s ended %s; it is started again %s", name, reason, when)
