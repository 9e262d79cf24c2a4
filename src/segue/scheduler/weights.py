"""Weight updates: who announces what, how far every rank has come, and when it becomes live.

    IDLE -> STAGING -> ARMING -> PREPARED -> RECEIVING -> RECEIVED -> COMMITTING -> IDLE

At most one session is open. Until COMMITTING the live weights are not touched, and any end but a commit
leaves them as they were. What the ranks do is told by their replies; time is passed in, and deadlines are
kept here. If a commit fails after it has written, the weights are POISONED: nothing is generated until all of
them have been replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec import structs

from segue.protocol.messages import PauseMode, SchedulerMessage
from segue.protocol.weights import (
    AbortSession,
    BeginUpdate,
    CheckWeights,
    Commit,
    CommitSession,
    Complete,
    Discard,
    EndUpdate,
    GetUpdateStatus,
    GetWeights,
    Group,
    Inspect,
    Join,
    JoinGroup,
    Leave,
    LeaveGroup,
    Load,
    Manifest,
    Prepare,
    RankReply,
    Receive,
    Received,
    SetVersion,
    Stage,
    Take,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensor,
    WeightAnswer,
    WeightCall,
    WeightCommand,
    WeightNotice,
)
from segue.scheduler.pause import PauseState
from segue.scheduler.rank_calls import RankCalls, problems, staging
from segue.scheduler.weight_session import RECEIVE_S, Kind, Phase, Session
from segue.weights.sync.merge import merge

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler

HOLDER: Literal["weight_commit"] = "weight_commit"


class WeightControl:
    """The state machine of one engine."""

    def __init__(self, scheduler: Scheduler, num_ranks: int) -> None:
        self._scheduler = scheduler
        self._num_ranks = num_ranks
        self.session: Session | None = None
        self.poisoned: str | None = None  # why
        self.groups: dict[str, Group] = {}
        self.num_committed = self.num_failed = 0
        self.model_path: str | None = None  # of the last checkpoint that became live
        self.last: dict[str, Any] = {}  # figures of the last update that was committed
        self._undone: str | None = None  # why the calls of a group that is not yet ended came to nothing
        self._ended: tuple[str, str | None, WeightAnswer] | None = None  # (session, group, its last answer)
        self._num_sessions = 0
        self._calls = RankCalls(num_ranks)
        self._answers: list[SchedulerMessage] = []

    # --- what the loop does with it ---

    def request(self, message: WeightCall, now: float) -> None:
        """A call of the frontend."""
        call, request = message.call, message.request
        match request:
            case JoinGroup():
                self._join(call, request)
            case LeaveGroup():
                self._leave(call, request, now)
            case Prepare():
                self._prepare(call, request, now)
            case Complete():
                self._complete(call, request, now)
            case CommitSession():
                self._commit_session(call, request, now)
            case AbortSession():
                self._abort_session(call, request, now)
            case GetUpdateStatus():
                self._answer([call], True, **self.status(now))
            case UpdateFromDistributed() | UpdateFromDisk() | UpdateFromTensor():
                self._single(call, request, now)
            case BeginUpdate():
                self._begin(call, now)
            case EndUpdate():
                self._end_group(call, now)
            case SetVersion():
                self._set_version(call, request)
            case GetWeights() | CheckWeights():
                self._inspect(call, request)

    def on_rank(self, event: RankReply | Received, now: float) -> None:
        """What a rank says."""
        if isinstance(event, Received):
            self._on_received(event, now)
        else:
            self._calls.hear(event, now)

    @property
    def next_deadline(self) -> float | None:
        """When :meth:`advance` has something to do though nothing else happens; None: never."""
        return None if self.session is None else self.session.deadline

    def advance(self, now: float) -> tuple[list[SchedulerMessage], list[Sequence[WeightCommand]]]:
        """What is to be sent to the frontend, and to the ranks (each entry: one command a rank), in order.

        To be called behind ``PauseControl.advance``: a commit begins when its hold has taken effect.
        """
        session = self.session
        deadline = self.next_deadline
        if session is not None and deadline is not None and now >= deadline:
            self._abort(session, session.lateness(now), now)
        elif session is not None and session.phase is Phase.COMMITTING:
            self._write(session, now)
        answers, self._answers = self._answers, []
        return answers, self._calls.take()

    def status(self, now: float) -> dict[str, Any]:
        """``GET /weights_update_status``."""
        session = self.session
        state: dict[str, Any] = {
            "state": self.state,
            "weight_version": self._scheduler.weight_version,
            "groups": sorted(self.groups),
            "generating": self._scheduler.has_work,
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

    # --- groups ---

    def _join(self, call: int, request: JoinGroup) -> None:
        group, size = request.group, self._num_ranks
        if not 1 <= group.rank_offset <= group.world_size - size:
            rule = f"must be 1 to world_size - {size} (rank 0 is the trainer, this engine has {size} ranks)"
            text = f"rank_offset={group.rank_offset} in world_size={group.world_size}: rank_offset {rule}"
            self._answer([call], False, text)
            return

        def joined(replies: list[RankReply], now: float) -> None:
            wrong = problems(replies)
            for name in {name for reply in replies for name in reply.fields.get("dropped", ())} - {
                group.name
            }:
                self.groups.pop(name, None)  # its trainer has gone
                if self.session is not None and self.session.phase is not Phase.RECEIVED:
                    self._end_session_of(name, "has lost its trainer", now)
            is_new = any(reply.fields.get("is_new") for reply in replies)
            if is_new:
                self._end_session_of(group.name, "was joined anew", now)
            if wrong:
                if is_new:  # on some ranks only
                    self.groups.pop(group.name, None)
                    self._calls.tell(lambda _, inner: Leave(call=inner, name=group.name))
                self._answer([call], False, wrong)
            else:
                self.groups[group.name] = group
                self._answer([call], True, f"Joined group {group.name!r}.")

        self._calls.tell(lambda _, inner: Join(call=inner, group=group, timeout_s=request.timeout_s), joined)

    def _leave(self, call: int, request: LeaveGroup, now: float) -> None:
        name = request.name
        if name not in self.groups:
            self._answer([call], False, self._no_group(name))
            return
        self._end_session_of(name, "was destroyed", now)
        self._ended = None
        del self.groups[name]

        def left(replies: list[RankReply], now: float) -> None:
            wrong = problems(replies)
            self._answer([call], not wrong, wrong or f"Left group {name!r}.")

        self._calls.tell(lambda _, inner: Leave(call=inner, name=name), left)

    def _end_session_of(self, name: str, why: str, now: float) -> None:
        """Of a group that is no more; a commit needs none."""
        session = self.session
        if session is not None and session.group_name == name and session.phase is not Phase.COMMITTING:
            self._abort(session, f"group {name!r} {why}", now)

    def _no_group(self, name: str) -> str:
        known = f"known: {', '.join(map(repr, sorted(self.groups)))}" if self.groups else "there is none"
        return f"unknown group {name!r} ({known}); join it with /init_weights_update_group first"

    # --- a session in two phases ---

    def _prepare(self, call: int, request: Prepare, now: float) -> None:
        manifest, session = request.manifest, self.session
        if session is not None:
            same = session.kind == "session" and session.manifest == manifest
            named = request.session_id is not None and session.id == request.session_id
            if same and (
                named or (request.session_id is None and session.phase.value <= Phase.PREPARED.value)
            ):
                session.preparing.append(call)
                self._answer_prepared(session)
                return
        self._ended = None
        refusal = self._refusal(manifest, is_partial=manifest.partial)
        if refusal is None and request.num_buckets not in (None, len(manifest.buckets)):
            refusal = f"num_buckets={request.num_buckets}, but buckets has {len(manifest.buckets)} entries"
        if refusal is not None:
            self._answer([call], False, refusal)
            return
        session = self._open("session", now, request.session_id)
        session.manifest = manifest
        session.weight_version = request.weight_version
        session.timeout_s, session.arm_timeout_s = request.timeout_s, request.arm_timeout_s
        session.preparing.append(call)
        self._stage(session, manifest, now)

    def _refusal(self, manifest: Manifest | None, *, is_partial: bool) -> str | None:
        """Why an update cannot begin now."""
        if self.session is not None:
            session = self.session
            way = "end it" if session.kind == "group of calls" else "complete or abort it"
            return f"session {session.id!r} is open ({self.state}); {way} first"
        if self._undone is not None:
            return f"the update that was begun has failed ({self._undone}); end it with /end_weight_update"
        if manifest is not None and (refusal := self._receive_refusal(manifest)):
            return refusal
        if self.poisoned is not None and is_partial:
            return f"the weights are poisoned ({self.poisoned}); send all of them"
        return None

    def _receive_refusal(self, manifest: Manifest) -> str | None:
        if manifest.group_name not in self.groups:
            return self._no_group(manifest.group_name)
        scheduler = self._scheduler
        if scheduler.limits.receive_requires_pause and scheduler.control.state is not PauseState.PAUSED:
            return "generation runs, and --weight-recv-requires-pause is set; POST /pause_generation first"
        return None

    def _open(self, kind: Kind, now: float, name: str | None = None) -> Session:
        self._num_sessions += 1
        self.session = session = Session(
            number=self._num_sessions,
            id=name or f"session-{self._num_sessions}",
            kind=kind,
            phase=Phase.STAGING,
            began=now,
            progress_at=now,
        )
        return session

    def _stage(self, session: Session, manifest: Manifest, now: float) -> None:
        session.manifest = manifest
        session.is_empty = session.is_empty and not manifest.buckets
        session.is_partial = session.is_partial and manifest.partial
        session.bytes_before += session.slowest(session.bytes, self._num_ranks)
        session.buckets_before += session.slowest(session.buckets, self._num_ranks)
        session.buckets, session.bytes, session.done = {}, {}, set()
        self._enter(session, Phase.STAGING, now)

        def staged(replies: list[RankReply], now: float) -> None:
            if self.session is not session:
                return
            if wrong := problems(replies):
                self._on_unfit(session, manifest, wrong, now)
                return
            session.staging = staging(replies)
            self._enter(session, Phase.ARMING, now)
            self._calls.tell(lambda _, call: Receive(call=call, session=session.number), armed)

        def armed(replies: list[RankReply], now: float) -> None:
            if self.session is not session:
                return
            if wrong := problems(replies):
                self._abort(session, wrong, now)
                return
            self._enter(session, Phase.PREPARED, now)
            self._answer_prepared(session)
            self._see_progress(session, now)

        self._calls.tell(lambda _, call: Stage(call=call, session=session.number, manifest=manifest), staged)

    def _on_unfit(self, session: Session, manifest: Manifest, wrong: str, now: float) -> None:
        """What was announced cannot be taken; a client of a single call may be sending it all the same."""
        if session.kind == "session" or manifest.discard:
            self._abort(session, session.refusal or wrong, now)
            return
        session.refusal, session.then = wrong, "refuse"
        self._stage(session, structs.replace(manifest, discard=True), now)

    def _answer_prepared(self, session: Session) -> None:
        if session.phase.value < Phase.PREPARED.value:
            return
        text = f"Every rank receives {len(session.manifest.buckets) if session.manifest else 0} buckets."
        fields = {"staging": session.staging, "generating": self._scheduler.has_work}
        self._answer(session.preparing, True, text, session_id=session.id, **fields)
        session.preparing = []

    def _on_received(self, event: Received, now: float) -> None:
        session = self.session
        if session is None or event.session != session.number or session.phase is Phase.COMMITTING:
            return
        if event.error is not None:
            self._abort(session, f"rank {event.rank}: {event.error}", now)
            return
        session.buckets[event.rank], session.bytes[event.rank] = event.num_buckets, event.num_bytes
        if event.done:
            session.done.add(event.rank)
        self._see_progress(session, now)

    def _see_progress(self, session: Session, now: float) -> None:
        """Told by any rank, from PREPARED on."""
        if session.phase.value < Phase.PREPARED.value or not (session.bytes or session.done):
            return
        if session.phase is not Phase.RECEIVING:
            session.receiving_at = now
        self._enter(session, Phase.RECEIVING, now)
        if len(session.done) == self._num_ranks:
            session.receive_s += now - session.receiving_at
            self._enter(session, Phase.RECEIVED, now)
            self._on_all_there(session, now)

    def _on_all_there(self, session: Session, now: float) -> None:
        match session.then:
            case "wait":
                pass
            case "answer":
                self._answer_received(session)
            case "commit":
                self._hold(session, now)
            case "refuse":
                self._abort(session, session.refusal, now)

    def _complete(self, call: int, request: Complete, now: float) -> None:
        session = self._find(call, request.session_id, request.group_name)
        if session is None:
            return
        if session.phase is Phase.COMMITTING:
            session.ending.append(call)
            return
        session.ending.append(call)
        session.flush_cache = session.flush_cache or request.flush_cache
        if session.then != "commit":  # another call may have asked for it
            session.then = "commit" if request.commit else "answer"
        if session.phase is Phase.RECEIVED:
            self._on_all_there(session, now)
        else:
            session.answer_by = now + session.timeout_s

    def _commit_session(self, call: int, request: CommitSession, now: float) -> None:
        session = self._find(call, request.session_id, None)
        if session is None:
            return
        if session.phase not in (Phase.RECEIVED, Phase.COMMITTING):
            self._answer([call], False, f"session {session.id!r} is {self.state}; complete it first")
            return
        session.ending.append(call)
        if session.phase is Phase.RECEIVED:
            session.flush_cache = session.flush_cache or request.flush_cache
            self._hold(session, now)

    def _abort_session(self, call: int, request: AbortSession, now: float) -> None:
        session = self.session
        if session is None and self._undone is not None and request.session_id is None:
            self._undone = None
            self._answer([call], True, "The update was undone; the weights are as they were.")
        elif session is None or request.session_id not in (None, session.id):
            self._answer([call], False, self._not_open(request.session_id))
        elif session.phase is Phase.COMMITTING:
            self._answer([call], False, f"session {session.id!r} is being committed, which takes a moment")
        else:
            self._abort(session, "it was aborted by a client", now)
            self._undone = None
            self._answer([call], True, f"Session {session.id!r} was aborted; the weights are as they were.")

    def _find(self, call: int, session_id: str | None, group_name: str | None) -> Session | None:
        """The open session, if it is the one that is meant; else the call is answered."""
        session = self.session
        if session is not None and session.kind == "session":
            if session_id not in (None, session.id):
                text = f"session {session_id!r} is not open; {session.id!r} is ({self.state})"
                self._answer([call], False, text)
                return None
            if group_name not in (None, session.group_name):
                text = f"session {session.id!r} is of group {session.group_name!r}, not {group_name!r}"
                self._answer([call], False, text)
                return None
            return session
        if self._ended is not None:
            name, group, answer = self._ended
            if session_id in (None, name) and group_name in (None, group):
                self._answers.append(structs.replace(answer, call=call))
                return None
        self._answer([call], False, self._not_open(session_id))
        return None

    def _not_open(self, session_id: str | None) -> str:
        named = "no session" if session_id is None else f"no session {session_id!r}"
        return f"{named} is open; /prepare_weights_update opens one"

    def _answer_received(self, session: Session) -> None:
        """Everything is there, and the commit is another call's."""
        text = "Everything was received; commit it, or call again."
        self._answer(session.ending, True, text, **self._figures(session))
        session.ending, session.answer_by, session.then = [], None, "wait"

    # --- the older calls ---

    def _single(
        self, call: int, request: UpdateFromDistributed | UpdateFromDisk | UpdateFromTensor, now: float
    ) -> None:
        manifest = request.manifest if isinstance(request, UpdateFromDistributed) else None
        session = self.session
        if session is not None and session.kind == "group of calls" and session.phase is Phase.RECEIVED:
            if manifest is not None and (refusal := self._receive_refusal(manifest)):
                self._answer([call], False, refusal)
                return
            session.then = "answer"
        else:
            refusal = self._refusal(manifest, is_partial=not isinstance(request, UpdateFromDisk))
            if refusal is not None:
                self._refuse(call, manifest, refusal, now)
                return
            session = self._open("call", now)
            session.then = "commit"
            if manifest is not None:
                session.arm_timeout_s = RECEIVE_S  # the client sends at once
        session.ending.append(call)
        session.weight_version = request.weight_version or session.weight_version
        session.flush_cache = session.flush_cache or request.flush_cache
        session.abort_all = session.abort_all or request.abort_all
        match request:
            case UpdateFromDistributed():
                self._stage(session, request.manifest, now)
            case UpdateFromDisk():
                self._load(session, request, now)
            case UpdateFromTensor():
                self._take(session, request, now)

    def _refuse(self, call: int, manifest: Manifest | None, refusal: str, now: float) -> None:
        """A client that sends already is let finish, where that can be received."""
        if manifest is None or self.session is not None or self._receive_refusal(manifest):
            self._answer([call], False, refusal)
            return
        session = self._open("call", now)
        session.arm_timeout_s, session.then, session.refusal = RECEIVE_S, "refuse", refusal
        session.ending.append(call)
        self._stage(session, structs.replace(manifest, discard=True), now)

    def _load(self, session: Session, request: UpdateFromDisk, now: float) -> None:
        session.model_path, session.is_partial, session.is_empty = request.model_path, False, False
        self._enter(session, Phase.ARMING, now)
        self._calls.tell(
            lambda _, call: Load(
                call=call,
                session=session.number,
                model_path=request.model_path,
                load_format=request.load_format,
            ),
            lambda replies, now: self._brought(session, replies, now),
        )

    def _take(self, session: Session, request: UpdateFromTensor, now: float) -> None:
        if len(request.payloads) not in (1, self._num_ranks):
            text = (
                f"serialized_named_tensors has {len(request.payloads)} entries; give one for all ranks, or "
            )
            self._abort(session, f"{text}one for each of the {self._num_ranks}", now)
            return
        session.is_empty = False
        self._enter(session, Phase.ARMING, now)
        self._calls.tell(
            lambda rank, call: Take(
                call=call,
                session=session.number,
                payload=request.payloads[rank if len(request.payloads) > 1 else 0],
                load_format=request.load_format,
                copy=session.kind == "group of calls",
            ),
            lambda replies, now: self._brought(session, replies, now),
        )

    def _brought(self, session: Session, replies: list[RankReply], now: float) -> None:
        """The ranks have read a checkpoint, or what came with the call."""
        if self.session is not session:
            return
        if wrong := problems(replies):
            self._abort(session, wrong, now)
            return
        session.staging = staging(replies)
        session.bytes = {reply.rank: reply.fields.get("num_bytes", 0) for reply in replies}
        self._enter(session, Phase.RECEIVED, now)
        self._on_all_there(session, now)

    def _begin(self, call: int, now: float) -> None:
        refusal = self._refusal(None, is_partial=True)
        if refusal is not None:
            self._answer([call], False, refusal)
            return
        session = self._open("group of calls", now)
        session.phase = Phase.RECEIVED  # all of nothing
        self._notify()
        self._answer([call], True, "The calls that follow become live together, at /end_weight_update.")

    def _end_group(self, call: int, now: float) -> None:
        session = self.session
        if session is None and self._undone is not None:
            text = f"the update has failed ({self._undone}); the weights are as they were"
            self._undone = None
            self._answer([call], False, text)
        elif session is None or session.kind != "group of calls":
            self._answer([call], False, "no update was begun; /begin_weight_update begins one")
        elif session.phase is not Phase.RECEIVED:
            self._answer([call], False, f"a call of this update is still {self.state}; end it behind that")
        elif session.is_empty:
            self._close(session)
            self._answer([call], True, "Nothing was sent; the weights are as they were.")
        else:
            session.ending.append(call)
            self._hold(session, now)

    # --- the commit ---

    def _hold(self, session: Session, now: float) -> None:
        self._enter(session, Phase.COMMITTING, now)
        session.answer_by = None
        session.num_paused = len(self._scheduler.running)
        mode: PauseMode = "retract" if session.flush_cache else "in_place"
        self._scheduler.control.hold(HOLDER, "abort" if session.abort_all else mode)

    def _write(self, session: Session, now: float) -> None:
        """Once nothing runs."""
        if "WRITING" not in session.times and self._scheduler.control.state is PauseState.PAUSED:
            session.times["WRITING"] = now
            self._calls.tell(lambda _, call: Commit(call=call, session=session.number), self._on_committed)

    def _on_committed(self, replies: list[RankReply], now: float) -> None:
        session = self.session
        assert session is not None and session.phase is Phase.COMMITTING
        scheduler = self._scheduler
        if wrong := problems(replies):
            if any(reply.fields.get("touched") or not reply.errors for reply in replies):
                self._poison(wrong)
            self._abort(session, wrong, now)
            scheduler.control.release(HOLDER)
            return
        scheduler.set_weight_version(session.weight_version or self._next_version())
        if not session.is_partial:
            self.poisoned = scheduler.refuses = None
        if session.flush_cache:
            scheduler.forget_cache()
        self.num_committed += 1
        session.times["LIVE"] = now
        self.last = self._figures(session) | {"kind": session.kind}
        self.model_path = session.model_path or self.model_path
        scheduler.control.release(HOLDER)
        self._close(session)
        self._finish(session, True, "The new weights are live.")

    def _poison(self, why: str) -> None:
        self.poisoned = why
        self._scheduler.refuses = f"the weights are poisoned ({why}); update all of them, or start again"
        self._answers.append(
            self._scheduler.output(finished=self._scheduler.abort_all("the weights are poisoned"))
        )

    def _next_version(self) -> str:
        version = self._scheduler.weight_version
        is_number = version.isascii() and version.isdigit()
        return str(int(version) + 1) if is_number else str(self._scheduler.kv_epoch + 1)

    def _set_version(self, call: int, request: SetVersion) -> None:
        scheduler = self._scheduler
        if request.abort_all:
            self._answers.append(scheduler.output(finished=scheduler.abort_all()))
        scheduler.rename_weights(request.version)
        self._notify()  # first: who has the answer may ask the frontend
        self._answer([call], True, f"Weight version is {request.version!r}.", new_version=request.version)

    # --- ends ---

    def _abort(self, session: Session, why: str, now: float) -> None:
        """The one exit of a session that does not become live."""
        self.num_failed += 1
        if session.kind == "group of calls":
            self._undone = why
        self._close(session)
        self._calls.tell(lambda _, call: Discard(call=call, session=session.number))
        self._answer(session.preparing, False, why, session_id=session.id)
        self._finish(session, False, why)

    def _enter(self, session: Session, phase: Phase, now: float) -> None:
        """Go on, or show a sign of life."""
        news, session.phase, session.progress_at = phase is not session.phase, phase, now
        session.times.setdefault(phase.name, now)
        if news:
            self._notify()

    def _close(self, session: Session) -> None:
        assert self.session is session
        self.session = None
        self._notify()

    def _finish(self, session: Session, success: bool, message: str) -> None:
        figures = self._figures(session)
        self._answer(session.ending, success, message, **figures)
        if session.kind == "session":
            self._ended = (session.id, session.group_name, WeightAnswer(0, success, message, figures))

    def _figures(self, session: Session) -> dict[str, Any]:
        return session.figures(self._num_ranks) | {"weight_version": self._scheduler.weight_version}

    # --- looking ---

    def _inspect(self, call: int, request: GetWeights | CheckWeights) -> None:
        def seen(replies: list[RankReply], now: float) -> None:
            if wrong := problems(replies):
                self._answer([call], False, wrong)
                return
            fields = merge(request, [reply.fields for reply in replies])
            differing = fields.get("differ", [])
            text = f"{len(differing)} tensors differ from the snapshot." if differing else ""
            self._answer([call], not differing, text, **fields)

        self._calls.tell(lambda _, inner: Inspect(call=inner, request=request), seen)

    # --- sending ---

    def _answer(self, calls: Sequence[int], success: bool, message: str = "", **fields: Any) -> None:
        self._answers += [WeightAnswer(call, success, message, fields) for call in calls]

    def _notify(self) -> None:
        self._answers.append(self.notice())

    def notice(self) -> WeightNotice:
        """What the frontend shows without asking."""
        return WeightNotice(
            version=self._scheduler.weight_version,
            state=self.state,
            poisoned=self.poisoned,
            model_path=self.model_path,
            num_committed=self.num_committed,
            num_failed=self.num_failed,
            last=self.last,
        )
