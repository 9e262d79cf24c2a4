"""A rank pushes pages into pools of other ranks, or tells when nobody can write to its own any more."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from segue.disagg.checksums import checksums_of
from segue.disagg.layout import HeadRoute
from segue.disagg.mover import Mover, PageReceiver
from segue.disagg.page_sender import PageSender
from segue.disagg.preparer import PagePreparer
from segue.disagg.transports.base import Peer, Writer
from segue.disagg.transports.export import PoolExport
from segue.disagg.transports.pieces import head_mover
from segue.disagg.transports.push import PushTransport
from segue.disagg.transports.shm import HostPages
from segue.kvcache.pool import KVPool, KVShape
from segue.memory import shared
from segue.messages.kv import (
    BanWriters,
    ConnectPeer,
    DisconnectPeer,
    KVEvent,
    PushEnded,
    PushPages,
    RankAddress,
    TransportOffer,
    WritersGone,
)
from tests.conftest import WaitUntil
from tests.disagg.transports.ranks import filled_pool, shape_of_pool, wait_for


class SlowTransport(PushTransport):
    """Connects once the test says so."""

    may_connect: threading.Event

    def connect(self, path: str, blob: bytes, route: HeadRoute, session: str, opened_at: float) -> Peer:
        wait_for(self.may_connect)
        return super().connect(path, blob, route, session, opened_at)


class DecodeRank:
    """A pool in shared memory that others write to, behind a mover."""

    def __init__(self, path: Path, shape: KVShape | None = None, rank: int = 0) -> None:
        shape = shape or shape_of_pool()
        self.path = str(path)
        self.descriptor = shared.create(shape.num_bytes)
        memory = shared.map_shared(self.descriptor, shape.num_bytes)
        self.pool = KVPool(shape, torch.frombuffer(memory, dtype=torch.uint8))
        self.events: list[KVEvent] = []
        self.gone_writers: list[Writer] = []
        receiver = PageReceiver(self._export, self.events.append)
        preparer = PagePreparer(head_mover(self.pool), checksums_of(self.pool), self.events.append, rank=rank)
        self.mover = Mover(None, receiver, preparer=preparer)

    def _export(self, on_writer_gone: Callable[[Writer], None]) -> PoolExport:
        def note(writer: Writer) -> None:
            on_writer_gone(writer)
            self.gone_writers.append(writer)

        self.export = PoolExport(self.pool, self.descriptor, self.path, note)
        return self.export

    @property
    def pages(self) -> Tensor:
        """The first byte of each page, the scratch page included."""
        return self.pool.data.flatten(1)[:, 0]

    @property
    def address(self) -> RankAddress:
        return RankAddress(path=self.path, device="", offers=[TransportOffer("shm", self.export.blob)])

    def close(self) -> None:
        self.mover.close()
        os.close(self.descriptor)


class PrefillRank:
    """A filled pool behind a mover; its steps end when the test says so."""

    def __init__(
        self, *, rank: int = 0, tp: int = 1, has_checksums: bool = False, shape: KVShape | None = None
    ) -> None:
        self.pool = filled_pool(shape or shape_of_pool())
        self.events: list[KVEvent] = []
        self.steps = {0: threading.Event(), 1: threading.Event()}
        self.steps[0].set()
        self.may_connect = threading.Event()
        self.may_connect.set()
        self.tickets = itertools.count(1)
        self.sender = PageSender(
            {"shm": self._make},
            rank=rank,
            tp=tp,
            queue_behind=self._await_step,
            send=self.events.append,
            checksums=checksums_of(self.pool) if has_checksums else None,
        )
        self.mover = Mover(self.sender, None)

    def _make(self, on_ready: Callable[[], None]) -> SlowTransport:
        transport = SlowTransport(self.pool, HostPages(self.pool), on_ready)
        transport.may_connect = self.may_connect
        return transport

    def _await_step(self, step: int) -> None:
        if step == 99:
            raise RuntimeError("the device is lost")
        wait_for(self.steps[step])

    def connect(self, *ranks: DecodeRank, session: str = "s", kv_heads: int = 2) -> None:
        addresses = [rank.address for rank in ranks]
        command = ConnectPeer(
            session=session,
            opened_at=time.monotonic(),
            transport="shm",
            tp=len(ranks),
            kv_heads=kv_heads,
            ranks=addresses,
        )
        self.mover.handle(command)

    def push(self, sources: list[int], targets: list[int], *, after: int = 0, session: str = "s") -> int:
        ticket = next(self.tickets)
        self.mover.handle(
            PushPages(ticket=ticket, session=session, sources=sources, targets=targets, after_step=after)
        )
        return ticket

    def close(self) -> None:
        for event in (*self.steps.values(), self.may_connect):
            event.set()
        self.mover.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def decode(stack: ExitStack, tmp_path: Path) -> DecodeRank:
    rank = DecodeRank(tmp_path / "kv0")
    stack.callback(rank.close)
    return rank


@pytest.fixture
def prefill(stack: ExitStack) -> PrefillRank:
    rank = PrefillRank()
    stack.callback(rank.close)
    return rank


def ended(rank: PrefillRank, wait_until: WaitUntil, count: int = 1) -> list[PushEnded]:
    """The ends of pushes, in order, once there are so many."""
    wait_until(lambda: len(rank.events) >= count, what=f"the end of {count} pushes")
    assert len(rank.events) == count
    return told(rank)


def told(rank: PrefillRank) -> list[PushEnded]:
    """The ends of pushes so far, all of which came just now, as if they had come at 0."""
    found = [event for event in rank.events if isinstance(event, PushEnded)]
    assert all(0 <= time.monotonic() - event.at < 60 for event in found)
    return [msgspec.structs.replace(event, at=0.0) for event in found]


def test_pages_land_and_the_push_is_reported(
    prefill: PrefillRank, decode: DecodeRank, wait_until: WaitUntil
) -> None:
    prefill.connect(decode)
    ticket = prefill.push([0, 5], [4, 1])
    assert ended(prefill, wait_until) == [PushEnded(ticket=ticket, at=0.0)]
    assert decode.pages.tolist() == [0, 6, 0, 0, 1, 0, 0]


def test_a_push_waits_for_its_step_and_later_pushes_wait_for_it(
    prefill: PrefillRank, decode: DecodeRank, wait_until: WaitUntil
) -> None:
    prefill.connect(decode)
    tickets = [prefill.push([0], [3], after=1), prefill.push([1], [3])]
    wait_until(decode.export.writers, what="the connection")
    assert prefill.events == [] and not decode.pages.any()
    prefill.steps[1].set()
    assert [event.ticket for event in ended(prefill, wait_until, 2)] == tickets
    assert decode.pages[3] == 2, "the later push is behind the earlier one"


def test_a_push_whose_step_failed_is_reported_with_the_reason(
    prefill: PrefillRank, decode: DecodeRank, wait_until: WaitUntil
) -> None:
    prefill.connect(decode)
    prefill.push([0], [0], after=99)
    (event,) = ended(prefill, wait_until)
    assert "the device is lost" in event.error and not decode.pages.any()


def test_pages_that_the_pool_does_not_have_are_refused_and_the_next_push_is_done(
    prefill: PrefillRank, decode: DecodeRank, wait_until: WaitUntil
) -> None:
    prefill.connect(decode)
    prefill.push([0, 0], [0, 6])
    prefill.push([2], [2])
    wrong, right = ended(prefill, wait_until, 2)
    assert "target page 6 is not in the KV pool" in wrong.error and right.error == ""
    assert decode.pages.tolist() == [0, 0, 3, 0, 0, 0, 0]


def test_pushes_wait_until_their_pools_are_connected(
    prefill: PrefillRank, decode: DecodeRank, wait_until: WaitUntil
) -> None:
    prefill.may_connect.clear()
    prefill.connect(decode)
    tickets = [prefill.push([page], [3]) for page in (0, 1, 2)]
    assert prefill.events == []
    prefill.may_connect.set()
    assert ended(prefill, wait_until, 3) == [PushEnded(ticket=ticket, at=0.0) for ticket in tickets]
    assert decode.pages[3] == 3, "they are in the order of their commands"


def test_pools_that_cannot_be_connected_fail_all_pushes_of_their_session(
    prefill: PrefillRank, decode: DecodeRank, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
) -> None:
    prefill.may_connect.clear()
    prefill.connect(decode)
    early = prefill.push([0], [0])
    decode.export.close()
    prefill.may_connect.set()
    ended(prefill, wait_until)
    late = prefill.push([0], [0])
    events = ended(prefill, wait_until, 2)
    assert [event.ticket for event in events] == [early, late]
    assert all(f"{decode.path!r} does not answer" in event.error for event in events)
    assert "cannot be pushed to a decode worker" in caplog.text


def test_a_session_that_is_not_connected_any_more_takes_no_push(
    prefill: PrefillRank, decode: DecodeRank, wait_until: WaitUntil
) -> None:
    prefill.connect(decode)
    prefill.mover.handle(DisconnectPeer(session="s"))
    ticket = prefill.push([0], [0])
    assert ended(prefill, wait_until) == [PushEnded(ticket=ticket, at=0.0, error="the connection is lost")]


def test_a_disconnect_comes_behind_what_is_posted(
    prefill: PrefillRank, decode: DecodeRank, wait_until: WaitUntil
) -> None:
    prefill.connect(decode)
    prefill.push([0], [0], after=1)
    wait_until(decode.export.writers, what="the connection")
    prefill.mover.handle(DisconnectPeer(session="s"))
    assert len(decode.export.writers()) == 1
    prefill.steps[1].set()
    assert ended(prefill, wait_until)[0].error == ""
    wait_until(lambda: not decode.export.writers(), what="the disconnect")
    assert decode.pages[0] == 1


def test_a_disconnect_while_pools_are_connected_leaves_no_writer(
    prefill: PrefillRank, decode: DecodeRank, wait_until: WaitUntil
) -> None:
    prefill.may_connect.clear()
    prefill.connect(decode)
    ticket = prefill.push([0], [0])
    prefill.mover.handle(DisconnectPeer(session="s"))
    prefill.may_connect.set()
    assert ended(prefill, wait_until) == [PushEnded(ticket=ticket, at=0.0)]
    wait_until(lambda: [writer.session for writer in decode.gone_writers] == ["s"], what="the disconnect")
    assert not decode.export.writers()


def test_a_push_to_several_ranks_ends_once_when_all_of_them_have_it(
    prefill: PrefillRank, stack: ExitStack, tmp_path: Path, wait_until: WaitUntil
) -> None:
    halves = [DecodeRank(tmp_path / f"kv{rank}", shape_of_pool(num_kv_heads=1)) for rank in range(2)]
    for half in halves:
        stack.callback(half.close)
    prefill.connect(*halves)
    ticket = prefill.push([2], [4])
    assert ended(prefill, wait_until) == [PushEnded(ticket=ticket, at=0.0)]
    for half in halves:
        assert half.pages.tolist() == [0, 0, 0, 0, 3, 0, 0]


def test_a_push_to_several_ranks_of_which_one_is_lost_fails_once(
    prefill: PrefillRank, stack: ExitStack, tmp_path: Path, wait_until: WaitUntil
) -> None:
    halves = [DecodeRank(tmp_path / f"kv{rank}", shape_of_pool(num_kv_heads=1)) for rank in range(2)]
    for half in halves:
        stack.callback(half.close)
    prefill.connect(*halves)
    prefill.push([2], [4], after=1)
    wait_until(lambda: all(half.export.writers() for half in halves), what="both connections")
    halves[0].export.close()
    prefill.steps[1].set()
    (event,) = ended(prefill, wait_until)
    assert halves[0].path in event.error
    assert halves[1].pages[4] == 3, "the other rank has its part"


def test_a_rank_whose_heads_another_one_sends_has_nothing_to_push(
    stack: ExitStack, decode: DecodeRank, wait_until: WaitUntil
) -> None:
    second = PrefillRank(rank=1, tp=2)  # both ranks have the model's only head
    stack.callback(second.close)
    second.connect(decode, kv_heads=1)
    ticket = second.push([0], [0])
    assert ended(second, wait_until) == [PushEnded(ticket=ticket, at=0.0)]
    assert not decode.export.writers() and not decode.pages.any()


def test_a_session_without_writers_is_over_when_it_is_banned(decode: DecodeRank) -> None:
    decode.mover.handle(BanWriters(session="s"))
    assert decode.events == [WritersGone(session="s")]


def test_a_session_with_a_writer_is_over_when_that_writer_has_gone(
    prefill: PrefillRank, decode: DecodeRank, wait_until: WaitUntil
) -> None:
    prefill.connect(decode)
    prefill.connect(decode, session="other")
    wait_until(lambda: len(decode.export.writers()) == 2, what="both connections")
    decode.mover.handle(BanWriters(session="s"))
    assert decode.events == []
    prefill.mover.handle(DisconnectPeer(session="s"))
    wait_until(lambda: decode.events, what="the writer's end")
    assert decode.events == [WritersGone(session="s")]
    assert [writer.session for writer in decode.export.writers()] == ["other"]


def test_a_writer_that_leaves_by_itself_is_not_reported(
    prefill: PrefillRank, decode: DecodeRank, wait_until: WaitUntil
) -> None:
    prefill.connect(decode)
    wait_until(decode.export.writers, what="the connection")
    prefill.mover.handle(DisconnectPeer(session="s"))
    wait_until(lambda: decode.gone_writers, what="the disconnect")
    assert decode.events == []


def test_nobody_is_let_in_for_a_banned_session(
    prefill: PrefillRank, decode: DecodeRank, wait_until: WaitUntil
) -> None:
    decode.mover.handle(BanWriters(session="s"))
    prefill.connect(decode)
    prefill.push([0], [0])
    (event,) = ended(prefill, wait_until)
    assert "refuses this writer" in event.error and not decode.pages.any()


def test_a_rank_without_a_sender_leaves_other_pools_alone(decode: DecodeRank) -> None:
    command = ConnectPeer(
        session="s", opened_at=time.monotonic(), transport="shm", tp=1, kv_heads=2, ranks=[decode.address]
    )
    decode.mover.handle(command)
    decode.mover.handle(DisconnectPeer(session="s"))
    assert not decode.export.writers() and decode.events == []


def test_a_connection_that_is_made_while_the_rank_closes_is_given_up(
    prefill: PrefillRank, decode: DecodeRank, wait_until: WaitUntil
) -> None:
    prefill.may_connect.clear()
    prefill.connect(decode)
    ticket = prefill.push([0], [0])
    prefill.mover.close()
    prefill.may_connect.set()
    (event,) = ended(prefill, wait_until)
    assert event.ticket == ticket and "this worker ends" in event.error
    wait_until(lambda: decode.gone_writers, what="the end of the connection")
    assert decode.pages.tolist() == [0] * 7 and not decode.export.writers()


def test_closing_awaits_what_is_posted(
    prefill: PrefillRank, decode: DecodeRank, wait_until: WaitUntil
) -> None:
    prefill.connect(decode)
    tickets = [prefill.push([0], [0])]
    wait_until(lambda: prefill.events, what="the end of a push: both sides are connected")
    tickets += [prefill.push([page], [page]) for page in range(6)]
    prefill.close()
    assert told(prefill) == [PushEnded(ticket=ticket, at=0.0) for ticket in tickets]
    assert decode.pages.tolist() == [1, 2, 3, 4, 5, 6, 0]
