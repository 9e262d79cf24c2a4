"""Rank 0's loop, which drives the scheduler and its model runner; the other ranks follow its plans.

The loop makes no decisions. It moves messages between the frontend's sockets and the pure scheduler,
sends each plan to the other tensor-parallel ranks, and launches it. Idle or paused, it blocks on its sockets.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from msgspec import structs

from segue.errors import ConfigError
from segue.heartbeat import Turn
from segue.logs import logger
from segue.messages.control import (
    Continue,
    Flush,
    FrontendMessage,
    GetLoad,
    GetState,
    Pause,
    Paused,
    SchedulerMessage,
    SchedulerOutput,
    SetRole,
    Shutdown,
    State,
)
from segue.messages.guided import GuidedVocabulary
from segue.messages.kv import PagesPrepared, PushEnded, RankJoined, WritersGone
from segue.messages.kv_link import LinkClosed, LinkMessage, LinkOpened
from segue.messages.life import EndWake, PingRanks, RankAnswer, WakeRanks
from segue.messages.memory import MemoryMoved, ReleaseMemory, ResumeMemory
from segue.messages.profile import StartProfile, StopProfile, Traced
from segue.messages.requests import Abort, AddRequest, Finish, Finished, Rejected
from segue.messages.steps import Drain, Drained, KernelsCompiled, RankEvent, RankMessage, StepPlan
from segue.messages.weight_update import WeightCall, WithdrawCall
from segue.scheduler.internal_state import internal_state
from segue.scheduler.invariants import find_problems
from segue.scheduler.load import load_of
from segue.scheduler.scheduler import Scheduler
from segue.weight_update.control.calls import WeightControl
from segue.worker.profiling import ProfileControl
from segue.worker.rank_life import RankLife
from segue.worker.throughput import Throughput
from segue.worker.warm_kv import WarmKV

if TYPE_CHECKING:  # these need torch, which the loop does not
    from segue.disagg.mover import Mover
    from segue.memory.rank_memory import Generations
    from segue.model_runner.executor import ForwardOutput
    from segue.model_runner.runner import ModelRunner
    from segue.weight_update.rank import WeightUpdater
    from segue.worker.kv_links import KVLinks
    from segue.worker.profiling import RankProfiler
    from segue.worker.released_memory import ReleasedMemory


OVERLAP_DEPTH = 2  # steps in flight, with overlap: a step is launched before the last one's result is read
MAX_POLL_S = 3600.0  # the socket takes milliseconds as an integer; a client may give any number of seconds


@dataclass(eq=False)
class SchedulerLoop:
    """Rank 0's loop.

    A turn is one round: take messages, launch a step, read a result. Each handled message or result may let a
    pause, a flush or a weight update go on; `_advance` then sends what that produces.
    """

    scheduler: Scheduler
    runner: ModelRunner
    updater: WeightUpdater
    _: KW_ONLY
    inbox: zmq.Socket[bytes]  # PULL, of `FrontendMessage`
    outbox: zmq.Socket[bytes]  # PUSH, of `SchedulerMessage`
    followers: Sequence[zmq.Socket[bytes]] = ()  # PUSH, of `RankMessage`, one per further rank
    events: zmq.Socket[bytes]  # PULL, of the `RankEvent` of all ranks, this one included
    kv_links: KVLinks | None = (
        None  # to the workers that KV is handed to or comes from; None: started with --role both
    )
    mover: Mover | None = None  # of this rank's KV
    memory: ReleasedMemory | None = None  # of this rank; None: without --enable-memory-saver
    profiler: RankProfiler | None = None  # of this rank; None: without --profile-dir
    warm: WarmKV | None = None  # None: without --warm-kv
    generations: Generations | None = None  # of weights that engines share; None: they are this engine's own
    overlap: bool  # whether a step is planned and launched before the previous step's result is read
    spin: float = 0.0  # seconds that an idle loop polls before it sleeps, because a wake-up takes long
    memory_usage: dict[str, int]
    turn: Turn = field(default_factory=Turn)  # shows other threads how long the present turn has taken

    def __post_init__(self) -> None:
        """Prepare what the loop keeps from turn to turn."""
        self._life = RankLife(self.runner, self._answer_life)
        self._weights = WeightControl(self.scheduler.weights, 1 + len(self.followers))
        self._profiles = ProfileControl(1 + len(self.followers))
        if (served := self.generations) is not None:
            self._weights.machine.start_with(served.number, served.name, served.version, served.model_path)
        self._early_events: deque[RankEvent] = deque()  # read while the ranks' drain was awaited
        self._poller = zmq.Poller()
        for socket in (self.inbox, self.events):
            self._poller.register(socket, zmq.POLLIN)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FrontendMessage).decode
        self._decode_event = msgspec.msgpack.Decoder(RankEvent).decode
        self._throughput = Throughput(time.monotonic())
        self._warned_of_non_finite = False
        self._has_vocabulary = False  # without it, no request was ever guided
        self._shown_handover = b""  # the counters that were reported last while no step ran
        self._running = True

    def run(self) -> None:
        """Serve until :class:`Shutdown`.

        Each turn takes the messages, launches a step, and only then reads the oldest result, if no further
        step can be launched before: with overlap the device computes while the host plans and replies.
        """
        if self.generations is not None:  # which version it is was found at the start
            self._send(self._weights.machine.notice())
        in_flight: deque[ForwardOutput] = deque()
        idle = True  # whether nothing is in flight or can be launched before a message or a deadline comes
        depth = OVERLAP_DEPTH if self.overlap else 1
        while self._running:
            self.turn.begin()
            self._receive(block=idle)
            if in_flight:
                self._wait_for_turn(in_flight[0])
            if self._has_vocabulary:
                self.scheduler.can_guide = self.runner.can_guide()
            plan = self.scheduler.plan(time.monotonic())
            self._forget_settled()
            if plan is not None:
                in_flight.append(self._launch(plan))
            self._advance_handover()  # pages are granted by `plan` also if there is nothing to launch
            idle = not in_flight
            if in_flight and (plan is None or len(in_flight) == depth):
                self._apply(in_flight.popleft())

    def _launch(self, plan: StepPlan) -> ForwardOutput:
        """Send a plan to the other ranks and launch it on this one, without waiting for the device."""
        self._write_journal()  # the step may write to pages that an engine after this one must not use then
        self._send_to_followers(plan)
        launched = self.runner.forward_batch(plan)
        self.scheduler.launched(time.monotonic())
        return launched

    def _apply(self, launched: ForwardOutput) -> None:
        """Wait for a step's result, and send the tokens and ends that the scheduler makes of it."""
        result = launched.result()
        output = self.scheduler.apply(result, time.monotonic())
        self._forget_settled()
        if output.counters.non_finite_logits and not self._warned_of_non_finite:
            self._warned_of_non_finite = True
            self._warn_of_non_finite(output)
        self._throughput.add(len(output.tokens), time.monotonic())
        self._profiles.on_step()
        self._write_journal()  # before the reply: nobody adopts what has failed if this engine dies now
        self._send(output)
        self._advance()

    def _forget_settled(self) -> None:
        """Let the runner forget the grammars of slots that are free, before a plan gives one to a request."""
        slots = self.scheduler.resources.take_settled()
        if slots and self._has_vocabulary:
            self.runner.forget(slots)

    def _write_journal(self) -> None:
        """Note for an engine that takes over which pages it may use from now on."""
        if self.warm is not None:
            self.warm.write()

    def _answer_life(self, answer: RankAnswer) -> None:
        """Pass a rank's answer on. With the last answer to a wake, pages of the engine before are adopted."""
        if self.warm is not None:
            self.warm.on_answer(answer)
        self._send(answer)

    def _warn_of_non_finite(self, output: SchedulerOutput) -> None:
        """Log which requests failed because of NaN or infinite logits, and what can be done; called once."""
        logger.error(
            "logits were not finite (NaN or infinite) for request %s with weights of version %r: the request "
            "ends with the error non_finite_logits. This is logged once; segue:non_finite_logits_total of "
            "/metrics counts such requests. If many requests fail, the weights are bad, or too large for the "
            "dtype: load or send them again, or choose --dtype bfloat16 or float32. If few requests fail, "
            "look at their prompts",
            ", ".join(finished.rid for finished in output.finished if finished.reason == "error"),
            self.scheduler.weight_version,
        )

    def _wait_for_turn(self, before: ForwardOutput) -> None:
        """Handle messages until the scheduler wants the step behind ``before`` to be launched."""
        until = self.scheduler.launch_at(time.monotonic())
        while self._running and time.monotonic() < until and self.scheduler.has_work:
            if before.ready():
                return
            if self._poller.poll(1):  # waits 1 ms at most
                self._receive(block=False)

    def _advance(self) -> None:
        """Send the answers of pauses, flushes and weight updates, and the weight updates' commands.

        A command is a list with one message per rank; rank 0's updater is in this process.
        """
        self._advance_pause()
        self._advance_memory()
        self._advance_profile()
        self._advance_role()
        self._advance_handover()
        answers, commands = self._weights.advance(time.monotonic())
        self._write_journal()
        for answer in answers:
            self._send(answer)
        for own, *others in commands:
            self._send_each(others)
            self.updater.handle(own)

    def _advance_memory(self) -> None:
        """Send the answers of calls that release or resume memory, and their commands."""
        answers, commands = self.scheduler.standby.advance()
        if answers:
            self._send(self._weights.machine.notice())  # a client that has its answer may ask for the health
        for answer in answers:
            self._send(answer)
        for own, *others in commands:
            self._send_each(others)
            assert self.memory is not None
            self.memory.handle(own)

    def _advance_profile(self) -> None:
        """Send the answers of calls that begin or end a profile, and their commands."""
        answers, commands = self._profiles.take()
        for answer in answers:
            self._send(answer)
        for own, *others in commands:
            self._send_each(others)
            assert self.profiler is not None, "a profile was asked for without --profile-dir"
            self.profiler.handle(own)

    def _send_each(self, commands: Sequence[RankMessage]) -> None:
        """Send each of the other ranks its own command."""
        for follower, command in zip(self.followers, commands, strict=True):
            follower.send(self._encode(command))

    def _advance_handover(self) -> None:
        """Send what handing over KV leads to: replies, commands to the ranks, messages to other workers."""
        if self.kv_links is None or self.mover is None:
            return
        now, handover = time.monotonic(), self.scheduler.handover
        self.kv_links.set_load(self.scheduler)
        handover.machine.advance(now)
        commands, handover.machine.peers.commands = handover.machine.peers.commands, []
        for command in commands:
            self._send_to_followers(command)
            self.mover.handle(command)
        self.kv_links.flush(now)
        replies, handover.replies = handover.replies, []
        for reply in replies:
            self._send(reply)
        self._show_handover()

    def _show_handover(self) -> None:
        """Report offers and leases that have changed while no step runs, whose output would show them."""
        if not self.scheduler.in_flight:
            counters = self._encode(self.scheduler.handover.counters())
            if counters != self._shown_handover:
                self._shown_handover = counters
                self._send(self.scheduler.output())

    def _advance_role(self) -> None:
        """Enter the next role if nothing is left of the old one, and send what became of the change."""
        now, roles = time.monotonic(), self.scheduler.roles
        if (role := roles.due(now)) is not None:
            try:
                address = None if self.kv_links is None else self.kv_links.set_role(role)
            except ConfigError as error:  # the port of a prefill engine is in use
                roles.fail(error)
            else:
                roles.enter(address)
        replies, roles.replies = roles.replies, []
        for reply in replies:
            self._send(reply)

    def _advance_pause(self) -> None:
        """Send the pause machine's replies; a pause is shown and answered once every rank has drained."""
        now = time.monotonic()
        replies = self.scheduler.control.advance(now)  # among them an output that shows the pause
        self._write_journal()  # before the answer to a flush: what was flushed shall not come back
        late_ms = 0.0
        if self.followers and any(isinstance(reply, Paused) and reply.mode for reply in replies):
            self._drain_ranks()
            late_ms = (time.monotonic() - now) * 1e3
        for reply in replies:
            if isinstance(reply, Paused) and reply.mode:
                reply = structs.replace(reply, drained_ms=reply.drained_ms + late_ms)
            self._send(reply)

    def _send_to_followers(self, message: RankMessage) -> None:
        """Send a message to every other rank, encoded once."""
        if self.followers:
            frame = self._encode(message)
            for follower in self.followers:
                follower.send(frame)

    def _drain_ranks(self) -> None:
        """Block until every other rank has ended its steps; rank 0's own have ended before.

        Other events that arrive meanwhile are kept for `_next_event`.
        """
        self._send_to_followers(Drain())
        missing = len(self.followers)
        while missing:
            event = self._decode_event(self.events.recv())
            if isinstance(event, Drained):
                missing -= 1
            else:
                self._early_events.append(event)

    def _receive(self, *, block: bool) -> None:
        """Handle all events and messages that have arrived; with ``block``, first wait for one.

        The wait also ends at the next deadline. Events of the ranks go before messages of the frontend.
        """
        while self._running and self._poll(block):
            block = False
            if event := self._next_event():
                self._on_event(event, time.monotonic())
            elif self.inbox.poll(0):
                try:
                    message = self._decode(self.inbox.recv())
                except msgspec.ValidationError:  # one call without an answer is better than an engine's death
                    logger.exception("a message of the frontend breaks a rule of its fields, and is dropped")
                else:
                    self._take(message)
            self._advance()  # so that the next message meets the state that this one has led to
        self._advance()

    def _on_event(self, event: RankEvent, now: float) -> None:
        """Handle an event of a rank, or of a connection to another worker."""
        self.scheduler.now = now
        match event:
            case PushEnded() | PagesPrepared() | WritersGone():
                self.scheduler.handover.machine.on_rank(event, now)
            case LinkOpened() | LinkMessage() | LinkClosed():
                assert self.kv_links is not None
                self.kv_links.on_event(event, now)
            case MemoryMoved():
                self.scheduler.standby.on_rank(event, now)
            case Traced():
                self._profiles.on_rank(event, now)
            case RankAnswer():
                self._answer_life(event)
            case KernelsCompiled():
                totals = self.scheduler.totals
                totals.compiled_kernels[event.rank] = event.compiled
                totals.loaded_kernels[event.rank] = event.loaded
                self._send(self.scheduler.output())
            case Drained() | RankJoined():
                raise AssertionError(f"a rank sent {type(event).__name__}, which nobody awaits")
            case _:
                self._weights.on_rank(event, now)

    def _next_event(self) -> RankEvent | None:
        """Return the oldest event of any rank, or None if there is none; never waits."""
        if self._early_events:
            return self._early_events.popleft()
        try:
            event: RankEvent = self._decode_event(self.events.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        return event

    def _take(self, message: FrontendMessage) -> None:
        """Handle one message of the frontend, and send at once what it leads to, such as ends of requests."""
        finished: list[Finished] = []
        self.scheduler.now = time.monotonic()
        match message:
            case AddRequest():
                answer = self.scheduler.add(message, time.monotonic())
                if isinstance(answer, Rejected):
                    self._send(answer)
                elif answer is not None:
                    finished = [answer]
                elif not self.scheduler.has_work:  # no step will report the new number of waiting requests
                    self._send(self.scheduler.output())
            case GuidedVocabulary():
                self.runner.set_vocabulary(message)
                self._has_vocabulary = True
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
            case SetRole():
                self.scheduler.roles.set(message, time.monotonic())
            case ReleaseMemory() | ResumeMemory():
                self.scheduler.standby.request(message)
            case StartProfile():
                self._profiles.start(message)
            case StopProfile():
                self._profiles.stop(message)
            case GetLoad():
                refused = {} if self.kv_links is None else self.kv_links.refused(time.monotonic())
                self._send(load_of(self.scheduler, message.call, refused))
            case PingRanks() | WakeRanks() | EndWake():
                self._send_to_followers(message)
                if self.warm is not None and isinstance(message, WakeRanks):
                    self.warm.await_ranks(message.call)
                self._life.handle(message)
            case Shutdown():
                self._running = False
        if finished:
            self._send(self.scheduler.output(finished=finished))

    def _poll(self, block: bool) -> bool:
        """Whether a message is there; with ``block``, wait for one, or until the next deadline.

        The wait polls for ``spin`` seconds before it sleeps.
        """
        if self._early_events or self._poller.poll(0):
            return True
        if not block:
            return False
        s = self.scheduler
        times = (
            s.wake_at,
            s.control.next_deadline,
            s.roles.next_deadline,
            s.handover.machine.next_deadline,
            self._weights.next_deadline,
        )
        deadline = min((each for each in times if each is not None), default=math.inf)
        spun = min(time.monotonic() + self.spin, deadline)
        while time.monotonic() < spun:
            if self._poller.poll(0):
                return True
        self.turn.rest()
        patience = min(deadline - time.monotonic(), MAX_POLL_S)
        arrived = self._poller.poll(max(0, math.ceil(patience * 1e3)))
        self.turn.begin()
        return bool(arrived)

    def _send(self, message: SchedulerMessage) -> None:
        self.outbox.send(self._encode(message))

    def _send_state(self, message: GetState) -> None:
        """Answer with the scheduler's state and the loop's own measures; checks invariants if asked to."""
        state: dict[str, Any] = internal_state(self.scheduler) | {
            "memory_usage": self.memory_usage,
            "weight_update": self._weights.status(time.monotonic()),
            "last_gen_throughput": self._throughput.per_second(time.monotonic()),
        }
        if self._has_vocabulary:
            state["guided_ms"] = self.runner.guided_ms()
        problems = find_problems(self.scheduler) if message.check else []
        self._send(State(message.call, state, problems))
