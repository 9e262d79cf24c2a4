"""Watches and kills processes for the fence, by the pidfds of all engines that have a session."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from typing import TYPE_CHECKING

from segue.gms import messages as wire
from segue.gms.fence_fsm import (
    EndedEvent,
    FenceAnswer,
    FenceEvent,
    FenceGoneEvent,
    FenceState,
    FenceTickEvent,
    FencingEvent,
    KillProcess,
    SeenEvent,
    ServesEvent,
    fence_step,
)
from segue.gms.session import GmsSession
from segue.logs import logger

if TYPE_CHECKING:
    from segue.gms.service import MemoryService


class ProcessFence:
    """The processes of engines, each by the number of its session. They are watched until they have ended.

    A session may have ended long before. If a process cannot be watched, no fence waits for it.
    """

    def __init__(self, service: MemoryService) -> None:
        self._service = service
        self._state = FenceState()
        self._pidfds: dict[int, int] = {}
        self._names: dict[int, tuple[int, str]] = {}  # process id, and name for messages
        self._processes: dict[int, int] = {}  # the same number for all sessions of one process
        self._calls: dict[int, int] = {}  # by the session that waits
        self.can_watch = True

    def seen(self, session: GmsSession, pidfd: int | None) -> None:
        """Watch the process of a session from now on; the pidfd is the caller's, None: there is none."""
        hello = session.hello
        if hello.tag != "weights":
            return
        if pidfd is None:
            self.can_watch = False
            return
        number = session.number
        self._processes[number] = number
        # A process of another PID namespace has the id 0 here. And a process that has just ended has left its
        # id to others.
        known = [old for old, (pid, _) in self._names.items() if pid and pid == session.pid]
        for old in [old for old in known if not _has_fired(self._pidfds[old])]:
            self._processes[number] = self._processes[old]
            if old not in self._service.sessions:  # one pidfd is enough
                self._step(EndedEvent(process=old))
                self._forget(old)
        self._pidfds[number] = own = os.dup(pidfd)
        self._names[number] = session.pid, session.name
        asyncio.get_running_loop().add_reader(own, self._ended, number)
        self._step(SeenEvent(process=number, cohort=hello.cohort, engine=hello.engine, epoch=hello.epoch))

    def serves(self, session: GmsSession, epoch: int) -> None:
        """Note that a session's engine has claimed an epoch."""
        hello = session.hello
        self._step(ServesEvent(cohort=hello.cohort, engine=hello.engine, epoch=epoch))

    def process_of(self, session: int) -> int | None:
        """Return the number of a session's process, which stays the same; None: it is not watched."""
        return self._processes.get(session)

    def kill(self, process: int) -> None:
        """Kill a process by its number of `process_of`, if the system allows it."""
        for number, each in self._processes.items():
            if each == process:
                self._kill(number)
                return

    def who(self, process: int) -> str:
        """Return what a process is called in messages."""
        found = [self._names[number][1] for number, each in self._processes.items() if each == process]
        return found[-1] if found else "a process that has ended"

    def ask(self, session: GmsSession, message: wire.FenceEngines) -> None:
        """Carry a fence out; the answer may come later."""
        self._calls[session.number] = message.call
        event = FenceEvent(
            session=session.number,
            cohort=session.hello.cohort,
            engine=session.hello.engine,
            below=message.below,
            kills=message.kills,
            deadline=time.monotonic() + message.wait_s,
        )
        self._step(event)

    def gone(self, session: int) -> None:
        """Forget that a session waits; a process that has served, or may write to KV, is still watched."""
        self._step(FenceGoneEvent(session=session))
        if session not in self._pidfds or session in self._state.processes:
            return
        if not self._service.kv.has_writer(self._processes[session]):
            self._forget(session)

    def tick(self) -> None:
        """Let time pass."""
        self._step(FenceTickEvent())

    def close(self) -> None:
        """Watch no process any more."""
        for pidfd in self._pidfds.values():
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()

    def _ended(self, number: int) -> None:
        process = self._processes[number]
        self._step(EndedEvent(process=number))
        self._forget(number)
        self._service.kv.ended(process)

    def _forget(self, number: int) -> None:
        pidfd = self._pidfds.pop(number)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        del self._names[number], self._processes[number]

    def _step(self, event: FencingEvent) -> None:
        self._state, effects = fence_step(self._state, event, time.monotonic())
        for effect in effects:
            match effect:
                case KillProcess():
                    self._kill(effect.process)
                case FenceAnswer():
                    session = self._service.sessions.get(effect.session)
                    alive = [self._names[number][0] for number in effect.alive]
                    call = self._calls.pop(effect.session)
                    if session is not None:
                        session.port.send(
                            wire.EnginesFenced(call=call, alive=alive, is_proved=self.can_watch)
                        )

    def _kill(self, number: int) -> None:
        name = self._names[number][1]
        try:
            signal.pidfd_send_signal(self._pidfds[number], signal.SIGKILL)
        except ProcessLookupError:
            return  # it has ended just now
        except OSError as error:  # it is in another PID namespace, or another user's
            logger.warning("%s cannot be killed (%s); its container's supervisor must do it", name, error)
            return
        self._service.note_event("fenced", f"{name} was killed, because a newer engine serves")


def _has_fired(pidfd: int) -> bool:
    """Whether a process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
