"""The part of receiving over NCCL that decides when a receive may be queued; no device is asked."""

import threading
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from segue.weights.sync.wires import Broadcast, CudaWire
from tests.conftest import WaitUntil


class Over(Exception):
    pass


class Session:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.is_over = False
        self.said: list[str] = []

    def check(self) -> None:
        if self.is_over:
            raise Over

    def entered(self) -> None:
        self.said.append("entered")

    def landed(self, broadcast: Broadcast) -> None:
        self.said.append(f"landed {broadcast.bucket}")

    def taken(self, broadcast: Broadcast) -> None:
        self.said.append(f"taken {broadcast.bucket}")


class Store:
    """A group whose trainer's store answers when it is let."""

    def __init__(self) -> None:
        self.announced = 0
        self.asked, self.answers = threading.Event(), threading.Event()
        self.answers.set()
        self.process_group = SimpleNamespace(broadcast=self._broadcast)

    def connect(self) -> None:
        pass

    def is_announced(self, bucket: int) -> bool:
        self.asked.set()
        assert self.answers.wait(20)
        return bucket < self.announced

    def _broadcast(self, *_: object) -> None:
        raise AssertionError("a receive was queued")


class Stream(nullcontext[None]):
    """Has nothing to do."""

    def query(self) -> bool:
        return True


def wire_of(group: Store, num_buckets: int = 2) -> CudaWire:
    wire: Any = object.__new__(CudaWire)
    wire._group = group
    wire._broadcasts = [Broadcast(8, [], torch.empty(8), index, index + 1) for index in range(num_buckets)]
    wire._targets = [each.direct for each in wire._broadcasts]
    wire._turns, wire._takes = [None] * num_buckets, [lambda: None] * num_buckets
    wire._landed = wire._copied = [None] * 32
    wire._wire = wire._copies = Stream()
    wire._under_way, wire._is_asking = deque(), False
    found: CudaWire = wire
    return found


def in_thread(wire: CudaWire, session: Session) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            wire.receive(session)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_no_receive_is_queued_before_its_bucket_is_announced() -> None:
    group, session = Store(), Session()
    wire = wire_of(group)
    thread, raised = in_thread(wire, session)
    for _ in range(3):
        group.asked.clear()
        assert group.asked.wait(20)
    assert session.said == ["entered"] and not raised
    group.announced = 1
    thread.join(20)
    assert [type(error) for error in raised] == [AssertionError]


def test_what_has_landed_is_counted_while_the_next_bucket_is_waited_for(wait_until: WaitUntil) -> None:
    group, session = Store(), Session()
    wire: Any = wire_of(group)
    has_landed = threading.Event()
    wire._under_way.append((wire._broadcasts[0], SimpleNamespace(query=has_landed.is_set)))
    thread, raised = in_thread(wire, session)
    assert group.asked.wait(20)
    has_landed.set()
    wait_until(lambda: "taken 0" in session.said, what="the bucket counted")
    session.is_over = True
    thread.join(20)
    assert [type(error) for error in raised] == [Over]


@pytest.mark.parametrize("answer", [0, 2])
def test_a_receive_whose_trainer_never_answers_is_abandoned_and_does_nothing_later(answer: int) -> None:
    group, session = Store(), Session()
    wire: Any = wire_of(group)
    group.answers.clear()
    thread, raised = in_thread(wire, session)
    assert group.asked.wait(20)
    session.is_over = True
    assert wire.abandon()
    assert wire._targets == [] and all(each.direct is None for each in wire._broadcasts)
    group.announced = answer
    group.answers.set()
    thread.join(20)
    assert [type(error) for error in raised] == [Over]


def test_what_is_queued_is_not_abandoned() -> None:
    wire: Any = wire_of(Store())
    assert not wire.abandon()
    wire._is_asking, wire._copies = True, SimpleNamespace(query=lambda: False)
    assert not wire.abandon()
