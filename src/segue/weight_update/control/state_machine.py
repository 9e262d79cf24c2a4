"""Weight updates: how far every rank has come, and when what came becomes live.

    IDLE -> STAGING -> POSTING -> PREPARED -> RECEIVING -> RECEIVED -> COMMITTING -> IDLE

At most one session is open. Until COMMITTING the served weights are not touched, and any end but a commit
leaves them as they were. What the ranks do is told by their replies; time is passed in, and deadlines are
kept here. If a commit fails after it has written, the weights are POISONED: nothing is generated until all of
them have been replaced.
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
from segue.weight_update.control.session import Kind, UpdatePhase, UpdateSession


class Port(Protocol):
    """What a weight update may ask of the scheduler, and do to it."""

    @property
    def weight_version(self) -> str:
        """The name of the served weights."""

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""

    @property
    def num_running(self) -> int:
        """The number of requests that have begun."""

    @property
    def stands_still(self) -> bool:
        """Whether a hold has taken effect: no step is in flight, and none is planned."""

    @property
    def receive_requires_pause(self) -> bool:
        """Whether weights may be received only while generation is paused."""

    def hold(self, mode: PauseMode) -> None:
        """Stop planning steps, until :meth:`release`."""

    def release(self) -> None:
        """End the hold."""

    def commit(self, version: str | None, *, flush_cache: bool) -> None:
        """Serve new weights from the next step on, under this name; None stands for the next number."""

    def rename(self, version: str) -> None:
        """Give the served weights another name."""

    def refuse(self, reason: str | None) -> None:
        """Refuse every new request for this reason; None accepts requests again."""

    def abort_all(self, message: str | None = None) -> SchedulerMessage:
        """End every request; returns what the frontend has to be told."""


class WeightMachine:
    """The state machine of one engine; `calls.WeightControl` has the calls to it."""

    def __init__(self, port: Port, num_ranks: int) -> None:
        self._port = port
        self._num_ranks = num_ranks
        self.session: UpdateSession | None = None
        self.poisoned: str | None = None  # why
        self.groups: dict[str, Group] = {}
        self.num_committed = self.num_failed = 0
        self.model_path: str | None = None  # of the last checkpoint that became live
        self.last: dict[str, Any] = {}  # figures of the last update that was committed
        self._undone: str | None = None  # why the calls of a group that is not yet ended came to nothing
        self._ended: tuple[str, str | None, WeightAnswer] | None = None  # (session, group, its last answer)
        self._num_sessions = 0
        self._fan_out = FanOut(num_ranks)
        self._joins = GroupJoins()
        self._answers: list[SchedulerMessage] = []

    def on_rank(self, event: RankReply | Received, now: float) -> None:
        """What a rank says."""
        if isinstance(event, Received):
            self._on_received(event, now)
        else:
            self._fan_out.on_reply(event, now)

    @property
    def next_deadline(self) -> float | None:
        """When :meth:`advance` has something to do though nothing else happens; None: never."""
        deadlines = (self._joins.next_deadline, None if self.session is None else self.session.deadline)
        return min((each for each in deadlines if each is not None), default=None)

    def advance(self, now: float) -> tuple[list[SchedulerMessage], list[Sequence[WeightCommand]]]:
        """What is to be sent to the frontend, and to the ranks (each entry: one command a rank), in order.

        To be called behind ``PauseControl.advance``: a commit begins when its hold has taken effect.
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
            lambda _, call: StopJoin(call=call, group=group, why="nobody waits for it any more")
        )

    def status(self, now: float) -> dict[str, Any]:
        """``GET /weights_update_status``."""
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
        """The session's phase, in lower case; without one ``idle`` or ``poisoned``."""
        if self.session is not None:
            return self.session.phase.name.lower()
        return "idle" if self.poisoned is None else "poisoned"

    def notice(self) -> WeightNotice:
        """What the frontend shows without asking."""
        return WeightNotice(
            version=self._port.weight_version,
            state=self.state,
            poisoned=self.poisoned,
            model_path=self.model_path,
            num_committed=self.num_committed,
            num_failed=self.num_failed,
            last=self.last,
        )

    # --- what comes, and how far it is ---

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

        longest_s = session.longest_s

        def staged(replies: list[RankReply], now: float) -> None:
            if self.session is not session:
                return
            if wrong := problems(replies):
                self._on_unfit(session, manifest, wrong, now)
                return
            session.staging = staging(replies)
            self._enter(session, UpdatePhase.POSTING, now)
            self._fan_out.send(
                lambda _, call: Receive(call=call, session=session.number, longest_s=longest_s), armed
            )

        def armed(replies: list[RankReply], now: float) -> None:
            if self.session is not session:
                return
            if wrong := problems(replies):
                self._abort(session, wrong, now)
                return
            self._enter(session, UpdatePhase.PREPARED, now)
            self._answer_prepared(session)
            self._see_progress(session, now)

        self._fan_out.send(
            lambda _, call: Stage(call=call, session=session.number, manifest=manifest), staged
        )

    def _on_unfit(self, session: UpdateSession, manifest: Manifest, wrong: str, now: float) -> None:
        """What was announced cannot be taken; a client of a single call may be sending it all the same."""
        if session.kind == "session" or manifest.discard:
            self._abort(session, session.refusal or wrong, now)
            return
        session.refusal, session.then = wrong, "refuse"
        self._stage(session, structs.replace(manifest, discard=True), now)

    def _answer_prepared(self, session: UpdateSession) -> None:
        if session.phase.value < UpdatePhase.PREPARED.value:
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
            lambda replies, now: self._brought(session, replies, now),
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
            lambda replies, now: self._brought(session, replies, now),
        )

    def _brought(self, session: UpdateSession, replies: list[RankReply], now: float) -> None:
        """The ranks have read a checkpoint, or what came with the call."""
        if self.session is not session:
            return
        if wrong := problems(replies):
            self._abort(session, wrong, now)
            return
        session.staging = staging(replies)
        session.bytes = {reply.rank: reply.fields.get("num_bytes", 0) for reply in replies}
        self._enter(session, UpdatePhase.RECEIVED, now)
        self._on_all_there(session, now)

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
        self._see_progress(session, now)

    def _see_progress(self, session: UpdateSession, now: float) -> None:
        """Told by any rank, from PREPARED on."""
        if session.phase.value < UpdatePhase.PREPARED.value or not (session.bytes or session.done):
            return
        if session.phase is not UpdatePhase.RECEIVING:
            session.receiving_at = now
        self._enter(session, UpdatePhase.RECEIVING, now)
        if len(session.done) == self._num_ranks:
            session.receive_s += now - session.receiving_at
            self._enter(session, UpdatePhase.RECEIVED, now)
            self._on_all_there(session, now)

    def _on_all_there(self, session: UpdateSession, now: float) -> None:
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
        """Everything is there, and the commit is another call's."""
        text = "Everything was received; commit it, or call again."
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
        """Once nothing runs."""
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
        session.times["LIVE"] = now
        self.last = self._figures(session) | {"kind": session.kind}
        self.model_path = session.model_path or self.model_path
        self._port.release()
        self._close(session)
        self._finish(session, True, "The new weights are live.")

    def _poison(self, why: str) -> None:
        self.poisoned = why
        self._port.refuse(f"the weights are poisoned ({why}); update all of them, or start again")
        self._answers.append(self._port.abort_all("the weights are poisoned"))

    # --- ends ---

    def _abort(self, session: UpdateSession, why: str, now: float) -> None:
        """The one exit of a session that does not become live."""
        self.num_failed += 1
        if session.kind == "group of calls":
            self._undone = why
        self._close(session)
        self._fan_out.send(lambda _, call: Discard(call=call, session=session.number))
        self._answer(session.preparing, False, why, session_id=session.id)
        self._finish(session, False, why)

    def _enter(self, session: UpdateSession, phase: UpdatePhase, now: float) -> None:
        """Go on, or show a sign of life."""
        news, session.phase, session.progress_at = phase is not session.phase, phase, now
        session.times.setdefault(phase.name, now)
        if news:
            self._notify()

    def _close(self, session: UpdateSession) -> None:
        assert self.session is session
        self.session = None
        self._notify()

    def _finish(self, session: UpdateSession, success: bool, message: str) -> None:
        figures = self._figures(session)
        self._answer(session.ending, success, message, **figures)
        if session.kind == "session":
            self._ended = (session.id, session.group_name, WeightAnswer(0, success, message, figures))

    def _figures(self, session: UpdateSession) -> dict[str, Any]:
        return session.figures(self._num_ranks) | {"weight_version": self._port.weight_version}

    # --- sending ---

    def _answer(self, calls: Sequence[int], success: bool, message: str = "", **fields: Any) -> None:
        self._answers += [WeightAnswer(call, success, message, fields) for call in calls]

    def _notify(self) -> None:
        self._answers.append(self.notice())
