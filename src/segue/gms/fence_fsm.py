"""The fence, as pure data: an engine that begins to serve has the processes of those before it ended.

An engine takes over once the lock of its cohort is free. That proves that a descriptor was closed, not that
nothing runs any more: a process may be stopped, or still be in the driver. The service has a pidfd per
process, which fires when the process has ended. A fence waits for all processes of other engines that have
served with a lower epoch, and has them killed where that is wanted. A process whose engine stands by has no
epoch, and no fence ever touches it.

Nothing here does I/O: :func:`fence_step` returns effects, which :mod:`segue.gms.fencing` carries out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import assert_never


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenEvent:
    """A process of an engine has opened a session."""

    process: int
    cohort: str
    engine: str
    epoch: int = 0  # with which its engine serves; 0: it stands by


@dataclass(frozen=True, slots=True, kw_only=True)
class ServesEvent:
    """An engine has claimed an epoch: all its processes serve from now on."""

    cohort: str
    engine: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedEvent:
    """The pidfd of a process has fired."""

    process: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceEvent:
    """An engine waits for the end of those before it."""

    session: int
    cohort: str
    engine: str
    below: int  # the epoch of the engine that asks
    kills: bool
    deadline: float = inf  # until when it waits


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceGoneEvent:
    """The connection of a session has ended. Its process, of the same number, may still run.

    The process is forgotten if its engine has not served: then no fence will ever ask for it.
    """

    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceTickEvent:
    """Time has passed."""


FencingEvent = SeenEvent | ServesEvent | EndedEvent | FenceEvent | FenceGoneEvent | FenceTickEvent


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Kill a process, if the system allows it; EndedEvent follows when it has ended."""

    process: int


@dataclass(frozen=True, slots=True)
class FenceAnswer:
    """What a session has waited for is over, or the wait is."""

    session: int
    alive: tuple[int, ...]  # processes that have not ended


FencingEffect = KillProcess | FenceAnswer


@dataclass(frozen=True, slots=True)
class WatchedProcess:
    """A process that has not ended."""

    cohort: str
    engine: str
    epoch: int  # with which its engine serves, or has served; 0: it stands by


@dataclass(frozen=True, slots=True)
class FenceState:
    """All processes that have not ended, and the sessions that wait for some of them."""

    processes: dict[int, WatchedProcess] = field(default_factory=dict)
    waiting: tuple[FenceEvent, ...] = ()


def fence_step(
    state: FenceState, event: FencingEvent, now: float = 0.0
) -> tuple[FenceState, list[FencingEffect]]:
    """Return the state after an event, and what is to be done, in order."""
    processes, waiting = dict(state.processes), state.waiting
    effects: list[FencingEffect] = []
    match event:
        case SeenEvent():
            processes[event.process] = WatchedProcess(event.cohort, event.engine, event.epoch)
        case ServesEvent():
            for number, each in processes.items():
                # One with an epoch is of an engine of this name that is ending, or has told its own.
                if (each.cohort, each.engine) == (event.cohort, event.engine) and not each.epoch:
                    processes[number] = replace(each, epoch=event.epoch)
        case EndedEvent():
            processes.pop(event.process, None)
        case FenceEvent():
            waiting = (*(each for each in waiting if each.session != event.session), event)
            if event.kills:
                effects += [KillProcess(number) for number in before(processes, event)]
        case FenceGoneEvent():
            waiting = tuple(each for each in waiting if each.session != event.session)
            if event.session in processes and not processes[event.session].epoch:
                del processes[event.session]
        case FenceTickEvent():
            pass
        case _:
            assert_never(event)
    left = []
    for fence in waiting:
        alive = before(processes, fence)
        if alive and fence.deadline > now:
            left.append(fence)
        else:
            effects.append(FenceAnswer(fence.session, alive))
    return FenceState(processes, tuple(left)), effects


def before(processes: dict[int, WatchedProcess], fence: FenceEvent) -> tuple[int, ...]:
    """Return the processes that a fence waits for."""
    return tuple(
        number
        for number, each in processes.items()
        if each.cohort == fence.cohort and each.engine != fence.engine and 0 < each.epoch < fence.below
    )
