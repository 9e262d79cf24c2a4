"""Heads that go through pieces are where the decode ranks would have computed them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from segue.disagg.layout import heads_of, piece_span, plan
from segue.disagg.transports.export import shape_of
from segue.disagg.transports.pieces import DeviceHeadCopies, HeadMover, HostHeads
from segue.kvcache.pool import KVPool
from tests.disagg.transports.ranks import shape_of_pool

CASES = [case for case in product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8)) if case[0] != case[1]] + [(2, 3, 6)]
NUM_PAGES = 6
SOURCES, TARGETS = [4, 0, 5], [1, 5, 2]


def in_small_groups(pool: KVPool) -> HeadMover:
    """What a GPU does, with room for two pages at a time."""
    return DeviceHeadCopies(pool, scratch_bytes=2 * pool.page_bytes)


def random_pool(kv_heads: int, head_bytes: int) -> Tensor:
    """The pages of a model of one rank."""
    shape = (NUM_PAGES + 1, 3, 2, 4, kv_heads, head_bytes)
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(kv_heads))


def pool_of(heads: range, head_bytes: int, data: Tensor | None = None) -> KVPool:
    shape = shape_of_pool(num_pages=NUM_PAGES, num_kv_heads=len(heads), head_dim=head_bytes)
    pool = KVPool(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8))
    if data is not None:
        pool.data.copy_(data[..., list(heads), :])
    return pool


@pytest.mark.parametrize("make", [HostHeads, DeviceHeadCopies, in_small_groups])
@pytest.mark.parametrize("head_bytes", [4, 16])
@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads"), CASES)
def test_heads_that_go_through_pieces_are_in_their_places(
    make: Callable[[KVPool], HeadMover], p_tp: int, d_tp: int, kv_heads: int, head_bytes: int
) -> None:
    whole = random_pool(kv_heads, head_bytes)
    sources = [pool_of(heads_of(rank, p_tp, kv_heads), head_bytes, whole) for rank in range(p_tp)]
    targets = [pool_of(heads_of(rank, d_tp, kv_heads), head_bytes) for rank in range(d_tp)]
    arrived: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(d_tp)}
    for route in plan(p_tp, d_tp, kv_heads):
        target = targets[route.target_rank]
        span = piece_span(route, shape_of(target))
        pieces = torch.full((5, span.num_bytes), 99, dtype=torch.uint8)
        make(sources[route.source_rank]).gather(
            SOURCES, (route.source_head, route.num_heads), pieces, [3, 0, 1]
        )
        assert pieces[[2, 4]].eq(99).all(), "a slot that was not named was written"
        pages = target.data.view(NUM_PAGES + 1, -1)
        pages[TARGETS, span.start : span.start + span.num_bytes] = pieces[[3, 0, 1]]
        arrived[route.target_rank].append((route.target_head, route.num_heads))
    for rank, target in enumerate(targets):
        if len(arrived[rank]) > 1:
            make(target).spread(TARGETS, arrived[rank])
        expected = torch.zeros_like(target.data)
        expected[TARGETS] = whole[SOURCES][..., list(heads_of(rank, d_tp, kv_heads)), :]
        assert torch.equal(target.data, expected)
