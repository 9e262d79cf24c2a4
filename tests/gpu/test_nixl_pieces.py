"""Ranks of unequal tensor parallelism get their heads by NIXL in the memory of GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product

import pytest
import torch
from torch import Tensor

from segue.disagg.layout import heads_of, piece_span, plan
from segue.disagg.transports import nixl_staging
from segue.disagg.transports.base import Done
from segue.disagg.transports.export import shape_of
from segue.disagg.transports.nixl import NixlTransport
from segue.disagg.transports.nixl_agent import has_nixl
from segue.disagg.transports.pieces import DeviceHeads
from segue.kvcache.pool import KVPool, KVShape
from tests.disagg.transports.nixl_ranks import NixlReadersRank
from tests.disagg.transports.ranks import Remote, Sender, pairs, shape_of_pool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

CASES = [case for case in product((1, 2, 4), (1, 2, 4), (2, 4, 8)) if case[0] != case[1]] + [(2, 3, 6)]
NUM_PAGES = 40
PAGES = [(0, 5), (4, 2), (39, 38), *((page, page) for page in range(6, 30))]
SOURCES, TARGETS = (list(each) for each in zip(*PAGES, strict=True))
needs_nixl = pytest.mark.skipif(not has_nixl(), reason="NIXL is not installed")


def shape(tp: int, kv_heads: int, head_bytes: int) -> KVShape:
    heads = len(heads_of(0, tp, kv_heads))
    return shape_of_pool(num_kv_heads=heads, num_pages=NUM_PAGES, page_size=16, head_dim=head_bytes)


def pool_of(shape: KVShape, data: Tensor | None = None) -> KVPool:
    """A pool of zeroes, or with these heads."""
    pool = KVPool(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8, device="cuda"))
    if data is not None:
        pool.data.copy_(data)
    torch.cuda.synchronize()
    return pool


def random_pages(kv_heads: int, head_bytes: int) -> Tensor:
    return torch.randint(1, 256, (NUM_PAGES + 1, 3, 2, 16, kv_heads, head_bytes), dtype=torch.uint8)


def heads_from(whole: Tensor, rank: int, tp: int) -> Tensor:
    return whole[..., list(heads_of(rank, tp, whole.shape[-2])), :]


def expected(whole: Tensor, rank: int, tp: int) -> Tensor:
    """The pool of a decode rank."""
    mine = heads_from(whole, rank, tp)
    pool = torch.zeros_like(mine)
    pool[TARGETS] = mine[SOURCES]
    return pool


@pytest.mark.parametrize("head_bytes", [4, 256])
@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads"), CASES)
def test_heads_that_go_through_pieces_are_in_their_places(
    p_tp: int, d_tp: int, kv_heads: int, head_bytes: int
) -> None:
    whole = random_pages(kv_heads, head_bytes)
    sources = [
        pool_of(shape(p_tp, kv_heads, head_bytes), heads_from(whole, rank, p_tp)) for rank in range(p_tp)
    ]
    targets = [pool_of(shape(d_tp, kv_heads, head_bytes)) for _ in range(d_tp)]
    arrived = [list[tuple[int, int]]() for _ in range(d_tp)]
    slots = list(range(len(SOURCES)))[::-1]
    for route in plan(p_tp, d_tp, kv_heads):
        span = piece_span(route, shape_of(targets[route.target_rank]))
        pieces = torch.zeros((len(slots), span.num_bytes), dtype=torch.uint8, device="cuda")
        heads = DeviceHeads(sources[route.source_rank])
        heads.gather(SOURCES, (route.source_head, route.num_heads), pieces, slots)
        pages = targets[route.target_rank].data.view(NUM_PAGES + 1, -1)
        pages[TARGETS, span.start : span.start + span.num_bytes] = pieces[slots]
        arrived[route.target_rank].append((route.target_head, route.num_heads))
    torch.cuda.synchronize()
    for rank, target in enumerate(targets):
        if len(arrived[rank]) > 1:
            DeviceHeads(target).spread(TARGETS, arrived[rank])
        assert torch.equal(target.data.cpu(), expected(whole, rank, d_tp))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def readers(stack: ExitStack) -> Remote:
    remote = Remote(NixlReadersRank, shape_of_pool(), "cuda:0")
    stack.callback(remote.end)
    return remote


@pytest.fixture
def make_sender(stack: ExitStack) -> Callable[[KVPool], Sender]:
    def make(pool: KVPool) -> Sender:
        sender = Sender(pool, make=NixlTransport)
        stack.callback(sender.transport.close)
        return sender

    return make


@needs_nixl
@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads"), [(1, 2, 4), (2, 1, 4), (4, 2, 8), (2, 3, 6)])
def test_every_rank_gets_its_heads(
    readers: Remote,
    make_sender: Callable[[KVPool], Sender],
    monkeypatch: pytest.MonkeyPatch,
    p_tp: int,
    d_tp: int,
    kv_heads: int,
) -> None:
    monkeypatch.setattr(nixl_staging, "STAGING_BYTES", 300_000)  # less than the pages of a push have
    whole = random_pages(kv_heads, 256)
    senders = [
        make_sender(pool_of(shape(p_tp, kv_heads, 256), heads_from(whole, rank, p_tp)))
        for rank in range(p_tp)
    ]
    blobs = [readers("add", shape(d_tp, kv_heads, 256)) for _ in range(d_tp)]
    pieces = [list[tuple[int, int]]() for _ in range(d_tp)]
    for route in plan(p_tp, d_tp, kv_heads):
        sender = senders[route.source_rank]
        peer = sender.transport.connect("", blobs[route.target_rank], route, "s", time.monotonic())
        assert isinstance(sender.push(peer, pairs(*PAGES)), Done)
        pieces[route.target_rank].append((route.target_head, route.num_heads))
    for rank in range(d_tp):
        if len(pieces[rank]) > 1:
            readers("spread", rank, TARGETS, pieces[rank])
        assert readers("data", rank) == expected(whole, rank, d_tp).numpy().tobytes()


@needs_nixl
def test_heads_are_gathered_behind_the_step_that_computes_them(
    readers: Remote, make_sender: Callable[[KVPool], Sender]
) -> None:
    whole = random_pages(2, 256)
    sender = make_sender(pool_of(shape(1, 2, 256), whole))
    (_, route), blob = plan(1, 2, kv_heads=2), readers("add", shape(2, 2, 256))
    peer = sender.transport.connect("", blob, route, "s", time.monotonic())
    steps, ended = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(steps):
        torch.cuda._sleep(400_000_000)  # cycles: about 0.2 s
        sender.pool.data[3] = 77
        ended.record()
    assert isinstance(sender.push(peer, pairs((3, 2)), ended.wait), Done)
    page = torch.zeros(NUM_PAGES + 1, 3 * 2 * 16 * 256, dtype=torch.uint8)
    page[2] = 77
    assert readers("data", 0) == page.numpy().tobytes()
