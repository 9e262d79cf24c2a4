import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from segue.messages.control import GraphCost
from segue.messages.steps import StepPlan
from segue.model_runner import graphs, grid
from segue.model_runner.graphs import (
    MAX_PADDING,
    CaptureSizes,
    GraphMeter,
    Graphs,
    Route,
    capture_kinds,
    choose_route,
    describe_costs,
    find_bucket,
    guided_sizes,
    max_forward_graph_tokens,
    max_prompts,
    prefill_sizes,
    row_sizes,
    token_sizes,
)

GRID = grid.grid_sizes([1, 2, 4, 8], [16, 32, 64, 128, 256], max_len=256, rows=256, tokens=8448)
CAPTURE_SIZES = CaptureSizes(
    decode=row_sizes(256),
    forward=token_sizes(8448),
    prefill=token_sizes(256),
    registered=[partial(grid.choose, GRID)],
)


def make_plan(
    num_decode: int, prompts: list[int], *, sampling_mode: str = "plain", prompt_logprobs: int = 0
) -> StepPlan:
    lens = [1] * num_decode + prompts
    logits = [1] * len(lens)
    logits[-1] += prompt_logprobs
    starts = [100] * num_decode + [0] * len(prompts)
    slots = list(range(len(lens)))
    return StepPlan(1, [], [], num_decode, slots, starts, lens, logits, [True] * len(lens), sampling_mode)  # type: ignore[arg-type]


def test_every_number_of_rows_has_a_bucket_with_little_padding() -> None:
    for max_rows in (1, 7, 12, 100, 256, 300):
        sizes = row_sizes(max_rows)
        assert sizes == sorted(set(sizes)) and sizes[-1] == max_rows
        for rows in range(1, max_rows + 1):
            found = find_bucket(sizes, rows)
            assert found is not None and rows <= found <= max(rows + 16, rows * 5 // 4)


def test_every_number_of_tokens_up_to_the_largest_forward_graph_has_a_bucket() -> None:
    sizes = token_sizes(8448)
    assert sizes[0] == 16 and sizes[-1] == 1024
    for tokens in range(1, 1025):
        found = find_bucket(sizes, tokens)
        assert found is not None and tokens <= found <= max(16, tokens * MAX_PADDING)
    assert find_bucket(sizes, 1025) is None


def test_given_sizes_replace_the_default_ones() -> None:
    assert row_sizes(8, [16, 4, 4, 1]) == [1, 4]
    assert token_sizes(300, given=[4, 512, 260]) == [4, 260]
    assert prefill_sizes([4, 260, 2048]) == [4, 2048]
    capture_sizes = CaptureSizes(decode=row_sizes(8, [4]), forward=token_sizes(12, given=[4]))
    assert choose_route(make_plan(3, []), capture_sizes) == Route("decode", 4)
    assert choose_route(make_plan(5, []), capture_sizes).reason == "tokens"


def test_several_ranks_sample_with_filters_after_a_forward_graph() -> None:
    capture_sizes = CaptureSizes(sampling_modes=("plain",), decode=row_sizes(8), forward=token_sizes(64))
    assert choose_route(make_plan(5, []), capture_sizes) == Route("decode", 5)
    assert choose_route(make_plan(5, [], sampling_mode="filtered"), capture_sizes) == Route("forward", 16)


def test_a_guided_decode_step_is_sampled_apart_and_has_few_graphs() -> None:
    rows = row_sizes(100)
    sizes = guided_sizes(rows)
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 100] and guided_sizes(row_sizes(64))[-2:] == [32, 64]
    modes = ("plain", "filtered", "guided")
    captured = CaptureSizes(sampling_modes=modes, decode=rows, guided=sizes, forward=token_sizes(256))
    for count in range(1, 101):
        route = choose_route(make_plan(count, [], sampling_mode="guided"), captured)
        assert route.kind == "guided" and count <= route.tokens <= max(16, 2 * count)
    assert choose_route(make_plan(5, [3], sampling_mode="guided"), captured).kind == "forward"
    plain_alone = CaptureSizes(sampling_modes=("plain",), decode=rows, forward=token_sizes(256))
    assert choose_route(make_plan(5, [], sampling_mode="guided"), plain_alone).kind == "forward"


def test_small_models_have_larger_forward_graphs() -> None:
    assert max_forward_graph_tokens(36, 7_000_000_000) == 1028
    max_captured = max_forward_graph_tokens(28, 440_000_000)
    assert 8448 < max_captured < 16384
    sizes = token_sizes(8448, max_captured)
    assert sizes[: len(token_sizes(8448))] == token_sizes(8448) and sizes[-2:] == [8192, 8448]
    for tokens in range(1025, 8449):
        found = find_bucket(sizes, tokens)
        assert found is not None and tokens <= found <= tokens * 9 / 8
    assert token_sizes(8448, 1028)[-1] == 1024


def test_long_prompts_have_prefill_graphs_with_room_for_few_prompts() -> None:
    max_captured = max_forward_graph_tokens(28, 440_000_000)
    capture_sizes = CaptureSizes(
        decode=row_sizes(256),
        forward=token_sizes(8448, max_captured),
        prefill=prefill_sizes(token_sizes(8448, max_captured)),
    )
    assert [size for size in capture_sizes.prefill if 256 < size < 2048] == []
    assert choose_route(make_plan(0, [2048] * 4), capture_sizes) == Route("prefill", 8192)
    assert choose_route(make_plan(0, [80] * 96 + [512]), capture_sizes) == Route(
        "forward", 8192
    )  # one prompt more than the prefill graph has room for
    assert choose_route(make_plan(0, [1500]), capture_sizes) == Route(
        "forward", 1536
    )  # the prefill graph of 2,048 tokens is larger
    assert choose_route(make_plan(1, [2048]), capture_sizes) == Route("forward", 2304)


def test_no_bucket_is_larger_than_the_largest_step_of_the_runner() -> None:
    assert token_sizes(200, 9999)[-2:] == [192, 200]
    assert token_sizes(60) == [16, 32, 48, 60]
    assert token_sizes(64) == [16, 32, 48, 64]
    assert token_sizes(2) == [2]


@pytest.mark.parametrize(("chunk", "rows"), [(1, 1), (5, 4), (64, 8), (256, 8), (512, 32), (512, 100)])
def test_a_whole_chunk_with_any_number_of_decode_rows_has_a_bucket(chunk: int, rows: int) -> None:
    sizes = token_sizes(chunk + rows)
    for decode in range(rows + 1):
        found = find_bucket(sizes, chunk + decode)
        assert found is not None and chunk + decode <= found <= chunk + rows


def test_a_step_is_not_padded_to_more_than_twice_its_size() -> None:
    assert find_bucket([16, 64], 20) is None
    assert find_bucket([16, 64], 32) == 64
    assert find_bucket([16, 64], 3) == 16
    assert find_bucket([32, 64], 3) is None
    assert find_bucket([], 3) is None


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (make_plan(5, []), Route("decode", 5)),
        (make_plan(9, []), Route("decode", 12)),
        (make_plan(9, [], sampling_mode="filtered"), Route("decode", 12)),
        (make_plan(9, [], sampling_mode="full"), Route("forward", 16)),
        (make_plan(9, [30]), Route("forward", 48)),
        (make_plan(0, [17]), Route("grid", 32, prompts=1)),
        (
            make_plan(0, [17, 3, 12], sampling_mode="full"),
            Route("prefill", 32),
        ),  # the grid's 4 x 32 tokens would be mostly padding
        (make_plan(0, [100, 120, 90]), Route("grid", 512, prompts=4)),
        (make_plan(0, [3]), Route("grid", 16, prompts=1)),  # the smallest of all
        (make_plan(1, [128]), Route("forward", 144)),  # the grid has no room for decode rows
        (make_plan(0, [300]), Route("forward", 320)),
        (
            make_plan(0, [17], sampling_mode="full", prompt_logprobs=3),
            Route("eager", 17, reason="prompt_logprobs"),
        ),
        (make_plan(3, [1200]), Route("eager", 1203, reason="tokens")),
        (make_plan(0, [3] * 16), Route("prefill", 48)),  # a group whose prompt is cached except for its end
        (make_plan(0, [1] * 40), Route("eager", 40, reason="prompts")),
    ],
)
def test_a_step_takes_the_smallest_graph_that_holds_it(plan: StepPlan, expected: Route) -> None:
    assert choose_route(plan, CAPTURE_SIZES) == expected
    assert choose_route(plan, CaptureSizes()) == Route("eager", plan.num_tokens, reason="disabled")


def test_the_route_depends_on_the_plan_only_and_never_pads_to_more_than_twice() -> None:
    rng = random.Random(4)
    kinds = set()
    for _ in range(3000):
        lens = [min(600, max(1, int(rng.lognormvariate(2.8, 1.6)))) for _ in range(rng.randint(0, 12))]
        plan = make_plan(rng.randint(0 if lens else 1, 64), lens, sampling_mode=rng.choice(["plain", "full"]))
        route, count = choose_route(plan, CAPTURE_SIZES), plan.num_tokens
        # The route does not depend on the step number and the pages.
        other = StepPlan(99, [], [(0, 0, [1])], *[getattr(plan, name) for name in plan.__struct_fields__[3:]])
        assert choose_route(other, CAPTURE_SIZES) == route
        kinds.add(route.kind)
        if route.kind == "grid":
            length = route.tokens // route.prompts
            assert (route.prompts, length) in GRID and len(lens) <= route.prompts and max(lens) <= length
        if route.kind == "prefill":
            assert plan.num_decode == 0
        if route.kind in ("forward", "prefill"):
            assert len(lens) <= max_prompts(route.tokens)
        if route.kind in ("grid", "forward", "prefill"):
            assert count <= route.tokens <= max(MAX_PADDING * count, 16)
        if route.kind == "eager":
            assert route.tokens == count and route.reason in ("tokens", "prompts")
    assert kinds == {"decode", "forward", "prefill", "grid", "eager"}


def test_without_room_for_all_the_largest_and_the_smallest_sizes_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = SimpleNamespace(
        capture_begin=lambda **options: None,
        **{name: lambda: None for name in ("capture_end", "replay", "synchronize")},
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: silent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: silent)
    for room, captured, left_out in (
        (9, [1, 2, 4, 8, 16], []),
        (3, [1, 2, 16], [4, 8]),
        (1, [16], [1, 2, 4, 8]),
        (0, [], [16, 1, 2, 4, 8]),
    ):
        ran: list[int] = []
        answers = iter([True] * room + [False])
        graphs: Any = Graphs[int]("some", [4, 1, 16, 8, 2], ran.append, pool=None, checked=None)
        assert graphs.capture(lambda answers=answers: next(answers)) == left_out
        assert graphs.sizes == captured
        assert ran[:1] == captured[-1:]  # the largest is first, because the others fit into its memory
    nothing: Any = Graphs[int]("some", [], ran.append, pool=None, checked=None)
    assert nothing.capture(lambda: True) == nothing.sizes == []


def test_each_graph_is_replayed_once_so_that_no_request_pays_for_its_upload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    noted = {name: partial(done.append, name) for name in ("capture_end", "replay", "synchronize")}
    device = SimpleNamespace(capture_begin=lambda **options: done.append("capture_begin"), **noted)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device)
    kind: Any = Graphs[int](
        "some",
        [4, 8],
        lambda size: done.append(f"run {size}"),
        pool=None,
        checked=None,
        shortened=lambda: noted_block(done),
    )
    assert kind.capture(lambda: True) == []
    for size in (8, 4):
        began, done = done[:7], done[7:]
        assert began == [
            *("short", f"run {size}", "long", "capture_begin", f"run {size}", "capture_end", "replay"),
        ]
    assert done == ["synchronize"], "the device replays a graph while the next one is captured"


@contextmanager
def noted_block(done: list[str]) -> Iterator[None]:
    done.append("short")
    yield
    done.append("long")


def test_no_garbage_is_collected_between_captures() -> None:
    seen = []
    kind: Any = SimpleNamespace(capture=lambda has_room: seen.append(gc.isenabled()) or [], sizes=[])
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            capture_kinds({"some": kind}, lambda: 0, 1)
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
    assert seen == [False, False]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Capture three kinds of graphs with a device whose memory and clock are counters.

    Each graph takes 10 MiB, and 1.25 s with the eager run before it and its replay. There is room for five.
    """
    device = {"bytes": 0, "seconds": 100.0}

    def capture_end() -> None:
        device["bytes"] += 10 << 20
        device["seconds"] += 0.5

    def run(size: int) -> None:
        device["seconds"] += 0.25

    def replay() -> None:
        device["seconds"] += 0.25

    silent = SimpleNamespace(
        capture_begin=lambda **options: None,
        capture_end=capture_end,
        replay=replay,
        synchronize=lambda: None,
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: silent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: silent)
    monkeypatch.setattr(graphs.time, "monotonic", lambda: device["seconds"])
    sizes: dict[str, list[int]] = {"decode": [1, 2], "none": [], "forward": [16, 32, 64, 128], "grid": [16]}
    kinds: Any = {name: Graphs[int](name, each, run, pool=None, checked=None) for name, each in sizes.items()}
    costs, left_out = capture_kinds(kinds, lambda: int(device["bytes"]), 50 << 20)
    return {"costs": costs, "left_out": left_out}


def test_each_kind_of_graphs_has_its_own_cost(captured: dict[str, Any]) -> None:
    assert captured["costs"] == {
        "decode": GraphCost(num_graphs=2, seconds=2.5, num_bytes=20 << 20),
        "forward": GraphCost(num_graphs=3, seconds=3.75, num_bytes=30 << 20),
    }


def test_the_sizes_without_room_are_named_by_kind(captured: dict[str, Any]) -> None:
    assert captured["left_out"] == {"forward": [64], "grid": [16]}


def test_the_log_names_what_each_kind_has_cost(captured: dict[str, Any]) -> None:
    text = "5 graphs: decode 2 in 2.50 s, 20 MiB; forward 3 in 3.75 s, 30 MiB"
    assert describe_costs(captured["costs"]) == text


@pytest.mark.parametrize(("is_alone", "expected"), [(True, 3 * 2**30 + 7 * 2**20), (False, 12 * 2**20)])
def test_what_other_processes_of_a_device_take_does_not_count_as_graphs(
    monkeypatch: pytest.MonkeyPatch, is_alone: bool, expected: int
) -> None:
    free, reserved = [60 * 2**30], [2**30]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    meter = GraphMeter(torch.device("cuda"), num_layers=32, is_alone=is_alone)
    reserved[0] += 4 * 2**20  # a pool of torch's
    free[0] -= 4 * 2**20 + 3 * 2**20  # and the driver's part
    assert meter.read() == 7 * 2**20
    free[0] -= 3 * 2**30  # another engine's KV cache
    assert meter.read() == expected
    free[0] += 2**30 if not is_alone else 0  # what another one gives back does not make room
    assert meter.read() == expected
