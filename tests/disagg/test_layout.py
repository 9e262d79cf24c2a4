"""Every KV head of every decode rank comes once, from the lowest prefill rank that has it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from segue.disagg.layout import (
    HeadRoute,
    PageShape,
    fits,
    heads_of,
    piece_span,
    plan,
    row_runs,
    split_routes,
)
from segue.distributed.info import TPInfo
from segue.errors import TensorParallelError, TransportError
from segue.models.config import ModelConfig
from segue.models.sharding import shard

SIZES, KV_HEADS = (1, 2, 4, 8), (1, 2, 3, 4, 8)
LAYERS, PAGE_SIZE, HEAD_BYTES = 2, 3, 4
SHAPE = PageShape(num_layers=LAYERS, page_size=PAGE_SIZE, num_heads=4, head_bytes=HEAD_BYTES)


CASES = [
    case for case in product(SIZES, SIZES, KV_HEADS) if fits(case[0], case[2]) and fits(case[1], case[2])
]


def model_of(kv_heads: int) -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 256,
            "hidden_size": 96,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 24,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 64,
        }
    )


def page_of(rank: int, tp: int, kv_heads: int) -> NDArray[np.uint8]:
    """A page of a rank in which every byte depends on the layer, key or value, slot and the model's head."""
    rows = np.arange(LAYERS * 2 * PAGE_SIZE, dtype=np.uint8)[:, None, None]
    heads = np.array(heads_of(rank, tp, kv_heads), dtype=np.uint8)[None, :, None]
    return rows * 16 + heads + np.zeros(HEAD_BYTES, np.uint8)


@pytest.mark.parametrize(("tp", "kv_heads"), [*product((*SIZES, 3, 6), KV_HEADS)])
def test_ranks_have_the_heads_that_sharding_gives_them(tp: int, kv_heads: int) -> None:
    model = model_of(kv_heads)
    if not fits(tp, kv_heads):
        with pytest.raises(TensorParallelError):
            shard(model, TPInfo(0, tp))
        return
    for rank in range(tp):
        sizes = shard(model, TPInfo(rank, tp))
        heads = heads_of(rank, tp, kv_heads)
        assert (heads.start, len(heads)) == (sizes.kv_head_start, sizes.num_kv_heads)


@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads"), CASES)
def test_every_head_of_every_decode_rank_is_written_once(p_tp: int, d_tp: int, kv_heads: int) -> None:
    written: Counter[tuple[int, int]] = Counter()
    for route in plan(p_tp, d_tp, kv_heads):
        heads = heads_of(route.target_rank, d_tp, kv_heads)
        for i in range(route.num_heads):
            written[route.target_rank, heads[route.target_head + i]] += 1
    expected = {(rank, head) for rank in range(d_tp) for head in heads_of(rank, d_tp, kv_heads)}
    assert written == dict.fromkeys(expected, 1)


@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads"), CASES)
def test_the_lowest_rank_that_has_a_head_sends_it(p_tp: int, d_tp: int, kv_heads: int) -> None:
    for route in plan(p_tp, d_tp, kv_heads):
        sent = heads_of(route.source_rank, p_tp, kv_heads)[route.source_head :][: route.num_heads]
        assert len(sent) == route.num_heads
        for head in sent:
            owners = [rank for rank in range(p_tp) if head in heads_of(rank, p_tp, kv_heads)]
            assert route.source_rank == owners[0]


@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads"), CASES)
def test_routes_make_the_pages_that_the_decode_ranks_would_have_computed(
    p_tp: int, d_tp: int, kv_heads: int
) -> None:
    pages = [np.full_like(page_of(rank, d_tp, kv_heads), 255) for rank in range(d_tp)]
    for route in plan(p_tp, d_tp, kv_heads):
        source = page_of(route.source_rank, p_tp, kv_heads)[:, route.source_head :][:, : route.num_heads]
        pages[route.target_rank][:, route.target_head :][:, : route.num_heads] = source
    for rank in range(d_tp):
        assert np.array_equal(pages[rank], page_of(rank, d_tp, kv_heads))


@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads"), [*CASES, (2, 3, 6), (3, 2, 6)])
def test_the_pieces_of_a_page_fill_it_in_the_order_of_their_heads(
    p_tp: int, d_tp: int, kv_heads: int
) -> None:
    for rank in range(d_tp):
        shape = replace(SHAPE, num_heads=len(heads_of(rank, d_tp, kv_heads)))
        routes = [route for route in plan(p_tp, d_tp, kv_heads) if route.target_rank == rank]
        end, arrived = 0, []
        for route in routes:
            span = piece_span(route, shape)
            assert span.start == end
            end += span.num_bytes
            source = page_of(route.source_rank, p_tp, kv_heads)
            arrived.append(source[:, route.source_head :][:, : route.num_heads].tobytes())
            assert len(arrived[-1]) == span.num_bytes
            if route.has_whole_source(replace(SHAPE, num_heads=source.shape[1])):
                assert arrived[-1] == source.tobytes(), "the page is the piece"
        assert end == shape.page_bytes
        is_whole = b"".join(arrived) == page_of(rank, d_tp, kv_heads).tobytes()
        split = [route for route in split_routes(p_tp, d_tp, kv_heads) if route.target_rank == rank]
        assert split == ([] if len(routes) == 1 else routes)
        assert is_whole == (not split), "only what comes from several ranks is out of order"


@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads"), CASES)
def test_two_ranks_have_at_most_one_route(p_tp: int, d_tp: int, kv_heads: int) -> None:
    pairs = [(route.source_rank, route.target_rank) for route in plan(p_tp, d_tp, kv_heads)]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (1, 2)])
def test_a_size_that_does_not_fit_the_heads_is_refused(p_tp: int, d_tp: int) -> None:
    with pytest.raises(TransportError, match="tensor-parallel size 2 does not fit 3 KV heads"):
        plan(p_tp, d_tp, kv_heads=3)


@pytest.mark.parametrize(("tp", "kv_heads"), [(0, 8), (8, 0), (-1, 8), (3, 8), (6, 4)])
def test_sizes_that_do_not_fit(tp: int, kv_heads: int) -> None:
    assert not fits(tp, kv_heads)


def test_equal_sizes_send_whole_pages() -> None:
    (route, *others) = plan(2, 2, kv_heads=8)
    assert route.covers(SHAPE, SHAPE) and len(others) == 1
    assert not plan(1, 2, kv_heads=8)[0].covers(replace(SHAPE, num_heads=8), SHAPE)


@pytest.mark.parametrize("name", ["num_layers", "page_size", "head_bytes"])
def test_pages_of_different_shapes_are_refused(name: str) -> None:
    (route,) = plan(1, 1, kv_heads=4)
    route.check(SHAPE, SHAPE)
    other = replace(SHAPE, **{name: 5})
    with pytest.raises(TransportError, match=f"{name}={getattr(SHAPE, name)} to one with {name}=5"):
        route.check(SHAPE, other)


@pytest.mark.parametrize("name", ["source_head", "target_head"])
@pytest.mark.parametrize("first", [-1, 2])
def test_heads_that_a_rank_does_not_have_are_refused(name: str, first: int) -> None:
    route = HeadRoute(source_rank=0, target_rank=0, source_head=0, target_head=0, num_heads=3)
    route.check(SHAPE, SHAPE)
    with pytest.raises(TransportError, match="rank 0, which has 4"):
        replace(route, **{name: first}).check(SHAPE, SHAPE)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 1), (1, 4), (4, 2), (2, 2)])
def test_runs_of_rows_are_the_bytes_of_a_routes_heads(p_tp: int, d_tp: int) -> None:
    """Compared with numpy's slices of pages, on three pages that follow each other."""
    heads, num_pages = 4, 3
    shapes = [replace(SHAPE, num_heads=heads // tp) for tp in (p_tp, d_tp)]
    pools = [
        np.arange(num_pages * shape.page_bytes, dtype=np.int64).reshape(
            num_pages, shape.num_rows, -1, HEAD_BYTES
        )
        for shape in shapes
    ]  # each byte is its own address
    for route in plan(p_tp, d_tp, heads):
        runs = row_runs(route, *shapes)
        lanes = np.arange(runs.run)
        sides = [
            (shapes[0], runs.source_start, runs.source_row, pools[0], route.source_head),
            (shapes[1], runs.target_start, runs.target_row, pools[1], route.target_head),
        ]
        for shape, start, row_bytes, pool, first in sides:
            assert runs.num_rows * row_bytes == shape.page_bytes
            rows = np.arange(num_pages * runs.num_rows) * row_bytes
            found = (start + rows[:, None] + lanes).reshape(num_pages, runs.num_rows, -1, HEAD_BYTES)
            assert np.array_equal(found, pool[:, :, first : first + route.num_heads])
