"""A process of Segue within an actor: it ends with the actor, and the actor hears of its end."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from segue.cluster.probe import is_ready
from segue.cluster.processes import ChildProcess, ChildSpec
from segue.errors import ChildStartError
from segue.failover.pod import ProbeKind
from segue.failover.prober import Prober, keep_probing

PROBE_S = 0.1  # between two looks whether it is ready
KILL_S = 5.0  # for a killed process to end


class HostedProcess:
    """One process, started with this object. A thread owns it: the kernel kills it when that thread ends.

    It is never started again: that is for whoever hears of its end.
    """

    def __init__(self, spec: ChildSpec, on_end: Callable[[str], None]) -> None:
        """Start the process.

        Args:
            spec: what it is; its liveness probes kill it. Its `restart_after_s` has no meaning here.
            on_end: called in another thread with the end of a sentence once the process has ended or was
                killed, unless :meth:`stop` ended it. Where the process was never ready, nothing is called,
                and :meth:`wait_ready` raises.
        """
        self._spec = spec
        self._on_end = on_end
        self._failure: str | None = None
        self._is_ready = False
        self._is_stopping = False
        self._settled = threading.Event()  # it is ready, or has ended
        self._started = threading.Event()  # `_process` is what it will be
        self._process: ChildProcess | None = None
        self._thread = threading.Thread(target=self._run, name=f"segue-{spec.name}", daemon=True)
        self._thread.start()
        self._started.wait()

    @property
    def pid(self) -> int:
        """The process id."""
        return 0 if self._process is None else self._process.pid

    def wait_ready(self) -> None:
        """Return once the process is ready.

        Raises:
            ChildStartError: it ended before.
        """
        self._settled.wait()
        if not self._is_ready:
            raise ChildStartError(f"{self._spec.name} ended {self._failure} before it was ready; see its log")

    def stop(self, drain_s: float) -> None:
        """End the process: after ``drain_s`` seconds for its work it is killed. May be called again."""
        self._is_stopping = True
        for number, patience_s in ((signal.SIGTERM, drain_s), (signal.SIGKILL, KILL_S)):
            if self._process is not None and self._thread.is_alive():
                with suppress(RuntimeError):  # its loop has just closed
                    self._loop.call_soon_threadsafe(self._signal, number)
                self._thread.join(patience_s)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.signal(number)

    def _run(self) -> None:
        """Accompany the process to its end, and tell of that."""
        reason = asyncio.run(self._live())
        self._failure = reason
        self._settled.set()
        if self._is_ready and not self._is_stopping:
            self._on_end(reason)

    async def _live(self) -> str:
        self._loop = asyncio.get_running_loop()
        self._becomes_ready = asyncio.Event()
        try:
            self._process = ChildProcess(self._spec, self._write)
        except OSError as error:
            return f"because it could not be started ({error.strerror})"
        finally:
            self._started.set()
        ends = [asyncio.create_task(self._process.wait())]
        if self._spec.health is not None:
            ends.append(asyncio.create_task(self._watch()))
        probing = asyncio.create_task(self._until_ready())
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in ends if task in done).result()
        finally:
            for task in (*ends, probing):
                task.cancel()
            await asyncio.gather(*ends, probing, return_exceptions=True)
            await self._process.close()

    async def _until_ready(self) -> None:
        while not await is_ready(self._spec.probe):
            await asyncio.sleep(PROBE_S)
        self._is_ready = True
        self._settled.set()
        self._becomes_ready.set()

    async def _watch(self) -> str:
        """Return why the process must be killed, once its probes say so.

        A process without a startup probe is not asked whether it lives before it is ready: on a busy machine
        a start takes long.
        """
        health = self._spec.health
        assert health is not None
        if ProbeKind.STARTUP not in health.probes:
            await self._becomes_ready.wait()
        prober = Prober(health.probes, time.monotonic())
        return f"because {await keep_probing(prober, health.ports, _no_command, host=health.host)}"

    def _write(self, line: str) -> None:
        """Write a line of the process where Ray collects those of the actor."""
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)


async def _no_command(command: tuple[str, ...]) -> str | None:
    """Refuse to run the command of a probe: those of engines and routers ask over HTTP."""
    return f"{' '.join(command)!r} is a command, and only probes over HTTP are run here"
