"""Drives a scheduler and a model runner: the only module of this room that does I/O.

The loop owns no policy. It moves messages between the frontend's sockets and the pure scheduler, sends each
plan to the other tensor-parallel ranks, and launches it. Idle or paused, it blocks on its socket.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import msgspec
import zmq
from msgspec import structs

from segue.heartbeat import Turn
from segue.logs import logger
from segue.messages.control import (
    Continue,
    Flush,
    FrontendMessage,
    GetState,
    Pause,
    Paused,
    SchedulerMessage,
    SchedulerOutput,
    Shutdown,
    State,
)
from segue.messages.requests import Abort, AddRequest, Finish, Finished
from segue.messages.steps import Drain, Drained, RankEvent, RankMessage, StepPlan, StepResult
from segue.messages.weight_update import RankReply, Received, WeightCall, WeightCommand, WithdrawCall
from segue.scheduler.internal_state import internal_state
from segue.scheduler.scheduler import Scheduler
from segue.scheduler.weight_port import SchedulerPort
from segue.weight_update.control.calls import WeightControl


class Pending(Protocol):
    """A launched step."""

    def ready(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self) -> StepResult:
        """Wait for it; raises what the step raised."""
        ...


class Runner(Protocol):
    """What the loop needs of a model runner."""

    def forward_batch(self, plan: StepPlan) -> Pending:
        """Launch a step and return at once; steps run in launch order."""
        ...


class Updater(Protocol):
    """What a loop needs of a rank's weight updater."""

    def handle(self, command: WeightCommand) -> None:
        """Begin to do it and return at once; the reply goes to rank 0 as a ``RankEvent``."""
        ...


# So long before the end of a long step the next one is launched. In between, the device would wait for the
# host if the end were foreseen a little late, which steps of a few milliseconds would feel (measured: 5 % of
# the throughput of prefill at 18 ms a step).
LEAD_S, LONG_S = 0.003, 0.05
_MANY_TOKENS = 512  # of a step whose length is foreseen
MAX_POLL_S = 3600.0  # the socket takes milliseconds as an integer; a client may give any number of seconds


@dataclass(slots=True)
class Launched:
    """A step in flight."""

    pending: Pending
    num_tokens: int
    at: float  # when, in seconds


class SchedulerLoop:
    """Rank 0's loop.

    ``inbox`` is a PULL socket of ``FrontendMessage``, ``outbox`` a PUSH socket of ``SchedulerMessage``,
    ``followers`` one PUSH socket of ``RankMessage`` a further rank, ``events`` a PULL socket of the
    ``RankEvent`` of all ranks, this one included. With ``overlap`` a step is planned and launched before the
    one before it is read. Idle, the loop looks for ``spin`` seconds before it sleeps: being woken takes long.
    ``turn`` tells another thread how long the loop has been busy with one turn, which is about a step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        updater: Updater,
        *,
        inbox: zmq.Socket[bytes],
        outbox: zmq.Socket[bytes],
        followers: Sequence[zmq.Socket[bytes]] = (),
        events: zmq.Socket[bytes],
        overlap: bool,
        spin: float = 0.0,
        memory_usage: dict[str, int],
        turn: Turn | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._updater = updater
        self._weights = WeightControl(SchedulerPort(scheduler), 1 + len(followers))
        self._inbox = inbox
        self._outbox = outbox
        self._followers = followers
        self._events = events
        self._early: deque[RankEvent] = deque()  # read while something else was awaited
        self._poller = zmq.Poller()
        for socket in (inbox, events):
            self._poller.register(socket, zmq.POLLIN)
        self._overlap = overlap
        self._spin = spin
        self._memory_usage = memory_usage
        self._turn = turn or Turn()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FrontendMessage).decode
        self._decode_event = msgspec.msgpack.Decoder(RankEvent).decode
        self._throughput = Throughput(time.perf_counter)
        self._speed = StepSpeed()
        self._warned = False  # of logits that are not finite
        self._running = True

    def run(self) -> None:
        """Serve until :class:`Shutdown`."""
        before: Launched | None = None
        while self._running:
            self._turn.begin()
            self._receive(block=before is None and not self.scheduler.has_work)
            if before is not None:
                self._wait_for_turn(before)
            launched = self._launch()
            if before is not None:
                self._apply(before)
            if launched is not None and not self._overlap:
                self._apply(launched)
                launched = None
            before = launched

    def _launch(self) -> Launched | None:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        now = time.monotonic()
        self._tell_ranks(plan)
        return Launched(self._runner.forward_batch(plan), plan.num_tokens, now)

    def _apply(self, launched: Launched) -> None:
        result = launched.pending.result()
        self._speed.note(launched, time.monotonic())
        output = self.scheduler.apply(result)
        if output.counters.non_finite_logits and not self._warned:
            self._warned = True
            self._warn_of_non_finite(output)
        self._throughput.add(len(output.tokens))
        self._send(output)
        self._advance()

    def _warn_of_non_finite(self, output: SchedulerOutput) -> None:
        rids = [finished.rid for finished in output.finished if finished.reason == "error"]
        logger.error(
            "logits were not finite (NaN or infinite) for request %s with weights of version %r: it ends "
            "with the error non_finite_logits. This is logged once; segue:non_finite_logits_total of "
            "/metrics counts such requests. If they are many, the weights are bad, or too large for the "
            "dtype: load or send them again, or choose --dtype bfloat16 or float32. If they are few, look "
            "at their prompts",
            ", ".join(rids),
            self.scheduler.weight_version,
        )

    def _wait_for_turn(self, before: Launched) -> None:
        """Take messages until shortly before the end of a long step.

        A step cannot be called back: a pause, or a new request, would wait for one that was launched earlier.
        """
        begin, seconds = self._speed.foresee(before)
        if seconds < LONG_S:
            return
        until = begin + seconds - LEAD_S
        while self._running and time.monotonic() < until and self.scheduler.has_work:
            if before.pending.ready():
                return
            if self._poller.poll(1):
                self._receive(block=False)

    def _advance(self) -> None:
        """Send what has to be answered, and go on with an update of the weights."""
        self._advance_pause()
        answers, commands = self._weights.advance(time.monotonic())
        for answer in answers:
            self._send(answer)
        for mine, *theirs in commands:
            for follower, command in zip(self._followers, theirs, strict=True):
                follower.send(self._encode(command))
            self._updater.handle(mine)

    def _advance_pause(self) -> None:
        """A pause holds only once no rank runs anything."""
        now = time.monotonic()
        replies = self.scheduler.control.advance(now)
        late_ms = 0.0
        if self._followers and any(isinstance(reply, Paused) and reply.mode for reply in replies):
            self._drain_ranks()
            late_ms = (time.monotonic() - now) * 1e3
        for reply in replies:
            if isinstance(reply, Paused) and reply.mode:
                reply = structs.replace(reply, drained_ms=reply.drained_ms + late_ms)
            self._send(reply)

    def _tell_ranks(self, message: RankMessage) -> None:
        if self._followers:
            frame = self._encode(message)
            for follower in self._followers:
                follower.send(frame)

    def _drain_ranks(self) -> None:
        self._tell_ranks(Drain())
        missing = len(self._followers)
        while missing:
            event = self._decode_event(self._events.recv())
            if isinstance(event, Drained):
                missing -= 1
            else:
                self._early.append(event)

    def _receive(self, *, block: bool) -> None:
        while self._running and self._poll(block):
            block = False
            if event := self._next_event():
                self._weights.on_rank(event, time.monotonic())
            elif self._inbox.poll(0):
                self._take(self._decode(self._inbox.recv()))
            self._advance()  # what one message has brought about holds for the next
        self._advance()

    def _next_event(self) -> RankReply | Received | None:
        if self._early:
            event = self._early.popleft()
        else:
            try:
                event = self._decode_event(self._events.recv(zmq.NOBLOCK))
            except zmq.Again:
                return None
        assert not isinstance(event, Drained), "no rank drains unasked"
        return event

    def _take(self, message: FrontendMessage) -> None:
        finished: list[Finished] = []
        match message:
            case AddRequest():
                if (rejected := self.scheduler.add(message)) is not None:
                    self._send(rejected)
                elif not self.scheduler.has_work:  # no step will tell that one more waits
                    self._send(self.scheduler.output())
            case Abort():
                finished = self.scheduler.abort(message)
            case Finish():
                finished = self.scheduler.finish(message)
            case Pause():
                self.scheduler.control.pause(message, time.monotonic())
            case Continue():
                self.scheduler.control.continue_(message)
            case Flush():
                self.scheduler.control.flush(message, time.monotonic())
            case WeightCall():
                self._weights.request(message, time.monotonic())
            case WithdrawCall():
                self._weights.withdraw(message.call)
            case GetState():
                self._send_state(message)
            case Shutdown():
                self._running = False
        if finished:
            self._send(self.scheduler.output(finished=finished))

    def _poll(self, block: bool) -> bool:
        """Whether a message is there; ``block``: wait for it, or until the scheduler has something to do."""
        if self._early or self._poller.poll(0):
            return True
        if not block:
            return False
        spun = time.monotonic() + self._spin
        while time.monotonic() < spun:
            if self._poller.poll(0):
                return True
        self._turn.rest()
        try:
            return self._sleep()
        finally:
            self._turn.begin()

    def _sleep(self) -> bool:
        """Whether a message has come; returns without one when the scheduler has something to do."""
        deadlines = (self.scheduler.control.next_deadline, self._weights.next_deadline)
        deadline = min((each for each in deadlines if each is not None), default=None)
        if deadline is None:
            return bool(self._poller.poll(None))
        patience = min(deadline - time.monotonic(), MAX_POLL_S)
        return bool(self._poller.poll(max(0, math.ceil(patience * 1e3))))

    def _send(self, message: SchedulerMessage) -> None:
        self._outbox.send(self._encode(message))

    def _send_state(self, message: GetState) -> None:
        state: dict[str, Any] = internal_state(self.scheduler) | {
            "memory_usage": self._memory_usage,
            "weight_update": self._weights.status(time.monotonic()),
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


class StepSpeed:
    """Foresees the end of a step of many tokens, by the last ones of about as many."""

    _REMEMBERED = 5

    def __init__(self) -> None:
        self._last_end = 0.0
        self._per_token: dict[int, deque[float]] = {}  # seconds, by the magnitude of the number of tokens

    def note(self, launched: Launched, end: float) -> None:
        """The result of a step, the one that ran after the last one noted, was read at ``end``."""
        if launched.num_tokens >= _MANY_TOKENS:
            took = end - self._begin(launched)
            magnitude = launched.num_tokens.bit_length()
            seen = self._per_token.setdefault(magnitude, deque(maxlen=self._REMEMBERED))
            seen.append(took / launched.num_tokens)
        self._last_end = end

    def foresee(self, launched: Launched) -> tuple[float, float]:
        """When the step behind the last one noted began, and how long it will take; 0 where nothing is known.

        A median: a step that waited for a kernel to be compiled, and the one behind it, tell nothing.
        """
        seen = self._per_token.get(launched.num_tokens.bit_length())
        return self._begin(launched), launched.num_tokens * median(seen) if seen else 0.0

    def _begin(self, launched: Launched) -> float:
        return max(launched.at, self._last_end)


def follow(
    runner: Runner,
    updater: Updater,
    messages: zmq.Socket[bytes],
    send: Callable[[RankEvent], None],
    *,
    depth: int,
    turn: Turn | None = None,
) -> None:
    """The loop of the other ranks: run every plan in order, with at most ``depth`` unread; never returns."""
    decode = msgspec.msgpack.Decoder(RankMessage).decode
    pending: list[Pending] = []
    turn = turn or Turn()
    while True:
        turn.rest()
        frame = messages.recv()
        turn.begin()
        match message := decode(frame):
            case StepPlan():
                pending.append(runner.forward_batch(message))
                while len(pending) >= depth:
                    pending.pop(0).result()
            case Drain():
                while pending:
                    pending.pop(0).result()
                send(Drained())
            case _:
                updater.handle(message)
