"""Pages of ranks of two tensor-parallel sizes, copied on the planned routes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from segue.disagg.layout import PageShape, heads_of, plan
from segue.disagg.transports.page_copy import copy_pages

NUM_PAGES = 4
CASES = [
    (p_tp, d_tp, kv_heads)
    for p_tp, d_tp, kv_heads in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 3, 4, 8))
    if all(kv_heads % tp == 0 or tp % kv_heads == 0 for tp in (p_tp, d_tp))
]


def shape_for(tp: int, kv_heads: int) -> PageShape:
    return PageShape(num_layers=2, page_size=3, num_heads=len(heads_of(0, tp, kv_heads)), head_bytes=16)


def pool_of(model: NDArray[np.uint8], rank: int, tp: int) -> NDArray[np.uint8]:
    """All bytes of a rank's pool; the model's is [page, row, head, byte]."""
    return model[:, :, list(heads_of(rank, tp, model.shape[2]))].reshape(-1)


@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads"), CASES)
def test_every_decode_rank_has_its_heads_of_the_pages_and_nothing_else(
    p_tp: int, d_tp: int, kv_heads: int
) -> None:
    random = np.random.default_rng(0)
    size = (NUM_PAGES, 2 * 2 * 3, kv_heads, 16)
    source, target = random.integers(0, 256, (2, *size), np.uint8)
    expected = target.copy()
    expected[[3, 0]] = source[[1, 2]]
    pools = [pool_of(target, rank, d_tp) for rank in range(d_tp)]
    for route in plan(p_tp, d_tp, kv_heads):
        copy_pages(
            pool_of(source, route.source_rank, p_tp),
            shape_for(p_tp, kv_heads),
            [1, 2],
            pools[route.target_rank],
            shape_for(d_tp, kv_heads),
            [3, 0],
            route,
        )
    for rank, pool in enumerate(pools):
        assert np.array_equal(pool, pool_of(expected, rank, d_tp))
