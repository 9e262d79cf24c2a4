"""Watches and kills processes for the fence, by the pidfds of all engines that have a session."""

from __future__ import annotations

import asyncio
import os
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
        for old, (pid, _) in list(self._names.items()):
            if pid == session.pid and old not in self._service.sessions:
                self._ended(old)  # the same process, with another session: one pidfd is enough
        self._pidfds[number] = own = os.dup(pidfd)
        self._names[number] = session.pid, session.name
        asyncio.get_running_loop().add_reader(own, self._ended, number)
        self._step(SeenEvent(process=number, cohort=hello.cohort, engine=hello.engine, epoch=hello.epoch))

    def serves(self, session: GmsSession, epoch: int) -> None:
        """Note that a session's engine has claimed an epoch."""
        hello = session.hello
        self._step(ServesEvent(cohort=hello.cohort, engine=hello.engine, epoch=epoch))

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
        """Forget that a session waits; the process of an engine that has served is still watched."""
        self._step(FenceGoneEvent(session=session))
        if session in self._pidfds and session not in self._state.processes:
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
        self._step(EndedEvent(process=number))
        self._forget(number)

    def _forget(self, number: int) -> None:
        pidfd = self._pidfds.pop(number)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        del self._names[number]

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
