"""Which processes run: a state machine per child process, and the order in which all of them end.

Nothing here starts a process or reads a clock. Events and times go in, and commands come out, which
`segue.cluster.runner` carries out. Times are monotonic, in seconds.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from segue.children import RestartRule


class ChildState(Enum):
    """The states of one child: whether its process runs, and what it is expected to do."""

    WAITING = auto()  # no process; one is started at `due`
    STARTING = auto()  # its process is not ready yet
    READY = auto()
    DRAINING = auto()  # it was asked to end, and may take its time
    STOPPING = auto()  # it was told to end at once, and is killed at `due`
    ENDED = auto()  # no process, and none will be started


class ChildEvent(Enum):
    """What can happen to a child."""

    DUE = auto()  # the time that its state waits for has come
    PROBED = auto()  # its probe has found it ready
    DIED = auto()  # its process ended, and another one shall take its place
    EXITED = auto()  # its process ended, and none shall take its place
    UNHEALTHY = auto()  # its probes want it killed
    DRAIN = auto()  # it shall end when its work is done
    STOP = auto()  # it shall end at once


class ChildAction(Enum):
    """What is done to a child's process."""

    NOTHING = auto()
    START = auto()
    TERM = auto()
    INTERRUPT = auto()
    KILL = auto()


SIGNALS = {
    ChildAction.TERM: signal.SIGTERM,
    ChildAction.INTERRUPT: signal.SIGINT,
    ChildAction.KILL: signal.SIGKILL,
}


# What follows from each event that can happen in a state. Pairs that are missing change nothing: the event
# comes too late, as a probe's answer does when the child was told to end meanwhile, or asks for what is so.
TABLE: dict[tuple[ChildState, ChildEvent], tuple[ChildState, ChildAction]] = {
    (ChildState.WAITING, ChildEvent.DUE): (ChildState.STARTING, ChildAction.START),
    (ChildState.WAITING, ChildEvent.DRAIN): (ChildState.ENDED, ChildAction.NOTHING),
    (ChildState.WAITING, ChildEvent.STOP): (ChildState.ENDED, ChildAction.NOTHING),
    (ChildState.STARTING, ChildEvent.PROBED): (ChildState.READY, ChildAction.NOTHING),
    (ChildState.STARTING, ChildEvent.DIED): (ChildState.WAITING, ChildAction.NOTHING),
    (ChildState.STARTING, ChildEvent.EXITED): (ChildState.ENDED, ChildAction.NOTHING),
    (ChildState.STARTING, ChildEvent.UNHEALTHY): (ChildState.STARTING, ChildAction.KILL),
    (ChildState.STARTING, ChildEvent.DRAIN): (ChildState.DRAINING, ChildAction.TERM),
    (ChildState.STARTING, ChildEvent.STOP): (ChildState.STOPPING, ChildAction.INTERRUPT),
    (ChildState.READY, ChildEvent.DIED): (ChildState.WAITING, ChildAction.NOTHING),
    (ChildState.READY, ChildEvent.EXITED): (ChildState.ENDED, ChildAction.NOTHING),
    (ChildState.READY, ChildEvent.UNHEALTHY): (ChildState.READY, ChildAction.KILL),
    (ChildState.READY, ChildEvent.DRAIN): (ChildState.DRAINING, ChildAction.TERM),
    (ChildState.READY, ChildEvent.STOP): (ChildState.STOPPING, ChildAction.INTERRUPT),
    (ChildState.DRAINING, ChildEvent.EXITED): (ChildState.ENDED, ChildAction.NOTHING),
    (ChildState.DRAINING, ChildEvent.STOP): (ChildState.STOPPING, ChildAction.INTERRUPT),
    (ChildState.STOPPING, ChildEvent.EXITED): (ChildState.ENDED, ChildAction.NOTHING),
    (ChildState.STOPPING, ChildEvent.DUE): (ChildState.STOPPING, ChildAction.KILL),
}


class ChildCommand(NamedTuple):
    """One thing to do now."""

    name: str  # of the child
    action: ChildAction  # never NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorRules:
    """The times of a supervisor, in seconds."""

    drain_s: float  # for all children together, from SIGTERM until they are told to end at once
    stop_s: float = 5.0  # from there until they are killed
    restart: RestartRule = field(default_factory=RestartRule)  # a child may have a longer pause of its own


@dataclass(slots=True)
class Child:
    """One child, as the supervisor knows it."""

    name: str
    stage: int  # children of a higher stage end before those of a lower one are asked to
    least_pause_s: float = 0.0  # before each restart
    state: ChildState = ChildState.WAITING
    due: float | None = None  # when DUE happens; None: it does not
    started_at: float = 0.0  # its last process
    ready_since: float | None = None  # None: it is not ready
    was_ready: bool = False
    num_deaths: int = 0  # in a row, as its `RestartRule` counts


class Supervisor:
    """All children. Each method that takes an event returns the commands that follow from it."""

    def __init__(
        self,
        stages: Mapping[str, int],
        rules: SupervisorRules,
        now: float,
        least_pauses: Mapping[str, float] | None = None,
    ) -> None:
        """Take the children's names, stages and pauses; :meth:`advance` starts them."""
        pauses = least_pauses or {}
        self.children = {
            name: Child(name, stage, pauses.get(name, 0.0), due=now) for name, stage in stages.items()
        }
        self.failure: str | None = None  # why everything ends without having been asked to
        self._rules = rules
        self._is_draining = False
        self._is_stopping = False
        self._drain_until: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether every child is ready."""
        return all(child.state is ChildState.READY for child in self.children.values())

    @property
    def is_over(self) -> bool:
        """Whether no process is left, and none will be started."""
        return all(child.state is ChildState.ENDED for child in self.children.values())

    @property
    def is_ending(self) -> bool:
        """Whether the children are to end."""
        return self._is_draining or self._is_stopping

    @property
    def wake_at(self) -> float | None:
        """When :meth:`advance` must be called next; None: not before the next event."""
        times = [self._drain_until, *(child.due for child in self.children.values())]
        return min((time for time in times if time is not None), default=None)

    def advance(self, now: float) -> list[ChildCommand]:
        """Do what is due: start children, end a drain that takes too long, kill what does not end."""
        commands = [
            command
            for child in self.children.values()
            if child.due is not None and child.due <= now
            for command in self._apply(child, ChildEvent.DUE, now)
        ]
        if self._drain_until is not None and self._drain_until <= now:
            commands += self.stop(now)
        return commands

    def probed(self, name: str, now: float) -> list[ChildCommand]:
        """Note that a child is ready."""
        return self._apply(self.children[name], ChildEvent.PROBED, now)

    def unhealthy(self, name: str, now: float) -> list[ChildCommand]:
        """Note that a child's probes want its process killed; then another one takes its place."""
        return self._apply(self.children[name], ChildEvent.UNHEALTHY, now)

    def exited(self, name: str, reason: str, now: float) -> list[ChildCommand]:
        """Note that a child's process has ended; ``reason`` is the end of a sentence.

        A child that was never ready would most likely fail again, so then everything ends.
        """
        child = self.children[name]
        if not self.is_ending and not child.was_ready:
            self.failure = f"{name} ended {reason} before it was ready; see its log above"
            return [*self._apply(child, ChildEvent.EXITED, now), *self.stop(now)]
        if self.is_ending:
            return [*self._apply(child, ChildEvent.EXITED, now), *self._drain_next(now)]
        return self._apply(child, ChildEvent.DIED, now)

    def drain(self, now: float) -> list[ChildCommand]:
        """Let all children end when their work is done, the highest stage first. Nothing is started again."""
        if self.is_ending:
            return []
        self._is_draining = True
        self._drain_until = now + self._rules.drain_s
        return self._drain_next(now)

    def stop(self, now: float) -> list[ChildCommand]:
        """End all children at once."""
        self._is_stopping, self._drain_until = True, None
        return [
            command
            for child in self.children.values()
            for command in self._apply(child, ChildEvent.STOP, now)
        ]

    def _drain_next(self, now: float) -> list[ChildCommand]:
        """Ask the highest stage that has not ended to end; children without a process have ended."""
        for child in self.children.values():
            if child.state is ChildState.WAITING:
                self._apply(child, ChildEvent.DRAIN, now)
        left = [child for child in self.children.values() if child.state is not ChildState.ENDED]
        highest = max((child.stage for child in left), default=0)
        if not left:
            self._drain_until = None
        return [
            command
            for child in left
            if child.stage == highest
            for command in self._apply(child, ChildEvent.DRAIN, now)
        ]

    def _apply(self, child: Child, event: ChildEvent, now: float) -> list[ChildCommand]:
        """Let an event happen to a child; returns the command that follows, if there is one."""
        old = child.state
        if (old, event) not in TABLE:
            return []
        child.state, action = TABLE[old, event]
        child.due = None
        if event is ChildEvent.PROBED:
            child.ready_since, child.was_ready = now, True
        elif action is ChildAction.START:
            child.started_at = now
        elif child.state is ChildState.WAITING:
            child.due = now + self._pause_after_death(child, now)
        elif child.state is ChildState.STOPPING and old is not ChildState.STOPPING:
            child.due = now + self._rules.stop_s
        if child.state is not ChildState.READY:
            child.ready_since = None
        return [] if action is ChildAction.NOTHING else [ChildCommand(child.name, action)]

    def _pause_after_death(self, child: Child, now: float) -> float:
        """Count a death; returns the seconds until the child is started again."""
        start_s = 0.0 if child.ready_since is None else child.ready_since - child.started_at
        ready_s = 0.0 if child.ready_since is None else now - child.ready_since
        child.num_deaths = self._rules.restart.count(child.num_deaths, start_s, ready_s)
        return max(child.least_pause_s, self._rules.restart.pause_s(child.num_deaths))
