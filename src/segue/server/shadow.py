"""How an engine comes to serve: at once, or in place of another one once that one's lock is free."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext, suppress

from segue.errors import ForbiddenError, LockHeldError, LockLostError, NoStandbyError
from segue.failover.control_note import ControlNotes
from segue.failover.watchdog import Watchdog
from segue.launch.runtime import Runtime
from segue.logs import logger
from segue.server import canary
from segue.server.cohort import CohortMember
from segue.server.endpoint import EngineEndpoint

WAKE_S = 10.0  # that a wake may take, and
WAKE_BYTES_PER_S = 10 << 30  # so many bytes of KV cache add a second
GUARD_S = 0.1  # between two looks whether the lock is still this engine's
LOCK_S = 0.5  # that a call for a wake waits for the lock, which may have become free at this moment


class Takeover:
    """Has an engine that stands by serve, at most once: lock, epoch, memory, test request, API port.

    Without a ``membership`` there is neither lock nor epoch nor test request, and the engine serves at once.
    """

    def __init__(self, runtime: Runtime, endpoint: EngineEndpoint, membership: CohortMember | None) -> None:
        """Begin to wait for the moment at which the engine is to serve."""
        self._runtime = runtime
        self._endpoint = endpoint
        self._membership = membership
        self._has_lock = asyncio.Event()
        self._guard: asyncio.Task[None] | None = None
        self.hand_over_asked = asyncio.Event()
        self.task = asyncio.create_task(self._run())  # ends once the engine serves, or cannot

    async def wake_up(self) -> None:
        """Have the engine serve now, and return once it does; all callers share one wake.

        Raises:
            LockHeldError: another engine of the cohort serves.
            ForbiddenError: the engine is to wait for the lock.
            SegueError: this engine cannot serve, and ends.
        """
        wake_by = self._runtime.config.wake
        if self._membership is not None and not self._has_lock.is_set():
            if wake_by == "lock":
                text = "this engine waits until the one that serves has ended (--wake lock)"
                raise ForbiddenError(f"{text}; start it with --wake manual or --wake both")
            if wake_by == "manual" and self._membership.lock.try_acquire():
                self._has_lock.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_lock.wait(), LOCK_S)
            if not self._has_lock.is_set():
                raise LockHeldError(
                    f"the lock of cohort {self._membership.cohort} is held by {self._membership.holder}; end "
                    "that engine, or send it POST /engine/hand_over"
                )
        await asyncio.shield(self.task)

    def hand_over(self) -> None:
        """Have the engine end its requests and itself, since another one waits to take over.

        Raises:
            NoStandbyError: none waits, or this engine does not serve.
        """
        if not self.task.done() or self._membership is None or not self._membership.has_standby:
            raise NoStandbyError(
                "no other engine of this cohort waits to take over, so handing over would end the service; "
                "start one with --shadow-mode, or send this one SIGTERM to drain and end it"
            )
        self.hand_over_asked.set()

    async def close(self) -> None:
        """End what still waits or watches; the lock stays as it is."""
        tasks = [task for task in (self.task, self._guard) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        """Wait until the engine is to serve, and wake it."""
        await asyncio.to_thread(self._runtime.source.tokenizer_digest)  # routers will wait for it
        if self._membership is not None and self._runtime.config.wake == "manual":
            await self._has_lock.wait()
        elif self._membership is not None:
            await self._membership.wait_for_lock()
        self._has_lock.set()
        await self._wake()

    async def _wake(self) -> None:
        runtime, membership, life = self._runtime, self._membership, self._runtime.life
        timeout_s = None if membership is None else _timeout_s(runtime)
        clock = _PhaseClock(life.wake_phases)
        runtime.begin_wake(timeout_s)
        with nullcontext() if timeout_s is None else Watchdog(timeout_s, runtime.kill_workers, "the wake"):
            epoch = 0
            if membership is not None:
                life.num_failovers += membership.lock.note() is not None
                epoch = await membership.claim(self._endpoint.own_url)
            clock.note("claim")
            await runtime.wake_ranks(epoch, timeout_s or 0.0)
            clock.note("memory")
            if membership is not None:
                await canary.check(runtime, membership.directory)
                await _take_over_pause(runtime, membership.control_notes)  # behind it: it would be stopped
            clock.note("canary")
            await self._endpoint.serve(runtime, epoch)
            clock.note("serve")
            runtime.activate()
        clock.note_total()
        if membership is not None:
            phases = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in life.wake_phases.items())
            logger.info("serves cohort %s with epoch %d; woke in %s", membership.cohort, epoch, phases)
            self._guard = asyncio.create_task(_end_without(membership, self._endpoint.own_url, runtime))


class _PhaseClock:
    """Notes how long each phase of a wake takes."""

    def __init__(self, phases: dict[str, float]) -> None:
        self._phases = phases
        self._began = self._last = time.monotonic()

    def note(self, name: str) -> None:
        """End the phase with this name."""
        now = time.monotonic()
        self._phases[name], self._last = now - self._last, now

    def note_total(self) -> None:
        """End the last phase."""
        self._phases["total"] = self._last - self._began


async def _take_over_pause(runtime: Runtime, notes: ControlNotes) -> None:
    """Pause generation if the engine before was paused by a user, for the time that is left."""
    runtime.control_notes = notes
    if (pause := notes.left()) is not None:
        mode, left_s = pause
        await runtime.pause_generation(mode, left_s)
        logger.info("generation is paused, as on the engine before")


async def _end_without(membership: CohortMember, url: str, runtime: Runtime) -> None:
    """End an engine that serves as soon as it has lost its lock, for another one has its place then."""
    while membership.lock.is_ours():
        await asyncio.sleep(GUARD_S)
    membership.leave_epoch(url)
    path = membership.lock.path
    text = f"the lock {path} is no longer this engine's, or another one has claimed a higher epoch"
    runtime.fail(LockLostError(f"{text}; the engine ends"))


def _timeout_s(runtime: Runtime) -> float:
    """Returns how long a wake may take."""
    given = runtime.config.wake_timeout_s
    return given or WAKE_S + runtime.config.tp * runtime.manager.ready.kv_bytes / WAKE_BYTES_PER_S
