"""The scheduler loop with real sockets and a fake runner."""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import zmq
from msgspec import structs

from segue.heartbeat import Turn
from segue.laps.pick import PrefillPolicy
from segue.messages.control import (
    Continue,
    Continued,
    Flush,
    Flushed,
    FrontendMessage,
    GetState,
    Pause,
    Paused,
    SchedulerMessage,
    SchedulerOutput,
    Shutdown,
    State,
)
from segue.messages.guided import GrammarSpec, GuidedVocabulary
from segue.messages.kv import BanWriters, Claim, First, Grant, KVCommand, KVMessage, ReservePages
from segue.messages.kv_link import LinkClosed, LinkEvent, LinkMessage, LinkOpened
from segue.messages.requests import Abort, AddRequest, Handoff, Rejected, SamplingParams, pack_ids
from segue.messages.steps import (
    NON_FINITE,
    Drain,
    Drained,
    KernelsCompiled,
    RankEvent,
    RankMessage,
    StepPlan,
    StepResult,
)
from segue.model_runner.runner import ModelRunner
from segue.scheduler.request import Request
from segue.scheduler.scheduler import Scheduler
from segue.worker.follower import follow
from segue.worker.loop import SchedulerLoop
from tests.conftest import WaitUntil
from tests.scheduler.simulation import FakeDevice, HoldBack, Simulation, expected_output
from tests.support.fake_worker import EchoRunner
from tests.support.held_steps import hold_here
from tests.support.kv_hello import hello
from tests.worker.updaters import FakeUpdater

DEADLINE_MS = 10_000
NO_UPDATER = FakeUpdater(lambda event: None)


@dataclass
class Done:
    """A step that is already finished."""

    value: StepResult

    def ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.value


class FakeRunner:
    """Launches on the simulation's device and counts the steps in flight."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.device = FakeDevice(scheduler.limits)
        self.scheduler = scheduler
        self.deepest = 0
        self.can_follow = True  # whether guided requests can begin

    def set_vocabulary(self, vocabulary: GuidedVocabulary) -> None:
        pass

    def can_guide(self) -> bool:
        return self.can_follow

    def forget(self, slots: Sequence[int]) -> None:
        pass

    def forward_batch(self, plan: StepPlan) -> Done:
        self.deepest = max(self.deepest, len(self.scheduler.in_flight))
        while len(self.device.unapplied) >= len(self.scheduler.in_flight):  # this step is among the latter
            self.device.unapplied.popleft()
        return Done(self.device.launch(plan, "0"))


class Client:
    """The frontend's side of the sockets."""

    def __init__(
        self, *, overlap: bool, ranks: int = 1, policy: PrefillPolicy[Request] | None = None, **limits: int
    ) -> None:
        self.overlap = overlap
        context = zmq.Context.instance()
        self.to_loop, inbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        outbox, self.from_loop = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        followers, self.plans = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        events, self.events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for name, (bound, connected) in {
            "in": (self.to_loop, inbox),
            "out": (self.from_loop, outbox),
            "plan": (followers, self.plans),
            "events": (events, self.events),
        }.items():
            bound.bind(f"inproc://{id(self)}-{name}")
            connected.connect(f"inproc://{id(self)}-{name}")
        self.sockets = [
            self.to_loop,
            inbox,
            outbox,
            self.from_loop,
            followers,
            self.plans,
            events,
            self.events,
        ]
        scheduler = Simulation(policy, **limits).scheduler
        self.runner = FakeRunner(scheduler)
        self.loop = SchedulerLoop(
            scheduler,
            self.runner,
            FakeUpdater(self.send_event),
            inbox=inbox,
            outbox=outbox,
            followers=[followers][: ranks - 1],
            events=events,
            overlap=overlap,
            memory_usage={"weights": 1},
        )
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def send_event(self, event: RankEvent) -> None:
        """Send an event to the loop, as a rank does."""
        self.events.send(msgspec.msgpack.encode(event))

    def send(self, message: FrontendMessage) -> None:
        self.to_loop.send(msgspec.msgpack.encode(message))

    def receive(self) -> SchedulerMessage:
        assert self.from_loop.poll(DEADLINE_MS), "no answer from the loop"
        return msgspec.msgpack.decode(self.from_loop.recv(), type=SchedulerMessage)

    def collect(self, rid: str) -> list[int]:
        tokens: list[int] = []
        while True:
            message = self.receive()
            assert isinstance(message, SchedulerOutput)
            tokens += [t for r, t in zip(message.rids, message.tokens, strict=True) if r == rid]
            if any(finished.rid == rid for finished in message.finished):
                return tokens

    def close(self) -> None:
        if self.thread.is_alive():
            self.send(Shutdown())
        self.thread.join(DEADLINE_MS / 1000)
        assert not self.thread.is_alive()

    def close_sockets(self) -> None:
        for socket in self.sockets:
            socket.close(linger=0)


@pytest.fixture(params=[False, True], ids=["normal", "overlap"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    client = Client(overlap=request.param)
    yield client
    client.close()
    client.close_sockets()


@pytest.fixture(params=[False, True], ids=["normal", "overlap"])
def leader(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of a loop that sends its plans to a second rank."""
    client = Client(overlap=request.param, ranks=2)
    yield client
    client.close()
    client.close_sockets()


PARAMS = SamplingParams(max_new_tokens=9)


def test_a_request_gets_its_tokens(client: Client) -> None:
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS))
    assert client.collect("r") == expected_output([1, 2, 3], PARAMS, 100)


def test_while_grammars_cannot_be_followed_yet_other_requests_go_on(client: Client) -> None:
    client.runner.can_follow = False
    client.send(GuidedVocabulary(tokens=[], special_ids=[], eos_ids=[]))
    guided = structs.replace(PARAMS, grammar=GrammarSpec("regex", "a"))
    client.send(AddRequest(rid="guided", prompt=pack_ids([1, 2]), params=guided))
    shown = client.receive()
    assert isinstance(shown, SchedulerOutput) and shown.counters.num_waiting == 1
    client.send(AddRequest(rid="plain", prompt=pack_ids([1, 2, 3]), params=PARAMS))
    assert client.collect("plain") == expected_output([1, 2, 3], PARAMS, 100)
    assert not client.loop.scheduler.requests["guided"].admitted_at
    client.runner.can_follow = True
    assert client.collect("guided") == expected_output([1, 2], PARAMS, 100)


def test_a_message_that_breaks_a_rule_is_dropped_and_the_engine_goes_on(client: Client) -> None:
    client.to_loop.send(msgspec.msgpack.encode(["Pause", 1, "for ever"]))
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS))
    assert client.collect("r") == expected_output([1, 2, 3], PARAMS, 100)


def test_overlap_keeps_two_steps_in_flight(client: Client) -> None:
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS))
    client.collect("r")
    assert client.runner.deepest == (2 if client.overlap else 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_loop_sleeps_while_the_policy_holds_a_request_back(overlap: bool) -> None:
    client = Client(overlap=overlap, policy=HoldBack(0.3))
    plan, times = client.loop.scheduler.plan, []

    def note_and_plan(now: float) -> StepPlan | None:
        times.append(now)
        return plan(now)

    client.loop.scheduler.plan = note_and_plan  # type: ignore[method-assign]
    begun = time.monotonic()
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS))
    assert client.collect("r") == expected_output([1, 2, 3], PARAMS, 100)
    assert time.monotonic() >= begun + 0.3
    assert len(times) <= PARAMS.max_new_tokens + 10, "it asks again at the time that the policy gives"
    client.close()
    client.close_sockets()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_is_held_back_can_be_aborted_and_does_not_hold_up_a_pause(overlap: bool) -> None:
    client = Client(overlap=overlap, policy=HoldBack(3600.0))
    for rid in ("a", "b"):
        client.send(AddRequest(rid=rid, prompt=pack_ids([1, 2, 3]), params=PARAMS))
    client.send(Abort("a"))
    assert client.collect("a") == []
    paused = ask(client, Pause(1, "wait"))
    assert isinstance(paused, Paused) and paused.num_waiting == 1
    client.close()
    client.close_sockets()


def test_a_request_whose_outputs_end_it_is_answered_at_once(client: Client) -> None:
    outputs = expected_output([1, 2, 3], PARAMS, 100)
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS, outputs=pack_ids(outputs)))
    answer = client.receive()
    assert isinstance(answer, SchedulerOutput) and not answer.tokens
    assert [(end.rid, end.reason, end.num_tokens) for end in answer.finished] == [("r", "length", 9)]


def test_a_request_goes_on_from_its_outputs(client: Client) -> None:
    outputs = expected_output([1, 2, 3], PARAMS, 100)
    known = pack_ids(outputs[:4])
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS, outputs=known))
    assert client.collect("r") == outputs[4:]


def test_followers_get_every_plan_in_order(leader: Client) -> None:
    leader.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS))
    leader.collect("r")
    ran: list[int] = []

    class Stop(Exception):
        pass

    class Recorder:
        def forward_batch(self, plan: StepPlan) -> Done:
            ran.append(plan.step)
            if plan.step == PARAMS.max_new_tokens:
                raise Stop
            return Done(StepResult(plan.step, [], 0.0))

    with pytest.raises(Stop):
        follow(Recorder(), NO_UPDATER, leader.plans, leader.send_event, Turn())
    assert ran == list(range(1, 10))


def test_an_abort_ends_the_request_with_its_tokens(client: Client) -> None:
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=SamplingParams(max_new_tokens=90)))
    first = client.receive()
    client.send(Abort("r"))
    assert isinstance(first, SchedulerOutput)
    ends = list(first.finished)
    while not ends:
        message = client.receive()
        assert isinstance(message, SchedulerOutput)
        ends += message.finished
    assert ends[0].rid == "r"
    client.send(GetState(1, check=True))
    state = client.receive()
    while not isinstance(state, State):
        state = client.receive()
    assert state.problems == []


def test_the_state_has_the_waiting_requests_and_the_memory_usage(client: Client) -> None:
    client.send(GetState(7, check=True))
    state = client.receive()
    assert isinstance(state, State)
    assert (state.call, state.problems, state.state["waiting_queue_rids"]) == (7, [], [])
    assert state.state["memory_usage"] == {"weights": 1}


def test_non_finite_logits_are_logged_once(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    launch = client.runner.forward_batch

    def launch_non_finite(plan: StepPlan) -> Done:
        client.runner.device.unapplied.clear()  # each step's result was read before the next request comes
        done = launch(plan)
        return Done(msgspec.structs.replace(done.value, tokens=[NON_FINITE] * len(done.value.tokens)))

    client.runner.forward_batch = launch_non_finite  # type: ignore[method-assign]
    for rid in ("first", "second"):
        client.send(AddRequest(rid=rid, prompt=pack_ids([1, 2, 3]), params=PARAMS))
        assert client.collect(rid) == []
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "not finite (NaN or infinite) for request first " in record.getMessage()


def test_kernels_that_ranks_compile_are_counted_at_once_also_while_nothing_runs(leader: Client) -> None:
    for event in (KernelsCompiled(1, 1, 0), KernelsCompiled(0, 2, 1), KernelsCompiled(1, 2, 0)):
        leader.send_event(event)
        output = leader.receive()
        assert isinstance(output, SchedulerOutput)
        assert output.counters.compiled_kernels[event.rank] == event.compiled
    assert output.counters.compiled_kernels == {0: 2, 1: 2}
    assert output.counters.loaded_kernels == {0: 1, 1: 0}
    leader.send(GetState(7))
    state = leader.receive()
    assert isinstance(state, State)
    assert state.state["kernel_compilations_after_ready"] == 4
    assert state.state["kernel_loads_after_ready"] == 1


def test_a_rejection_is_answered(client: Client) -> None:
    client.send(AddRequest(rid="r", prompt=b"", params=PARAMS))
    rejected = client.receive()
    assert isinstance(rejected, Rejected) and rejected.kind == "ContextLengthError"


def test_the_scheduler_is_told_when_a_launch_is_over(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, launch = client.loop.scheduler, client.runner.forward_batch
    begun: list[int] = []
    over: list[tuple[list[int], bool]] = []

    def begin(plan: StepPlan) -> Done:
        begun.append(plan.step)
        return launch(plan)

    def launched(now: float) -> None:
        over.append((list(begun), now >= scheduler.in_flight[-1].planned_at))

    monkeypatch.setattr(client.runner, "forward_batch", begin)
    monkeypatch.setattr(scheduler, "launched", launched)
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS))
    client.collect("r")
    assert over == [(begun[: i + 1], True) for i in range(len(begun))] != []


class Slow:
    """A step that takes ``seconds`` from the end of the step before it."""

    ends = 0.0

    def __init__(self, value: StepResult, seconds: float) -> None:
        self.value = value
        Slow.ends = self.end = max(time.monotonic(), Slow.ends) + seconds

    def ready(self) -> bool:
        return time.monotonic() >= self.end

    def result(self) -> StepResult:
        time.sleep(max(0.0, self.end - time.monotonic()))
        return self.value


def slow_down(client: Client, seconds: float) -> None:
    """Make every step take ``seconds``."""
    launch = client.runner.forward_batch
    client.loop.runner.forward_batch = lambda plan: Slow(launch(plan).value, seconds)  # type: ignore[attr-defined]


def ask(client: Client, message: FrontendMessage) -> SchedulerMessage:
    """Send a call and return its answer; outputs that come before it are dropped."""
    client.send(message)
    while isinstance(answer := client.receive(), SchedulerOutput):
        pass
    return answer


@pytest.fixture
def follower(leader: Client) -> Iterator[list[int]]:
    """A second rank on a thread; gives the list of the steps that it has finished."""
    finished: list[int] = []

    class Late(Done):
        def result(self) -> StepResult:
            time.sleep(0.01)
            finished.append(self.value.step)
            return self.value

    class Runner:
        def forward_batch(self, plan: StepPlan) -> Done:
            return Late(StepResult(plan.step, [], 0.0))

    def run() -> None:
        with suppress(msgspec.DecodeError):
            follow(Runner(), NO_UPDATER, leader.plans, leader.send_event, Turn())

    thread = threading.Thread(target=run)
    thread.start()
    yield finished
    leader.close()
    leader.sockets[4].send(b"not a plan")
    thread.join(DEADLINE_MS / 1000)
    assert not thread.is_alive()


def test_a_pause_is_answered_when_every_rank_has_drained(leader: Client, follower: list[int]) -> None:
    slow_down(leader, 0.01)
    leader.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=SamplingParams(max_new_tokens=90)))
    leader.receive()
    paused = ask(leader, Pause(1, "in_place"))
    assert isinstance(paused, Paused) and paused.num_running == 1
    steps = leader.loop.scheduler.totals.num_steps
    assert follower == list(range(1, steps + 1))
    assert ask(leader, Continue(2)) == Continued(2)
    tokens = leader.collect("r")
    assert tokens == expected_output([1, 2, 3], SamplingParams(max_new_tokens=90), 100)[-len(tokens) :]


def test_drained_ms_includes_the_drain_of_every_rank(leader: Client) -> None:
    leader.send(Pause(1, "in_place"))
    assert msgspec.msgpack.decode(leader.plans.recv(), type=RankMessage) == Drain()
    assert not leader.from_loop.poll(50)
    leader.send_event(Drained())
    while not isinstance(paused := leader.receive(), Paused):
        pass
    assert paused.drained_ms >= 50


def test_a_pause_that_is_continued_at_once_does_not_drain_the_ranks(leader: Client) -> None:
    if not leader.overlap:
        return  # without overlap no step is in flight when messages come: a pause takes effect at once
    slow_down(leader, 0.01)
    leader.send(AddRequest(rid="r", prompt=pack_ids([1]), params=SamplingParams(max_new_tokens=90)))
    leader.receive()
    send_together(leader, Pause(1, "in_place"), Continue(2))
    while not isinstance(message := leader.receive(), Continued):
        assert not isinstance(message, Paused) or message.mode is None
    leader.collect("r")
    while leader.plans.poll(0):
        assert isinstance(msgspec.msgpack.decode(leader.plans.recv(), type=RankMessage), StepPlan)


def test_a_pause_ends_by_itself_when_its_ttl_is_over(client: Client) -> None:
    assert isinstance(ask(client, Pause(1, "retract", ttl_s=0.05)), Paused)
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS))
    assert client.collect("r") == expected_output([1, 2, 3], PARAMS, 100)


def send_together(client: Client, *messages: FrontendMessage) -> None:
    """Send messages so that the loop finds all of them in one turn."""
    decode, sent = client.loop._decode, threading.Event()

    def decode_late(frame: bytes) -> FrontendMessage:
        assert sent.wait(DEADLINE_MS / 1000)
        return decode(frame)

    client.loop._decode = decode_late  # type: ignore[method-assign]
    for message in messages:
        client.send(message)
    sent.set()


def test_an_idle_engine_is_paused_before_the_next_message(client: Client) -> None:
    send_together(
        client,
        Pause(1, "abort"),
        AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS),
        Pause(2, "in_place"),
        GetState(3),
        Continue(4),
    )
    messages: list[SchedulerMessage] = []
    while not isinstance(message := client.receive(), Continued):
        messages.append(message)
    assert [m.mode for m in messages if isinstance(m, Paused)] == ["abort", "abort"]
    states = [m.state for m in messages if isinstance(m, State)]
    assert [(s["engine_paused"], s["waiting_queue_rids"]) for s in states] == [(True, ["r"])]
    assert client.collect("r") == expected_output([1, 2, 3], PARAMS, 100)


def test_the_counters_report_waiting_requests_while_paused(client: Client) -> None:
    assert isinstance(ask(client, Pause(1, "in_place")), Paused)
    for count in (1, 2):
        client.send(AddRequest(rid=str(count), prompt=pack_ids([1, 2, 3]), params=PARAMS))
        output = client.receive()
        assert isinstance(output, SchedulerOutput) and output.counters.num_waiting == count


def test_a_flush_waits_until_its_deadline(client: Client) -> None:
    slow_down(client, 0.01)
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=SamplingParams(max_new_tokens=90)))
    client.receive()
    client.send(Pause(1, "in_place"))
    while not isinstance(client.receive(), Paused):
        pass
    refused = ask(client, Flush(2, timeout_s=0.05))
    assert isinstance(refused, Flushed) and not refused.success and "pause with mode" in refused.error_msg
    client.send(Continue(3))
    flushed = ask(client, Flush(4, timeout_s=10.0))
    while not isinstance(flushed, Flushed):
        flushed = client.receive()
    assert flushed.success


def test_a_pause_in_a_long_prefill_waits_for_one_chunk_at_most() -> None:
    chunk_s, length = 0.1, 16 * 512
    client = Client(overlap=True, num_pages=2 * length // 4, max_seq_len=2 * length, chunked_prefill_size=512)
    slow_down(client, chunk_s)
    client.send(AddRequest(rid="r", prompt=pack_ids([1] * length), params=PARAMS))
    for _ in range(2):
        client.receive()  # the loop can predict the next chunk once it has read the first
    drained = []
    for call in range(4):
        time.sleep(chunk_s / 3)  # in the middle of a chunk
        sent = time.monotonic()
        assert isinstance(ask(client, Pause(call, "in_place")), Paused)
        drained.append(time.monotonic() - sent)
        client.send(Continue(9))
        while not isinstance(client.receive(), Continued):
            pass
        client.receive()
    client.send(Abort("r"))
    client.close()
    client.close_sockets()
    # Up to two chunks if the next one were launched early; a stall of the machine does not come each time.
    assert min(drained) <= 1.2 * chunk_s


class OtherWorker:
    """A prefill worker that exists in the test alone, in the place of a decode worker's connections."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.machine = scheduler.handover.machine
        self.got: list[KVMessage] = []

    def on_event(self, event: LinkEvent, now: float) -> None:
        match event:
            case LinkOpened():
                self.machine.on_opened(event.peer, event.session, "p:1", event.hello, "shm", now)
            case LinkMessage():
                self.machine.on_message(event.peer, event.message, now)
            case LinkClosed():
                self.machine.on_closed(event.peer, now)

    def set_load(self, scheduler: Scheduler) -> None:
        pass

    def flush(self, now: float) -> None:
        self.got += [message for _, message in self.machine.peers.messages]
        self.machine.peers.messages = []


class FakeMover:
    """Notes the commands to a rank."""

    def __init__(self) -> None:
        self.commands: list[KVCommand] = []

    def handle(self, command: KVCommand) -> None:
        self.commands.append(command)


@pytest.fixture(params=[False, True], ids=["normal", "overlap"])
def decode(request: pytest.FixtureRequest) -> Iterator[Client]:
    """The client of a decode worker, which is connected to a prefill worker and has one request."""
    client = Client(overlap=request.param, role="decode")  # type: ignore[arg-type]
    client.loop.mover = FakeMover()  # type: ignore[assignment]
    client.loop.kv_links = OtherWorker(client.loop.scheduler)  # type: ignore[assignment]
    client.send_event(LinkOpened(1, "s", hello("prefill")))
    handoff = Handoff(id=7, part="decode", peer="p:1")
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS, handoff=handoff))
    yield client
    client.close()
    client.close_sockets()


def test_what_handing_over_leads_to_is_sent_although_no_step_runs(
    decode: Client, wait_until: WaitUntil
) -> None:
    got = decode.loop.kv_links.got  # type: ignore[union-attr]
    wait_until(lambda: [type(message) for message in got] == [Claim], what="the claim")
    decode.send_event(LinkMessage(1, ReservePages(handoff=7, lease=1, num_tokens=3)))
    wait_until(lambda: [type(message) for message in got] == [Claim, Grant], what="the grant")
    decode.send_event(LinkMessage(1, First(handoff=7, token=4, version="0", cached_tokens=0, seed=0)))
    while not (message := decode.receive()).rids:
        pass
    assert (message.rids, message.tokens) == (["r"], [4])
    decode.send_event(LinkClosed(1, "kv_link_lost", "it has ended"))
    commands = decode.loop.mover.commands  # type: ignore[union-attr]
    wait_until(lambda: commands == [BanWriters(session="s")], what="the command to the rank")


def test_the_state_of_leases_is_shown_although_no_step_runs(decode: Client, wait_until: WaitUntil) -> None:
    got = decode.loop.kv_links.got  # type: ignore[union-attr]
    wait_until(lambda: got, what="the claim")
    decode.send_event(LinkMessage(1, ReservePages(handoff=7, lease=1, num_tokens=3)))
    while (message := decode.receive()).counters.handover.leases != {"granted": 1}:
        pass
    assert message.step_seconds == 0.0


def test_the_runners_of_fake_workers_have_what_the_loop_asks_for() -> None:
    """Otherwise hundreds of tests would fail, and none of them here."""
    asked = set(re.findall(r"self\.runner\.(\w+)", inspect.getsource(SchedulerLoop)))
    assert "forward_batch" in asked
    assert asked <= {*dir(EchoRunner)} & {*dir(ModelRunner)}


def test_a_loop_whose_steps_a_test_holds_goes_on_whenever_the_gate_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_here(tmp_path / "steps", monkeypatch)
    receive = SchedulerLoop._receive

    def open_gate_and_receive(self: SchedulerLoop, *, block: bool) -> None:
        if block and self.scheduler.waiting:  # it has just been held back, and no message will come
            gate.open()
        receive(self, block=block)

    monkeypatch.setattr(SchedulerLoop, "_receive", open_gate_and_receive)
    gate.close_after(0)
    client = Client(overlap=False)
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS))
    assert client.collect("r") == expected_output([1, 2, 3], PARAMS, 100)
    client.close()
    client.close_sockets()
