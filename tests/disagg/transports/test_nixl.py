"""Pages arrive in another rank's pool by NIXL, over TCP; whoever is lost, each push ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from segue.disagg.transports import nixl, nixl_agent
from segue.disagg.transports.base import Done, Failed, Peer
from segue.disagg.transports.nixl import NixlTransport
from segue.disagg.transports.nixl_agent import has_nixl
from segue.errors import ConfigError, PageRangeError, TransportError
from segue.kvcache.pool import KVShape
from tests.conftest import WaitUntil
from tests.disagg.transports.nixl_ranks import NixlReader, NixlReaderRank, NixlWriterRank
from tests.disagg.transports.ranks import (
    LARGE,
    WHOLE,
    Remote,
    Sender,
    filled_pool,
    pairs,
    shape_of_pool,
    wait_for,
)

pytestmark = pytest.mark.skipif(not has_nixl(), reason="NIXL is not installed")
MakeReader = Callable[..., NixlReader]
MakeSender = Callable[..., Sender]
MakeRemote = Callable[..., Remote]


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture
def make_nixl_reader(stack: ExitStack) -> MakeReader:
    def make(shape: KVShape | None = None) -> NixlReader:
        reader = NixlReader(shape)
        stack.callback(reader.export.close)
        return reader

    return make


@pytest.fixture
def make_nixl_sender(stack: ExitStack) -> MakeSender:
    def make(shape: KVShape | None = None) -> Sender:
        sender = Sender(filled_pool(shape or shape_of_pool()), make=NixlTransport)
        stack.callback(sender.transport.close)
        return sender

    return make


@pytest.fixture
def reader(make_nixl_reader: MakeReader) -> NixlReader:
    return make_nixl_reader()


@pytest.fixture
def sender(make_nixl_sender: MakeSender) -> Sender:
    return make_nixl_sender()


@pytest.fixture
def stopped(make_remote: MakeRemote) -> Iterator[tuple[Remote, bytes]]:
    """A reader's process that is stopped, and its blob: what is pushed to it does not arrive."""
    remote = make_remote(NixlReaderRank, LARGE)
    blob = remote("blob")
    os.kill(remote.process.pid, signal.SIGSTOP)
    yield remote, blob
    os.kill(remote.process.pid, signal.SIGCONT)


def connect(sender: Sender, blob: bytes) -> Peer:
    return sender.transport.connect("", blob, WHOLE, "s", time.monotonic())


def test_pages_of_another_process_arrive(reader: NixlReader, make_remote: MakeRemote) -> None:
    writer = make_remote(NixlWriterRank)
    peer = writer("connect", reader.export.blob)
    assert writer("push", peer, pairs((0, 4), (5, 1))) == Done(ticket=1)
    for page, value in enumerate([0, 6, 0, 0, 1, 0, 0]):
        assert reader.pool.data[page].eq(value).all()


def test_large_pages_arrive_whole(make_nixl_sender: MakeSender, make_nixl_reader: MakeReader) -> None:
    sender, reader = make_nixl_sender(LARGE), make_nixl_reader(LARGE)
    assert sender.push(connect(sender, reader.export.blob), pairs((0, 2), (2, 1))) == Done(ticket=1)
    assert all(reader.pool.data[page].eq(value).all() for page, value in enumerate([0, 3, 1, 0]))


def test_a_push_waits_for_its_step(reader: NixlReader, sender: Sender) -> None:
    peer, step = connect(sender, reader.export.blob), threading.Event()
    ticket = sender.transport.push(peer, pairs((0, 0)), lambda: wait_for(step))
    assert sender.transport.poll() == [] and not reader.pages.any()
    step.set()
    assert sender.wait(ticket) == Done(ticket=ticket)
    assert reader.pages[0] == 1


def test_a_push_goes_on_while_the_next_one_waits_for_its_step(reader: NixlReader, sender: Sender) -> None:
    peer, step = connect(sender, reader.export.blob), threading.Event()
    first = sender.transport.push(peer, pairs((0, 0)), lambda: None)
    second = sender.transport.push(peer, pairs((1, 1)), lambda: wait_for(step))
    assert sender.wait(first) == Done(ticket=first)
    step.set()
    assert sender.wait(second) == Done(ticket=second)


def test_a_push_whose_step_failed_writes_nothing(reader: NixlReader, sender: Sender) -> None:
    def fail() -> None:
        raise RuntimeError("the device is lost")

    peer = connect(sender, reader.export.blob)
    event = sender.push(peer, pairs((0, 0)), fail)
    assert isinstance(event, Failed) and "the device is lost" in event.error.message
    assert not reader.pages.any()
    assert sender.push(peer, pairs((0, 0))) == Done(ticket=2)


@pytest.mark.parametrize("page", [-1, 6, 7])  # 6 is the scratch page
@pytest.mark.parametrize("which", ["source", "target"])
def test_pages_that_a_pool_does_not_have_are_refused(
    reader: NixlReader, sender: Sender, which: str, page: int
) -> None:
    peer = connect(sender, reader.export.blob)
    wrong = (page, 1) if which == "source" else (1, page)
    with pytest.raises(PageRangeError, match=f"{which} page {page} .* are 0 to 5"):
        sender.transport.push(peer, pairs((0, 0), wrong), lambda: None)


def test_a_pool_with_other_pages_is_refused(make_nixl_reader: MakeReader, sender: Sender) -> None:
    with pytest.raises(TransportError, match=r"page_size=.* must be equal"):
        connect(sender, make_nixl_reader(shape_of_pool(page_size=8)).export.blob)


def test_an_offer_of_another_version_is_refused(sender: Sender) -> None:
    with pytest.raises(TransportError, match="must run the same version of Segue"):
        connect(sender, b"\x93\x01\x02\x03")


def test_several_peers_share_a_connection(reader: NixlReader, sender: Sender) -> None:
    first, second = connect(sender, reader.export.blob), connect(sender, reader.export.blob)
    sender.push(first, pairs((0, 0)))
    sender.transport.disconnect(first)
    assert isinstance(sender.push(second, pairs((1, 1))), Done)
    with pytest.raises(TransportError, match=f"peer {first} is not connected"):
        sender.transport.push(first, pairs((2, 2)), lambda: None)
    assert reader.pages.tolist() == [1, 2, 0, 0, 0, 0, 0]


def test_a_pool_is_connected_again(reader: NixlReader, sender: Sender, wait_until: WaitUntil) -> None:
    for page in range(3):
        peer = connect(sender, reader.export.blob)
        assert isinstance(sender.push(peer, pairs((page, page))), Done)
        sender.transport.disconnect(peer)
        wait_until(lambda peer=peer: sender.transport.quiet(peer), what="the peer is given up")
    assert reader.pages.tolist() == [1, 2, 3, 0, 0, 0, 0]


def test_a_peer_that_leaves_gets_what_was_pushed_before(
    stopped: tuple[Remote, bytes],
    make_nixl_sender: MakeSender,
    make_nixl_reader: MakeReader,
    wait_until: WaitUntil,
) -> None:
    (remote, blob), sender = stopped, make_nixl_sender(LARGE)
    other = connect(sender, make_nixl_reader(LARGE).export.blob)
    peer = connect(sender, blob)
    ticket = sender.transport.push(peer, pairs((0, 1)), lambda: None)
    sender.transport.disconnect(peer)
    assert isinstance(sender.push(other, pairs((0, 0))), Done)  # so that the peer's end has been dealt with
    assert not sender.transport.quiet(peer)
    os.kill(remote.process.pid, signal.SIGCONT)
    assert sender.wait(ticket) == Done(ticket=ticket)
    wait_until(lambda: sender.transport.quiet(peer), what="the peer is given up")
    assert remote("pages") == [0, 1, 0, 0]


def test_a_push_to_a_killed_reader_fails_and_the_next_reader_gets_its_pages(
    stopped: tuple[Remote, bytes], make_nixl_sender: MakeSender, make_nixl_reader: MakeReader
) -> None:
    (remote, blob), sender = stopped, make_nixl_sender(LARGE)
    peer = connect(sender, blob)
    tickets = [sender.transport.push(peer, pairs((page, page)), lambda: None) for page in range(3)]
    assert sender.transport.poll() == []
    remote.process.kill()
    for ticket in tickets:
        assert isinstance(sender.wait(ticket), Failed)
    again = sender.push(peer, pairs((0, 0)))
    assert isinstance(again, Failed) and "see whether the other worker runs" in again.error.message
    sender.transport.disconnect(peer)
    reader = make_nixl_reader(LARGE)
    assert isinstance(sender.push(connect(sender, reader.export.blob), pairs((0, 0))), Done)
    assert reader.pages.tolist() == [1, 0, 0, 0]


def test_a_reader_that_hangs_does_not_hold_up_the_end(
    stopped: tuple[Remote, bytes],
    make_nixl_sender: MakeSender,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(nixl, "CLOSE_S", 0.2)
    sender = make_nixl_sender(LARGE)
    sender.transport.push(connect(sender, stopped[1]), pairs((0, 0)), lambda: None)
    sender.transport.close()
    assert "1 pushes of KV pages have not ended within 0.2 s" in caplog.text


def test_an_idle_reader_and_writer_leave_the_cores_alone(
    reader: NixlReader, sender: Sender, wait_until: WaitUntil
) -> None:
    peer = connect(sender, reader.export.blob)
    sender.push(peer, pairs((0, 0)))

    def are_idle() -> bool:
        begin = time.process_time()
        time.sleep(1.0)  # the measured time
        return time.process_time() - begin < 0.15

    wait_until(are_idle, timeout=15, what="no thread polls while no pages move")


def test_without_the_library_an_engine_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    tomorrow = replace(nixl_agent.NIXL, modules=("nixl_of_tomorrow",))
    monkeypatch.setattr(nixl_agent, "NIXL", tomorrow)
    with pytest.raises(ConfigError, match=r"pip install 'segue\[nixl\]', or use --pd-transport shm"):
        Sender(filled_pool(shape_of_pool()), make=NixlTransport)
    with pytest.raises(ConfigError, match="nixl_of_tomorrow"):
        NixlReader()
