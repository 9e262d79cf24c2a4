"""Weight updates on one rank: executes the commands of rank 0 and sends replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from segue.errors import SegueError, WeightSyncError
from segue.logs import logger
from segue.memory.tensor_ops import warm_up
from segue.messages.weight_operations import Bucket, CheckWeights, GetWeights, Manifest
from segue.messages.weight_update import (
    Commit,
    Discard,
    Inspect,
    Join,
    Leave,
    Load,
    RankReply,
    Receive,
    Received,
    Stage,
    StopJoin,
    Take,
    WeightCommand,
)
from segue.weight_update import commit, from_checkpoint
from segue.weight_update.inspect import Inspector
from segue.weight_update.manifest import bucket_bytes, check, normalised, receive_buffer_bytes
from segue.weight_update.payload.decode import decode, from_base64
from segue.weight_update.served import ServedWeights
from segue.weight_update.staging import Incoming, StagedWeights, ZeroCopyTensors
from segue.weight_update.staging_memory import StagingMemory
from segue.weight_update.transport.group import JoinedGroup
from segue.weight_update.transport.joining import Groups, JoinAttempt
from segue.weight_update.transport.receiver import Receiver

Send = Callable[[RankReply | Received], None]
Fields = dict[str, Any]

_FREED_S, _FREED_POLL_S = 30.0, 0.2
_MAX_ERROR = 4096  # characters of one error in a reply
_IDLE_S = 10.0  # that a cancelled receive may take until it touches no memory any more


@dataclass(slots=True)
class RankSession:
    """One session's weights and state; the command that works on the session holds its lock."""

    staged: StagedWeights
    num_bytes: int = 0  # that `Load` and `Take` have brought to this rank
    lock: threading.Lock = field(default_factory=threading.Lock)
    cancelled: threading.Event = field(default_factory=threading.Event)
    errors: list[str] = field(default_factory=list)  # if there are any, it can only be discarded
    zero_copy: ZeroCopyTensors | None = None
    manifest: Manifest | None = None  # of a `Stage` whose `Receive` has not begun
    sink: Incoming | None = None  # for that manifest; None if it is to be discarded
    receiver: Receiver | None = None
    is_receiving: bool = False
    changes: tuple[commit.Copies, set[str]] | None = None  # the prepared commit, and the parameters it writes


@dataclass(frozen=True, slots=True)
class _Done:
    """The result of work on the compute stream: it has run on a CPU, and was launched on CUDA."""

    errors: list[str]
    fields: Fields
    seconds: float  # on the host
    events: list[torch.Event]  # on CUDA: recorded before and after the work


class WeightUpdater:
    """Executes each `WeightCommand`, and sends a `RankReply` from any thread.

    The commands of a session come one at a time, each after the reply to the last one; only `Discard` may
    come earlier. One session is open at a time. Nothing here waits for another rank of the engine.
    """

    def __init__(self, served: ServedWeights, send: Send) -> None:
        """Allocate the memory that is reserved for staging.

        Raises:
            torch.OutOfMemoryError: there is too little memory.
        """
        self._served = served
        self._send = send
        self._groups = Groups(served.device, served.master_allow)
        self._memory = StagingMemory(
            served.device, served.specs, reserved=served.reserved, headroom=served.headroom
        )
        if served.device.type == "cuda":
            served.submit(partial(warm_up, served.device, served.dtype)).result()
        self._inspector = Inspector(served)
        self._sessions: dict[int, RankSession] = {}
        self._freed: list[threading.Event] = []  # per ended session; set once its memory is given back
        self._threads: set[threading.Thread] = set()

    def handle(self, command: WeightCommand) -> None:
        """Begin to execute `command` and return at once; a commit is queued behind the submitted steps."""
        match command:
            case Commit():
                self._start_commit(command)
            case Inspect():
                self._submit(
                    command.call, partial(self._inspect, command.request), {}, lambda succeeded: None
                )
            case Receive():
                self._spawn(partial(self._start_receive, command))
            case Join():
                self._start_join(command)
            case StopJoin():
                self._answer(command.call, partial(self._stop_join, command))
            case Leave():
                self._spawn(partial(self._answer, command.call, partial(self._leave, command)))
            case Discard():
                self._cancel(command.session)
                self._freed.append(freed := threading.Event())
                work = partial(self._discard, command.session, freed)
                self._spawn(partial(self._answer, command.call, work))
            case Stage() | Load() | Take():
                session = self._sessions.setdefault(
                    command.session, RankSession(StagedWeights(self._served, self._memory))
                )
                self._freed = [event for event in self._freed if not event.is_set()]
                work = partial(self._handle_weights, session, command, self._freed)
                self._spawn(partial(self._answer, command.call, work))

    def close(self) -> None:
        """End all sessions and joins and give all memory back; no command may be handled any more."""
        for session in list(self._sessions):
            self._cancel(session)
        self._groups.close()
        for thread in list(self._threads):
            thread.join(timeout=10)
        for left in self._sessions.values():
            self._release(left)
        self._sessions.clear()
        self._memory.close()

    def _start_receive(self, command: Receive) -> None:
        errors = _errors_of(partial(self._receive, command))
        if errors:
            self._send(RankReply(rank=self._served.tp.rank, call=command.call, errors=errors))

    def _handle_weights(
        self, session: RankSession, command: Stage | Load | Take, freed: list[threading.Event]
    ) -> tuple[list[str], Fields]:
        errors = _wait_freed(session, freed)
        with session.lock:
            errors = (
                ["the session was discarded"]
                if session.cancelled.is_set()
                else errors or self._add_weights(session, command)
            )
            staged = session.staged
            return errors, {
                "num_bytes": session.num_bytes,
                "staging_bytes": staged.num_bytes,
                "place": staged.place,
                "note": staged.note,
            }

    def _start_join(self, command: Join) -> None:
        """Begin to join in this thread, so that a later `StopJoin` finds the attempt."""
        dropped, started = self._groups.drop_dead(), list[JoinAttempt | None]()
        errors = _errors_of(
            lambda: started.append(self._groups.start(command.group, self._served.tp.rank, command.timeout_s))
        )
        attempt = started[0] if started else None
        work = partial(self._join, command, attempt, errors, dropped)
        if attempt is None:
            self._answer(command.call, work)
        else:
            self._spawn(partial(self._answer, command.call, work))

    def _join(
        self, command: Join, attempt: JoinAttempt | None, errors: list[str], dropped: list[str]
    ) -> tuple[list[str], Fields]:
        """Wait for the attempt, and report in the reply's fields what became of groups.

        `is_new`: this command joined the group. `kept`: an older group of this name is alive. `dropped`: the
        names of groups that were found dead.
        """
        if attempt is not None:
            errors = _errors_of(partial(self._groups.wait, attempt, command.timeout_s))
        found = self._groups.get(command.group.name)
        is_new = attempt is not None and not errors
        kept = not is_new and found is not None and found.alive
        dropped = [name for name in dropped if self._groups.get(name) is None]
        return errors, {"is_new": is_new, "kept": kept, "dropped": dropped}

    def _stop_join(self, command: StopJoin) -> tuple[list[str], Fields]:
        self._groups.stop(command.group, command.why)
        return [], {}

    def _leave(self, command: Leave) -> tuple[list[str], Fields]:
        self._groups.leave(command.name)
        return [], {}

    def _add_weights(self, session: RankSession, command: Stage | Load | Take) -> list[str]:
        drops = isinstance(command, Stage) and command.manifest.discard
        if session.errors and not drops:
            return session.errors
        if session.zero_copy is not None:
            return ["the session has tensors that were not copied, and accepts no more: commit it first"]
        if isinstance(command, Stage):
            return self._stage(session, command.manifest)
        session.changes = None
        add = (
            partial(self._load, session, command)
            if isinstance(command, Load)
            else partial(self._take, session, command)
        )
        session.errors = _errors_of(add) or _errors_of(partial(self._prepare, session))
        return session.errors

    def _stage(self, session: RankSession, manifest: Manifest) -> list[str]:
        group = self._group(manifest)
        problems = check(manifest, self._served.weight_map)
        if problems:
            return problems
        manifest = normalised(manifest)
        session.sink = session.changes = None  # the sink may be of a `Stage` that another rank refused
        if not manifest.discard:
            session.errors = ["memory could not be allocated for all weights of the session: discard it"]
            receive_buffer = receive_buffer_bytes(manifest)
            if manifest.flattened:
                receive_buffer = group.receive_buffer_cost(receive_buffer)
            session.sink = Incoming(session.staged, manifest, group.device, receive_buffer=receive_buffer)
            session.errors = []
        session.manifest = manifest
        return []

    def _receive(self, command: Receive) -> None:
        """Begin to receive; `ready` sends the reply, or `done` if the receive ends before that."""
        session = self._sessions.get(command.session)
        if session is None or session.manifest is None:
            raise WeightSyncError(f"session {command.session} has no staged manifest: stage one first")
        manifest, sink = session.manifest, session.sink
        group = self._group(manifest)
        reply = partial(RankReply, rank=self._served.tp.rank, call=command.call)
        report = partial(Received, rank=self._served.tp.rank, session=command.session)
        unanswered = threading.Semaphore(1)
        counts = (0, 0)

        def ready() -> None:
            if unanswered.acquire(blocking=False):
                self._send(reply())

        def progress(num_buckets: int, num_bytes: int) -> None:
            nonlocal counts
            counts = (num_buckets, num_bytes)
            self._send(report(num_buckets=num_buckets, num_bytes=num_bytes))

        def done(error: str | None) -> None:
            errors = [error] if error is not None else _errors_of(sink.finish) if sink is not None else []
            errors = errors or _errors_of(partial(self._prepare, session))
            session.errors, session.is_receiving = session.errors or errors, False
            if unanswered.acquire(blocking=False):
                self._send(reply(errors=errors))
            self._send(
                report(num_buckets=counts[0], num_bytes=counts[1], done=True, error="; ".join(errors) or None)
            )

        takes = cast(Incoming, sink)  # None if the manifest is discarded: the receiver then uses no sink
        with session.lock:  # a later `Discard` finds the receiver
            if session.cancelled.is_set():
                raise WeightSyncError("the session was discarded")
            session.manifest = session.sink = None
            session.is_receiving = True
            session.receiver = Receiver(
                group,
                manifest,
                takes,
                on_ready=ready,
                on_progress=progress,
                on_done=done,
                gloo_timeout_s=command.gloo_timeout_s,
            )

    def _group(self, manifest: Manifest) -> JoinedGroup:
        group = self._groups.get(manifest.group_name)
        if group is None:
            raise WeightSyncError(
                f"There is no group {manifest.group_name!r}: join it first (init_weights_update_group).",
                param="group_name",
            )
        if not group.alive:
            raise WeightSyncError(
                f"The group {manifest.group_name!r} is dead: {group.reason}. Join it again.",
                param="group_name",
            )
        return group

    def _load(self, session: RankSession, command: Load) -> list[str]:
        errors = from_checkpoint.load(session.staged, command, session.cancelled.is_set)
        session.num_bytes = session.staged.num_bytes
        return errors

    def _take(self, session: RankSession, command: Take) -> list[str]:
        served = self._served
        payload = from_base64(command.payload)
        tensors = decode(payload, command.load_format, served.device, rank=served.tp.rank)
        bucket = Bucket(
            names=[name for name, _ in tensors],
            dtypes=[str(tensor.dtype) for _, tensor in tensors],
            shapes=[list(tensor.shape) for _, tensor in tensors],
        )
        manifest = Manifest(group_name="", buckets=[bucket], partial=True)
        problems = check(manifest, served.weight_map)
        if problems:
            return problems
        session.num_bytes += bucket_bytes(bucket)
        if command.copy or session.staged.parameters or any(t.device != served.device for _, t in tensors):
            sink = Incoming(session.staged, manifest, served.device, receive_buffer=0)
            for name, tensor in tensors:
                sink.store(name, tensor)
            return sink.finish()
        session.zero_copy = ZeroCopyTensors(served, self._memory, dict(tensors))
        return session.zero_copy.problems()

    def _start_commit(self, command: Commit) -> None:
        session = self._sessions.get(command.session)
        errors = (
            [f"there is no session {command.session}"]
            if session is None
            else ["the session is still being received: commit it once all ranks have received it"]
            if session.is_receiving
            else session.errors
        )
        if session is None or errors:
            self._spawn(partial(self._answer, command.call, lambda: (errors, {"touched": False})))
            return
        freed = threading.Event()
        then = partial(self._clean_up, command.session, freed)
        self._submit(command.call, partial(self._commit, session), {"touched": True}, then)
        self._freed.append(freed)

    def _clean_up(self, number: int, freed: threading.Event, succeeded: bool) -> None:
        """Give a committed session's memory back after the reply, so that no pause waits for it.

        A session whose commit failed is kept until its `Discard`.
        """
        try:
            if succeeded:
                self._discard(number, freed)
        except Exception:
            logger.exception("the memory of a committed weight update could not be given back")
        finally:
            freed.set()

    def _prepare(self, session: RankSession) -> None:
        """Prepare the commit's copies, so that the commit itself is short."""
        pairs, parameters = session.staged.pairs(), set(session.staged.parameters)
        if session.zero_copy is not None:
            pairs += session.zero_copy.pairs()
            parameters |= session.zero_copy.parameters
        with self._memory.on_stream():
            session.changes = commit.Copies(pairs), parameters
        self._memory.synchronize()

    def _commit(self, session: RankSession, fields: Fields) -> None:
        fields["touched"] = False
        if session.changes is None:
            raise WeightSyncError("the session has no weights to commit: receive or load some first")
        copies, parameters = session.changes
        fields["touched"] = bool(parameters)
        copies.write()
        self._served.rebuild(parameters)

    def _inspect(self, request: GetWeights | CheckWeights, fields: Fields) -> None:
        fields.update(self._inspector.answer(request))

    def _submit(
        self, call: int, work: Callable[[Fields], None], fields: Fields, then: Callable[[bool], None]
    ) -> None:
        """Queue `work`, which fills the reply's fields, on the compute stream.

        `fields`: the reply's fields unless `work` sets others. `then` is called after the reply, with whether
        the work succeeded.
        """
        future = self._served.submit(partial(self._on_stream, work))
        self._spawn(partial(self._finish, call, future, fields, then))

    def _on_stream(self, work: Callable[[Fields], None]) -> _Done:
        """Run `work` on the compute stream; raises nothing, since later steps would fail with it."""
        on_cuda = self._served.device.type == "cuda"
        events = [torch.Event(self._served.device, enable_timing=True) for _ in range(2)] if on_cuda else []
        started = time.monotonic()
        for event in events[:1]:
            event.record()
        fields: Fields = {}
        errors = _errors_of(partial(work, fields))
        for event in events[1:]:
            event.record()
        return _Done(errors=errors, fields=fields, seconds=time.monotonic() - started, events=events)

    def _finish(self, call: int, future: Future[_Done], fields: Fields, then: Callable[[bool], None]) -> None:
        def result() -> tuple[list[str], Fields]:
            done = future.result()
            fields.update(done.fields)
            seconds = done.seconds
            if done.events:
                first, last = done.events
                last.synchronize()
                seconds = first.elapsed_time(last) / 1e3
            return done.errors, {"seconds": seconds}

        succeeded = False
        try:
            succeeded = not self._answer(call, result, fields)
        finally:
            then(succeeded)

    def _cancel(self, number: int) -> None:
        session = self._sessions.get(number)
        if session is not None:
            session.cancelled.set()

    def _discard(self, number: int, freed: threading.Event) -> tuple[list[str], Fields]:
        try:
            session = self._sessions.pop(number, None)
            if session is not None:
                with session.lock:
                    self._release(session)
        finally:
            freed.set()
        return [], {}

    def _release(self, session: RankSession) -> None:
        idle = True
        if session.receiver is not None:
            session.receiver.cancel("discarded")
            idle = session.receiver.idle.wait(_IDLE_S)
        session.receiver = session.sink = session.zero_copy = session.changes = None
        session.staged.release(in_use=not idle)

    def _answer(
        self, call: int, work: Callable[[], tuple[list[str], Fields]], fields: Fields | None = None
    ) -> list[str]:
        """Send a reply with the errors and fields that `work` returns; with `fields` even if it raises."""
        fields = {} if fields is None else fields

        def run() -> list[str]:
            errors, found = work()
            fields.update(found)
            return errors

        errors = _errors_of(run)
        self._send(RankReply(rank=self._served.tp.rank, call=call, errors=errors, fields=fields))
        return errors

    def _spawn(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._threads.discard(thread)

        thread = threading.Thread(target=run, name="segue-weights", daemon=True)
        self._threads.add(thread)
        thread.start()


def _wait_freed(session: RankSession, freed: list[threading.Event]) -> list[str]:
    """Wait until earlier sessions have given their memory back, since this session may get it."""
    deadline = time.monotonic() + _FREED_S
    for event in freed:
        while not event.wait(_FREED_POLL_S):
            if session.cancelled.is_set():
                return []
            if time.monotonic() >= deadline:
                return [
                    "the previous update has ended, but has not given its memory back for "
                    f"{_FREED_S:g} s: a file or a peer that it waits for does not answer; retry later"
                ]
    return []


def _errors_of(work: Callable[[], Sequence[str] | None]) -> list[str]:
    """Returns the errors that `work` returns or raises, in a form that can be sent."""
    try:
        errors = list(work() or ())
    except SegueError as error:
        errors = [error.message]
    except Exception as error:
        logger.exception("a weight update failed")
        errors = [f"{type(error).__name__}: {error}"]
    return [_sendable(error) for error in errors]


def _sendable(error: str) -> str:
    """Returns an error as valid, short text: names in it may be long, and a file's name need not be text."""
    text = error.encode(errors="backslashreplace").decode()
    return text if len(text) <= _MAX_ERROR else f"{text[:_MAX_ERROR]}… ({len(text)} characters in all)"
