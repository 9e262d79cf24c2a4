"""Weight updates on one rank: hands each command of rank 0 to the session or the group that it is for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from segue.errors import MemoryServiceError
from segue.memory.rank_memory import NextWeights
from segue.memory.tensor_ops import warm_up
from segue.messages import weight_update as messages
from segue.weight_update.inspect import Inspector
from segue.weight_update.packing import PackedAhead
from segue.weight_update.rank_session import Fields, RankSession, Replies, Send, Work, errors_of
from segue.weight_update.served import ServedWeights
from segue.weight_update.staging_memory import StagingMemory
from segue.weight_update.transport.joining import Groups


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
        self._replies = Replies(send, served.tp.rank)
        self._groups = Groups(served.device, served.master_allow)
        self._memory = StagingMemory(
            served.memory, served.specs, reserved=served.reserved, headroom=served.headroom
        )
        if served.device.type == "cuda":  # now, since later it would delay a receive or a commit
            served.submit(partial(warm_up, served.device, served.dtype)).result()
        self._inspector = Inspector(served)
        self._sessions: dict[int, RankSession] = {}
        self._fetched: NextWeights | None = None  # weights of another engine, which are to be served
        self._packed = PackedAhead(served)  # their packed copies
        self._threads: set[threading.Thread] = set()  # that were started and have not ended
        self._lock = threading.Lock()  # of the two: the stream's thread starts threads, too
        self._is_closed = False

    def handle(self, command: messages.WeightCommand) -> None:
        """Begin to execute `command` and return at once; a commit is queued behind the submitted steps."""
        match command:
            case messages.Join():
                self._join(command)
            case messages.StopJoin():
                self._groups.stop(command.group, command.why)
                self._replies.send(command.call)
            case messages.Leave():
                self._spawn(command.call, lambda fields: self._groups.leave(command.name))
            case messages.Inspect():
                self._inspect(command)
            case messages.AdoptGeneration():
                self._adopt(command.call)
            case messages.FetchGeneration() | messages.DropGeneration() | messages.RenameWeights():
                self._spawn(command.call, partial(self._change_generation, command))
            case _:
                self._pass_on(command)

    def close(self) -> None:
        """End all sessions and joins and give all memory back; no command may be handled any more."""
        for session in self._sessions.values():
            session.close()
        self._groups.close()
        with self._lock:
            self._is_closed, threads = True, list(self._threads)
        for thread in threads:
            thread.join(timeout=10)
        self._memory.close()

    def _pass_on(self, command: messages.SessionCommand) -> None:
        """Give a command to its session; the first command of a session opens it."""
        self._sessions = {number: each for number, each in self._sessions.items() if not each.has_ended}
        session, others = self._sessions.get(command.session), list(self._sessions.values())
        if session is None and isinstance(command, messages.AddCommand):
            session = RankSession(command.session, self._served, self._memory, self._groups, self._replies)
            self._sessions[command.session] = session
        if session is not None:
            session.handle(command, others)
        elif isinstance(command, messages.Discard):  # of a session that has ended, or was never opened here
            self._replies.send(command.call)
        else:
            self._replies.send(command.call, [f"there is no session {command.session}"])

    def _join(self, command: messages.Join) -> None:
        """Begin to join in this thread, so that a later `StopJoin` finds the attempt.

        The reply's fields say what became of groups. `is_new`: this command joined the group. `dropped`: the
        names of groups that were found dead.
        """
        dropped = self._groups.drop_dead()
        attempt = self._groups.start(command.group, self._served.tp.rank, command.timeout_s)

        def wait(fields: Fields) -> list[str]:
            errors = errors_of(partial(self._groups.wait, attempt, command.timeout_s))
            fields["is_new"] = attempt.is_new and not errors
            # Another join may have replaced a dead group meanwhile.
            fields["dropped"] = [name for name in dropped if self._groups.get(name) is None]
            return errors

        self._spawn(command.call, wait)

    def _inspect(self, command: messages.Inspect) -> None:
        """Read or reset the weights between two steps, and reply there: an error would fail later steps too.

        If an earlier step has failed, the stream runs nothing any more: then its error is the reply.
        """
        read = partial(self._inspector.answer, command.request)
        answer = partial(self._replies.answer, command.call)

        def on_done(done: Future[None]) -> None:
            if done.exception() is not None:
                answer(lambda _: done.result())

        done = self._served.submit(partial(answer, lambda fields: fields.update(read())))
        done.add_done_callback(on_done)

    def _change_generation(
        self,
        command: messages.FetchGeneration | messages.DropGeneration | messages.RenameWeights,
        fields: Fields,
    ) -> list[str]:
        """Do what concerns shared weights outside of a session, in a thread."""
        generations = self._served.memory.generations
        assert generations is not None
        match command:
            case messages.FetchGeneration():
                try:
                    self._fetched = fetched = generations.fetch(command.generation)
                except MemoryServiceError as error:
                    fields["is_lost"] = error.code == "lost"
                    raise
                self._packed.make(fetched.parameters, fetched.arena.view, lambda: False)
            case messages.DropGeneration():
                self._release_fetched()
            case messages.RenameWeights():
                if self._served.tp.is_first:
                    generations.rename(command.version)
        return []

    def _adopt(self, call: int) -> None:
        """Serve the fetched generation between two steps, and reply there; then give up the one before."""
        fetched, generations = self._fetched, self._served.memory.generations
        assert fetched is not None and generations is not None
        self._fetched = None  # now: the next generation may be fetched before a thread gives this one up

        def adopt(fields: Fields) -> list[str]:
            fetched.adopt()
            self._served.rebuild(fetched.parameters, self._packed.take(fetched.parameters))
            fields["generation"] = generations.number, generations.name
            return []

        done = self._served.submit(partial(self._replies.answer, call, adopt))
        done.add_done_callback(lambda _: self._start(fetched.release))

    def _release_fetched(self) -> None:
        fetched, self._fetched = self._fetched, None
        self._packed.clear()
        if fetched is not None:
            fetched.release()

    def _spawn(self, call: int, work: Work) -> None:
        """Reply to `call` when a thread has done `work`."""
        self._start(partial(self._replies.answer, call, work))

    def _start(self, work: Callable[[], object]) -> None:
        """Have a thread do `work`, unless all is being closed."""

        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="segue-weights", daemon=True)
        with self._lock:
            if not self._is_closed:
                thread.start()
                self._threads.add(thread)
