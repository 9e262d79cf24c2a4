"""Pausing and flushing: what holds the engine, in which mode, and which calls still need an answer.

    RUNNING -> PAUSING -> PAUSED -> RUNNING

The engine runs while it has no hold. The user's hold ends with ``continue``, or when its ``ttl_s`` is over; a
weight commit, and a flush that retracts requests, end their own holds and never the user's. A pause takes
effect when no step is in flight and, in mode ``wait``, every request that has begun has ended; the calls that
asked for it are answered then.
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

LEAVING_S = 10.0  # that the answer to a pause of mode "retract" waits for pages which other workers still use
Holder = Literal["user", "weight_commit", "memory_release", "flush"]

_MODES: tuple[PauseMode, ...] = get_args(PauseMode)  # from the weakest to the strongest
_UNSEEN: frozenset[Holder] = frozenset(
    ("weight_commit", "flush")
)  # holds that are short and no pause to clients


class PauseState(Enum):
    """Whether the scheduler plans steps.

    Every new hold leads to PAUSING. PAUSING becomes PAUSED once all awaited steps and requests have ended.
    The release of the last hold leads to RUNNING; if mode ``wait`` is the strongest left, to PAUSING.
    """

    RUNNING = auto()
    PAUSING = auto()  # awaits the steps in flight and, in mode "wait", the requests that have begun
    PAUSED = auto()


@dataclass(frozen=True, slots=True)
class _PendingFlush:
    """A flush that is not answered yet."""

    message: Flush
    deadline: float
    step: int  # the last step launched before the flush came; it is awaited in any case


class PauseControl:
    """The pause state machine of one scheduler. All times are in seconds of the same clock.

    Several holders may hold the engine at the same time, each in its own mode. A hold is new until it takes
    effect: only then its mode is applied, and requests are retracted or aborted. No method sends anything:
    replies are collected, and :meth:`advance` returns them.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.state = PauseState.RUNNING
        self.holders: dict[Holder, PauseMode] = {}
        self._new_holds: dict[Holder, PauseMode] = {}  # holds that have not taken effect yet
        self._deadline: float | None = None  # when the user's hold ends by itself
        self._pauses: list[tuple[int, float]] = []  # unanswered pauses: (call, when it was sent)
        # Until when unanswered pauses wait for pages to come home, and how many requests they retracted.
        self._leaving: tuple[float, int] | None = None
        self._flushes: list[_PendingFlush] = []
        self._replies: list[SchedulerMessage] = []

    @property
    def mode(self) -> PauseMode | None:
        """The strongest mode of all holds; None if there is no hold."""
        return max(self.holders.values(), key=_MODES.index, default=None)

    @property
    def client_mode(self) -> PauseMode | None:
        """The strongest mode of all holds that clients see."""
        modes = (mode for holder, mode in self.holders.items() if holder not in _UNSEEN)
        return max(modes, key=_MODES.index, default=None)

    @property
    def client_state(self) -> PauseState:
        """The state as a client sees it; :attr:`state` also counts the hold of a weight commit."""
        if self.client_mode is None:
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

    @property
    def has_started_requests(self) -> bool:
        """Whether a request runs, or waits to go on with the tokens that it has."""
        s = self._scheduler
        return bool(s.running or s.handover.has_started_requests) or any(r.has_begun for r in s.waiting)

    def pause(self, message: Pause, now: float) -> None:
        """Hold the engine for the user. The mode can only grow stronger; the newest time to live counts."""
        self.hold("user", message.mode)
        self._deadline = None if message.ttl_s is None else now + message.ttl_s
        self._pauses.append((message.call, now if message.sent is None else message.sent))

    def continue_(self, message: Continue) -> None:
        """End the user's hold, if there is one."""
        self.release("user")
        self._replies.append(Continued(message.call))

    def hold(self, holder: Holder, mode: PauseMode = "in_place") -> None:
        """Add a hold, or make an existing one stronger; a weaker mode changes nothing.

        The hold counts as new in any case: :meth:`advance` lets it take effect, and applies ``mode``.
        """
        if self.admits:
            self._scheduler.handover.note_started()
        for holds in (self.holders, self._new_holds):
            holds[holder] = max(mode, holds.get(holder, mode), key=_MODES.index)
        self.state = PauseState.PAUSING

    def release(self, holder: Holder) -> None:
        """End a hold, if there is one; the engine runs again after the last one."""
        if self.holders.pop(holder, None) is None:
            return
        finished: list[Finished] = []
        if self._new_holds.pop(holder, None) == "abort":  # a promised abort is kept, even if released early
            finished = self._scheduler.abort_all()
        if holder == "user":
            self._deadline = None
        self._replies.append(self._scheduler.output(finished=finished))  # its counters show the new state
        if not self.holders:
            self.state = PauseState.RUNNING
        if "user" not in self.holders:  # calls that still wait for the user's pause learn that it has ended
            self._answer_pauses(num_aborted=len(finished))
        elif self.mode == "wait":  # a stronger hold has ended, and requests that have begun run on
            self.state = PauseState.PAUSING

    def flush(self, message: Flush, now: float) -> None:
        """Ask for the prefix cache to be emptied; :meth:`advance` returns the answer.

        With ``retract`` running requests give their KV back first, and go on afterwards.
        """
        if message.retract:
            self.hold("flush", "retract")
        in_flight = self._scheduler.in_flight
        last = in_flight[-1].plan.step if in_flight else 0
        self._flushes.append(_PendingFlush(message, now + message.timeout_s, last))

    @property
    def next_deadline(self) -> float | None:
        """When :meth:`advance` must be called even if nothing else happens; None: never."""
        deadlines = [flush.deadline for flush in self._flushes]
        if self._deadline is not None:
            deadlines.append(self._deadline)
        if self._leaving is not None:
            deadlines.append(self._leaving[0])
        return min(deadlines, default=None)

    def advance(self, now: float) -> list[SchedulerMessage]:
        """Move on to the next state where possible, and return the messages to send, in order.

        Call it after every message and every applied step, and at :attr:`next_deadline`.
        """
        self._scheduler.now = now
        if self._deadline is not None and now >= self._deadline:
            self.release("user")
        if self.state is PauseState.PAUSING and not self._must_wait():
            self._take_effect(now)
        elif self.state is PauseState.PAUSED and self._pauses and not self._user_waits():
            # Pages that it wants back have come home. Or a commit's hold took effect before the user's pause
            # of mode "wait"; the requests that this pause awaited have ended since.
            until, num_retracted = self._leaving or (now, 0)
            if now >= until or not self._scheduler.handover.num_leaving:
                self._new_holds.clear()
                self._answer_pauses(now, num_retracted=num_retracted)
        if self._flushes:
            self._flushes = [flush for flush in self._flushes if not self._try_flush(flush, now)]
            if not any(flush.message.retract for flush in self._flushes):
                self.release("flush")
        replies, self._replies = self._replies, []
        return replies

    def _must_wait(self) -> bool:
        """Whether a step or, in mode "wait", a request has to end before the pause takes effect."""
        return bool(self._scheduler.in_flight) or (self.mode == "wait" and self.has_started_requests)

    def _user_waits(self) -> bool:
        """Whether the user's pause waits for requests that have begun, even during a weight commit."""
        return self.holders.get("user") == "wait" and self.has_started_requests

    def _take_effect(self, now: float) -> None:
        """Enter PAUSED and apply the modes of the new holds.

        Older holds have taken effect already, so they do not abort or retract requests that came since. If a
        weight commit comes before a user's pause of mode "wait" is over, that pause goes on waiting.
        """
        self.state, finished, num_retracted = PauseState.PAUSED, list[Finished](), 0
        modes = set(self._new_holds.values())
        if "abort" in modes:
            finished = self._scheduler.abort_all()
        elif "retract" in modes:
            num_retracted = self._retract_all()
        waits = self._user_waits()  # then the user's hold stays new, and its calls stay unanswered
        self._new_holds = {"user": self._new_holds["user"]} if waits and "user" in self._new_holds else {}
        self._replies.append(self._scheduler.output(finished=finished))
        if waits or not self._pauses:  # no call is answered now
            return
        if "retract" in modes and self._scheduler.handover.num_leaving:
            self._leaving = (now + LEAVING_S, num_retracted)
        else:
            self._answer_pauses(now, num_retracted=num_retracted, num_aborted=len(finished))

    def _retract_all(self) -> int:
        """Retract every running request and free its KV; returns their number.

        The mode ``retract`` promises free memory, so pages that the prefix cache would keep are discarded
        too, unless another request has locked them or other pages follow them.
        """
        s = self._scheduler
        started = list(s.running.values())
        for request in started:
            node = request.node
            assert node is not None
            s.retract(request)
            s.resources.free(s.resources.prefix.discard(node))
        s.handover.want_memory_back(s.now)
        return len(started)

    def _answer_pauses(self, now: float | None = None, num_retracted: int = 0, num_aborted: int = 0) -> None:
        """Answer all pending pause calls; ``now`` is None if the pause ended before it took effect."""
        for call, since in self._pauses:
            self._replies.append(
                Paused(
                    call=call,
                    mode=self.client_mode,
                    num_running=len(self._scheduler.running),
                    num_waiting=self._scheduler.num_waiting,
                    num_retracted=num_retracted,
                    num_aborted=num_aborted,
                    num_pages_leaving=self._scheduler.handover.num_leaving,
                    drained_ms=0.0 if now is None else (now - since) * 1e3,
                )
            )
        self._pauses, self._leaving = [], None

    def _try_flush(self, flush: _PendingFlush, now: float) -> bool:
        """Answer the flush if that is possible now; returns whether it was answered.

        Steps that were launched before the flush are always awaited. Then requests that run, or that wait and
        could start, are awaited until the deadline, because they use the cache; after it the flush fails.
        """
        s, call = self._scheduler, flush.message.call
        if s.in_flight and s.in_flight[0].plan.step <= flush.step:
            return False
        if s.running or s.handover.owns_pages or (s.waiting and self.state is not PauseState.PAUSED):
            if now < flush.deadline:
                return False
            self._replies.append(Flushed(call=call, success=False, error_msg=self._why_not_flushed()))
            return True
        if s.in_flight:  # launched ahead: all requests of this step have ended meanwhile
            return False
        count = s.forget_cache()
        self._replies += [s.output(), Flushed(call=call, success=True, flushed_items=count)]
        return True

    def _why_not_flushed(self) -> str:
        """Return the text of a flush that failed: which requests prevent it, and what the user can do."""
        s = self._scheduler
        counts = f"{len(s.running)} requests run and {s.num_waiting} wait"
        if not s.running and (count := len({name for name, _ in s.handover.holds()})):
            counts += f", and {count} transfers of KV to or from other engines own pages"
            return f"{counts}; flush when they have ended (see timeout)"
        if self.state is PauseState.PAUSED:
            remedy = "paused in place, they keep their KV: pause with mode retract or abort, then flush"
        else:
            remedy = "flush when they have ended (see timeout), or pause with mode retract or abort first"
        return f"{counts}; {remedy}"
