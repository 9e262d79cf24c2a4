"""KV pages move between GPUs, or between two processes on one GPU, and only into the pages that are meant."""

from __future__ import annotations

import gc
import itertools
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from segue.disagg.layout import HeadRoute, heads_of, plan
from segue.disagg.transports.base import Done, Failed
from segue.errors import PeerLostError, TransportError
from segue.kvcache.pool import KVPool, KVShape
from segue.memory.device_shared import reachable_uuids, visible_uuids
from tests.conftest import WaitUntil
from tests.disagg.transports.ranks import (
    WHOLE,
    Reader,
    ReaderRank,
    Remote,
    Sender,
    WriterRank,
    pairs,
    shape_of_pool,
)

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(180)]

NUM_GPUS = torch.cuda.device_count()
needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason="needs 2 GPUs")
WAYS = [
    pytest.param(("cuda:0", "cuda:0"), id="one GPU"),
    pytest.param(("cuda:0", "cuda:1"), id="two GPUs", marks=needs_two),
]
Way = tuple[str, str]  # the devices of the writer and of the reader


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


class Ranks:
    """Makes readers and writers that end with the test."""

    def __init__(self, way: Way, stack: ExitStack, tmp_path: Path) -> None:
        self.source, self.target = way
        self._stack = stack
        self._tmp_path = tmp_path
        self._numbers = itertools.count()

    @property
    def path(self) -> Path:
        return self._tmp_path / f"rank{next(self._numbers)}"

    def reader(self, shape: KVShape | None = None) -> Reader:
        reader = Reader(self.path, shape, self.target)
        self._stack.callback(reader.close)
        return reader

    def sender(self, shape: KVShape | None = None, *, is_filled: bool = True) -> Sender:
        shape = shape or shape_of_pool()
        pool = KVPool(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8, device=self.source))
        if is_filled:
            for page in range(shape.num_pages + 1):
                pool.data[page] = page + 1
        torch.cuda.synchronize(self.source)
        sender = Sender(pool)
        self._stack.callback(sender.transport.close)
        return sender

    def remote(self, kind: type[WriterRank] | type[ReaderRank], shape: KVShape | None = None) -> Remote:
        device = self.source if kind is WriterRank else self.target
        remote = Remote(kind, shape or shape_of_pool(), device)
        self._stack.callback(remote.end)
        return remote


@pytest.fixture
def ranks(way: Way, stack: ExitStack, tmp_path: Path) -> Ranks:
    return Ranks(way, stack, tmp_path)


def random_(shape: tuple[int, ...], device: str, low: int = 0) -> Tensor:
    """Random bytes: as bfloat16, some are NaN."""
    return torch.randint(low, 256, shape, dtype=torch.uint8, device=device)


def test_pages_of_another_process_arrive(ranks: Ranks) -> None:
    reader, writer = ranks.reader(), ranks.remote(WriterRank)
    peer = writer("connect", reader.path, reader.export.blob)
    assert writer("push", peer, pairs((0, 4), (5, 1))) == Done(ticket=1)
    for page, value in enumerate([0, 6, 0, 0, 1, 0, 0]):
        assert reader.pool.data[page].eq(value).all(), f"page {page}"


def test_an_engine_can_hand_over_to_another_one_in_its_process(ranks: Ranks) -> None:
    reader, sender = ranks.reader(), ranks.sender()
    peer = sender.connect(reader)
    assert sender.push(peer, pairs((2, 3), (1, 0))) == Done(ticket=1)
    assert reader.pages.tolist() == [2, 0, 0, 3, 0, 0, 0]


def test_the_bits_of_every_number_are_copied(ranks: Ranks) -> None:
    """NaN too: the slots of a page that hold no token have whatever was there."""
    shape = shape_of_pool(num_pages=40, head_dim=64)
    reader, sender = ranks.reader(shape), ranks.sender(shape, is_filled=False)
    sender.pool.data.copy_(random_(tuple(sender.pool.data.shape), ranks.source))
    assert sender.pool.data.view(torch.bfloat16).isnan().any()
    torch.cuda.synchronize(ranks.source)
    order = torch.randperm(40).tolist()
    assert isinstance(sender.push(sender.connect(reader), pairs(*enumerate(order))), Done)
    assert torch.equal(reader.pool.data[order].cpu(), sender.pool.data[:40].cpu())
    assert not reader.pool.data[40].any(), "the scratch page is never sent"


@pytest.mark.parametrize(
    ("p_tp", "d_tp", "kv_heads"), [(1, 2, 4), (2, 1, 4), (4, 2, 4), (1, 4, 2), (2, 8, 4)]
)
@pytest.mark.parametrize("head_bytes", [8, 128, 256])
def test_ranks_of_unequal_tensor_parallelism_get_their_heads(
    ranks: Ranks, p_tp: int, d_tp: int, kv_heads: int, head_bytes: int
) -> None:
    def shape(heads: int) -> KVShape:
        return shape_of_pool(num_kv_heads=heads, head_dim=head_bytes, page_size=16, num_pages=9)

    whole = random_((10, 3, 2, 16, kv_heads, head_bytes), "cpu", low=1)
    readers = [ranks.reader(shape(len(heads_of(0, d_tp, kv_heads)))) for _ in range(d_tp)]
    senders = [ranks.sender(shape(len(heads_of(0, p_tp, kv_heads))), is_filled=False) for _ in range(p_tp)]
    for rank, sender in enumerate(senders):
        sender.pool.data.copy_(whole[..., list(heads_of(rank, p_tp, kv_heads)), :])
    torch.cuda.synchronize(ranks.source)
    for route in plan(p_tp, d_tp, kv_heads):
        sender = senders[route.source_rank]
        peer = sender.connect(readers[route.target_rank], route)
        assert isinstance(sender.push(peer, pairs((0, 5), (4, 2), (8, 8))), Done)
    for rank, reader in enumerate(readers):
        expected = torch.zeros(reader.pool.data.shape, dtype=torch.uint8)
        expected[[5, 2, 8]] = whole[[0, 4, 8]][..., list(heads_of(rank, d_tp, kv_heads)), :]
        assert torch.equal(reader.pool.data.cpu(), expected)


@pytest.mark.parametrize("num_heads", [2, 1], ids=["whole pages", "slices"])
def test_a_pool_may_have_more_than_2_to_the_32_elements(ranks: Ranks, num_heads: int) -> None:
    shape = shape_of_pool(num_pages=70, num_kv_heads=num_heads, head_dim=1 << 20, page_size=16 // num_heads)
    source = shape_of_pool(num_pages=2, num_kv_heads=2, head_dim=1 << 20, page_size=16 // num_heads)
    assert shape.num_bytes > 1 << 32
    reader, sender = ranks.reader(shape), ranks.sender(source)
    route = (
        WHOLE
        if num_heads == 2
        else HeadRoute(source_rank=0, target_rank=0, source_head=1, target_head=0, num_heads=1)
    )
    assert isinstance(sender.push(sender.connect(reader, route), pairs((1, 69), (0, 68), (1, 0))), Done)
    found = [reader.pool.data[page].unique().tolist() for page in (0, 1, 67, 68, 69, 70)]
    assert found == [[2], [0], [0], [1], [2], [0]]


def test_a_push_waits_on_the_gpu_for_the_step_that_computes_its_pages(ranks: Ranks) -> None:
    reader, sender = ranks.reader(), ranks.sender()
    peer = sender.connect(reader)
    sender.push(peer, pairs((0, 0)))  # whatever is made on first use is there
    asked: list[bool] = []
    with torch.cuda.device(ranks.source):
        steps, ended = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(steps):
            torch.cuda._sleep(400_000_000)  # cycles: about 0.2 s
            sender.pool.data[3] = 77
            ended.record()

    def after() -> None:
        ended.wait()  # the current stream waits, and not this thread
        asked.append(ended.query())

    ticket = sender.transport.push(peer, pairs((3, 2)), after)
    assert isinstance(sender.wait(ticket), Done)
    assert asked == [False], "the thread waited for the step"
    assert ended.query() and reader.pages.tolist() == [1, 0, 77, 0, 0, 0, 0]


def test_a_push_whose_step_failed_writes_nothing(ranks: Ranks) -> None:
    def fail() -> None:
        raise RuntimeError("the step failed")

    reader, sender = ranks.reader(), ranks.sender()
    peer = sender.connect(reader)
    event = sender.push(peer, pairs((0, 0)), fail)
    assert isinstance(event, Failed) and "the step failed" in event.error.message
    assert isinstance(sender.push(peer, pairs((1, 1))), Done)
    assert reader.pages.tolist() == [0, 2, 0, 0, 0, 0, 0]


def test_pushes_to_a_reader_that_was_killed_fail_and_the_writer_lives(ranks: Ranks) -> None:
    victim, sender, path = ranks.remote(ReaderRank), ranks.sender(), ranks.path
    peer = sender.transport.connect(
        str(path), victim("export", str(path)), WHOLE, "session", time.monotonic()
    )
    assert isinstance(sender.push(peer, pairs((0, 0))), Done)
    victim.process.kill()
    victim.process.wait()
    for _ in range(3):
        event = sender.push(peer, pairs((0, 0), (1, 1)))
        assert isinstance(event, Failed) and isinstance(event.error, PeerLostError)
    sender.transport.disconnect(peer)
    other = ranks.reader()
    assert isinstance(sender.push(sender.connect(other), pairs((4, 1))), Done)
    assert other.pages.tolist() == [0, 5, 0, 0, 0, 0, 0]


def test_memory_is_free_once_both_sides_have_given_it_up(
    ranks: Ranks, tmp_path: Path, wait_until: WaitUntil
) -> None:
    shape = shape_of_pool(num_pages=30, head_dim=1 << 20)

    def free() -> int:
        return torch.cuda.mem_get_info(ranks.target)[0]

    sender = ranks.sender()
    before = free()
    reader = Reader(tmp_path / "short", shape, ranks.target)
    taken = before - free()
    assert taken >= shape.num_bytes
    source = ranks.sender(shape_of_pool(num_pages=1, head_dim=1 << 20))
    peer = source.connect(reader)
    source.push(peer, pairs((0, 29)))
    source.transport.disconnect(peer)
    wait_until(lambda: source.transport.quiet(peer))
    reader.close()
    held = free()
    del reader
    gc.collect()  # its thread's callback makes it part of a cycle
    assert free() - held >= shape.num_bytes
    assert sender.transport.poll() == []


def test_memory_of_another_size_than_offered_is_refused(ranks: Ranks) -> None:
    import msgspec

    from segue.disagg.transports.export import read_offer

    reader, sender = ranks.reader(), ranks.sender()
    offer = read_offer(reader.path, reader.export.blob)
    wrong = msgspec.structs.replace(offer, num_pages=offer.num_pages + (1 << 20))
    with pytest.raises(TransportError, match="cannot be mapped"):
        sender.transport.connect(
            reader.path, msgspec.msgpack.encode(wrong), WHOLE, "session", time.monotonic()
        )
    assert isinstance(sender.push(sender.connect(reader), pairs((0, 0))), Done)


def test_a_gpu_reaches_itself_first() -> None:
    for index in range(NUM_GPUS):
        found = reachable_uuids(torch.device("cuda", index))
        assert found[0] == visible_uuids()[index] and len(found) == len(set(found))


# --- G2: writers that are killed ---

PUSHES = 200  # each takes milliseconds, and a writer is killed in the first ones
PAGES_EACH, HOME, MINE = 6, 200, 100


@pytest.mark.parametrize(
    ("rounds", "num_writers"),
    [pytest.param(3, 4, id="12_kills"), pytest.param(7, 15, id="105_kills", marks=pytest.mark.slow)],
)
def test_no_byte_of_a_killed_writer_comes_after_it_is_gone(
    ranks: Ranks, wait_until: WaitUntil, rounds: int, num_writers: int
) -> None:
    """Every page has a pattern: that of nobody, of its writer, or of the reader that has it back."""
    shape = shape_of_pool(num_pages=PAGES_EACH * num_writers + 4, page_size=16, head_dim=16 << 10)
    reader = ranks.reader(shape)
    reader.pool.data.fill_(MINE)
    torch.cuda.synchronize(ranks.target)
    for _ in range(rounds):
        before = len(reader.gone)
        writers = [ranks.remote(WriterRank, shape) for _ in range(num_writers)]
        with ThreadPoolExecutor(num_writers) as threads:  # each takes seconds to start
            calls = [threads.submit(w, "connect", reader.path, reader.export.blob) for w in writers]
            peers = [call.result() for call in calls]
        granted = [range(i * PAGES_EACH, (i + 1) * PAGES_EACH) for i in range(num_writers)]
        for writer, peer, pages in zip(writers, peers, granted, strict=True):
            writer("post_many", peer, pairs(*[(page, page) for page in pages]), PUSHES)
        for index, (writer, pages) in enumerate(zip(writers, granted, strict=True)):
            first = pages[0]
            wait_until(lambda page=first: reader.pages[page] == page + 1, what="the writer's bytes")
            reader.pool.data[first] = MINE
            wait_until(lambda page=first: reader.pages[page] == page + 1, what="its next bytes")
            writer.process.send_signal(signal.SIGKILL)
            wait_until(lambda count=before + index + 1: len(reader.gone) == count, what="its end")
            reader.pool.data[pages.start : pages.stop] = HOME
            torch.cuda.synchronize(ranks.target)
        time.sleep(0.3)  # late bytes would have this time to come
        patterns = torch.full((shape.num_pages + 1,), MINE, dtype=torch.uint8)
        patterns[: PAGES_EACH * num_writers] = HOME
        found = reader.pool.data.cpu().flatten(1)
        foreign = (found != patterns[:, None]).sum(1).tolist()
        assert foreign == [0] * (shape.num_pages + 1)
        for writer in writers:
            writer.end()
    states: Any = set(reader.states)
    assert states <= {"Z", ""}, "a writer counted as gone while it ran"
