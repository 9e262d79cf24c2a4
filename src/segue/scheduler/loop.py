"""Drives a scheduler and a model runner: the only module of this room that does I/O.

The loop owns no policy. It moves messages between the frontend's sockets and the pure scheduler, sends each
plan to the other tensor-parallel ranks, and launches it. Idle, it blocks on its socket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import zmq

from segue.protocol.messages import (
    Abort,
    AddRequest,
    Finish,
    Finished,
    FrontendMessage,
    GetState,
    SchedulerMessage,
    Shutdown,
    State,
    StepPlan,
    StepResult,
)
from segue.scheduler.report import internal_state
from segue.scheduler.scheduler import Scheduler


class Pending(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for it; raises what the step raised."""
        ...


class Runner(Protocol):
    """What the loop needs of a model runner."""

    def forward_batch(self, plan: StepPlan) -> Pending:
        """Launch a step and return at once; steps run in launch order."""
        ...


class SchedulerLoop:
    """Rank 0's loop.

    ``inbox`` is a PULL socket of ``FrontendMessage``, ``outbox`` a PUSH socket of ``SchedulerMessage``,
    ``followers`` one PUSH socket a further rank. With ``overlap`` a step is planned and launched before the
    one before it is read. Idle, the loop looks for ``spin`` seconds before it sleeps: being woken takes long.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        inbox: zmq.Socket[bytes],
        outbox: zmq.Socket[bytes],
        followers: Sequence[zmq.Socket[bytes]] = (),
        overlap: bool,
        spin: float = 0.0,
        memory_usage: dict[str, int],
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._inbox = inbox
        self._outbox = outbox
        self._followers = followers
        self._overlap = overlap
        self._spin = spin
        self._memory_usage = memory_usage
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FrontendMessage).decode
        self._throughput = Throughput(time.perf_counter)
        self._running = True

    def run(self) -> None:
        """Serve until :class:`Shutdown`."""
        pending: Pending | None = None
        while self._running:
            self._receive(block=pending is None and not self.scheduler.has_work)
            launched = self._launch()
            if pending is not None:
                self._apply(pending)
            if launched is not None and not self._overlap:
                self._apply(launched)
                launched = None
            pending = launched

    def _launch(self) -> Pending | None:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        if self._followers:
            frame = self._encode(plan)
            for follower in self._followers:
                follower.send(frame)
        return self._runner.forward_batch(plan)

    def _apply(self, pending: Pending) -> None:
        output = self.scheduler.apply(pending.result())
        self._throughput.add(len(output.tokens))
        self._send(output)

    def _receive(self, *, block: bool) -> None:
        finished: list[Finished] = []
        while self._running and self._poll(block and not finished):
            block = False
            message = self._decode(self._inbox.recv())
            match message:
                case AddRequest():
                    if (rejected := self.scheduler.add(message)) is not None:
                        self._send(rejected)
                case Abort():
                    finished += self.scheduler.abort(message)
                case Finish():
                    finished += self.scheduler.finish(message)
                case GetState():
                    self._send_state(message)
                case Shutdown():
                    self._running = False
        if finished:
            self._send(self.scheduler.output(finished=finished))

    def _poll(self, block: bool) -> bool:
        """Whether a message is there; ``block``: wait for it."""
        if self._inbox.poll(0):
            return True
        if not block:
            return False
        deadline = time.monotonic() + self._spin
        while time.monotonic() < deadline:
            if self._inbox.poll(0):
                return True
        return bool(self._inbox.poll(None))

    def _send(self, message: SchedulerMessage) -> None:
        self._outbox.send(self._encode(message))

    def _send_state(self, message: GetState) -> None:
        state: dict[str, Any] = internal_state(self.scheduler) | {
            "memory_usage": self._memory_usage,
            "last_gen_throughput": self._throughput.per_second(),
        }
        problems = self.scheduler.check_invariants() if message.check else []
        self._send(State(message.call, state, problems))


class Throughput:
    """Output tokens a second over the last full window."""

    WINDOW = 1.0  # seconds

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._count = 0
        self._last = 0.0

    def add(self, count: int) -> None:
        """Note tokens."""
        self._count += count
        now = self._clock()
        if (elapsed := now - self._since) >= self.WINDOW:
            self._last = self._count / elapsed
            self._since, self._count = now, 0

    def per_second(self) -> float:
        """Tokens a second; 0 once nothing has come for two windows."""
        return self._last if self._clock() - self._since < 2 * self.WINDOW else 0.0


def follow(runner: Runner, plans: zmq.Socket[bytes], *, depth: int) -> None:
    """The loop of the other ranks: run every plan in order, with at most ``depth`` unread; never returns."""
    decode = msgspec.msgpack.Decoder(StepPlan).decode
    pending: list[Pending] = []
    while True:
        pending.append(runner.forward_batch(decode(plans.recv())))
        if len(pending) >= depth:
            pending.pop(0).result()
