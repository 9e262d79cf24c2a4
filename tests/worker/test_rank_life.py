"""What ranks answer for the life of their engine, by themselves and through rank 0's loop."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from segue.distributed.info import TPInfo
from segue.failover.watchdog import TRACEBACK_S
from segue.messages.life import EndWake, HeldKV, PingRanks, RankAnswer, WakeRanks
from segue.messages.steps import RankMessage
from segue.worker.rank_life import RankLife
from tests.worker.test_loop import DEADLINE_MS, Client


class Rank:
    """The part of a runner that a life needs; it notes what it did."""

    def __init__(self, rank: int = 0) -> None:
        self.tp = TPInfo(rank=rank, size=2)
        self.held_kv: HeldKV | None = None
        self.done: list[str] = []
        self.error: Exception | None = None

    def deep_ping(self) -> None:
        self.done.append("ping")

    def wake(self, epoch: int, timeout_s: float) -> HeldKV | None:
        self.done.append(f"wake {epoch}" + (f" within {timeout_s:g} s" if timeout_s else ""))
        if self.error is not None:
            raise self.error
        return self.held_kv


def answers_of(rank: Rank, *messages: Any) -> list[RankAnswer]:
    answers: list[RankAnswer] = []
    life = RankLife(rank, answers.append)  # type: ignore[arg-type]
    for message in messages:
        life.handle(message)
    return answers


def test_only_a_deep_ping_runs_something() -> None:
    rank = Rank(1)
    assert answers_of(rank, PingRanks(7, False)) == [RankAnswer(7, 1)] and rank.done == []
    assert answers_of(rank, PingRanks(8, True)) == [RankAnswer(8, 1)] and rank.done == ["ping"]


def test_a_wake_without_a_limit_starts_no_watchdog() -> None:
    rank = Rank()
    assert answers_of(rank, WakeRanks(3, 0.0, 7), EndWake()) == [RankAnswer(3, 0)] and rank.done == ["wake 7"]


def test_a_rank_knows_how_long_its_wake_may_take() -> None:
    rank = Rank()
    answers_of(rank, WakeRanks(3, 60.0, 7), EndWake())
    assert rank.done == ["wake 7 within 60 s"]


def test_a_rank_that_cannot_wake_says_why(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(1)
    rank.error = MemoryError("no pages are left")
    assert answers_of(rank, WakeRanks(3, 0.0)) == [RankAnswer(3, 1, "MemoryError: no pages are left")]
    assert "rank 1 cannot wake" in caplog.text


def test_a_rank_that_has_woken_says_which_kv_memory_it_has() -> None:
    rank = Rank()
    rank.held_kv = held = HeldKV("abc", "def", False, 3)
    assert answers_of(rank, WakeRanks(3, 0.0)) == [RankAnswer(3, 0, "", held)]
    rank.error = MemoryError()
    assert answers_of(rank, WakeRanks(4, 0.0)) == [RankAnswer(4, 0, "MemoryError: ")]


HANGING = """
import ctypes
from segue.messages.life import EndWake, WakeRanks
from segue.worker.rank_life import RankLife
from tests.worker.test_rank_life import Rank
life = RankLife(Rank(), lambda answer: None)
life.handle(WakeRanks(1, 0.2))
{then}
ctypes.PyDLL(None).sleep(2)  # holds the GIL
"""


@pytest.mark.parametrize(("then", "code"), [("", 1), ("life.handle(EndWake())", 0)])
def test_a_rank_whose_wake_does_not_end_in_time_ends_itself(then: str, code: int) -> None:
    began = time.monotonic()
    command = [sys.executable, "-c", HANGING.format(then=then)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, "Timeout" in ended.stderr) == (code, code == 1)
    assert time.monotonic() - began >= 0.2 + TRACEBACK_S


@pytest.fixture
def leader() -> Iterator[Client]:
    client = Client(overlap=True, ranks=2)
    client.loop._life = RankLife(Rank(), client.loop._send)  # type: ignore[arg-type]
    yield client
    client.close()
    client.close_sockets()


def test_rank_0_sends_a_call_to_every_rank_and_each_answer_to_the_frontend(leader: Client) -> None:
    for message in (PingRanks(1, True), WakeRanks(2, 0.0), EndWake()):
        leader.send(message)
        assert leader.plans.poll(DEADLINE_MS)
        assert msgspec.msgpack.decode(leader.plans.recv(), type=RankMessage) == message
    assert [leader.receive(), leader.receive()] == [RankAnswer(1, 0), RankAnswer(2, 0)]
    leader.send_event(RankAnswer(1, 1))
    assert leader.receive() == RankAnswer(1, 1)
