"""Ranks of unequal tensor parallelism get their heads by NIXL, over TCP and from process to process."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any

import pytest
import torch

from segue.disagg.layout import HeadRoute, heads_of, plan
from segue.disagg.transports import nixl_staging
from segue.disagg.transports.base import Done, Failed, Peer
from segue.disagg.transports.nixl import NixlTransport
from segue.disagg.transports.nixl_agent import has_nixl
from segue.disagg.transports.pieces import HostHeads
from segue.errors import TransportError
from segue.kvcache.pool import KVPool, KVShape
from tests.conftest import WaitUntil
from tests.disagg.transports.nixl_ranks import NixlReadersRank
from tests.disagg.transports.ranks import Remote, Sender, filled_pool, pairs, shape_of_pool

pytestmark = pytest.mark.skipif(not has_nixl(), reason="NIXL is not installed")

SHORT = [(1, 2, 4), (2, 1, 4), (4, 2, 8), (2, 4, 2), (2, 3, 6)]  # the last one splits pages on both sides
LONG = [
    (p_tp, d_tp, kv_heads)
    for p_tp, d_tp, kv_heads in product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8))
    if p_tp != d_tp and (p_tp, d_tp, kv_heads) not in SHORT
]
NUM_PAGES = 40
PAGES = [(0, 5), (4, 2), (39, 38), *((page, page) for page in range(6, 30))]
HALF = plan(1, 2, kv_heads=2)  # from one rank with two heads to two ranks with one each
WIDE, NARROW = (shape_of_pool(num_pages=6, num_kv_heads=heads, head_dim=256 << 10) for heads in (2, 1))
SMALL = shape_of_pool(num_kv_heads=1)
MakeRemote = Callable[..., Remote]


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture(scope="module")
def readers() -> Any:
    """A process in which pools are made and read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        remote = Remote(NixlReadersRank, shape_of_pool())
    yield remote
    remote.end()


@pytest.fixture
def own_readers(make_remote: MakeRemote) -> Remote:
    """The same in a process that the test may stop or kill."""
    return make_remote(NixlReadersRank)


@pytest.fixture
def make_sender(stack: ExitStack) -> Callable[[KVPool], Sender]:
    def make(pool: KVPool) -> Sender:
        sender = Sender(pool, make=NixlTransport)
        stack.callback(sender.transport.close)
        return sender

    return make


MakeSender = Callable[[KVPool], Sender]


def connect(sender: Sender, blob: bytes, route: HeadRoute) -> Peer:
    return sender.transport.connect("", blob, route, "s", time.monotonic())


def staging(sender: Sender, peer: Peer) -> nixl_staging.Staging:
    found: nixl_staging.Staging = sender.transport._targets[peer].staging  # type: ignore[attr-defined]
    return found


def first_bytes(remote: Remote, index: int, shape: KVShape) -> list[int]:
    """The first byte of each page of a pool, all of whose pages have one value each."""
    pages = torch.frombuffer(bytearray(remote("data", index)), dtype=torch.uint8).view(
        shape.num_pages + 1, -1
    )
    assert pages.eq(pages[:, :1]).all(), "a page has bytes of another one"
    found: list[int] = pages[:, 0].tolist()
    return found


@pytest.mark.parametrize(
    ("p_tp", "d_tp", "kv_heads"),
    [*SHORT, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)],
)
def test_every_rank_gets_its_heads(
    readers: Remote,
    make_sender: MakeSender,
    monkeypatch: pytest.MonkeyPatch,
    p_tp: int,
    d_tp: int,
    kv_heads: int,
) -> None:
    def shape(tp: int) -> KVShape:
        heads = len(heads_of(0, tp, kv_heads))
        return shape_of_pool(num_kv_heads=heads, num_pages=NUM_PAGES, page_size=16, head_dim=16)

    monkeypatch.setattr(nixl_staging, "STAGING_BYTES", 20_000)  # less than the pages of a push have
    whole = torch.randint(1, 256, (NUM_PAGES + 1, 3, 2, 16, kv_heads, 16), dtype=torch.uint8)
    senders = []
    for rank in range(p_tp):
        pool = filled_pool(shape(p_tp))
        pool.data.copy_(whole[..., list(heads_of(rank, p_tp, kv_heads)), :])
        senders.append(make_sender(pool))
    blobs = [readers("add", shape(d_tp)) for _ in range(d_tp)]
    posted, pieces = [], [list[tuple[int, int]]() for _ in range(d_tp)]
    for route in plan(p_tp, d_tp, kv_heads):
        sender = senders[route.source_rank]
        peer = connect(sender, blobs[route.target_rank], route)
        posted.append((sender, sender.transport.push(peer, pairs(*PAGES), lambda: None)))
        pieces[route.target_rank].append((route.target_head, route.num_heads))
    assert all(isinstance(sender.wait(ticket), Done) for sender, ticket in posted)
    sources, targets = (list(each) for each in zip(*PAGES, strict=True))
    for rank in range(d_tp):
        if len(pieces[rank]) > 1:
            readers("spread", rank, targets, pieces[rank])
        expected = torch.zeros((NUM_PAGES + 1, 3, 2, 16, shape(d_tp).num_kv_heads, 16), dtype=torch.uint8)
        expected[targets] = whole[sources][..., list(heads_of(rank, d_tp, kv_heads)), :]
        assert readers("data", rank) == expected.numpy().tobytes()
    readers("end_all")


def test_memory_for_pieces_is_used_again_only_when_its_transfer_has_ended(
    own_readers: Remote, make_sender: MakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is stopped, so most bytes of the first pieces have not been read when the others are due."""
    monkeypatch.setattr(nixl_staging, "STAGING_BYTES", 0)
    sender = make_sender(filled_pool(WIDE))
    blobs = [own_readers("add", NARROW) for _ in HALF]
    peers = [connect(sender, blob, route) for blob, route in zip(blobs, HALF, strict=True)]
    assert [len(staging(sender, peer).staged.data) for peer in peers] == [2, 2]
    os.kill(own_readers.process.pid, signal.SIGSTOP)
    tickets = [
        sender.transport.push(peer, pairs(*((page, 5 - page) for page in order)), lambda: None)
        for order in ((0, 1, 2), (5, 4, 3))
        for peer in peers
    ]
    assert sender.transport.poll() == []
    os.kill(own_readers.process.pid, signal.SIGCONT)
    assert all(isinstance(sender.wait(ticket), Done) for ticket in tickets)
    for index in range(2):
        assert first_bytes(own_readers, index, NARROW) == [6, 5, 4, 3, 2, 1, 0]


@pytest.mark.slow
def test_a_peer_that_hangs_does_not_hold_up_the_others_and_its_end_fails_its_pushes_alone(
    readers: Remote, own_readers: Remote, make_sender: MakeSender
) -> None:
    sender, pages = make_sender(filled_pool(WIDE)), pairs(*((page, page) for page in range(6)))
    hanging = connect(sender, own_readers("add", NARROW), HALF[0])
    other = connect(sender, readers("add", NARROW), HALF[1])
    os.kill(own_readers.process.pid, signal.SIGSTOP)
    tickets = [sender.transport.push(hanging, pages, lambda: None) for _ in range(2)]
    assert sender.push(other, pages) == Done(ticket=3)
    assert first_bytes(readers, 0, NARROW) == [1, 2, 3, 4, 5, 6, 0]
    assert not sender.transport.quiet(hanging)
    own_readers.process.kill()
    assert all(isinstance(sender.wait(ticket), Failed) for ticket in tickets)
    assert isinstance(sender.push(hanging, pairs((0, 0))), Failed)
    assert sender.push(other, pairs((4, 0))) == Done(ticket=5)
    assert first_bytes(readers, 0, NARROW) == [5, 2, 3, 4, 5, 6, 0]
    readers("end_all")


def test_heads_are_gathered_behind_the_step_that_computes_them(
    readers: Remote, make_sender: MakeSender
) -> None:
    sender = make_sender(filled_pool(shape_of_pool()))
    peer = connect(sender, readers("add", SMALL), HALF[1])

    def compute() -> None:
        sender.pool.data[3] = 77

    assert isinstance(sender.push(peer, pairs((3, 0)), compute), Done)
    assert first_bytes(readers, 0, SMALL) == [77, 0, 0, 0, 0, 0, 0]
    readers("end_all")


def test_heads_that_cannot_be_gathered_fail_their_push_alone(
    readers: Remote, make_sender: MakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no memory of the GPU is left")

    sender = make_sender(filled_pool(WIDE))
    peer = connect(sender, readers("add", NARROW), HALF[0])
    with monkeypatch.context() as patch:
        patch.setattr(HostHeads, "gather", fail)
        event = sender.push(peer, pairs((0, 0)))
    assert isinstance(event, Failed) and "no memory of the GPU is left" in event.error.message
    assert sender.push(peer, pairs((1, 1))) == Done(ticket=2)
    assert first_bytes(readers, 0, NARROW) == [0, 2, 0, 0, 0, 0, 0]
    readers("end_all")


def test_memory_for_pieces_is_given_up_with_its_peer(
    readers: Remote, make_sender: MakeSender, wait_until: WaitUntil
) -> None:
    sender = make_sender(filled_pool(shape_of_pool()))
    peer = connect(sender, readers("add", SMALL), HALF[0])
    memory = weakref.ref(staging(sender, peer).staged.data)
    assert isinstance(sender.push(peer, pairs((0, 0))), Done)
    sender.transport.disconnect(peer)

    def is_free() -> bool:
        gc.collect()
        return memory() is None

    wait_until(is_free, what="the memory is free")
    readers("end_all")


def test_whole_pages_of_the_writer_need_no_memory(readers: Remote, make_sender: MakeSender) -> None:
    sender = make_sender(filled_pool(NARROW))
    peer = connect(sender, readers("add", WIDE), plan(2, 1, kv_heads=2)[0])
    assert staging(sender, peer) is None
    readers("end_all")


def test_a_pool_that_is_open_for_other_heads_is_refused(readers: Remote, make_sender: MakeSender) -> None:
    sender, blob = make_sender(filled_pool(NARROW)), readers("add", WIDE)
    first, second = plan(2, 1, kv_heads=2)
    connect(sender, blob, first)
    with pytest.raises(TransportError, match="one process has one --tp"):
        connect(sender, blob, second)
    readers("end_all")
