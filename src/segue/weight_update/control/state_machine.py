"""The life of a weight update on rank 0, from the manifest to the commit.

    IDLE -> STAGING -> POSTING -> PREPARED -> RECEIVING -> RECEIVED -> COMMITTING -> IDLE

At most one session is open. Before COMMITTING the served weights are not touched, and any end but a commit
leaves them as they were. The ranks' replies drive the phases; deadlines are kept here, and the caller passes
the time in. If a commit fails after a rank has written, the weights are POISONED: nothing is generated until
all of them have been replaced.

Weights that the memory service shares among engines are never written. A session stages a new generation of
them, and after RECEIVED it is SEALING. In COMMITTING the service makes the generation current, and then every
rank serves it. If one cannot, the engine ends, and the next one serves the new generation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from msgspec import structs

from segue.config import LoadFormat
from segue.errors import NewWeightsError
from segue.messages import weight_update as messages
from segue.messages.control import PauseMode
from segue.messages.weight_operations import Manifest, UpdateFromDisk, UpdateFromTensor
from segue.messages.weight_update import (
    RankReply,
    Received,
    WeightAnswer,
    WeightCall,
    WeightCommand,
    WeightNotice,
)
from segue.weight_update.control.outbox import Outbox
from segue.weight_update.control.port import Port
from segue.weight_update.control.session import (
    BEFORE_PREPARED,
    TO_BE_COMMITTED,
    Kind,
    UpdatePhase,
    UpdateSession,
)


class WeightMachine:
    """Leads the open session through its phases; its methods stand in the order of a session's life.

    A method sends a command to all ranks and names the method that goes on once every rank has replied
    (`_on_…`). `session.Kind` explains the three kinds of sessions.
    """

    def __init__(self, port: Port, outbox: Outbox[WeightCommand]) -> None:
        self._port = port
        self._outbox = outbox
        self.session: UpdateSession | None = None
        self.num_sessions = 0
        self._shown = WeightNotice(version=port.weight_version)  # `notice` brings it up to date
        self.group_error: str | None = None  # why a group of calls failed that its client has not ended yet
        # The session that ended last: (id, group, last answer). A repeated call gets the answer again.
        self.last_ended: tuple[str, str | None, WeightAnswer] | None = None
        self.generation: int | None = None  # of shared weights: the served one
        self.num_discarding = 0  # sessions that have ended, but whose ranks still work for them

    @property
    def state(self) -> str:
        """The open session's phase in lower case; without a session ``idle`` or ``poisoned``."""
        if self.session is not None:
            return self.session.phase.name.lower()
        return "idle" if self._port.poisoned is None else "poisoned"

    def notice(self) -> WeightNotice:
        """Returns the present state, as the frontend shows it without asking."""
        port = self._port
        return structs.replace(
            self._shown,
            version=port.weight_version,
            state=self.state,
            poisoned=port.poisoned,
            missing=port.missing,
        )

    def status(self, now: float) -> dict[str, Any]:
        """Returns the body of ``GET /weights_update_status``, apart from the groups."""
        session = self.session
        shown = structs.asdict(self.notice()) | {"generating": self._port.has_work}
        del shown["ended"]
        state = {name: value for name, value in shown.items() if value is not None}
        state["weight_version"] = state.pop("version")
        if session is not None:
            state |= {
                "session_id": session.id,
                "kind": session.kind,
                "group_name": session.group_name,
                "num_buckets": session.num_buckets,
                "num_buckets_received": session.slowest(session.buckets),
                "num_bytes_received": session.slowest(session.bytes),
                "seconds": now - session.began,
                "staging": session.staging,
            }
        return state

    # --- the beginning: the ranks check what is announced, take memory, and begin to receive or to read ---

    def open(self, kind: Kind, now: float, name: str | None = None) -> UpdateSession:
        """Open a session; none may be open."""
        assert self.session is None
        self.num_sessions += 1
        self._port.is_updating = True
        self.session = UpdateSession(
            number=self.num_sessions,
            id=name or f"session-{self.num_sessions}",
            kind=kind,
            num_ranks=self._outbox.num_ranks,
            began=now,
            progress_at=now,
        )
        return self.session

    def stage(self, session: UpdateSession, manifest: Manifest, now: float) -> None:
        """Have the ranks check a manifest and, once all of them accept it, receive its tensors."""
        session.begin_call(manifest)
        self.enter(session, UpdatePhase.STAGING, now)
        command = messages.Stage(session=session.number, manifest=manifest)
        if manifest.discard:
            self._command(session, command, then=self._on_staged, failed=self._on_stage_failed)
        else:
            self._add(session, command, then=self._on_staged, failed=self._on_stage_failed)

    def _add(
        self,
        session: UpdateSession,
        *commands: messages.WeightCommand,
        then: Callable[[UpdateSession, list[RankReply], float], None],
        failed: Callable[[UpdateSession, str, float], None] | None = None,
    ) -> None:
        """Command the ranks to add tensors; those of shared weights need a lease to write first."""
        if not self._port.shares_weights or session.has_lease:
            self._command(session, *commands, then=then, failed=failed)
            return

        def on_opened(session: UpdateSession, replies: list[RankReply], now: float) -> None:
            join = messages.JoinGeneration(session=session.number, lease=replies[0].fields["lease"])
            self._command(session, join, then=on_joined, failed=failed)

        def on_joined(session: UpdateSession, replies: list[RankReply], now: float) -> None:
            session.has_lease = True
            self._command(session, *commands, then=then, failed=failed)

        command = messages.OpenGeneration(session=session.number)
        self._command(session, command, then=on_opened, failed=failed)

    def _on_staged(self, session: UpdateSession, replies: list[RankReply], now: float) -> None:
        """Every rank has accepted the manifest: have them post their receives."""
        session.staging = _staging(replies)
        self.enter(session, UpdatePhase.POSTING, now)
        command = messages.Receive(session=session.number, gloo_timeout_s=session.gloo_timeout_s)
        self._command(session, command, then=self._on_posted)

    def _on_stage_failed(self, session: UpdateSession, wrong: str, now: float) -> None:
        """Abort a session whose manifest the ranks refuse.

        The client of a single call may be broadcasting already: its tensors are received and dropped first.
        """
        manifest = session.manifest
        assert manifest is not None
        if session.kind == "session" or manifest.discard:
            self.abort(session, session.refusal or wrong, now)
        else:
            session.refusal = wrong
            self.stage(session, structs.replace(manifest, discard=True), now)

    def _on_posted(self, session: UpdateSession, replies: list[RankReply], now: float) -> None:
        """Every rank waits for the first byte: tell the client that it may broadcast."""
        self.enter(session, UpdatePhase.PREPARED, now)
        self.answer_prepared(session)
        self._update_receiving(session, now)

    def answer_prepared(self, session: UpdateSession) -> None:
        """Answer the calls to prepare, if every rank receives; else `_on_posted` does so later."""
        if session.phase not in BEFORE_PREPARED:
            text = f"Every rank receives {session.num_buckets} buckets."
            fields = {"staging": session.staging, "generating": self._port.has_work}
            self._outbox.answer(session.preparing, True, text, session_id=session.id, **fields)
            session.preparing = []

    def load(self, session: UpdateSession, asked: WeightCall, now: float) -> None:
        """Have the ranks read a checkpoint, or tensors that came in the call.

        With one payload per rank each rank takes its own; a single payload goes to all ranks.
        """
        session.begin_call()
        self.enter(session, UpdatePhase.POSTING, now)  # the ranks read instead of posting receives
        number, request = session.number, asked.operation
        commands: list[messages.WeightCommand] = []
        if isinstance(request, UpdateFromDisk | UpdateFromTensor) and (text := _wrong_format(request)):
            self.abort(session, text, now)
            return
        if isinstance(request, UpdateFromDisk):
            session.model_path, session.is_partial = request.model_path, False
            roots, from_hub = asked.roots, asked.from_hub
            commands = [messages.Load(session=number, request=request, roots=roots, from_hub=from_hub)]
        elif isinstance(request, UpdateFromTensor):
            payloads, num_ranks = request.serialized_named_tensors, self._outbox.num_ranks
            if len(payloads) not in (1, num_ranks):
                text = (
                    f"serialized_named_tensors has {len(payloads)} entries; give one for all ranks, or one "
                    f"for each of the {num_ranks}"
                )
                self.abort(session, text, now)
                return
            copy = session.kind == "group of calls"  # the client may overwrite its tensors after each call
            commands = [messages.Take(session=number, payload=each, copy=copy) for each in payloads]
        self._add(session, *commands, then=self._on_loaded)

    def _on_loaded(self, session: UpdateSession, replies: list[RankReply], now: float) -> None:
        """Take the replies to ``Load`` and ``Take``."""
        session.staging = _staging(replies)
        session.bytes = {reply.rank: reply.fields.get("num_bytes", 0) for reply in replies}
        self._receive_ended(session, now)

    # --- receiving ---

    def on_received(self, event: Received, now: float) -> None:
        """Take a rank's progress report."""
        session = self.session
        if session is None or event.session != session.number or session.phase in TO_BE_COMMITTED:
            return  # the report is late: its session has ended, or everything was received before
        if event.error is not None:
            self.abort(session, f"rank {event.rank}: {event.error}", now)
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
        self.enter(session, UpdatePhase.RECEIVING, now)
        if len(session.done) == session.num_ranks:
            session.receive_s += now - session.receiving_at
            self._receive_ended(session, now)

    def _receive_ended(self, session: UpdateSession, now: float) -> None:
        """Every rank has the tensors, by broadcast or from a file or payload, and has checked them."""
        self.enter(session, UpdatePhase.RECEIVED, now)
        self.go_on(session, now)

    def go_on(self, session: UpdateSession, now: float) -> None:
        """Do with a session that is RECEIVED what its calls have asked for so far."""
        if session.refusal is not None:
            self.abort(session, session.refusal, now)
        elif session.then == "commit":
            self.commit(session, now)
        elif session.then == "answer":  # the calls to complete without a commit; another call commits it
            text = "Everything was received; commit the session, or complete it again."
            self._outbox.answer(session.ending, True, text, **self._figures(session))
            session.ending, session.answer_by, session.then = [], None, "wait"

    # --- the commit ---

    def commit(self, session: UpdateSession, now: float) -> None:
        """Have the ranks make shared weights final, while generation goes on; then hold it."""
        session.answer_by = None
        if not self._port.shares_weights:
            self._hold(session, now)
            return
        self.enter(session, UpdatePhase.SEALING, now)
        command = messages.SealGeneration(session=session.number)
        self._command(session, command, then=lambda session, _, now: self._hold(session, now))

    def _hold(self, session: UpdateSession, now: float) -> None:
        """Hold generation; the commit goes on in :meth:`advance` when the hold has taken effect.

        Running requests keep their KV pages, unless the cache is to be flushed (``retract``: they give the
        pages back and compute them anew) or the client wants the requests to end (``abort``).
        """
        self.enter(session, UpdatePhase.COMMITTING, now)
        mode: PauseMode = "retract" if session.flush_cache else "in_place"
        session.num_paused = self._port.hold("abort" if session.abort_all else mode)

    def advance(self, now: float) -> None:
        """Give up a session that is late, or send the commit to the ranks, once, when nothing runs."""
        session = self.session
        if session is None:
            return
        if session.deadline is not None and now >= session.deadline:
            self.abort(session, session.lateness(now), now)
        elif session.phase is UpdatePhase.COMMITTING:
            self._write(session, now)

    def _write(self, session: UpdateSession, now: float) -> None:
        """Send the commit to the ranks, once, as soon as no step is in flight."""
        if "WRITING" not in session.times and self._port.stands_still:
            session.times["WRITING"] = now
            session.weight_version = self._port.version_after(session.weight_version)
            if not self._port.shares_weights:
                self._outbox.command(messages.Commit(session=session.number), then=self._on_committed)
                return
            flip = messages.FlipGeneration(
                session=session.number, version=session.weight_version, model_path=session.model_path
            )
            self._outbox.command(flip, then=self._on_flipped)

    def _on_flipped(self, replies: list[RankReply], wrong: str, now: float) -> None:
        """The memory service has made the new generation current, or the weights stay as they are."""
        session = self.session
        assert session is not None and session.phase is UpdatePhase.COMMITTING
        if wrong:
            self.abort(session, wrong, now)
            self._port.release()
        else:
            self._outbox.command(messages.Commit(session=session.number), then=self._on_committed)

    def _on_committed(self, replies: list[RankReply], wrong: str, now: float) -> None:
        """Every rank has replied to the commit: serve the new weights, or end the session with an error.

        A rank without errors, or with ``touched``, has written. If any has and any has failed, old and new
        weights may be mixed: they are poisoned.
        """
        session = self.session
        assert session is not None and session.phase is UpdatePhase.COMMITTING
        if wrong and self._port.shares_weights:
            raise NewWeightsError(f"{wrong}; the memory service has the new weights")
        if wrong:
            if any(reply.fields.get("touched") or not reply.errors for reply in replies):
                self._poison(wrong)
            self.abort(session, wrong, now)
            self._port.release()
            return
        self._port.commit(session.weight_version, flush_cache=session.flush_cache)
        if not session.is_partial:
            self._port.poisoned = None
        self._port.missing = _missing(replies)
        self.note_generation(replies)
        session.times["SERVED"] = now
        self._shown.num_committed += 1
        self._shown.last = self._figures(session) | {"kind": session.kind}
        self._shown.model_path = session.model_path or self._shown.model_path
        self._shown.ended = session.record(now)
        self._port.release()
        self.close(session)
        self._finish(session, True, "The new weights are served.")

    def note_generation(self, replies: list[RankReply]) -> None:
        """Note which generation of shared weights is served now, of the replies of ranks that serve it."""
        if (found := replies[0].fields.get("generation")) is not None:
            self.generation, self._shown.generation = found

    def start_with(self, generation: int, name: str, version: str, model_path: str | None) -> None:
        """Note which generation of shared weights is served, and what its version is."""
        self.generation, self._shown.generation = generation, name
        self._port.weight_version, self._shown.model_path = version, model_path

    def note_path(self, model_path: str | None) -> None:
        """Note where another engine has read the weights that are served now."""
        self._shown.model_path = model_path or self._shown.model_path

    def _poison(self, why: str) -> None:
        """Stop serving: end every request, and refuse new ones until a full update replaces all weights."""
        self._port.poisoned = why
        finished = self._port.abort_all("the weights are poisoned")
        self._outbox.send(self._port.output(finished=finished))

    # --- the end ---

    def abort(self, session: UpdateSession, why: str, now: float) -> None:
        """End a session without a commit, and answer all calls that wait for it; every failure ends here."""
        self._shown.num_failed += 1
        if session.kind == "group of calls":
            self.group_error = why
        self._shown.ended = session.record(now, why)
        self.close(session)
        self.num_discarding += 1
        self._outbox.command(messages.Discard(session=session.number), then=self._on_discarded)
        self._outbox.answer(session.preparing, False, why, session_id=session.id)
        self._finish(session, False, why)

    def _on_discarded(self, replies: list[RankReply], wrong: str, now: float) -> None:
        self.num_discarding -= 1

    def abort_session_of(self, name: str, why: str, now: float, *, if_received: bool = True) -> None:
        """Abort the open session if it is of group ``name``; one that is being committed goes on.

        ``if_received``: abort also a session that has received everything, and so needs the group no more.
        """
        spared = [*TO_BE_COMMITTED] if if_received else [*TO_BE_COMMITTED, UpdatePhase.RECEIVED]
        session = self.session
        if session is not None and session.group_name == name and session.phase not in spared:
            self.abort(session, f"group {name!r} {why}", now)

    def close(self, session: UpdateSession) -> None:
        """Forget the open session, and let the frontend know; its calls are answered elsewhere."""
        assert self.session is session
        self.session = None
        self._port.is_updating = False
        self._outbox.send(self.notice())

    def _finish(self, session: UpdateSession, success: bool, message: str) -> None:
        """Answer the calls that wait for the end, and keep the answer for a call that is repeated."""
        figures = self._figures(session)
        self._outbox.answer(session.ending, success, message, **figures)
        if session.kind == "session":
            answer = WeightAnswer(0, success, message, figures)
            self.last_ended = session.id, session.group_name, answer

    # --- what all phases use ---

    def enter(self, session: UpdateSession, phase: UpdatePhase, now: float) -> None:
        """Enter a phase, or note progress in the present one."""
        if session.enter(phase, now):
            self._outbox.send(self.notice())

    def _command(
        self,
        session: UpdateSession,
        *commands: messages.WeightCommand,
        then: Callable[[UpdateSession, list[RankReply], float], None],
        failed: Callable[[UpdateSession, str, float], None] | None = None,
    ) -> None:
        """Command the ranks; if one fails, ``failed`` is called, or the session aborted.

        Replies that come after the session has ended are ignored.
        """

        def on_replies(replies: list[RankReply], wrong: str, now: float) -> None:
            if self.session is not session:
                return
            if wrong:
                (failed or self.abort)(session, wrong, now)
            else:
                then(session, replies, now)

        self._outbox.command(*commands, then=on_replies)

    def _figures(self, session: UpdateSession) -> dict[str, Any]:
        return session.figures() | {"weight_version": self._port.weight_version}


def _staging(replies: list[RankReply]) -> dict[str, Any]:
    """Returns the kind of staging memory, and the bytes staged on all ranks together."""
    fields = replies[0].fields
    return {
        "place": fields.get("place", "device"),
        "num_bytes": sum(reply.fields.get("staging_bytes", 0) for reply in replies),
        "note": fields.get("note", ""),
    }


def _missing(replies: list[RankReply]) -> str | None:
    """Return what is still to be sent after the weights were released or reset; None: nothing."""
    fields = max((reply.fields for reply in replies), key=lambda fields: fields.get("num_missing", 0))
    if not (count := fields.get("num_missing", 0)):
        return None
    first = f"such as {fields['missing']!r}"
    return f"tensors that have not been sent since they were released or reset: {count}, {first}"


def _wrong_format(request: UpdateFromDisk | UpdateFromTensor) -> str:
    """Return what is wrong with the call's load format; empty: nothing."""
    if isinstance(request, UpdateFromDisk):
        formats, rule = get_args(LoadFormat), f"one of {', '.join(get_args(LoadFormat))}"
    else:
        formats, rule = ("flattened_bucket",), "'flattened_bucket'"
    if request.load_format in (None, *formats):
        return ""
    return f"load_format is {request.load_format!r}; use null or {rule}"
