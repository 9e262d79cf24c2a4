"""One weight update on one rank: its weights, and the thread that executes its commands one after another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from segue.errors import SegueError, WeightSyncError
from segue.logs import logger
from segue.memory.tensor_ops import Copies
from segue.messages import weight_update as messages
from segue.messages.weight_operations import Bucket, Manifest
from segue.messages.weight_update import AddCommand, RankReply, Received, SessionCommand
from segue.weight_update import from_checkpoint
from segue.weight_update.manifest import check
from segue.weight_update.payload.decode import decode, from_base64
from segue.weight_update.served import ServedWeights
from segue.weight_update.staging import Incoming, StagedWeights
from segue.weight_update.staging_memory import StagingMemory
from segue.weight_update.transport.base import plan, receive_buffer_size
from segue.weight_update.transport.group import JoinedGroup
from segue.weight_update.transport.joining import Groups
from segue.weight_update.transport.pace import ReceivePace
from segue.weight_update.transport.receiver import Receiver
from segue.weight_update.zero_copy import ZeroCopyTensors

Fields = dict[str, Any]
Send = Callable[[RankReply | Received], None]
Written = tuple[list[str], bool, torch.Event | None]  # errors; whether it may have written; CUDA: the end
Work = Callable[[Fields], list[str] | None]  # sets fields of a reply, and returns or raises its errors

_FREED_S, _FREED_POLL_S = 30.0, 0.2
_CLOSE_S = 10.0
_MAX_ERROR = 4096  # characters of one error in a reply
_IDLE_S = 10.0  # that a cancelled receive may take until it touches no memory any more


class RankSession:
    """One session on this rank.

    Its thread takes piece after piece of work from a queue: the commands of rank 0, and the end of a receive,
    which has threads of its own. So nothing here needs a lock. A commit runs where the steps run, and so does
    the reply to a commit of shared weights.

    The weights come by broadcasts (`Stage`, then `Receive`), from a checkpoint (`Load`) or in a payload
    (`Take`), and wait in staging memory until `Commit`. Methods return their errors as sentences.
    """

    def __init__(
        self, number: int, served: ServedWeights, memory: StagingMemory, groups: Groups, replies: Replies
    ) -> None:
        self.has_ended = False  # committed or discarded
        self._number = number
        self._served = served
        self._memory = memory
        self._groups = groups
        self._replies = replies
        self._staged = StagedWeights(served, memory)
        self._zero_copy: ZeroCopyTensors | None = None
        self._num_bytes = 0  # that the last `Load` or `Take` has brought to this rank
        self._errors: list[str] = []  # if there are any, the session can only be discarded
        self._manifest: Manifest | None = None  # of a `Stage` whose `Receive` has not begun
        self._sink: Incoming | None = None  # for the last manifest; None if it is to be discarded
        self._receiver: Receiver | None = None
        self._unanswered: int | None = None  # the call of a `Receive` that has not got its reply
        self._progress = (0, 0)  # buckets and bytes received
        self._is_receiving = False
        # The prepared commit, and the parameters that it changes.
        self._changes: tuple[Callable[[], None], set[str]] | None = None
        self._cancelled = threading.Event()
        self._freed = threading.Event()  # not set while memory is about to be given back
        self._freed.set()
        self._discards = SimpleQueue[int]()  # the calls of each `Discard` that has not got its reply
        self._work = SimpleQueue[Callable[[], object]]()
        self._thread = threading.Thread(target=self._run, name="segue-weights", daemon=True)
        self._thread.start()

    def handle(self, command: SessionCommand, others: Iterable[RankSession]) -> None:
        """Begin to execute a command and return at once; `others` may have memory that they give back."""
        match command:
            case messages.Receive():
                self._work.put(partial(self._receive, command))
            case messages.JoinGeneration() | messages.SealGeneration() | messages.FlipGeneration():
                work = partial(self._write_generation, command)
                self._work.put(partial(self._replies.answer, command.call, work))
            case messages.Commit():
                self._begin_commit(command.call)
            case messages.Discard():
                self._cancelled.set()  # now: the thread may be busy with an earlier command
                self._freed.clear()
                self._discards.put(command.call)
                self._work.put(self._discard)
                if self.has_ended:  # the thread may have ended without seeing this
                    self._answer_discards()
            case _:  # an `AddCommand`
                freed = [each._freed for each in others if not each._freed.is_set()]
                add = partial(self._add, command, freed)
                self._work.put(partial(self._replies.answer, command.call, add))

    def close(self) -> None:
        """Give the memory back and end the thread, unless it is stuck."""
        self._cancelled.set()
        self._work.put(self._end)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        """The thread: does one queued piece of work after another until the session has ended."""
        if self._served.device.type == "cuda":
            torch.cuda.set_device(self._served.device)
        while not self.has_ended:
            self._work.get()()
        self._answer_discards()  # those that came while the memory of a commit was given back

    # --- weights are announced, or brought by a checkpoint or a payload ---

    def _add(self, command: AddCommand, freed: Sequence[threading.Event], fields: Fields) -> list[str]:
        """Do an `AddCommand`: stage a manifest, or take in the tensors of a checkpoint or a payload.

        Sets the figures of the staging memory in `fields`. A manifest that is only to be discarded is
        accepted after errors too, since its receive is what keeps the trainer from hanging.
        """
        late = self._wait_freed(freed)
        drops = isinstance(command, messages.Stage) and command.manifest.discard
        if self._cancelled.is_set():  # while it waited
            return ["the session was discarded"]
        if late or (self._errors and not drops):
            return late or self._errors
        if self._zero_copy is not None:
            return ["the session has tensors that were not copied, and accepts no more: commit it first"]
        if isinstance(command, messages.OpenGeneration):
            return self._open_generation(fields)
        self._changes = None  # prepared again once the new tensors are here
        if isinstance(command, messages.Stage):
            errors = self._stage(command.manifest)
        else:
            bring = partial(self._bring, command)
            errors = self._errors = errors_of(bring) or errors_of(self._prepare)
        staged = self._staged
        fields |= {"num_bytes": self._num_bytes, "staging_bytes": staged.num_bytes}
        fields |= {"place": staged.place, "note": staged.note}
        return errors

    # --- shared weights are written as a generation ---

    def _open_generation(self, fields: Fields) -> list[str]:
        """Take a lease to write, on rank 0."""
        generations = self._served.memory.generations
        assert generations is not None
        if self._served.tp.is_first:
            self._staged.next_weights = generations.open()
            fields["lease"] = self._staged.next_weights.lease
        return []

    def _write_generation(
        self,
        command: messages.JoinGeneration | messages.SealGeneration | messages.FlipGeneration,
        fields: Fields,
    ) -> list[str]:
        """Do this rank's part of what all ranks do with a generation, in the session's thread."""
        generations, staged = self._served.memory.generations, self._staged
        assert generations is not None
        if self._cancelled.is_set():
            return ["the session was discarded"]
        match command:
            case messages.JoinGeneration():
                if staged.next_weights is None:
                    staged.next_weights = generations.join(command.lease)
            case messages.SealGeneration():
                if self._errors or self._is_receiving or self._changes is None:
                    return self._errors or [
                        "the session has no weights to commit: receive or load some first"
                    ]
                staged.seal()
            case messages.FlipGeneration():
                assert staged.next_weights is not None
                if self._served.tp.is_first:
                    staged.next_weights.commit(command.version, command.model_path)
        return []

    def _wait_freed(self, freed: Sequence[threading.Event]) -> list[str]:
        """Wait until earlier sessions have given their memory back, since this session may get it."""
        deadline = time.monotonic() + _FREED_S
        for event in freed:
            while not (event.wait(_FREED_POLL_S) or self._cancelled.is_set()):
                if time.monotonic() >= deadline:
                    return [
                        "the previous update has ended, but has not given its memory back for "
                        f"{_FREED_S:g} s: a file or a peer that it waits for does not answer; retry later"
                    ]
        return []

    def _stage(self, manifest: Manifest) -> list[str]:
        """Check a manifest, and allocate memory for its tensors and for its two receive buffers.

        The receive buffers themselves are allocated by the `Receiver`; here it is only checked that there is
        room for them. If memory cannot be allocated, the session can only be discarded.
        """
        group = self._group(manifest)
        if problems := check(manifest, self._served.weight_map):
            return problems
        self._sink = None  # it may be of a `Stage` that another rank refused
        if not manifest.discard:
            self._errors = ["memory could not be allocated for all weights of the session: discard it"]
            receive_buffer = 2 * receive_buffer_size(plan(manifest, sink=None, device=group.device))
            if manifest.flattened:
                receive_buffer = group.receive_buffer_cost(receive_buffer)
            self._sink = Incoming(self._staged, manifest, group.device, receive_buffer=receive_buffer)
            self._errors = []
        self._manifest = manifest
        return []

    def _group(self, manifest: Manifest) -> JoinedGroup:
        """Returns the living group over which the manifest's tensors come.

        Raises:
            WeightSyncError: the group was not joined, or is dead.
        """
        group, name = self._groups.get(manifest.group_name), manifest.group_name
        if group is None:
            raise WeightSyncError(f"There is no group {name!r}: join it first (init_weights_update_group).")
        if not group.alive:
            raise WeightSyncError(f"The group {name!r} is dead: {group.reason}. Join it again.")
        return group

    def _bring(self, command: messages.Load | messages.Take) -> list[str]:
        """Take in the tensors of a checkpoint or a payload; returns the problems of their values.

        A payload's tensors are copied to staging memory if the client may change them after the reply, if
        they join other staged tensors, or if they lie on another device. Otherwise they stay where they are
        until the commit copies them straight to the served weights.
        """
        served = self._served
        if isinstance(command, messages.Load):
            errors = from_checkpoint.load(self._staged, command, self._cancelled.is_set)
            self._num_bytes = self._staged.num_bytes
            return errors
        payload = from_base64(command.payload)
        tensors = decode(payload, served.device, rank=served.tp.rank)
        bucket = Bucket(
            names=[name for name, _ in tensors],
            dtypes=[str(tensor.dtype) for _, tensor in tensors],
            shapes=[list(tensor.shape) for _, tensor in tensors],
        )
        manifest = Manifest(group_name="", buckets=[bucket], partial=True)
        if problems := check(manifest, served.weight_map):
            return problems
        self._num_bytes = sum(tensor.nbytes for _, tensor in tensors)
        # A commit only copies: what is on another device, or is to be quantized, is staged.
        must_stage = any(
            tensor.device != served.device or served.weight_map.is_fp8(name) for name, tensor in tensors
        )
        if command.copy or self._staged.must_stage or must_stage:
            sink = Incoming(self._staged, manifest, served.device, receive_buffer=0)
            for name, tensor in tensors:
                sink.store(name, tensor)
            return sink.finish()
        self._zero_copy = ZeroCopyTensors(served, self._memory, dict(tensors))
        return self._zero_copy.problems()

    # --- weights are received ---

    def _receive(self, command: messages.Receive) -> None:
        """Begin to receive; the reply comes once the trainer may broadcast, or if the receive ends before."""
        if errors := errors_of(partial(self._start_receiver, command)):
            self._replies.send(command.call, errors)

    def _start_receiver(self, command: messages.Receive) -> None:
        """Start the threads that receive; from then on the callbacks below report what they do."""
        manifest, self._manifest = self._manifest, None
        if self._cancelled.is_set():
            raise WeightSyncError("the session was discarded")
        if manifest is None:
            raise WeightSyncError(f"session {self._number} has no staged manifest: stage one first")
        group = self._group(manifest)
        self._unanswered, self._progress, self._is_receiving = command.call, (0, 0), True
        self._receiver = Receiver(
            group,
            manifest,
            self._sink,
            on_ready=self._answer_receive,
            on_progress=self._on_progress,
            on_done=self._on_done,
            gloo_timeout_s=command.gloo_timeout_s,
            pace=ReceivePace(self._served.receive_share, self._served.is_generating),
        )

    def _answer_receive(self, errors: Sequence[str] = ()) -> None:
        """Reply to the `Receive` command, unless that was done; `errors`: why the receive has failed."""
        call, self._unanswered = self._unanswered, None
        if call is not None:
            self._replies.send(call, errors)

    def _on_progress(self, num_buckets: int, num_bytes: int) -> None:
        self._progress = num_buckets, num_bytes
        self._replies.report(self._number, self._progress)

    def _on_done(self, error: str | None) -> None:
        """Take the end of a receive, in the receiver's thread; the long checks go to the session's thread."""
        if error is None:
            self._work.put(self._check_received)
        else:
            self._end_receive([error])

    def _check_received(self) -> None:
        """Check the received values (without a sink there are none), prepare the commit, report the end."""
        errors = [] if self._sink is None else errors_of(self._sink.finish)
        self._end_receive(errors or errors_of(self._prepare))

    def _end_receive(self, errors: list[str]) -> None:
        """Report the end of a receive; with errors the session can only be discarded."""
        self._errors, self._is_receiving = self._errors or errors, False
        self._answer_receive(errors)
        self._replies.report(self._number, self._progress, done=True, error="; ".join(errors) or None)

    # --- the commit ---

    def _prepare(self) -> None:
        """Prepare the copies from staged to served memory, so that generation pauses only for the copies.

        Staged weights that take the places of the served ones need none.
        """
        self._staged.pack(self._cancelled.is_set)
        parameters = set(self._staged.parameters)
        if self._staged.next_weights is not None:
            self._changes = self._staged.next_weights.adopt, parameters
            return
        pairs = self._staged.pairs()
        if self._zero_copy is not None:
            pairs += self._zero_copy.pairs()
            parameters |= self._zero_copy.parameters
        with self._memory.on_stream():
            self._changes = Copies(pairs).write, parameters
        self._memory.synchronize()

    def _begin_commit(self, call: int) -> None:
        """Queue the commit behind the submitted steps; called by the thread that submits them."""
        errors = self._errors
        if self._is_receiving:
            errors = ["the session is still being received: commit it once all ranks have received it"]
        elif self._changes is None and not errors:
            errors = ["the session has no weights to commit: receive or load some first"]
        if errors:
            self._replies.send(call, errors, {"touched": False})
            return
        self._freed.clear()  # the next session waits for the memory that this one is about to give back
        written = self._served.submit(self._write)
        if self._staged.next_weights is None:
            self._work.put(partial(self._end_commit, call, written))
        else:  # generation waits for the reply, so the thread that writes sends it; this session's one waits
            written.add_done_callback(partial(self._end_commit, call))
            self._work.put(partial(wait, [written]))

    def _write(self) -> Written:
        """Write the served weights between two steps; raises nothing, since later steps would fail too.

        On CUDA copies are only launched here: the event of the result marks their end. Weights that take the
        places of the served ones need no event, since the steps that read them are launched later.
        """
        assert self._changes is not None
        replace, parameters = self._changes
        names = {*self._staged.names, *(() if self._zero_copy is None else self._zero_copy.tensors)}

        def write() -> None:
            replace()
            self._served.rebuild(parameters, self._staged.packed.take(parameters))
            self._served.note_sent(names)

        errors = errors_of(write)
        event = None
        if self._served.device.type == "cuda" and self._staged.next_weights is None:
            event = torch.Event(self._served.device)
            event.record()
        return errors, bool(parameters), event

    def _end_commit(self, call: int, written: Future[Written]) -> None:
        """Reply to a commit, and only then queue giving the memory back, so that no pause waits for that.

        A session whose commit failed is kept until its `Discard`.
        """
        fields: Fields = {"touched": True}  # unless it is known that nothing was written

        def end() -> list[str]:
            errors, fields["touched"], event = written.result()
            if event is not None:
                event.synchronize()
            return errors

        errors = errors_of(end)
        if (generations := self._served.memory.generations) is not None:
            fields["generation"] = generations.number, generations.name
        if self._served.missing:
            fields |= {"num_missing": len(self._served.missing), "missing": min(self._served.missing)}
        if errors:
            self._freed.set()  # before the reply, which a `Discard` follows
        self._replies.send(call, errors, fields)
        if not errors:
            self._work.put(self._give_back)

    def _give_back(self) -> None:
        """End the session after the reply to its commit, which an error can change no more: it is logged."""
        try:
            self._end()
        except Exception:
            logger.exception("the memory of a committed weight update could not be given back")

    # --- the end ---

    def _discard(self) -> None:
        self._answer_discards(errors_of(self._end))

    def _answer_discards(self, errors: Sequence[str] = ()) -> None:
        """Reply to every `Discard` that has not got its reply; the session has ended."""
        with suppress(Empty):
            while True:
                self._replies.send(self._discards.get_nowait(), errors)

    def _end(self) -> None:
        """Stop receiving, give the memory back, and end the thread.

        Memory that a stuck receive may still write to is never used again.
        """
        try:
            idle = True
            if self._receiver is not None:
                self._receiver.end(error="discarded")
                idle = self._receiver.idle.wait(_IDLE_S)
            self._receiver = self._sink = self._zero_copy = self._changes = None
            self._staged.release(in_use=not idle)
        finally:
            self.has_ended = True
            self._freed.set()


class Replies:
    """Sends what a rank reports to rank 0; any thread may call it."""

    def __init__(self, send: Send, rank: int) -> None:
        self._send = send
        self._rank = rank

    def answer(self, call: int, work: Work) -> None:
        """Do `work`, and send the reply to a command."""
        fields: Fields = {}
        self.send(call, errors_of(partial(work, fields)), fields)

    def send(self, call: int, errors: Sequence[str] = (), fields: Fields | None = None) -> None:
        """Send the reply to a command."""
        self._send(RankReply(rank=self._rank, call=call, errors=list(errors), fields=fields or {}))

    def report(self, session: int, progress: tuple[int, int], **end: Any) -> None:
        """Send the progress of a receive, in buckets and bytes; ``end``: further fields of the report."""
        count, size = progress
        self._send(Received(rank=self._rank, session=session, num_buckets=count, num_bytes=size, **end))


def errors_of(work: Callable[[], list[str] | None]) -> list[str]:
    """Returns the errors that `work` returns or raises, in a form that can be sent."""
    try:
        errors = work() or []
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
