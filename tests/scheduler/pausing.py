"""The simulation with a controller that pauses, continues, flushes and changes weights.

It keeps its own account of holds, launched steps, tokens and unanswered calls, from the messages alone, and
compares it after every event: the scheduler's own state would prove nothing.
"""

from __future__ import annotations

from collections import deque
from typing import get_args

from segue.laps.classes import PromptClass
from segue.laps.pick import PrefillPolicy
from segue.messages.control import (
    Continue,
    Continued,
    Flush,
    Flushed,
    LapsLimits,
    Pause,
    Paused,
    PauseMode,
    SchedulerMessage,
    SchedulerOutput,
)
from segue.messages.requests import Abort, Finish
from segue.messages.steps import StepPlan
from segue.scheduler.prefill import NewTokenRatio
from segue.scheduler.request import Request
from tests.scheduler.simulation import Simulation

MODES: tuple[PauseMode, ...] = get_args(PauseMode)  # from the weakest to the strongest
COMMIT = "weight_commit"
ANSWERS: dict[type, type] = {Pause: Paused, Continue: Continued, Flush: Flushed}


def strongest(*modes: PauseMode | None) -> PauseMode | None:
    return max((mode for mode in modes if mode is not None), key=MODES.index, default=None)


class PausingSimulation(Simulation):
    """A simulation whose controller pauses, continues, flushes and changes weights."""

    def __init__(
        self,
        policy: PrefillPolicy[Request] | None = None,
        laps: LapsLimits | None = None,
        **limits: int | bool,
    ) -> None:
        super().__init__(policy, laps, **limits)
        self.control = self.scheduler.control
        self.calls = 0
        self.owed: dict[int, Pause | Continue | Flush] = {}  # calls that have no answer yet
        self.answers: dict[int, Paused | Continued | Flushed] = {}
        self.flush_deadlines: dict[int, float] = {}
        self.was_held = False  # when the answers that are taken now were made
        self.user: PauseMode | None = None  # the mode of the user's hold
        self.ends_at: float | None = None  # when the user's hold ends by itself
        self.committing = False
        self.overtaken: set[int] = set()  # pauses that ended before they took effect
        self.begun: set[str] = (
            set()
        )  # requests that were admitted once, or came with outputs and no pause was on
        self.settled = True  # whether all answers of the scheduler were taken
        self.kept: dict[str, tuple[int, list[int], int]] = {}  # rid -> state that a pause in place must keep
        self.launched_versions: deque[str] = deque()
        self.launched_slots: deque[list[int]] = deque()
        self.token_versions: dict[str, list[str]] = {}
        self.priorities: dict[str, int] = {}  # of all requests, in order of arrival
        self.unchecked: list[str] = []  # requests that have ended and whose end was not checked yet

    # --- actions of the controller and of clients ---

    @property
    def mode(self) -> PauseMode | None:
        """The mode of the strongest hold."""
        flushing = any(isinstance(m, Flush) and m.retract for m in self.owed.values())
        return strongest(self.user, "in_place" if self.committing else None, "retract" if flushing else None)

    @property
    def live(self) -> list[str]:
        """Requests that have not ended, in order of arrival."""
        return [rid for rid in self.prompts if rid not in self.finished]

    def add(
        self, rid: str, prompt: list[int], *, priority: int = 0, num_known: int = 0, **params: object
    ) -> None:
        self.priorities[rid] = priority
        self.token_versions[rid] = []
        super().add(rid, prompt, priority=priority, num_known=num_known, **params)
        if self.num_known[rid] and self.mode is None:
            self.begun.add(rid)

    def pause(self, mode: PauseMode, ttl_s: float | None = None, *, settle: bool = True) -> int:
        """Pause; returns the number of the call."""
        message = Pause(self._call(), mode, ttl_s)
        self.owed[message.call] = message
        self.user = strongest(self.user, mode)
        self.ends_at = None if ttl_s is None else self.now + ttl_s
        self.control.pause(message, self.now)
        self._after(settle)
        return message.call

    def proceed(self, *, settle: bool = True) -> int:
        """Continue; returns the number of the call."""
        message = Continue(self._call())
        self.owed[message.call] = message
        self.user = self.ends_at = None
        self.overtaken |= {call for call, other in self.owed.items() if isinstance(other, Pause)}
        self.control.continue_(message)
        self._after(settle)
        return message.call

    def flush(self, timeout_s: float = 0.0, *, retract: bool = False, settle: bool = True) -> int:
        """Flush; returns the number of the call."""
        message = Flush(self._call(), timeout_s, retract)
        self.owed[message.call] = message
        self.flush_deadlines[message.call] = self.now + timeout_s
        if retract:  # it takes what a pause in place has kept
            self.kept = {}
        self.control.flush(message, self.now)
        self._after(settle)
        return message.call

    def abort(self, rid: str = "", *, settle: bool = True) -> None:
        """Abort one request, or all requests if ``rid`` is empty."""
        self.settle()
        ended = self.scheduler.abort(Abort(rid, abort_all=not rid))
        assert all(finished.reason == "abort" for finished in ended)
        self.end(ended)
        assert rid in self.finished if rid else not self.live, "an abort acts at once"
        self._after(settle)

    def stop(self, rid: str, num_tokens: int) -> None:
        """End a request as the detokenizer does when it has found a stop string."""
        self.settle()
        if rid in self.finished:
            return
        self.end(self.scheduler.finish(Finish(rid, num_tokens)))
        assert self.finished[rid].num_tokens == num_tokens
        self._after(True)

    def begin_commit(self) -> None:
        self.committing = True
        self.control.hold(COMMIT)
        self._after(True)

    def end_commit(self, version: str) -> None:
        """Commit weights; no step may be in flight."""
        self.scheduler.weights.commit(version, flush_cache=False)
        self.committing = False
        self.control.release(COMMIT)
        self._after(True)

    def pass_time(self, seconds: float) -> None:
        super().pass_time(seconds)
        self._after(True)

    def answered(self, call: int) -> Paused | Continued | Flushed:
        assert call in self.answers, "no answer yet"
        return self.answers[call]

    def paused(self, call: int) -> Paused:
        answer = self.answered(call)
        assert isinstance(answer, Paused)
        return answer

    def flushed(self, call: int) -> Flushed:
        answer = self.answered(call)
        assert isinstance(answer, Flushed)
        return answer

    def _call(self) -> int:
        self.calls += 1
        return self.calls

    def _after(self, settle: bool) -> None:
        if self.mode in (None, "wait"):
            self.kept = {}
        if self.user is None:
            self.overtaken |= {call for call, message in self.owed.items() if isinstance(message, Pause)}
        self.settled = False
        if settle:
            self.settle()

    # --- the loop ---

    def launch(self) -> StepPlan | None:
        self.settle()
        was_idle = not self.results
        used = {page: owners for step in self.device.unapplied for page, owners in step.items()}
        plan = super().launch()
        if plan is None:
            may_run = set({None: self.live, "wait": self.begun & set(self.live)}.get(self.mode, ()))
            held_back = self.scheduler.wake_at is not None and self.scheduler.wake_at > self.now
            if not self.scheduler.can_guide:  # then guided requests alone wait, unless they run
                may_run -= {r.rid for r in self.scheduler.waiting if r.params.grammar is not None}
                held_back &= self.holds_back
                assert self.scheduler.wake_at is not None or not self.scheduler.control.runs
            assert not (was_idle and may_run) or held_back, "requests may run, and nothing is planned"
            return None
        assert self.mode in (None, "wait"), "a step was planned during a pause"
        rids = {request.slot: rid for rid, request in self.scheduler.running.items()}
        admitted = {rids[new.slot] for new in plan.new_slots}
        assert self.mode is None or admitted <= self.begun, "a request was admitted during a pause"
        self.begun |= admitted
        cached = {node.page for node in self.scheduler.resources.prefix.nodes()}
        for slot, _, pages in plan.pages:
            for page in pages:
                foreign = used.get(page, set()) - {self.device.owner[slot]}
                assert not foreign or page in cached, f"page {page} is given out while a step uses it"
        self.launched_versions.append(self.scheduler.weight_version)
        self.launched_slots.append(plan.slots)
        return plan

    def apply(self) -> SchedulerOutput:
        output = super().apply()
        self.launched_slots.popleft()
        version = self.launched_versions.popleft()
        for rid in output.rids:
            self.token_versions[rid].append(version)
        self.settle()
        return output

    def end(self, finished: list) -> None:
        super().end(finished)
        for item in finished:
            self.unchecked.append(item.rid)
            self.kept.pop(item.rid, None)

    def overlapped_step(self) -> bool:
        did = super().overlapped_step()
        self.settle()
        return did

    def settle(self) -> None:
        """Take the answers, as the loop does after messages and results; each must be due and correct."""
        if self.ends_at is not None and self.now >= self.ends_at:
            self.user = self.ends_at = None
        self._after(settle=False)
        self.was_held = self.mode is not None  # several flushes may be answered under the hold of one
        for message in self.control.advance(self.now):
            self._take(message)
        self.settled = True
        running = self.scheduler.running
        if not self.results:
            begun = self.begun & set(self.live)
            waits = self.user == "wait" and begun  # also during a weight commit
            busy = running or (
                self.scheduler.waiting and (self.mode is None or (self.mode == "wait" and begun))
            )
            for call, message in self.owed.items():
                assert not isinstance(message, Pause) or waits, "a pause that has taken effect is unanswered"
                if isinstance(message, Flush):
                    due = not busy or self.now >= self.flush_deadlines[call]
                    assert not due, "a flush that could be answered is not"
        assert not any(isinstance(message, Continue) for message in self.owed.values())
        deadlines = [self.flush_deadlines[call] for call, m in self.owed.items() if isinstance(m, Flush)]
        if self.ends_at is not None:
            deadlines.append(self.ends_at)
        assert self.control.next_deadline == min(deadlines, default=None)

    def _take(self, message: SchedulerMessage) -> None:
        if isinstance(message, SchedulerOutput):
            assert not message.tokens
            aborting = any(isinstance(m, Pause) and m.mode == "abort" for m in self.owed.values())
            assert aborting or not message.finished, "requests were aborted without a pause of mode abort"
            self.end(message.finished)
            return
        assert isinstance(message, Paused | Continued | Flushed)
        assert message.call in self.owed, "a call is answered twice, or was never made"
        call = self.owed[message.call]
        assert type(message) is ANSWERS[type(call)]
        self.answers[message.call] = message
        if isinstance(message, Flushed):
            self._on_flushed(message)
        del self.owed[message.call]
        if isinstance(message, Paused):
            self._on_paused(call, message)

    def _on_paused(self, call: Pause | Continue | Flush, message: Paused) -> None:
        scheduler = self.scheduler
        if message.call in self.overtaken:
            assert message.mode is None, "the hold of a weight commit is reported as a client's pause"
            return
        assert not self.results, "a pause is answered while a step is in flight"
        assert message.mode == self.user
        assert (message.num_running, message.num_waiting) == (len(scheduler.running), len(scheduler.waiting))
        assert message.drained_ms >= 0
        if message.mode != "in_place":
            assert not scheduler.running
        if isinstance(call, Pause) and call.mode == message.mode == "abort":
            assert not self.live
        self.kept = {r.rid: (r.slot, list(r.pages), r.launched) for r in scheduler.running.values()}

    def _on_flushed(self, message: Flushed) -> None:
        scheduler, resources = self.scheduler, self.scheduler.resources
        if not message.success:
            assert self.now >= self.flush_deadlines[message.call] and message.error_msg
            is_paused = self.mode not in (None, "wait") and not self.results
            assert scheduler.running or (scheduler.waiting and not is_paused)
            return
        assert not self.results, "flushed while a step is in flight"
        assert not scheduler.running, "flushed the KV of a running request"
        assert not scheduler.waiting or self.was_held, "flushed although requests wait"
        assert len(resources.free_pages) == self.limits.num_pages
        assert len(resources.free_slots) == self.limits.max_running_requests
        assert (resources.prefix.num_pages, scheduler.num_decode_steps) == (0, 0)
        assert scheduler.new_token_ratio == NewTokenRatio()

    # --- the account ---

    def check(self) -> None:
        super().check()
        scheduler, resources = self.scheduler, self.scheduler.resources
        if self.settled:
            assert set(scheduler.requests) == set(self.live), "a live request was lost, or an ended one kept"
        arrivals = list(self.priorities)
        for name in get_args(PromptClass):
            queue = [r.rid for r in scheduler.waiting.of(name)]
            in_order = sorted(queue, key=lambda rid: (-self.priorities[rid], arrivals.index(rid)))
            assert queue == in_order, "a retracted request lost its position in the queue"
        used = {page for step in self.device.unapplied for page in step}
        slots = {slot for step in self.launched_slots for slot in step}
        unlocked = {node.page for node in resources.prefix.nodes() if not node.locks}
        assert not used & {*resources.free_pages}, "a page is free while a step in flight uses it"
        assert not used & unlocked, "a cached page may be evicted while a step in flight uses it"
        assert not slots & {*resources.free_slots}, "a slot is free while a step in flight uses it"
        for rid, state in self.kept.items() if self.settled else ():
            request = scheduler.running[rid]
            assert (request.slot, request.pages, request.launched) == state, "moved during a pause in place"
        for rid in self.unchecked:
            end = self.finished[rid]
            spans = [version for version, start, stop in end.versions for _ in range(start, stop)]
            num_new = max(0, end.num_tokens - self.num_known[rid])
            assert spans == self.token_versions[rid][:num_new], "version spans differ from the steps"
            assert end.reason != "abort" or end.num_tokens == len(self.outputs[rid])
        self.unchecked = []
