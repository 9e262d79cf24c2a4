"""Pausing and flushing: who holds the engine, in which mode, and who waits to hear that it stands still.

    RUNNING -> PAUSING -> PAUSED -> RUNNING

An engine runs while nobody holds it. A user's hold ends with ``continue``, or when its time is up; a weight
commit ends its own hold and never the user's. A pause takes effect when no step is in flight (mode ``wait``:
when no request that has begun is left either); those who asked for it are answered then.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal, get_args

from segue.messages.control import (
    Continue,
    Continued,
    Flush,
    Flushed,
    Pause,
    Paused,
    PauseMode,
    SchedulerMessage,
)
from segue.messages.requests import Finished

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler

Holder = Literal["user", "weight_commit", "memory_release"]

_MODES: tuple[PauseMode, ...] = get_args(PauseMode)  # from the weakest on


class PauseState(Enum):
    """Whether steps are planned."""

    RUNNING = auto()
    PAUSING = auto()  # what was launched, or with mode "wait" what has begun, is awaited
    PAUSED = auto()


@dataclass(frozen=True, slots=True)
class _PendingFlush:
    message: Flush
    deadline: float
    step: int  # the last one launched when it came, awaited in any case


class PauseControl:
    """The state machine of one scheduler. Times are in seconds, of any one clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.state = PauseState.RUNNING
        self.holders: dict[Holder, PauseMode] = {}
        self._asked: dict[Holder, PauseMode] = {}  # what has not taken effect yet
        self._deadline: float | None = None  # when the user's hold ends by itself
        self._pauses: list[tuple[int, float]] = []  # (call, when it was sent), not yet answered
        self._flushes: list[_PendingFlush] = []
        self._replies: list[SchedulerMessage] = []

    @property
    def mode(self) -> PauseMode | None:
        """The strongest of the holders' modes; None if nobody holds the engine."""
        return max(self.holders.values(), key=_MODES.index, default=None)

    @property
    def asked_mode(self) -> PauseMode | None:
        """The mode of a client's pause: a weight commit holds the engine for a moment, and nobody asked."""
        modes = (mode for holder, mode in self.holders.items() if holder != "weight_commit")
        return max(modes, key=_MODES.index, default=None)

    @property
    def asked_state(self) -> PauseState:
        """How far a client's pause is; :attr:`state` counts what a weight commit holds too."""
        if self.asked_mode is None:
            return PauseState.RUNNING
        if self.state is PauseState.PAUSED and not self._user_waits():
            return PauseState.PAUSED
        return PauseState.PAUSING

    @property
    def admits(self) -> bool:
        """Whether waiting requests may start."""
        return self.state is PauseState.RUNNING

    @property
    def runs(self) -> bool:
        """Whether requests that have started go on."""
        return self.admits or (self.state is PauseState.PAUSING and self.mode == "wait")

    def pause(self, message: Pause, now: float) -> None:
        """A user's pause: its mode only grows stronger, its time to live is the latest one's."""
        self.hold("user", message.mode)
        self._deadline = None if message.ttl_s is None else now + message.ttl_s
        self._pauses.append((message.call, now if message.sent is None else message.sent))

    def continue_(self, message: Continue) -> None:
        """End the user's pause, if there is one."""
        self.release("user")
        self._replies.append(Continued(message.call))

    def hold(self, holder: Holder, mode: PauseMode = "in_place") -> None:
        """Stop, or stop more thoroughly."""
        for holds in (self.holders, self._asked):
            holds[holder] = max(mode, holds.get(holder, mode), key=_MODES.index)
        self.state = PauseState.PAUSING

    def release(self, holder: Holder) -> None:
        """End a hold, if there is one; the engine runs when it was the last."""
        if self.holders.pop(holder, None) is None:
            return
        finished: list[Finished] = []
        if self._asked.pop(holder, None) == "abort":  # who was told that all end, sees all end
            finished = self._scheduler.abort_all()
        if holder == "user":
            self._deadline = None
        self._replies.append(self._scheduler.output(finished=finished))
        if not self.holders:
            self.state = PauseState.RUNNING
            self._answer_pauses(num_aborted=len(finished))
        elif self.state is PauseState.PAUSED and "user" not in self.holders:  # who waited behind a commit
            self._answer_pauses()
        elif self.mode == "wait":  # nothing stronger keeps from ending what runs
            self.state = PauseState.PAUSING

    def flush(self, message: Flush, now: float) -> None:
        """Ask for all cached KV to be forgotten."""
        in_flight = self._scheduler.in_flight
        last = in_flight[-1].number if in_flight else 0
        self._flushes.append(_PendingFlush(message, now + message.timeout_s, last))

    @property
    def next_deadline(self) -> float | None:
        """When :meth:`advance` has something to do though nothing else happens; None: never."""
        deadlines = [flush.deadline for flush in self._flushes]
        if self._deadline is not None:
            deadlines.append(self._deadline)
        return min(deadlines, default=None)

    def advance(self, now: float) -> list[SchedulerMessage]:
        """What messages, ends of steps and time have brought about: the answers, in order.

        To be called after each of them; where nothing happens, at :attr:`next_deadline`.
        """
        if self._deadline is not None and now >= self._deadline:
            self.release("user")
        if self.state is PauseState.PAUSING and not self._awaited():
            self._stand_still(now)
        elif self.state is PauseState.PAUSED and self._pauses and not self._user_waits():
            self._asked.clear()  # what was waited for has ended during a weight commit
            self._answer_pauses(now)
        if self._flushes:
            self._flushes = [flush for flush in self._flushes if not self._try_flush(flush, now)]
        replies, self._replies = self._replies, []
        return replies

    def _awaited(self) -> bool:
        """Whether a step, or with mode "wait" a request, has to end before a pause takes effect."""
        return bool(self._scheduler.in_flight or (self.mode == "wait" and self._scheduler.has_begun))

    def _user_waits(self) -> bool:
        """Whether a user waits for requests that have begun, be it behind a weight commit."""
        return self.holders.get("user") == "wait" and self._scheduler.has_begun

    def _stand_still(self, now: float) -> None:
        """The new holds take effect; the others had theirs, and what came since is not theirs to end.

        A user who waits for what has begun goes on waiting behind a weight commit.
        """
        self.state, finished, num_retracted = PauseState.PAUSED, list[Finished](), 0
        asked = set(self._asked.values())
        if "abort" in asked:
            finished = self._scheduler.abort_all()
        elif "retract" in asked:
            num_retracted = self._scheduler.retract_all()
        waits = self._user_waits()
        self._asked = {"user": self._asked["user"]} if waits and "user" in self._asked else {}
        self._replies.append(self._scheduler.output(finished=finished))
        if not waits:
            self._answer_pauses(now, num_retracted=num_retracted, num_aborted=len(finished))

    def _answer_pauses(
        self, now: float | None = None, *, num_retracted: int = 0, num_aborted: int = 0
    ) -> None:
        """Answer those who asked for a pause; `now` is None if it was ended before it took effect."""
        for call, since in self._pauses:
            self._replies.append(
                Paused(
                    call=call,
                    mode=self.asked_mode,
                    num_running=len(self._scheduler.running),
                    num_waiting=len(self._scheduler.waiting),
                    num_retracted=num_retracted,
                    num_aborted=num_aborted,
                    drained_ms=0.0 if now is None else (now - since) * 1e3,
                )
            )
        self._pauses = []

    def _try_flush(self, flush: _PendingFlush, now: float) -> bool:
        """Whether the flush was answered."""
        s, call = self._scheduler, flush.message.call
        if s.in_flight and s.in_flight[0].number <= flush.step:
            return False
        if s.running or (s.waiting and self.state is not PauseState.PAUSED):
            if now < flush.deadline:
                return False
            self._replies.append(Flushed(call, False, 0, self._busy()))
            return True
        if s.in_flight:  # a surplus step: its requests have ended
            return False
        count = s.forget_cache()
        self._replies += [s.output(), Flushed(call, True, count)]
        return True

    def _busy(self) -> str:
        counts = f"{len(self._scheduler.running)} requests run and {len(self._scheduler.waiting)} wait"
        if self.state is PauseState.PAUSED:
            return (
                f"{counts}; paused in place they keep their KV: pause with mode retract or abort, then flush"
            )
        return (
            f"{counts}; flush when they have ended (see timeout), or pause with mode retract or abort first"
        )
