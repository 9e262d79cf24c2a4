"""Weight updates: the session's phases, from the manifest to the commit.

    IDLE -> STAGING -> POSTING -> PREPARED -> RECEIVING -> RECEIVED -> COMMITTING -> IDLE

At most one session is open. Before COMMITTING the served weights are not touched, and any end but a commit
leaves them as they were. The ranks' replies drive the phases; deadlines are kept here, and the caller passes
the time in. If a commit fails after a rank has written, the weights are POISONED: nothing is generated until
all of them have been replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import structs

from segue.messages.control import PauseMode, SchedulerMessage
from segue.messages.weight_operations import Group, Manifest, UpdateFromDisk, UpdateFromTensor
from segue.messages.weight_update import (
    Commit,
    Discard,
    Load,
    RankReply,
    Receive,
    Received,
    Stage,
    StopJoin,
    Take,
    WeightAnswer,
    WeightCall,
    WeightCommand,
    WeightNotice,
)
from segue.weight_update.control.fan_out import FanOut, problems, staging
from segue.weight_update.control.group_joins import GroupJoins
from segue.weight_update.control.session import BEFORE_PREPARED, Kind, UpdatePhase, UpdateSession


class Port(Protocol):
    """The part of the scheduler that a weight update may read and change."""

    @property
    def weight_version(self) -> str:
        """The name of the served weights."""

    @property
    def has_work(self) -> bool:
        """Whether steps are being planned: a request runs or waits, and no pause stops it."""

    @property
    def num_running(self) -> int:
        """The number of running requests."""

    @property
    def stands_still(self) -> bool:
        """Whether a hold has taken effect: no step is in flight, and none is planned."""

    @property
    def receive_requires_pause(self) -> bool:
        """Whether weights may be received only while generation is paused."""

    def hold(self, mode: PauseMode) -> None:
        """Stop the planning of steps until :meth:`release`."""

    def release(self) -> None:
        """End the hold."""

    def commit(self, version: str | None, *, flush_cache: bool) -> None:
        """Serve new weights from the next step on, as this version; None takes the next number."""

    def rename(self, version: str) -> None:
        """Give the served weights another name."""

    def refuse(self, reason: str | None) -> None:
        """Refuse every new request for this reason; None accepts requests again."""

    def abort_all(self, message: str | None = None) -> SchedulerMessage:
        """End every request; returns the message for the frontend."""


class WeightMachine:
    """The state machine of one engine; its subclass :class:`.calls.WeightControl` handles the calls.

    ``session`` is None in the states ``idle`` and ``poisoned``; otherwise its :class:`.session.UpdatePhase`
    is the state.
    """

    def __init__(self, port: Port, num_ranks: int) -> None:
        self._port = port
        self._num_ranks = num_ranks
        self.session: UpdateSession | None = None
        self.poisoned: str | None = None  # why the weights are poisoned; None: they are not
        self.groups: dict[str, Group] = {}  # by name, those that every rank has joined
        self.num_committed = self.num_failed = 0
        self.model_path: str | None = None  # the last checkpoint that was committed
        self.last: dict[str, Any] = {}  # figures of the last committed update
        self._group_error: str | None = None  # why a group of calls failed that its client has not ended yet
        # The session that ended last: (id, group, last answer). A repeated call gets the answer again.
        self._last_ended: tuple[str, str | None, WeightAnswer] | None = None
        self._num_sessions = 0
        self._fan_out = FanOut(num_ranks)
        self._joins = GroupJoins()
        self._answers: list[SchedulerMessage] = []

    def on_rank(self, event: RankReply | Received, now: float) -> None:
        """Take a rank's reply or progress report."""
        if isinstance(event, Received):
            self._on_received(event, now)
        else:
            self._fan_out.on_reply(event, now)

    @property
    def next_deadline(self) -> float | None:
        """When :meth:`advance` must be called even if nothing else happens; None: never."""
        deadlines = (self._joins.next_deadline, None if self.session is None else self.session.deadline)
        return min((each for each in deadlines if each is not None), default=None)

    def advance(self, now: float) -> tuple[list[SchedulerMessage], list[Sequence[WeightCommand]]]:
        """Check deadlines and begin a commit that can begin.

        Call it after ``PauseControl.advance``, because a commit begins when its hold has taken effect.

        Returns:
            The messages for the frontend, and the commands for the ranks, one per rank in each entry; both
            are in the order of sending.
        """
        self._advance_joins(now)
        session = self.session
        deadline = None if session is None else session.deadline
        if session is not None and deadline is not None and now >= deadline:
            self._abort(session, session.lateness(now), now)
        elif session is not None and session.phase is UpdatePhase.COMMITTING:
            self._write(session, now)
        answers, self._answers = self._answers, []
        return answers, self._fan_out.take()

    def _advance_joins(self, now: float) -> None:
        for call, text in self._joins.expire(now):
            self._answer([call], False, text)
        for group in self._joins.stop_unwanted():
            self._stop_join(group)

    def _stop_join(self, group: Group) -> None:
        self._fan_out.send(
            lambda _, call: StopJoin(call=call, group=group, why="no client waits for it any more")
        )

    def status(self, now: float) -> dict[str, Any]:
        """Returns the body of ``GET /weights_update_status``."""
        session = self.session
        state: dict[str, Any] = {
            "state": self.state,
            "weight_version": self._port.weight_version,
            "groups": sorted(self.groups),
            "generating": self._port.has_work,
            "num_committed": self.num_committed,
            "num_failed": self.num_failed,
            "last": self.last,
        }
        if self.poisoned is not None:
            state["poisoned"] = self.poisoned
        if session is not None:
            state |= {
                "session_id": session.id,
                "kind": session.kind,
                "group_name": session.group_name,
                "num_buckets": 0 if session.manifest is None else len(session.manifest.buckets),
                "num_buckets_received": session.slowest(session.buckets, self._num_ranks),
                "num_bytes_received": session.slowest(session.bytes, self._num_ranks),
                "seconds": now - session.began,
                "staging": session.staging,
            }
        return state

    @property
    def state(self) -> str:
        """The open session's phase in lower case; without a session ``idle`` or ``poisoned``."""
        if self.session is not None:
            return self.session.phase.name.lower()
        return "idle" if self.poisoned is None else "poisoned"

    def notice(self) -> WeightNotice:
        """Returns the present state, as the frontend shows it without asking."""
        return WeightNotice(
            version=self._port.weight_version,
            state=self.state,
            poisoned=self.poisoned,
            model_path=self.model_path,
            num_committed=self.num_committed,
            num_failed=self.num_failed,
            last=self.last,
        )

    # --- staging and receiving ---

    def _open(self, kind: Kind, now: float, name: str | None = None) -> UpdateSession:
        self._num_sessions += 1
        self.session = session = UpdateSession(
            number=self._num_sessions,
            id=name or f"session-{self._num_sessions}",
            kind=kind,
            phase=UpdatePhase.STAGING,
            began=now,
            progress_at=now,
        )
        return session

    def _stage(self, session: UpdateSession, manifest: Manifest, now: float) -> None:
        session.manifest = manifest
        session.is_empty = session.is_empty and not manifest.buckets
        session.is_partial = session.is_partial and manifest.partial
        session.bytes_before += session.slowest(session.bytes, self._num_ranks)
        session.buckets_before += session.slowest(session.buckets, self._num_ranks)
        session.buckets, session.bytes, session.done = {}, {}, set()
        self._enter(session, UpdatePhase.STAGING, now)

        gloo_timeout_s = session.gloo_timeout_s

        def staged(replies: list[RankReply], now: float) -> None:
            if self.session is not session:
                return
            if wrong := problems(replies):
                self._on_stage_failed(session, manifest, wrong, now)
                return
            session.staging = staging(replies)
            self._enter(session, UpdatePhase.POSTING, now)
            self._fan_out.send(
                lambda _, call: Receive(call=call, session=session.number, gloo_timeout_s=gloo_timeout_s),
                posted,
            )

        def posted(replies: list[RankReply], now: float) -> None:
            if self.session is not session:
                return
            if wrong := problems(replies):
                self._abort(session, wrong, now)
                return
            self._enter(session, UpdatePhase.PREPARED, now)
            self._answer_prepared(session)
            self._update_receiving(session, now)

        self._fan_out.send(
            lambda _, call: Stage(call=call, session=session.number, manifest=manifest), staged
        )

    def _on_stage_failed(self, session: UpdateSession, manifest: Manifest, wrong: str, now: float) -> None:
        """Abort a session whose manifest the ranks refuse.

        The client of a single call may be broadcasting already: its tensors are received and dropped first.
        """
        if session.kind == "session" or manifest.discard:
            self._abort(session, session.refusal or wrong, now)
            return
        session.refusal, session.then = wrong, "refuse"
        self._stage(session, structs.replace(manifest, discard=True), now)

    def _answer_prepared(self, session: UpdateSession) -> None:
        if session.phase in BEFORE_PREPARED:
            return
        text = f"Every rank receives {len(session.manifest.buckets) if session.manifest else 0} buckets."
        fields = {"staging": session.staging, "generating": self._port.has_work}
        self._answer(session.preparing, True, text, session_id=session.id, **fields)
        session.preparing = []

    def _load(self, session: UpdateSession, asked: WeightCall, request: UpdateFromDisk, now: float) -> None:
        session.model_path, session.is_partial, session.is_empty = request.model_path, False, False
        self._enter(session, UpdatePhase.POSTING, now)
        self._fan_out.send(
            lambda _, call: Load(
                call=call,
                session=session.number,
                model_path=request.model_path,
                load_format=request.load_format,
                roots=asked.roots,
                from_hub=asked.from_hub,
            ),
            lambda replies, now: self._on_loaded(session, replies, now),
        )

    def _take(self, session: UpdateSession, request: UpdateFromTensor, now: float) -> None:
        payloads = request.serialized_named_tensors
        if len(payloads) not in (1, self._num_ranks):
            text = (
                f"serialized_named_tensors has {len(payloads)} entries; give one for all ranks, or one for "
                f"each of the {self._num_ranks}"
            )
            self._abort(session, text, now)
            return
        session.is_empty = False
        self._enter(session, UpdatePhase.POSTING, now)
        self._fan_out.send(
            lambda rank, call: Take(
                call=call,
                session=session.number,
                payload=request.serialized_named_tensors[
                    rank if len(request.serialized_named_tensors) > 1 else 0
                ],
                load_format=request.load_format,
                copy=session.kind == "group of calls",
            ),
            lambda replies, now: self._on_loaded(session, replies, now),
        )

    def _on_loaded(self, session: UpdateSession, replies: list[RankReply], now: float) -> None:
        """Take the replies to ``Load`` and ``Take``: a checkpoint or payload was read, or that failed."""
        if self.session is not session:
            return
        if wrong := problems(replies):
            self._abort(session, wrong, now)
            return
        session.staging = staging(replies)
        session.bytes = {reply.rank: reply.fields.get("num_bytes", 0) for reply in replies}
        self._enter(session, UpdatePhase.RECEIVED, now)
        self._on_all_received(session, now)

    def _on_received(self, event: Received, now: float) -> None:
        session = self.session
        if session is None or event.session != session.number or session.phase is UpdatePhase.COMMITTING:
            return
        if event.error is not None:
            self._abort(session, f"rank {event.rank}: {event.error}", now)
            return
        session.buckets[event.rank], session.bytes[event.rank] = event.num_buckets, event.num_bytes
        if event.done:
            session.done.add(event.rank)
        self._update_receiving(session, now)

    def _update_receiving(self, session: UpdateSession, now: float) -> None:
        """Enter RECEIVING once a rank has reported, and RECEIVED once every rank is done.

        A rank may report before every rank has posted its receive; that is noted at PREPARED.
        """
        if session.phase in BEFORE_PREPARED or not (session.bytes or session.done):
            return
        if session.phase is not UpdatePhase.RECEIVING:
            session.receiving_at = now
        self._enter(session, UpdatePhase.RECEIVING, now)
        if len(session.done) == self._num_ranks:
            session.receive_s += now - session.receiving_at
            self._enter(session, UpdatePhase.RECEIVED, now)
            self._on_all_received(session, now)

    def _on_all_received(self, session: UpdateSession, now: float) -> None:
        match session.then:
            case "wait":
                pass
            case "answer":
                self._answer_received(session)
            case "commit":
                self._hold(session, now)
            case "refuse":
                self._abort(session, session.refusal, now)

    def _answer_received(self, session: UpdateSession) -> None:
        """Answer the calls to complete without a commit; another call commits the session."""
        text = "Everything was received; commit the session, or complete it again."
        self._answer(session.ending, True, text, **self._figures(session))
        session.ending, session.answer_by, session.then = [], None, "wait"

    # --- the commit ---

    def _hold(self, session: UpdateSession, now: float) -> None:
        self._enter(session, UpdatePhase.COMMITTING, now)
        session.answer_by = None
        session.num_paused = self._port.num_running
        mode: PauseMode = "retract" if session.flush_cache else "in_place"
        self._port.hold("abort" if session.abort_all else mode)

    def _write(self, session: UpdateSession, now: float) -> None:
        """Send the commit to the ranks, once, when the hold has taken effect."""
        if "WRITING" not in session.times and self._port.stands_still:
            session.times["WRITING"] = now
            self._fan_out.send(lambda _, call: Commit(call=call, session=session.number), self._on_committed)

    def _on_committed(self, replies: list[RankReply], now: float) -> None:
        session = self.session
        assert session is not None and session.phase is UpdatePhase.COMMITTING
        if wrong := problems(replies):
            if any(reply.fields.get("touched") or not reply.errors for reply in replies):
                self._poison(wrong)
            self._abort(session, wrong, now)
            self._port.release()
            return
        self._port.commit(session.weight_version, flush_cache=session.flush_cache)
        if not session.is_partial:
            self.poisoned = None
            self._port.refuse(None)
        self.num_committed += 1
        session.times["SERVED"] = now
        self.last = self._figures(session) | {"kind": session.kind}
        self.model_path = session.model_path or self.model_path
        self._port.release()
        self._close(session)
        self._finish(session, True, "The new weights are served.")

    def _poison(self, why: str) -> None:
        self.poisoned = why
        self._port.refuse(f"the weights are poisoned ({why}); update all of them, or start again")
        self._answers.append(self._port.abort_all("the weights are poisoned"))

    # --- ends ---

    def _abort(self, session: UpdateSession, why: str, now: float) -> None:
        """End a session without a commit; every failed session ends here."""
        self.num_failed += 1
        if session.kind == "group of calls":
            self._group_error = why
        self._close(session)
        self._fan_out.send(lambda _, call: Discard(call=call, session=session.number))
        self._answer(session.preparing, False, why, session_id=session.id)
        self._finish(session, False, why)

    def _enter(self, session: UpdateSession, phase: UpdatePhase, now: float) -> None:
        """Enter a phase, or note progress in the present one."""
        if session.enter(phase, now):
            self._notify()

    def _close(self, session: UpdateSession) -> None:
        assert self.session is session
        self.session = None
        self._notify()

    def _finish(self, session: UpdateSession, success: bool, message: str) -> None:
        figures = self._figures(session)
        self._answer(session.ending, success, message, **figures)
        if session.kind == "session":
            self._last_ended = (session.id, session.group_name, WeightAnswer(0, success, message, figures))

    def _figures(self, session: UpdateSession) -> dict[str, Any]:
        return session.figures(self._num_ranks) | {"weight_version": self._port.weight_version}

    # --- sending ---

    def _answer(self, calls: Sequence[int], success: bool, message: str = "", **fields: Any) -> None:
        self._answers += [WeightAnswer(call, success, message, fields) for call in calls]

    def _notify(self) -> None:
        self._answers.append(self.notice())
