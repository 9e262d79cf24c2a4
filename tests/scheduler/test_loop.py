"""The loop: real sockets, a fake runner."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
import zmq

from segue.protocol.messages import (
    Abort,
    AddRequest,
    FrontendMessage,
    GetState,
    Rejected,
    SamplingParams,
    SchedulerMessage,
    Shutdown,
    State,
    StepOutput,
    StepPlan,
    StepResult,
    pack_ids,
)
from segue.scheduler.loop import SchedulerLoop, Throughput, follow
from segue.scheduler.scheduler import Scheduler
from tests.scheduler.simulation import FakeDevice, Simulation, expected_output

DEADLINE_MS = 10_000


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

    def forward_batch(self, plan: StepPlan) -> Done:
        self.deepest = max(self.deepest, len(self.scheduler.in_flight))
        result = self.device.launch(plan, "0")
        if len(self.device.unapplied) > 1:
            self.device.unapplied.popleft()
        return Done(result)


class Client:
    """The frontend's side of the sockets."""

    def __init__(self, *, overlap: bool) -> None:
        context = zmq.Context.instance()
        self.to_loop, inbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        outbox, self.from_loop = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        followers, self.plans = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for name, (bound, connected) in {
            "in": (self.to_loop, inbox),
            "out": (self.from_loop, outbox),
            "plan": (followers, self.plans),
        }.items():
            bound.bind(f"inproc://{id(self)}-{name}")
            connected.connect(f"inproc://{id(self)}-{name}")
        self.sockets = [self.to_loop, inbox, outbox, self.from_loop, followers, self.plans]
        scheduler = Simulation().scheduler
        self.runner = FakeRunner(scheduler)
        self.loop = SchedulerLoop(
            scheduler,
            self.runner,
            inbox=inbox,
            outbox=outbox,
            followers=[followers],
            overlap=overlap,
            memory_usage={"weights": 1},
        )
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def send(self, message: FrontendMessage) -> None:
        self.to_loop.send(msgspec.msgpack.encode(message))

    def receive(self) -> SchedulerMessage:
        assert self.from_loop.poll(DEADLINE_MS), "no answer from the loop"
        return msgspec.msgpack.decode(self.from_loop.recv(), type=SchedulerMessage)

    def collect(self, rid: str) -> list[int]:
        tokens: list[int] = []
        while True:
            message = self.receive()
            assert isinstance(message, StepOutput)
            tokens += [t for r, t in zip(message.rids, message.tokens, strict=True) if r == rid]
            if any(finished.rid == rid for finished in message.finished):
                return tokens

    def close(self) -> None:
        self.send(Shutdown())
        self.thread.join(DEADLINE_MS / 1000)
        assert not self.thread.is_alive()
        for socket in self.sockets:
            socket.close(linger=0)


@pytest.fixture(params=[False, True], ids=["normal", "overlap"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    client = Client(overlap=request.param)
    yield client
    client.close()


PARAMS = SamplingParams(max_new_tokens=9)


def test_a_request_goes_through(client: Client) -> None:
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS))
    assert client.collect("r") == expected_output([1, 2, 3], PARAMS, 100)


def test_overlap_keeps_two_steps_in_flight(client: Client) -> None:
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS))
    client.collect("r")
    assert client.runner.deepest == (2 if client.loop._overlap else 1)


def test_followers_get_every_plan_in_order(client: Client) -> None:
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=PARAMS))
    client.collect("r")
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
        follow(Recorder(), client.plans, client.sockets[0], rank=1, depth=2)
    assert ran == list(range(1, 10))


def test_an_abort_ends_the_request_with_its_tokens(client: Client) -> None:
    client.send(AddRequest(rid="r", prompt=pack_ids([1, 2, 3]), params=SamplingParams(max_new_tokens=90)))
    first = client.receive()
    client.send(Abort("r"))
    assert isinstance(first, StepOutput)
    ends = list(first.finished)
    while not ends:
        message = client.receive()
        assert isinstance(message, StepOutput)
        ends += message.finished
    assert ends[0].rid == "r"
    client.send(GetState(1, check=True))
    state = client.receive()
    while not isinstance(state, State):
        state = client.receive()
    assert state.problems == []


def test_state_names_what_waits_and_runs(client: Client) -> None:
    client.send(GetState(7, check=True))
    state = client.receive()
    assert isinstance(state, State)
    assert (state.call, state.problems, state.state["waiting_queue_rids"]) == (7, [], [])
    assert state.state["memory_usage"] == {"weights": 1}


def test_a_rejection_is_answered(client: Client) -> None:
    client.send(AddRequest(rid="r", prompt=b"", params=PARAMS))
    rejected = client.receive()
    assert isinstance(rejected, Rejected) and rejected.kind == "ContextLengthError"


def test_throughput_is_of_the_last_window_and_fades() -> None:
    now = 0.0
    throughput = Throughput(lambda: now)
    now = 0.5
    throughput.add(100)
    now = 1.0
    throughput.add(100)
    assert throughput.per_second() == 200
    now = 3.5
    assert throughput.per_second() == 0
