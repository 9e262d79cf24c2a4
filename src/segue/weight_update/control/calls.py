"""The calls of weight updates: which are accepted, which are refused, and what they start.

``state_machine.py`` takes the update from there.
"""

from __future__ import annotations

from msgspec import structs

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
from segue.messages.weight_update import Inspect, Join, Leave, RankReply, WeightCall
from segue.weight_update.control.fan_out import problems
from segue.weight_update.control.merge_replies import merge
from segue.weight_update.control.session import BEFORE_PREPARED, RECEIVE_S, UpdatePhase, UpdateSession
from segue.weight_update.control.state_machine import WeightMachine


class WeightControl(WeightMachine):
    """One engine's weight updates: handles the frontend's calls, each of which is answered once."""

    def request(self, message: WeightCall, now: float) -> None:
        """Handle a call; :meth:`advance` returns its answer, now or later."""
        call, request = message.call, message.operation
        match request:
            case JoinGroup():
                self._join(call, request, now)
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
                self._single(message, request, now)
            case BeginUpdate():
                self._begin(call, now)
            case EndUpdate():
                self._end_group(call, now)
            case SetVersion():
                self._set_version(call, request)
            case GetWeights() | CheckWeights():
                self._inspect(call, request)

    # --- groups ---

    def withdraw(self, call: int) -> None:
        """Note that a call's client has gone; the joining of a group for which no other call waits ends."""
        self._joins.withdraw(call)

    def _join(self, call: int, request: JoinGroup, now: float) -> None:
        group, size = request.group, self._num_ranks
        if not 1 <= group.rank_offset <= group.world_size - size:
            rule = f"must be 1 to world_size - {size} (rank 0 is the trainer, this engine has {size} ranks)"
            text = f"rank_offset={group.rank_offset} in world_size={group.world_size}: rank_offset {rule}"
            self._answer([call], False, text)
            return
        refusal = self._joins.refusal(group)
        if refusal is not None:
            self._answer([call], False, refusal)
            return
        joining = self._joins.wait(call, group, request.timeout_s, now)
        if joining is None:  # the ranks are joining the group already
            return

        def joined(replies: list[RankReply], now: float) -> None:
            wrong, calls = problems(replies), self._joins.end(joining)
            for name in {name for reply in replies for name in reply.fields.get("dropped", ())} - {
                group.name
            }:
                self.groups.pop(name, None)  # the group's trainer has gone
                if self.session is not None and self.session.phase is not UpdatePhase.RECEIVED:
                    self._end_session_of(name, "has lost its trainer", now)
            is_new = any(reply.fields.get("is_new") for reply in replies)
            if is_new:
                self._end_session_of(group.name, "was joined anew", now)
            if wrong:
                if is_new:  # some ranks have joined and others have not
                    self.groups.pop(group.name, None)
                    self._fan_out.send(lambda _, inner: Leave(call=inner, name=group.name))
                self._answer(calls, False, wrong)
            else:
                self.groups[group.name] = group
                self._answer(calls, True, f"Joined group {group.name!r}.")

        self._fan_out.send(
            lambda _, inner: Join(call=inner, group=group, timeout_s=request.timeout_s), joined
        )

    def _leave(self, call: int, request: LeaveGroup, now: float) -> None:
        name = request.group_name
        if name not in self.groups:
            self._answer([call], False, self._no_group(name))
            return
        self._end_session_of(name, "was destroyed", now)
        self._last_ended = None
        del self.groups[name]

        def left(replies: list[RankReply], now: float) -> None:
            wrong = problems(replies)
            self._answer([call], not wrong, wrong or f"Left group {name!r}.")

        self._fan_out.send(lambda _, inner: Leave(call=inner, name=name), left)

    def _end_session_of(self, name: str, why: str, now: float) -> None:
        """Abort the open session if it receives from group ``name``, unless it is being committed."""
        session = self.session
        if session is not None and session.group_name == name and session.phase is not UpdatePhase.COMMITTING:
            self._abort(session, f"group {name!r} {why}", now)

    def _no_group(self, name: str) -> str:
        known = f"known: {', '.join(map(repr, sorted(self.groups)))}" if self.groups else "no group is known"
        return f"unknown group {name!r} ({known}); join it with /init_weights_update_group first"

    # --- a session in two phases ---

    def _prepare(self, call: int, request: Prepare, now: float) -> None:
        manifest, session = request.manifest, self.session
        if session is not None:
            same = session.kind == "session" and session.manifest == manifest
            named = request.session_id is not None and session.id == request.session_id
            if same and (
                named
                or (request.session_id is None and session.phase in (*BEFORE_PREPARED, UpdatePhase.PREPARED))
            ):
                session.preparing.append(call)
                self._answer_prepared(session)
                return
        self._last_ended = None
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

    def _complete(self, call: int, request: Complete, now: float) -> None:
        session = self._find(call, request.session_id, request.group_name)
        if session is None:
            return
        if session.phase is UpdatePhase.COMMITTING:
            session.ending.append(call)
            return
        session.ending.append(call)
        session.flush_cache = session.flush_cache or request.flush_cache
        if session.then != "commit":  # an earlier call may have asked for the commit
            session.then = "commit" if request.commit else "answer"
        if session.phase is UpdatePhase.RECEIVED:
            self._on_all_received(session, now)
        else:
            session.answer_by = now + session.timeout_s

    def _commit_session(self, call: int, request: CommitSession, now: float) -> None:
        session = self._find(call, request.session_id, None)
        if session is None:
            return
        if session.phase not in (UpdatePhase.RECEIVED, UpdatePhase.COMMITTING):
            self._answer([call], False, f"session {session.id!r} is {self.state}; complete it first")
            return
        session.ending.append(call)
        if session.phase is UpdatePhase.RECEIVED:
            session.flush_cache = session.flush_cache or request.flush_cache
            self._hold(session, now)

    def _abort_session(self, call: int, request: AbortSession, now: float) -> None:
        session = self.session
        if session is None and self._group_error is not None and request.session_id is None:
            self._group_error = None
            self._answer([call], True, "The update was ended; the weights are as they were.")
        elif session is None or request.session_id not in (None, session.id):
            self._answer([call], False, self._not_open(request.session_id))
        elif session.phase is UpdatePhase.COMMITTING:
            self._answer([call], False, f"session {session.id!r} is being committed; wait until that is done")
        else:
            self._abort(session, "it was aborted by a client", now)
            self._group_error = None
            self._answer([call], True, f"Session {session.id!r} was aborted; the weights are as they were.")

    def _find(self, call: int, session_id: str | None, group_name: str | None) -> UpdateSession | None:
        """Returns the open session if the given names are its own; else answers the call and returns None.

        A call for the session that ended last gets that session's last answer again.
        """
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
        if self._last_ended is not None:
            name, group, answer = self._last_ended
            if session_id in (None, name) and group_name in (None, group):
                self._answers.append(structs.replace(answer, call=call))
                return None
        self._answer([call], False, self._not_open(session_id))
        return None

    def _not_open(self, session_id: str | None) -> str:
        named = "no session" if session_id is None else f"no session {session_id!r}"
        return f"{named} is open; /prepare_weights_update opens one"

    # --- single calls ---

    def _single(
        self,
        message: WeightCall,
        request: UpdateFromDistributed | UpdateFromDisk | UpdateFromTensor,
        now: float,
    ) -> None:
        call = message.call
        manifest = request.manifest if isinstance(request, UpdateFromDistributed) else None
        session = self.session
        if session is not None and session.kind == "group of calls" and session.phase is UpdatePhase.RECEIVED:
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
                session.arm_timeout_s = RECEIVE_S  # the client broadcasts at once
        session.ending.append(call)
        session.weight_version = request.weight_version or session.weight_version
        session.flush_cache = session.flush_cache or request.flush_cache
        session.abort_all = session.abort_all or request.abort_all_requests
        match request:
            case UpdateFromDistributed():
                self._stage(session, request.manifest, now)
            case UpdateFromDisk():
                self._load(session, message, request, now)
            case UpdateFromTensor():
                self._take(session, request, now)

    def _refuse(self, call: int, manifest: Manifest | None, refusal: str, now: float) -> None:
        """Refuse a single call.

        Its client may be broadcasting already. If possible the ranks receive and drop the tensors first, so
        that the client does not hang.
        """
        if manifest is None or self.session is not None or self._receive_refusal(manifest):
            self._answer([call], False, refusal)
            return
        session = self._open("call", now)
        session.arm_timeout_s, session.then, session.refusal = RECEIVE_S, "refuse", refusal
        session.ending.append(call)
        self._stage(session, structs.replace(manifest, discard=True), now)

    def _begin(self, call: int, now: float) -> None:
        refusal = self._refusal(None, is_partial=True)
        if refusal is not None:
            self._answer([call], False, refusal)
            return
        session = self._open("group of calls", now)
        self._enter(session, UpdatePhase.RECEIVED, now)  # nothing was announced yet, so nothing is missing
        self._answer([call], True, "The calls that follow take effect together, at /end_weight_update.")

    def _end_group(self, call: int, now: float) -> None:
        session = self.session
        if session is None and self._group_error is not None:
            text = f"the update has failed ({self._group_error}); the weights are as they were"
            self._group_error = None
            self._answer([call], False, text)
        elif session is None or session.kind != "group of calls":
            self._answer([call], False, "no update was begun; /begin_weight_update begins one")
        elif session.phase is not UpdatePhase.RECEIVED:
            self._answer(
                [call], False, f"a call of this update is still {self.state}; end it when that is answered"
            )
        elif session.is_empty:
            self._close(session)
            self._answer([call], True, "Nothing was sent; the weights are as they were.")
        else:
            session.ending.append(call)
            self._hold(session, now)

    # --- whether an update may begin ---

    def _refusal(self, manifest: Manifest | None, *, is_partial: bool) -> str | None:
        """Why an update cannot begin now; None: it can."""
        if self.session is not None:
            session = self.session
            way = "end it" if session.kind == "group of calls" else "complete or abort it"
            return f"session {session.id!r} is open ({self.state}); {way} first"
        if self._group_error is not None:
            return f"the begun update has failed ({self._group_error}); end it with /end_weight_update"
        if manifest is not None and (refusal := self._receive_refusal(manifest)):
            return refusal
        if self.poisoned is not None and is_partial:
            return f"the weights are poisoned ({self.poisoned}); send all of them"
        return None

    def _receive_refusal(self, manifest: Manifest) -> str | None:
        if manifest.group_name not in self.groups:
            return self._no_group(manifest.group_name)
        if self._port.receive_requires_pause and not self._port.stands_still:
            return "generation runs, and --weight-recv-requires-pause is set; POST /pause_generation first"
        return None

    # --- versions and inspection ---

    def _set_version(self, call: int, request: SetVersion) -> None:
        if request.abort_all_requests:
            self._answers.append(self._port.abort_all())
        self._port.rename(request.new_version)
        self._notify()  # before the answer: its client may then ask the frontend for the version
        self._answer(
            [call], True, f"Weight version is {request.new_version!r}.", new_version=request.new_version
        )

    def _inspect(self, call: int, request: GetWeights | CheckWeights) -> None:
        def inspected(replies: list[RankReply], now: float) -> None:
            if wrong := problems(replies):
                self._answer([call], False, wrong)
                return
            fields = merge(request, [reply.fields for reply in replies])
            differing = fields.get("differ", [])
            text = f"{len(differing)} tensors differ from the snapshot." if differing else ""
            self._answer([call], not differing, text, **fields)

        self._fan_out.send(lambda _, inner: Inspect(call=inner, request=request), inspected)
