"""The calls of weight updates: which are accepted, which are refused, and what they start.

``state_machine.py`` takes the update from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from segue.messages import weight_operations as operations
from segue.messages.control import SchedulerMessage
from segue.messages.weight_update import (
    Inspect,
    RankReply,
    Received,
    RenameWeights,
    WeightCall,
    WeightCommand,
    WeightsChanged,
)
from segue.weight_update.control.following import FollowMachine
from segue.weight_update.control.groups import TrainerGroups
from segue.weight_update.control.outbox import Outbox, Refusal
from segue.weight_update.control.port import Port
from segue.weight_update.control.session import (
    BEFORE_PREPARED,
    RECEIVE_S,
    TO_BE_COMMITTED,
    UpdatePhase,
    UpdateSession,
)
from segue.weight_update.control.state_machine import WeightMachine

_MASK = (1 << 64) - 1
RESET = (
    "every value was overwritten by /weights_checker: send all of them, or load them with "
    "/update_weights_from_disk"
)


class WeightControl:
    """One engine's weight updates: handles the frontend's calls, each of which is answered once.

    There is one handler per kind of operation. It gets the call (``asked``, whose number the answer carries),
    its operation (``request``) and the time, and either answers through the outbox, at once or after the
    ranks' replies, or raises `Refusal`. `session.Kind` explains the three kinds of sessions.
    """

    def __init__(self, port: Port, num_ranks: int) -> None:
        self._port = port
        self._outbox = Outbox[WeightCommand](num_ranks)
        self.machine = WeightMachine(port, self._outbox)
        self.groups = TrainerGroups(self._outbox, self.machine)
        self.following = FollowMachine(port, self._outbox, self.machine)
        self._resets: list[int] = []  # calls that reset the weights, without an answer
        self._is_resetting = False  # whether the ranks were told to
        self._handlers: dict[type[operations.Operation], Callable[[WeightCall, Any, float], None]] = {
            operations.JoinGroup: self.groups.join,
            operations.LeaveGroup: self.groups.leave,
            operations.Prepare: self._prepare,
            operations.Complete: self._complete,
            operations.CommitSession: self._commit_session,
            operations.AbortSession: self._abort_session,
            operations.GetUpdateStatus: self._answer_status,
            operations.UpdateFromDistributed: self._single,
            operations.UpdateFromDisk: self._single,
            operations.UpdateFromTensor: self._single,
            operations.BeginUpdate: self._begin,
            operations.EndUpdate: self._end_group,
            operations.SetVersion: self._set_version,
            operations.GetWeights: self._inspect,
            operations.CheckWeights: self._check,
        }

    def request(self, message: WeightCall, now: float) -> None:
        """Handle a call; :meth:`advance` returns its answer, now or later."""
        try:
            self._handlers[type(message.operation)](message, message.operation, now)
        except Refusal as refusal:
            self._outbox.answer([message.call], False, str(refusal))

    def withdraw(self, call: int) -> None:
        """Note that a call's client has gone; the joining of a group for which no other call waits ends."""
        self.groups.withdraw(call)

    def on_rank(self, event: RankReply | Received | WeightsChanged, now: float) -> None:
        """Take a rank's reply or progress report, or a notice of the memory service."""
        if isinstance(event, WeightsChanged):
            self.following.on_changed(event)
        elif isinstance(event, Received):
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
        if self._resets and not self._is_resetting and self._port.stands_still:
            self._reset()
        self.machine.advance(now)
        self.following.advance(now)
        return self._outbox.take()

    def status(self, now: float) -> dict[str, Any]:
        """Returns the body of ``GET /weights_update_status``."""
        return self.machine.status(now) | {"groups": sorted(self.groups.joined)}

    def _answer_status(self, asked: WeightCall, request: operations.GetUpdateStatus, now: float) -> None:
        self._outbox.answer([asked.call], True, **self.status(now))

    # --- a session in two phases ---

    def _prepare(self, asked: WeightCall, request: operations.Prepare, now: float) -> None:
        """Open a session and have the ranks receive its broadcasts; the answer comes once all of them do.

        A client that repeats the call, because the answer was lost, gets the answer for the same session.
        """
        manifest, session = request.manifest, self.machine.session
        if session is not None and session.kind == "session" and session.manifest == manifest:
            # A repeated call without an id is taken for this session's only while nothing was received.
            nothing_came = session.phase in (*BEFORE_PREPARED, UpdatePhase.PREPARED)
            if request.session_id == session.id or (request.session_id is None and nothing_came):
                session.preparing.append(asked.call)
                self.machine.answer_prepared(session)
                return
        self.machine.last_ended = None  # its answer is not for the calls of a new session
        if refusal := self._refusal(manifest, is_partial=manifest.partial):
            raise Refusal(refusal)
        if request.num_buckets not in (None, len(manifest.buckets)):
            text = f"num_buckets={request.num_buckets}, but buckets has {len(manifest.buckets)} entries"
            raise Refusal(text)
        session = self.machine.open("session", now, request.session_id)
        session.weight_version = request.weight_version
        session.timeout_s, session.arm_timeout_s = request.timeout_s, request.arm_timeout_s
        session.preparing.append(asked.call)
        self.machine.stage(session, manifest, now)

    def _complete(self, asked: WeightCall, request: operations.Complete, now: float) -> None:
        """Note that the client waits for the end of the receive, and whether a commit is to follow.

        The answer comes after the commit, or with ``commit`` false once everything was received.
        """
        session = self._find(asked.call, request.session_id, request.group_name)
        if session is None:
            return
        session.ending.append(asked.call)
        if session.phase in TO_BE_COMMITTED:
            return
        session.flush_cache = session.flush_cache or request.flush_cache
        if session.then != "commit":  # an earlier call may have asked for the commit
            session.then = "commit" if request.commit else "answer"
        if session.phase is UpdatePhase.RECEIVED:
            self.machine.go_on(session, now)
        else:
            session.answer_by = now + session.timeout_s

    def _commit_session(self, asked: WeightCall, request: operations.CommitSession, now: float) -> None:
        """Commit a session that was completed with ``commit`` false: as a complete request that commits."""
        session = self._find(asked.call, request.session_id, None)
        if session is None:
            return
        if session.phase not in (UpdatePhase.RECEIVED, *TO_BE_COMMITTED):
            raise Refusal(f"session {session.id!r} is {self.machine.state}; complete it first")
        completed = operations.Complete(session_id=session.id, flush_cache=request.flush_cache)
        self._complete(asked, completed, now)

    def _abort_session(self, asked: WeightCall, request: operations.AbortSession, now: float) -> None:
        """Abort the open session, or forget a group of calls that has failed, so that another may begin."""
        session, text = self.machine.session, "The update was ended; the weights are as they were."
        if session is not None and request.session_id in (None, session.id):
            if session.phase is UpdatePhase.COMMITTING:
                raise Refusal(f"session {session.id!r} is being committed; wait until that is done")
            self.machine.abort(session, "it was aborted by a client", now)
            text = f"Session {session.id!r} was aborted; the weights are as they were."
        elif session is not None or self.machine.group_error is None or request.session_id is not None:
            raise Refusal(_not_open(request.session_id))
        self.machine.group_error = None
        self._outbox.answer([asked.call], True, text)

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

    def _single(self, asked: WeightCall, request: operations.SingleUpdate, now: float) -> None:
        """Begin an update that is received or read and then committed in one call.

        Within a group of calls its tensors join those of the open session, and the commit waits for the end
        of the group. The broadcasts of a refused call are received and dropped, where that is possible.
        """
        manifest = request.manifest if isinstance(request, operations.UpdateFromDistributed) else None
        session = self.machine.session
        if session is not None and session.kind == "group of calls" and session.phase is UpdatePhase.RECEIVED:
            if manifest is not None and (refusal := self._receive_refusal(manifest)):
                raise Refusal(refusal)
            session.then = "answer"
        else:
            refusal = self._refusal(manifest, is_partial=not isinstance(request, operations.UpdateFromDisk))
            # Only a call that broadcasts, over a joined group and with no session open, can be received and
            # dropped; any other is refused at once.
            if refusal and (manifest is None or session is not None or self._receive_refusal(manifest)):
                raise Refusal(refusal)
            session = self.machine.open("call", now)
            session.then, session.refusal = "commit", refusal
            if manifest is not None:
                # The client broadcasts at once. If it is refused, its tensors are received and dropped first,
                # so that it does not hang.
                session.arm_timeout_s = RECEIVE_S
                manifest = structs.replace(manifest, discard=refusal is not None)
        session.ending.append(asked.call)
        session.weight_version = request.weight_version or session.weight_version
        session.flush_cache = session.flush_cache or request.flush_cache
        session.abort_all = session.abort_all or request.abort_all_requests
        if manifest is not None:
            self.machine.stage(session, manifest, now)
        else:
            self.machine.load(session, asked, now)

    def _begin(self, asked: WeightCall, request: operations.BeginUpdate, now: float) -> None:
        """Open a group of calls: the single calls that follow are committed together, by `_end_group`."""
        if refusal := self._refusal(None, is_partial=True):
            raise Refusal(refusal)
        session = self.machine.open("group of calls", now)
        self.machine.enter(session, UpdatePhase.RECEIVED, now)  # nothing was announced: nothing is missing
        text = "The calls that follow take effect together, at /end_weight_update."
        self._outbox.answer([asked.call], True, text)

    def _end_group(self, asked: WeightCall, request: operations.EndUpdate, now: float) -> None:
        """Commit the open group of calls; one to which nothing was sent is only closed."""
        session, error = self.machine.session, self.machine.group_error
        if session is None and error is not None:
            self.machine.group_error = None
            raise Refusal(f"the update has failed ({error}); the weights are as they were; begin a new one")
        if session is None or session.kind != "group of calls":
            raise Refusal("no update was begun; /begin_weight_update begins one")
        if session.phase is not UpdatePhase.RECEIVED:
            state = self.machine.state
            raise Refusal(f"a call of this update is still {state}; end it when that is answered")
        if session.is_empty:
            self.machine.close(session)
            if request.weight_version is not None:
                text = f"nothing was sent, so nothing is called {request.weight_version!r}"
                raise Refusal(f"{text}; /update_weight_version renames the weights as they are")
            self._outbox.answer([asked.call], True, "Nothing was sent; the weights are as they were.")
        else:
            session.weight_version = request.weight_version or session.weight_version
            session.ending.append(asked.call)
            self.machine.commit(session, now)

    # --- whether an update may begin ---

    def _refusal(self, manifest: operations.Manifest | None, *, is_partial: bool) -> str | None:
        """Why an update cannot begin now; None: it can."""
        session, error, poisoned = self.machine.session, self.machine.group_error, self._port.poisoned
        if session is not None:
            way = "end it" if session.kind == "group of calls" else "complete or abort it"
            return f"session {session.id!r} is open ({self.machine.state}); {way} first"
        if self._port.unavailable is not None:
            return self._port.unavailable
        if self._resets:
            return "the weights are being reset; retry when that is answered"
        if self.following.is_busy:
            return "another engine of the cohort has changed the weights, and this one takes them over; retry"
        if error is not None:
            return f"the begun update has failed ({error}); end it with /end_weight_update"
        if manifest is not None and (refusal := self._receive_refusal(manifest)):
            return refusal
        if poisoned is not None and is_partial:
            return f"the weights are poisoned ({poisoned}); send all of them"
        return None

    def _receive_refusal(self, manifest: operations.Manifest) -> str | None:
        """Why the broadcasts of ``manifest`` cannot be received now; None: they can."""
        if manifest.group_name not in self.groups.joined:
            return self.groups.unknown(manifest.group_name)
        if self._port.receive_requires_pause and not self._port.stands_still:
            return "generation runs, and --weight-recv-requires-pause is set; POST /pause_generation first"
        return None

    # --- versions and inspection ---

    def _set_version(self, asked: WeightCall, request: operations.SetVersion, now: float) -> None:
        """Rename the served weights; with ``abort_all_requests`` the running requests end first."""
        version = request.new_version
        if request.abort_all_requests:
            self._outbox.send(self._port.output(finished=self._port.abort_all()))

        def on_renamed(replies: list[RankReply], wrong: str, now: float) -> None:
            if wrong:
                self._outbox.answer([asked.call], False, wrong)
                return
            self._port.weight_version = version  # cached KV stays valid
            self._outbox.send(self.machine.notice())  # before the answer: its client may then ask
            self._outbox.answer([asked.call], True, f"Weight version is {version!r}.", new_version=version)

        if self._port.shares_weights:
            self._outbox.command(RenameWeights(version=version), then=on_renamed)
        else:
            on_renamed([], "", now)

    def _inspect(self, asked: WeightCall, request: operations.Inspection, now: float) -> None:
        """Have every rank read its weights, and answer with what they found together.

        A comparison that finds a difference is answered as a failure.
        """
        if self._port.unavailable is not None:
            raise Refusal(self._port.unavailable)

        def inspected(replies: list[RankReply], wrong: str, now: float) -> None:
            """Answer the call once every rank has replied; ``wrong``: what went wrong, or ""."""
            if wrong:
                self._outbox.answer([asked.call], False, wrong)
                return
            fields = merge(request, replies)
            differing = fields.get("differ", [])
            text = f"{len(differing)} tensors differ from the snapshot." if differing else ""
            self._outbox.answer([asked.call], not differing, text, **fields)

        self._outbox.command(Inspect(request=request), then=inspected)

    def _check(self, asked: WeightCall, request: operations.CheckWeights, now: float) -> None:
        """Inspect the weights, or note that they are to be reset, which :meth:`advance` does once it can."""
        if request.action != "reset_tensors":
            self._inspect(asked, request, now)
            return
        if self._port.shares_weights:
            raise Refusal("other engines may serve these weights too (--gms-dir), so they cannot be reset")
        if not self._resets:
            if refusal := self._refusal(None, is_partial=False):
                raise Refusal(refusal)
            self._port.is_updating = True
            self._port.missing = RESET  # from now on, so that the hold stays until they are there again
            self._port.hold_until_whole()
            self._outbox.send(self.machine.notice())
        self._resets.append(asked.call)

    def _reset(self) -> None:
        """Have every rank overwrite its weights; if one fails, they count as reset all the same."""

        def on_reset(replies: list[RankReply], wrong: str, now: float) -> None:
            calls, self._resets, self._is_resetting = self._resets, [], False
            self._port.is_updating = False
            text = wrong or f"The weights were reset, and requests wait: {RESET}."
            self._outbox.answer(calls, not wrong, text)

        self._is_resetting = True
        request = operations.CheckWeights(action="reset_tensors")
        self._outbox.command(Inspect(request=request), then=on_reset)


def _not_open(session_id: str | None) -> str:
    """Returns the refusal of a call for a session (None: for any) that is not open."""
    named = "no session" if session_id is None else f"no session {session_id!r}"
    return f"{named} is open; /prepare_weights_update opens one"


def merge(request: operations.Inspection, replies: Sequence[RankReply]) -> dict[str, Any]:
    """Merges what all ranks found in their weights to the fields of one answer.

    ``GetWeights`` gives ``{"values"}``: the first ``truncate_size`` rows as nested lists. A checksum gives
    ``{"checksums", "total"}``, which do not depend on the number of ranks, and ``{"ranks"}``, the sum of each
    rank. A snapshot gives ``{"num_bytes"}``, and a comparison ``{"differ"}``: the names of the tensors.
    """
    ranks = [reply.fields for reply in replies]
    if isinstance(request, operations.GetWeights):
        values = np.zeros(ranks[0]["shape"], np.float32)
        for part in (part for fields in ranks for part in fields["parts"]):
            box = tuple(slice(*bounds) for bounds in part["place"])
            values[box] = np.frombuffer(part["float32"], np.float32).reshape(values[box].shape)
        return {"values": values.tolist()}
    if request.action == "checksum":  # the ranks hold different parts of a tensor, so its sums are added
        sums: dict[str, int] = {}
        for fields in ranks:
            for name, value in fields["checksums"].items():
                sums[name] = (sums.get(name, 0) + value) & _MASK
        totals = [sum(fields["checksums"].values()) & _MASK for fields in ranks]
        return {"checksums": sums, "total": sum(totals) & _MASK, "ranks": totals}
    if request.action == "snapshot":
        return {"num_bytes": sum(fields["num_bytes"] for fields in ranks)}
    return {"differ": sorted({name for fields in ranks for name in fields["differ"]})}
