"""The order of operations of a receive over NCCL, on gloo and on fake streams whose work is done at once."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor

from segue.errors import WeightSyncError
from segue.memory.nccl_buffers import GRANULARITY
from segue.messages.weight_operations import Group
from segue.trainer.group import TrainerGroup
from segue.weight_update.transport.base import ReceiveSpec, plan
from segue.weight_update.transport.group import ANNOUNCED_KEY, REGISTERED_KEY, JoinedGroup, prefixed
from segue.weight_update.transport.joining import Groups
from segue.weight_update.transport.nccl import NcclReceive
from segue.weight_update.transport.pace import ReceivePace
from tests.conftest import WaitUntil
from tests.weight_update.transport.test_receiver import BUCKETS, NewGroup, assert_received, manifest


class Over(Exception):
    pass


class Observer:
    """Records the calls that an observer of a receive gets."""

    def __init__(self) -> None:
        self.is_over = False
        self.calls: list[str] = []

    def check(self) -> None:
        if self.is_over:
            raise Over

    def ready(self) -> None:
        self.calls.append("ready")

    def received(self, broadcast: ReceiveSpec) -> None:
        self.calls.append(f"received {broadcast.bucket}")

    def stored(self, broadcast: ReceiveSpec) -> None:
        self.calls.append(f"stored {broadcast.bucket}")


class Store:
    """A group whose trainer's store answers only while the test allows it."""

    def __init__(self) -> None:
        self.announced = 0
        self.asked, self.answers = threading.Event(), threading.Event()
        self.answers.set()
        self.process_group = SimpleNamespace(broadcast=self._broadcast)

    def connect(self) -> None:
        pass

    def is_announced(self, bucket: int) -> bool:
        self.asked.set()
        assert self.answers.wait(60)
        return bucket < self.announced

    def _broadcast(self, *_: object) -> None:
        raise AssertionError("a receive was queued")


class Event:
    """An event that has already happened."""

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return True


class Stream(nullcontext[None]):
    """A stream without work left to do."""

    def query(self) -> bool:
        return True

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self) -> Event:
        return Event()


class Kept:
    """A sink that keeps copies; the tensors in `PLACES` are received directly into their final memory."""

    PLACES = ("scale", "large")

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        shapes = {name: (dtype, shape) for bucket in BUCKETS for name, dtype, shape in bucket}
        self._places = {
            name: torch.zeros(shapes[name][1], dtype=getattr(torch, shapes[name][0])) for name in self.PLACES
        }

    def direct(self, name: str) -> Tensor | None:
        return self._places.get(name)

    def store(self, name: str, tensor: Tensor) -> None:
        is_there = name in self._places and tensor.data_ptr() == self._places[name].data_ptr()
        self.tensors[name] = tensor if is_there else tensor.clone()

    def prepare(self, tensors: Sequence[tuple[str, Tensor]]) -> Callable[[], None]:
        def take() -> None:
            for name, tensor in tensors:
                self.store(name, tensor)

        return take


def receive_from(group: Store, num_buckets: int = 2) -> NcclReceive:
    receiving: Any = object.__new__(NcclReceive)
    receiving._group = group
    receiving._broadcasts = [
        ReceiveSpec(8, [], torch.empty(8), index, index + 1) for index in range(num_buckets)
    ]
    receiving._targets = [each.direct for each in receiving._broadcasts]
    receiving._buffer_indices, receiving._stores = [None] * num_buckets, [lambda: None] * num_buckets
    receiving._received_events = receiving._copied_events = [None] * 32
    receiving._receive_stream = receiving._copy_stream = Stream()
    receiving._in_flight, receiving._is_waiting, receiving._registered = deque(), False, None
    receiving._pace = ReceivePace()
    found: NcclReceive = receiving
    return found


def in_thread(receiving: NcclReceive, session: Observer) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            receiving.receive(session)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


@pytest.fixture
def joined(trainer: Any, groups: Groups, new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> JoinedGroup:
    """A group whose broadcasts are complete as soon as they are queued."""
    found: JoinedGroup = trainer.meet(groups, new_group())
    gloo: Any = found.process_group
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    monkeypatch.setattr(found, "streams", (Stream(), Stream()), raising=False)
    monkeypatch.setattr(
        found,
        "_process_group",
        SimpleNamespace(broadcast=lambda *given: gloo.broadcast(*given).wait(), recv=gloo.recv),
    )
    monkeypatch.setattr(found, "_is_communicator_built", True)
    return found


@pytest.mark.parametrize("flattened", [False, True])
def test_all_tensors_arrive(trainer: Any, joined: JoinedGroup, flattened: bool) -> None:
    sink, session = Kept(), Observer()
    broadcasts = plan(manifest("g", BUCKETS, flattened=flattened), sink, torch.device("cuda"))
    thread, raised = in_thread(NcclReceive(joined, broadcasts, sink), session)
    trainer.send(joined.group, BUCKETS, flattened=flattened)
    thread.join(60)
    assert not raised
    assert_received(sink.tensors, BUCKETS)
    assert session.calls == ["ready"] + [
        f"{what} {each.bucket}" for each in broadcasts for what in ("received", "stored")
    ]


class NotedPace(ReceivePace):
    """Notes what it is told."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.told: list[str] = []

    def posted(self, num_bytes: int) -> None:
        self.told.append("posted")
        super().posted(num_bytes)

    def drained(self) -> None:
        self.told.append("drained")
        super().drained()


def test_beside_requests_each_slice_ends_before_the_next_one_begins(
    trainer: Any, joined: JoinedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segue.weight_update.transport.pace.SLICE_BYTES", 0)  # each broadcast is a slice
    sink, pace = Kept(), NotedPace(0.5, lambda: True)
    broadcasts = plan(manifest("g", BUCKETS, flattened=True), sink, torch.device("cuda"))
    thread, raised = in_thread(NcclReceive(joined, broadcasts, sink, pace=pace), Observer())
    trainer.send(joined.group, BUCKETS, flattened=True)
    thread.join(60)
    assert not raised
    assert_received(sink.tensors, BUCKETS)
    assert pace.told == ["posted", "drained"] * len(broadcasts)


@pytest.mark.parametrize("flattened", [False, True])
def test_tensors_arrive_as_their_buckets_are_announced(
    trainer: Any, joined: JoinedGroup, wait_until: WaitUntil, flattened: bool
) -> None:
    store = prefixed(joined._store, joined.group)
    store.set(ANNOUNCED_KEY, "0")
    announced = 0
    for _ in range(2):  # sessions
        sink, session = Kept(), Observer()
        broadcasts = plan(manifest("g", BUCKETS, flattened=flattened), sink, torch.device("cuda"))
        thread, raised = in_thread(NcclReceive(joined, broadcasts, sink), session)
        trainer.send(joined.group, BUCKETS, flattened=flattened)
        expected: list[str] = []
        for bucket in BUCKETS:
            assert list(sink.tensors) == expected
            announced += 1
            store.set(ANNOUNCED_KEY, str(announced))
            expected += [tensor for tensor, *_ in bucket]
            wait_until(partial(has_just, sink, expected), what=f"{expected} and nothing else")
        thread.join(60)
        assert not raised and "error" not in trainer.answer()
        assert_received(sink.tensors, BUCKETS)
        joined.num_buckets += len(BUCKETS)


def has_just(sink: Kept, names: list[str]) -> bool:
    return list(sink.tensors) == names


def test_no_receive_is_queued_before_its_bucket_is_announced() -> None:
    group, session = Store(), Observer()
    receiving = receive_from(group)
    thread, raised = in_thread(receiving, session)
    for _ in range(3):
        group.asked.clear()
        assert group.asked.wait(60)
    assert session.calls == ["ready"] and not raised
    group.announced = 1
    thread.join(60)
    assert [type(error) for error in raised] == [AssertionError]


def test_received_buckets_are_counted_while_the_next_one_is_not_announced(wait_until: WaitUntil) -> None:
    group, session = Store(), Observer()
    receiving: Any = receive_from(group)
    is_received = threading.Event()
    receiving._in_flight.append((receiving._broadcasts[0], SimpleNamespace(query=is_received.is_set)))
    thread, raised = in_thread(receiving, session)
    assert group.asked.wait(60)
    is_received.set()
    wait_until(lambda: "stored 0" in session.calls, what="the bucket counted")
    session.is_over = True
    thread.join(60)
    assert [type(error) for error in raised] == [Over]


@pytest.mark.parametrize("answer", [0, 2])
def test_a_receive_that_waits_for_its_trainer_is_released_and_does_nothing_later(answer: int) -> None:
    group, session = Store(), Observer()
    receiving: Any = receive_from(group)
    group.answers.clear()
    thread, raised = in_thread(receiving, session)
    assert group.asked.wait(60)
    session.is_over = True
    assert receiving.try_release()
    assert receiving._targets == [] and all(each.direct is None for each in receiving._broadcasts)
    group.announced = answer
    group.answers.set()
    thread.join(60)
    assert [type(error) for error in raised] == [Over]


def test_buffers_are_not_released_while_device_work_is_queued() -> None:
    receiving: Any = receive_from(Store())
    assert not receiving.try_release()
    receiving._is_waiting, receiving._copy_stream = True, SimpleNamespace(query=lambda: False)
    assert not receiving.try_release()


class Registered:
    """Fake registered buffers, on the CPU."""

    made: list["Registered"]

    def __init__(self, nccl: object, device: object, num_bytes: int, count: int) -> None:
        self.nccl, self.num_bytes, self.is_registered = nccl, num_bytes, False
        self.buffers = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(count)]
        self.made.append(self)

    def register(self) -> None:
        self.is_registered = True


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Registered]:
    """All fake registered buffers that were made."""
    monkeypatch.setattr(Registered, "made", [], raising=False)
    monkeypatch.setattr("segue.weight_update.transport.group.RegisteredBuffers", Registered)
    monkeypatch.setattr("segue.weight_update.transport.group.can_register", lambda nccl, device: True)
    return Registered.made


def test_flattened_buckets_are_received_into_registered_buffers_that_the_group_keeps(
    trainer: Any, joined: JoinedGroup, registered: list[Registered], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixed(joined._store, joined.group).set(REGISTERED_KEY, "1")
    assert joined.registers
    connected = []

    def connect(device: torch.device) -> None:
        connected.append([each.is_registered for each in registered])

    monkeypatch.setattr(joined.process_group, "eager_connect_single_device", connect, raising=False)
    monkeypatch.setattr(joined, "_is_communicator_built", False)
    for _ in range(2):
        sink, session = Kept(), Observer()
        broadcasts = plan(manifest("g", BUCKETS, flattened=True), sink, torch.device("cuda"))
        receiving = NcclReceive(joined, broadcasts, sink, registered=True)
        (buffers,) = registered
        assert {target.untyped_storage().data_ptr() for target in receiving._targets} == {
            buffer.data_ptr() for buffer in buffers.buffers
        }
        thread, raised = in_thread(receiving, session)
        trainer.send(joined.group, BUCKETS, flattened=True)
        thread.join(60)
        assert not raised and "error" not in trainer.answer()
        assert_received(sink.tensors, BUCKETS)
        assert buffers.is_registered
    assert connected == [[False]], "connected once, and before anything was registered"


def test_receive_buffers_cost_memory_until_they_exist(joined: JoinedGroup, registered: object) -> None:
    assert joined.receive_buffer_cost(10) == 10  # gloo
    joined.group = msgspec.structs.replace(joined.group, backend="nccl")
    assert joined.receive_buffer_cost(10) == GRANULARITY
    assert joined.receive_buffer_cost(GRANULARITY + 1) == 2 * GRANULARITY
    first = joined.registered_buffers(5)
    assert joined.registered_buffers(3) is first
    assert (joined.receive_buffer_cost(10), joined.receive_buffer_cost(12)) == (0, GRANULARITY)
    assert joined.registered_buffers(6) is not first and joined.receive_buffer_cost(12) == 0


def test_a_device_that_cannot_register_buffers_is_an_error_with_a_remedy(
    joined: JoinedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segue.weight_update.transport.group.can_register", lambda nccl, device: False)
    with pytest.raises(WeightSyncError, match="send with flattened=False"):
        joined.registered_buffers(8)


def test_registered_buffers_outlive_the_communicator(
    joined: JoinedGroup, registered: list[Registered], wait_until: WaitUntil
) -> None:
    receive_buffer: Any = joined.registered_buffers(8)
    kept, aborted = weakref.ref(receive_buffer), []
    gloo = joined.process_group
    joined.group = msgspec.structs.replace(joined.group, backend="nccl")
    gloo.abort = lambda: aborted.append(kept() is not None)
    registered.clear()
    joined.mark_dead("for a test")
    with pytest.raises(WeightSyncError, match="for a test"):
        joined.register(receive_buffer)
    assert not receive_buffer.is_registered
    with pytest.raises(WeightSyncError, match="for a test"):
        joined.registered_buffers(1)
    del receive_buffer
    wait_until(lambda: aborted and kept() is None, what="the buffers gone")
    assert aborted == [True]


def test_a_trainer_keeps_its_registered_buffers_until_it_leaves(registered: list[Registered]) -> None:
    group = object.__new__(TrainerGroup)
    group.group = Group(
        name="g", master_address="a", master_port=1, rank_offset=0, world_size=2, backend="gloo"
    )
    group.device, group._registers = torch.device("cpu"), True
    store, nccl = cast(Any, None), cast(Any, "nccl")
    group._joined = joined = JoinedGroup(group.group, 0, group.device, store, None, nccl)
    first = group.buffers(8, 1)
    assert [each.is_registered for each in registered] == [True] and registered[0].nccl == "nccl"
    assert group.buffers(5, 1) is first
    assert len(group.buffers(8, 2)) == 2 and group.buffers(9, 1)[0].numel() == 9
    assert len(registered) == 3 and len(joined._registered) == 3
    group._joined = None
    with pytest.raises(RuntimeError, match="was left"):
        group.buffers(10, 1)
    assert len(registered) == 3
    group._registers = False
    assert group.buffers(10, 2)[0].numel() == 10 and len(registered) == 3
