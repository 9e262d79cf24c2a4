"""The calls of weight updates: which are accepted, which are refused, and what they start.

``state_machine.py`` takes the update from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from segue.messages.control import SchedulerMessage
from segue.messages.weight_operations import (
    AbortSession,
    BeginUpdate,
    CheckWeights,
    CommitSession,
    Complete,
    EndUpdate,
    GetUpdateStatus,
    GetWeights,
    JoinGroup,
    LeaveGroup,
    Manifest,
    Prepare,
    SetVersion,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensor,
)
from segue.messages.weight_update import (
    Inspect,
    RankReply,
    Received,
    WeightCall,
    WeightCommand,
    WeightNotice,
)
from segue.weight_update.control.groups import TrainerGroups
from segue.weight_update.control.outbox import Outbox, Refusal
from segue.weight_update.control.replies import merge, problems
from segue.weight_update.control.session import BEFORE_PREPARED, RECEIVE_S, UpdatePhase, UpdateSession
from segue.weight_update.control.state_machine import Port, WeightMachine


class WeightControl:
    """One engine's weight updates: handles the frontend's calls, each of which is answered once."""

    def __init__(self, port: Port, num_ranks: int) -> None:
        self._port = port
        self._outbox = Outbox(num_ranks)
        self.machine = WeightMachine(port, self._outbox)
        self.groups = TrainerGroups(self._outbox, self.machine)

    def request(self, message: WeightCall, now: float) -> None:
        """Handle a call; :meth:`advance` returns its answer, now or later."""
        try:
            self._handle(message, now)
        except Refusal as refusal:
            self._outbox.answer([message.call], False, str(refusal))

    def withdraw(self, call: int) -> None:
        """Note that a call's client has gone; the joining of a group for which no other call waits ends."""
        self.groups.withdraw(call)

    def on_rank(self, event: RankReply | Received, now: float) -> None:
        """Take a rank's reply or progress report."""
        if isinstance(event, Received):
            self.machine.on_received(event, now)
        else:
            self._outbox.on_reply(event, now)

    @property
    def next_deadline(self) -> float | None:
        """When :meth:`advance` must be called even if nothing else happens; None: never."""
        session = self.machine.session
        deadlines = (self.groups.next_deadline, None if session is None else session.deadline)
        return min((each for each in deadlines if each is not None), default=None)

    def advance(self, now: float) -> tuple[list[SchedulerMessage], list[Sequence[WeightCommand]]]:
        """Check deadlines and begin a commit that can begin.

        Call it after ``PauseControl.advance``, because a commit begins when its hold has taken effect.

        Returns:
            The messages for the frontend, and the commands for the ranks, one per rank in each entry; both
            are in the order of sending.
        """
        self.groups.advance(now)
        self.machine.advance(now)
        return self._outbox.take()

    def status(self, now: float) -> dict[str, Any]:
        """Returns the body of ``GET /weights_update_status``."""
        return self.machine.status(now) | {"groups": sorted(self.groups.joined)}

    def notice(self) -> WeightNotice:
        """Returns the present state, as the frontend shows it without asking."""
        return self.machine.notice()

    def _handle(self, message: WeightCall, now: float) -> None:
        call, request = message.call, message.operation
        match request:
            case JoinGroup():
                self.groups.join(call, request, now)
            case LeaveGroup():
                self.groups.leave(call, request.group_name, now)
            case Prepare():
                self._prepare(call, request, now)
            case Complete():
                self._complete(call, request, now)
            case CommitSession():
                self._commit_session(call, request, now)
            case AbortSession():
                self._abort_session(call, request, now)
            case GetUpdateStatus():
                self._outbox.answer([call], True, **self.status(now))
            case UpdateFromDistributed() | UpdateFromDisk() | UpdateFromTensor():
                self._single(message, request, now)
            case BeginUpdate():
                self._begin(call, now)
            case EndUpdate():
                self._end_group(call, now)
            case SetVersion():
                self._set_version(call, request)
            case GetWeights() | CheckWeights():
                self._inspect(call, request)

    # --- a session in two phases ---

    def _prepare(self, call: int, request: Prepare, now: float) -> None:
        manifest, session = request.manifest, self.machine.session
        if session is not None and session.kind == "session" and session.manifest == manifest:
            nothing_came = session.phase in (*BEFORE_PREPARED, UpdatePhase.PREPARED)
            if request.session_id == session.id or (request.session_id is None and nothing_came):
                session.preparing.append(call)
                self.machine.answer_prepared(session)
                return
        self.machine.last_ended = None
        self._check_idle(is_partial=manifest.partial, manifest=manifest)
        if request.num_buckets not in (None, len(manifest.buckets)):
            raise Refusal(
                f"num_buckets={request.num_buckets}, but buckets has {len(manifest.buckets)} entries"
            )
        session = self.machine.open("session", now, request.session_id)
        session.weight_version = request.weight_version
        session.timeout_s, session.arm_timeout_s = request.timeout_s, request.arm_timeout_s
        session.preparing.append(call)
        self.machine.stage(session, manifest, now)

    def _complete(self, call: int, request: Complete, now: float) -> None:
        session = self._find(call, request.session_id, request.group_name)
        if session is None:
            return
        session.ending.append(call)
        if session.phase is UpdatePhase.COMMITTING:
            return
        session.flush_cache = session.flush_cache or request.flush_cache
        if session.then != "commit":  # an earlier call may have asked for the commit
            session.then = "commit" if request.commit else "answer"
        if session.phase is UpdatePhase.RECEIVED:
            self.machine.go_on(session, now)
        else:
            session.answer_by = now + session.timeout_s

    def _commit_session(self, call: int, request: CommitSession, now: float) -> None:
        session = self._find(call, request.session_id, None)
        if session is None:
            return
        if session.phase not in (UpdatePhase.RECEIVED, UpdatePhase.COMMITTING):
            raise Refusal(f"session {session.id!r} is {self.machine.state}; complete it first")
        session.ending.append(call)
        if session.phase is UpdatePhase.RECEIVED:
            session.flush_cache = session.flush_cache or request.flush_cache
            self.machine.commit(session, now)

    def _abort_session(self, call: int, request: AbortSession, now: float) -> None:
        session, text = self.machine.session, "The update was ended; the weights are as they were."
        if session is not None and request.session_id in (None, session.id):
            if session.phase is UpdatePhase.COMMITTING:
                raise Refusal(f"session {session.id!r} is being committed; wait until that is done")
            self.machine.abort(session, "it was aborted by a client", now)
            text = f"Session {session.id!r} was aborted; the weights are as they were."
        elif session is not None or self.machine.group_error is None or request.session_id is not None:
            raise Refusal(_not_open(request.session_id))
        self.machine.group_error = None
        self._outbox.answer([call], True, text)

    def _find(self, call: int, session_id: str | None, group_name: str | None) -> UpdateSession | None:
        """Returns the open session if the given names are its own.

        A call for the session that ended last gets that session's last answer again; then returns None.

        Raises:
            Refusal: no such session is open.
        """
        session = self.machine.session
        if session is not None and session.kind == "session":
            if session_id not in (None, session.id):
                raise Refusal(f"session {session_id!r} is not open; {session.id!r} is ({self.machine.state})")
            if group_name not in (None, session.group_name):
                text = f"session {session.id!r} is of group {session.group_name!r}, not {group_name!r}"
                raise Refusal(text)
            return session
        if self.machine.last_ended is not None:
            name, group, answer = self.machine.last_ended
            if session_id in (None, name) and group_name in (None, group):
                self._outbox.send(structs.replace(answer, call=call))
                return None
        raise Refusal(_not_open(session_id))

    # --- single calls ---

    def _single(
        self,
        message: WeightCall,
        request: UpdateFromDistributed | UpdateFromDisk | UpdateFromTensor,
        now: float,
    ) -> None:
        manifest = request.manifest if isinstance(request, UpdateFromDistributed) else None
        session = self.machine.session
        if session is not None and session.kind == "group of calls" and session.phase is UpdatePhase.RECEIVED:
            if manifest is not None:
                self._check_receive(manifest)
            session.then = "answer"
        else:
            try:
                self._check_idle(is_partial=not isinstance(request, UpdateFromDisk), manifest=manifest)
            except Refusal as refusal:
                self._drop(message.call, manifest, refusal, now)
                return
            session = self.machine.open("call", now)
            session.then = "commit"
            if manifest is not None:
                session.arm_timeout_s = RECEIVE_S  # the client broadcasts at once
        session.ending.append(message.call)
        session.weight_version = request.weight_version or session.weight_version
        session.flush_cache = session.flush_cache or request.flush_cache
        session.abort_all = session.abort_all or request.abort_all_requests
        match request:
            case UpdateFromDistributed():
                self.machine.stage(session, request.manifest, now)
            case UpdateFromDisk():
                self.machine.load(session, message, request, now)
            case UpdateFromTensor():
                self.machine.take(session, request, now)

    def _drop(self, call: int, manifest: Manifest | None, refusal: Refusal, now: float) -> None:
        """Refuse a single call.

        Its client may be broadcasting already. If possible the ranks receive and drop the tensors first, so
        that the client does not hang.
        """
        if manifest is None or self.machine.session is not None:
            raise refusal
        try:
            self._check_receive(manifest)
        except Refusal:
            raise refusal from None
        session = self.machine.open("call", now)
        session.arm_timeout_s, session.then, session.refusal = RECEIVE_S, "refuse", str(refusal)
        session.ending.append(call)
        self.machine.stage(session, structs.replace(manifest, discard=True), now)

    def _begin(self, call: int, now: float) -> None:
        self._check_idle(is_partial=True)
        session = self.machine.open("group of calls", now)
        self.machine.enter(
            session, UpdatePhase.RECEIVED, now
        )  # nothing was announced yet: nothing is missing
        text = "The calls that follow take effect together, at /end_weight_update."
        self._outbox.answer([call], True, text)

    def _end_group(self, call: int, now: float) -> None:
        session, error = self.machine.session, self.machine.group_error
        if session is None and error is not None:
            self.machine.group_error = None
            raise Refusal(f"the update has failed ({error}); the weights are as they were")
        if session is None or session.kind != "group of calls":
            raise Refusal("no update was begun; /begin_weight_update begins one")
        if session.phase is not UpdatePhase.RECEIVED:
            state = self.machine.state
            raise Refusal(f"a call of this update is still {state}; end it when that is answered")
        if session.is_empty:
            self.machine.close(session)
            self._outbox.answer([call], True, "Nothing was sent; the weights are as they were.")
        else:
            session.ending.append(call)
            self.machine.commit(session, now)

    # --- whether an update may begin ---

    def _check_idle(self, *, is_partial: bool, manifest: Manifest | None = None) -> None:
        """Make sure that an update may begin now.

        Raises:
            Refusal: it may not.
        """
        session, error, poisoned = self.machine.session, self.machine.group_error, self._port.poisoned
        if session is not None:
            way = "end it" if session.kind == "group of calls" else "complete or abort it"
            raise Refusal(f"session {session.id!r} is open ({self.machine.state}); {way} first")
        if error is not None:
            raise Refusal(f"the begun update has failed ({error}); end it with /end_weight_update")
        if manifest is not None:
            self._check_receive(manifest)
        if poisoned is not None and is_partial:
            raise Refusal(f"the weights are poisoned ({poisoned}); send all of them")

    def _check_receive(self, manifest: Manifest) -> None:
        """Make sure that weights may be received from the manifest's group; raises as :meth:`_check_idle`."""
        self.groups.check(manifest.group_name)
        if self._port.receive_requires_pause and not self._port.stands_still:
            text = "generation runs, and --weight-recv-requires-pause is set; POST /pause_generation first"
            raise Refusal(text)

    # --- versions and inspection ---

    def _set_version(self, call: int, request: SetVersion) -> None:
        version = request.new_version
        if request.abort_all_requests:
            self._outbox.send(self._port.abort_all())
        self._port.rename(version)
        self._outbox.send(self.notice())  # before the answer: its client may then ask the frontend for it
        self._outbox.answer([call], True, f"Weight version is {version!r}.", new_version=version)

    def _inspect(self, call: int, request: GetWeights | CheckWeights) -> None:
        def inspected(replies: list[RankReply], now: float) -> None:
            if wrong := problems(replies):
                self._outbox.answer([call], False, wrong)
                return
            fields = merge(request, replies)
            differing = fields.get("differ", [])
            text = f"{len(differing)} tensors differ from the snapshot." if differing else ""
            self._outbox.answer([call], not differing, text, **fields)

        self._outbox.command(Inspect(request=request), then=inspected)


def _not_open(session_id: str | None) -> str:
    named = "no session" if session_id is None else f"no session {session_id!r}"
    return f"{named} is open; /prepare_weights_update opens one"
