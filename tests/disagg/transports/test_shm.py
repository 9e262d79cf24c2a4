"""Pages arrive in another process's pool, in order; what cannot be written fails with a named error."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec import msgpack

from segue.disagg.layout import heads_of, plan
from segue.disagg.transports import push
from segue.disagg.transports.base import Done, Failed
from segue.errors import PageRangeError, PeerLostError, TransportError
from segue.kvcache.pool import KVShape
from tests.conftest import WaitUntil
from tests.disagg.transports.ranks import (
    LARGE,
    WHOLE,
    Reader,
    ReaderRank,
    Remote,
    Sender,
    WriterRank,
    pairs,
    shape_of_pool,
    wait_for,
)

MakeReader = Callable[..., Reader]
MakeSender = Callable[..., Sender]
MakeRemote = Callable[..., Remote]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:segue")


def test_pages_of_another_process_arrive(reader: Reader, make_remote: MakeRemote) -> None:
    writer = make_remote(WriterRank)
    peer = writer("connect", reader.path, reader.export.blob)
    assert writer("push", peer, pairs((0, 4), (5, 1))) == Done(ticket=1)
    for page, value in enumerate([0, 6, 0, 0, 1, 0, 0]):
        assert reader.pool.data[page].eq(value).all()


def test_a_push_waits_for_its_step_and_the_pushes_before_it(reader: Reader, sender: Sender) -> None:
    peer, step = sender.connect(reader), threading.Event()
    first = sender.transport.push(peer, pairs((0, 0)), lambda: wait_for(step))
    second = sender.transport.push(peer, pairs((1, 1)), lambda: None)
    assert sender.transport.poll() == [] and not reader.pages.any()
    step.set()
    assert sender.wait(second) == Done(ticket=second)
    assert sender.order == [first, second]
    assert reader.pages.tolist() == [1, 2, 0, 0, 0, 0, 0]


def test_a_later_push_overwrites_an_earlier_one(reader: Reader, sender: Sender) -> None:
    peer = sender.connect(reader)
    tickets = [sender.transport.push(peer, pairs((page, 3)), lambda: None) for page in (0, 1, 2)]
    sender.wait(tickets[-1])
    assert reader.pages[3] == 3


def test_a_push_whose_step_failed_writes_nothing(reader: Reader, sender: Sender) -> None:
    def fail() -> None:
        raise RuntimeError("the device is lost")

    peer = sender.connect(reader)
    event = sender.push(peer, pairs((0, 0)), fail)
    assert isinstance(event, Failed) and "the device is lost" in event.error.message
    assert not reader.pages.any()
    assert sender.push(peer, pairs((0, 0))) == Done(ticket=2)


@pytest.mark.parametrize("page", [-1, 6, 7])  # 6 is the scratch page
@pytest.mark.parametrize("which", ["source", "target"])
def test_pages_that_a_pool_does_not_have_are_refused_before_anything_is_written(
    reader: Reader, sender: Sender, which: str, page: int
) -> None:
    peer = sender.connect(reader)
    wrong = (page, 1) if which == "source" else (1, page)
    with pytest.raises(PageRangeError, match=f"{which} page {page} .* are 0 to 5"):
        sender.transport.push(peer, pairs((0, 0), wrong), lambda: None)
    sender.push(peer, pairs((2, 2)))  # what was posted before has ended
    assert reader.pages.tolist() == [0, 0, 3, 0, 0, 0, 0]


def test_the_pools_may_have_different_numbers_of_pages(make_reader: MakeReader, sender: Sender) -> None:
    reader = make_reader(shape_of_pool(num_pages=9))
    peer = sender.connect(reader)
    assert sender.push(peer, pairs((5, 8))) == Done(ticket=1)
    with pytest.raises(PageRangeError, match=r"target page 9 .* are 0 to 8"):
        sender.transport.push(peer, pairs((5, 9)), lambda: None)


@pytest.mark.parametrize(
    ("p_tp", "d_tp", "kv_heads"), [(1, 2, 4), (4, 2, 4), (4, 1, 2), (1, 4, 2), (2, 8, 4)]
)
def test_ranks_of_unequal_tensor_parallelism_get_their_heads(
    make_reader: MakeReader, make_sender: MakeSender, p_tp: int, d_tp: int, kv_heads: int
) -> None:
    whole = torch.randint(1, 256, (7, 3, 2, 4, kv_heads, 8), dtype=torch.uint8)

    def shape(tp: int) -> KVShape:
        return shape_of_pool(num_kv_heads=len(heads_of(0, tp, kv_heads)))

    readers = [make_reader(shape(d_tp)) for _ in range(d_tp)]
    senders = [make_sender(shape(p_tp)) for _ in range(p_tp)]
    for rank, sender in enumerate(senders):
        sender.pool.data.copy_(whole[..., list(heads_of(rank, p_tp, kv_heads)), :])
    for route in plan(p_tp, d_tp, kv_heads):
        sender = senders[route.source_rank]
        sender.push(sender.connect(readers[route.target_rank], route), pairs((0, 5), (4, 2)))
    for rank, reader in enumerate(readers):
        expected = torch.zeros_like(reader.pool.data)
        expected[[5, 2]] = whole[[0, 4]][..., list(heads_of(rank, d_tp, kv_heads)), :]
        assert torch.equal(reader.pool.data, expected)


@pytest.mark.parametrize(
    ("name", "sizes"), [("page_size", {"page_size": 8}), ("head_bytes", {"head_dim": 4})]
)
def test_a_pool_with_other_pages_is_refused(
    make_reader: MakeReader, sender: Sender, name: str, sizes: dict[str, int]
) -> None:
    with pytest.raises(TransportError, match=f"{name}=.* must be equal"):
        sender.connect(make_reader(shape_of_pool(**sizes)))


def test_a_wrong_token_is_refused(make_reader: MakeReader, sender: Sender) -> None:
    reader, other = make_reader(), make_reader()
    with pytest.raises(TransportError, match="refuses this writer: its token is wrong"):
        sender.transport.connect(reader.path, other.export.blob, WHOLE, "session", time.monotonic())
    assert reader.export.writers() == []


def test_an_offer_that_cannot_be_read_is_refused(reader: Reader, sender: Sender) -> None:
    with pytest.raises(TransportError, match="cannot be read"):
        sender.transport.connect(reader.path, b"\x00", WHOLE, "session", time.monotonic())


def test_a_reader_that_is_not_there_is_named(reader: Reader, sender: Sender) -> None:
    reader.export.close()
    with pytest.raises(TransportError, match=f"{reader.path}.* does not answer .*No such file"):
        sender.connect(reader)


def test_a_reader_that_does_not_answer_is_given_up(
    make_remote: MakeRemote,
    sender: Sender,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: WaitUntil,
) -> None:
    reader = make_remote(ReaderRank)
    path = str(tmp_path / "stopped")
    blob = reader("export", path)
    reader.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, reader.process.pid, os.WSTOPPED | os.WNOWAIT)
    monkeypatch.setattr(push, "CONNECT_S", 0.2)
    gc.collect()  # what earlier tests have left would go meanwhile
    before = descriptors()
    with pytest.raises(TransportError, match=r"does not answer .*timed out"):
        sender.transport.connect(path, blob, WHOLE, "session", time.monotonic())
    monkeypatch.undo()
    assert descriptors() == before
    reader.process.send_signal(signal.SIGCONT)
    # Later connections are served later.
    sender.transport.disconnect(sender.transport.connect(path, blob, WHOLE, "session", time.monotonic()))
    wait_until(lambda: [writer.number for writer in reader("gone")] == [1, 2])


def test_memory_of_another_size_than_offered_is_refused(
    reader: Reader, sender: Sender, wait_until: WaitUntil
) -> None:
    token, num_pages, shape = msgpack.decode(reader.export.blob)
    gc.collect()  # what earlier tests have left would go meanwhile
    before = descriptors(), mappings()
    with pytest.raises(TransportError, match="cannot be mapped"):
        sender.transport.connect(
            reader.path, msgpack.encode([token, num_pages + 1, shape]), WHOLE, "session", time.monotonic()
        )
    wait_until(lambda: (descriptors(), mappings()) == before and not reader.export.writers())


def test_pushes_to_a_reader_that_was_killed_fail(
    make_remote: MakeRemote, make_sender: MakeSender, tmp_path: Path, wait_until: WaitUntil
) -> None:
    reader, sender = make_remote(ReaderRank, LARGE), make_sender(LARGE)
    path = str(tmp_path / "killed")
    peer = sender.transport.connect(path, reader("export", path), WHOLE, "session", time.monotonic())
    assert isinstance(sender.push(peer, pairs((0, 0))), Done)

    def kill() -> None:
        reader.process.kill()
        reader.process.wait()

    tickets = [sender.transport.push(peer, pairs((0, 0)), after) for after in (kill, lambda: None)]
    for ticket in tickets:
        event = sender.wait(ticket)
        assert isinstance(event, Failed) and isinstance(event.error, PeerLostError)
    gc.collect()  # what earlier tests have left would go meanwhile
    before = descriptors()
    sender.transport.disconnect(peer)
    wait_until(lambda: sender.transport.quiet(peer) and descriptors() == before - 2)


def test_a_push_during_which_the_reader_closes_fails(
    make_reader: MakeReader, make_sender: MakeSender, wait_until: WaitUntil
) -> None:
    reader, sender = make_reader(LARGE), make_sender(LARGE)
    peer = sender.connect(reader)
    ticket = sender.transport.push(peer, pairs(*[(0, 0)] * 200), lambda: None)
    wait_until(lambda: reader.pages[0] == 1, what="the copy's begin")
    reader.export.close()
    event = sender.wait(ticket)
    assert isinstance(event, Failed) and isinstance(event.error, PeerLostError)
    assert reader.path in event.error.message


def test_a_peer_is_quiet_when_no_push_to_it_is_left(reader: Reader, sender: Sender) -> None:
    peer, other, step = sender.connect(reader), sender.connect(reader), threading.Event()
    ticket = sender.transport.push(peer, pairs((0, 0)), lambda: wait_for(step))
    assert not sender.transport.quiet(peer) and sender.transport.quiet(other)
    step.set()
    sender.wait(ticket)
    assert sender.transport.quiet(peer)


def test_a_disconnect_comes_behind_what_is_posted(
    reader: Reader, sender: Sender, wait_until: WaitUntil
) -> None:
    peer, step = sender.connect(reader), threading.Event()
    ticket = sender.transport.push(peer, pairs((0, 0)), lambda: wait_for(step))
    sender.transport.disconnect(peer)
    assert not sender.transport.quiet(peer) and len(reader.export.writers()) == 1
    step.set()
    assert sender.wait(ticket) == Done(ticket=ticket)
    wait_until(lambda: sender.transport.quiet(peer))


def test_nothing_is_pushed_to_a_peer_that_is_disconnected(reader: Reader, sender: Sender) -> None:
    peer = sender.connect(reader)
    for _ in range(2):  # the second one changes nothing
        sender.transport.disconnect(peer)
    with pytest.raises(TransportError, match="peer 1 is not connected"):
        sender.transport.push(peer, pairs((0, 0)), lambda: None)


def test_closing_awaits_what_is_posted(reader: Reader, make_sender: MakeSender) -> None:
    sender = make_sender()
    peer = sender.connect(reader)
    for page in range(6):
        sender.transport.push(peer, pairs((page, page)), lambda: None)
    sender.transport.close()
    assert reader.pages.tolist() == [1, 2, 3, 4, 5, 6, 0]
    assert len(sender.transport.poll()) == 6


def test_a_hundred_connections_leave_no_descriptor_and_no_mapping(
    reader: Reader, sender: Sender, wait_until: WaitUntil
) -> None:
    gc.collect()  # what earlier tests have left would go meanwhile
    before = descriptors(), mappings()
    for i in range(100):
        peer = sender.connect(reader)
        sender.push(peer, pairs((i % 6, i % 6)))
        assert (descriptors(), mappings()) > before
        sender.transport.disconnect(peer)
        wait_until(lambda peer=peer: sender.transport.quiet(peer) and not reader.export.writers())
    wait_until(lambda: (descriptors(), mappings()) == before, what="the state of before")
    assert [writer.number for writer in reader.gone] == list(range(1, 101))


def test_an_exported_pool_that_is_closed_leaves_no_descriptor(
    make_reader: MakeReader, sender: Sender
) -> None:
    gc.collect()  # what earlier tests have left would go meanwhile
    before = descriptors()
    reader = make_reader()
    sender.connect(reader)
    sender.transport.close()
    reader.export.close()
    # The caller's descriptor, and that of its mapping, which lasts as long as the pool.
    assert descriptors() == before + 2


def test_a_blob_is_small(reader: Reader) -> None:
    assert len(reader.export.blob) < 200
