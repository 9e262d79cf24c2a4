"""Plans of GEMMs by weights in FP8: which are tried on which device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from segue.kernels.fp8_plan import MAX_FEW_ROWS, FP8Plan, FP8Shape, candidates, default_plan, row_steps
from segue.kernels.gemm_plan import ROWS, Kind
from tests.kernels.test_gemm_plan import H200, L40S

QWEN3_8B: list[tuple[int, int, Kind]] = [
    (6144, 4096, "split"),
    (4096, 4096, "split"),
    (24576, 4096, "gated"),
    (4096, 12288, "whole"),
]


@pytest.mark.parametrize("device", [H200, L40S], ids=["9.0", "8.9"])
@pytest.mark.parametrize("block", [0, 16, 128])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("size", "depth", "kind"), QWEN3_8B)
def test_candidates_fit_the_weight_and_the_device(size, depth, kind, rows, block, device) -> None:
    shape = FP8Shape(rows, size, depth, block, kind)
    found = candidates([shape], device)[shape]
    assert 0 < len(found) == len(set(found)) <= 10
    for plan in found:
        assert plan.shared_bytes(block, device.capability) <= device.shared_bytes
        assert (size % plan.block_n, depth % plan.block_k) == (0, 0)
        assert rows <= plan.block_m
        assert plan.splits == 1 or kind == "split"
        if block == 128:  # one scale for each product that is summed
            assert plan.block_k <= block
        if plan.fp8_tokens:  # the tensor cores of Hopper, which have one scale per row, or few
            assert device is H200 and block != 16 and plan.block_k == 128


@pytest.mark.parametrize(
    ("plan", "block", "on_ada", "on_hopper"),
    [
        (FP8Plan(16, 64, 128, 1, 3, 4), 0, 24576, 24576),
        (FP8Plan(16, 128, 128, 1, 6, 4), 16, 122880, 122880),
        (FP8Plan(32, 128, 256, 1, 3, 8), 16, 114688, 114688),
        (FP8Plan(32, 64, 128, 1, 4, 4), 128, 49920, 49920),
        (FP8Plan(64, 64, 256, 1, 3, 4), 0, 98304, 163840),
        (FP8Plan(64, 128, 128, 1, 6, 4), 128, 166400, 215552),
        (FP8Plan(64, 128, 128, 1, 6, 8), 16, 184320, 233472),
        (FP8Plan(64, 128, 256, 1, 3, 4), 0, 131072, 229376),
        (FP8Plan(64, 128, 256, 1, 3, 4), 16, 147456, 245760),
        (FP8Plan(16, 64, 128, 1, 4, 4, fp8_tokens=True), 0, None, 49536),
        (FP8Plan(32, 128, 128, 1, 4, 4, fp8_tokens=True), 128, None, 100608),
        (FP8Plan(64, 64, 128, 1, 6, 4, fp8_tokens=True), 0, None, 150016),
    ],
    ids=str,
)
def test_a_program_takes_no_more_shared_memory_than_expected(plan, block, on_ada, on_hopper) -> None:
    """What Triton 3.6 compiles."""
    for capability, compiled in (((8, 9), on_ada), ((9, 0), on_hopper)):
        if compiled is not None:
            assert 0 <= plan.shared_bytes(block, capability) - compiled <= 1024


def test_both_ways_to_multiply_are_tried_on_hopper() -> None:
    shape = FP8Shape(1, 6144, 4096, 0, "split")
    assert [plan.fp8_tokens for plan in candidates([shape], H200)[shape]] == [False, True] * 5


def test_kernels_that_are_needed_anyway_have_an_advantage() -> None:
    shapes = [FP8Shape(1, size, depth, 0, kind) for size, depth, kind in QWEN3_8B]
    alone = {plan for shape in shapes for plan in candidates([shape], H200)[shape]}
    together = {plan for plans in candidates(shapes, H200).values() for plan in plans}
    assert len({replace(plan, splits=1) for plan in together}) < len(
        {replace(plan, splits=1) for plan in alone}
    )


def test_a_gated_gemm_has_kernels_of_its_own() -> None:
    whole, gated = FP8Shape(16, 4096, 12288, 0, "whole"), FP8Shape(16, 24576, 4096, 0, "gated")
    assert candidates([whole, gated], H200)[gated] == candidates([gated], H200)[gated]


def test_weights_of_another_form_have_another_key() -> None:
    assert FP8Shape(1, 6144, 4096, 0, "split").key == "6144x4096 fp8"
    assert FP8Shape(8, 6144, 4096, 128, "whole").key == "6144x4096 fp8/128"


@pytest.mark.parametrize("rows", [1, 17, 64, 65, 4096])
def test_the_default_plan_splits_only_where_it_may(rows) -> None:
    split, whole = (default_plan(FP8Shape(rows, 1024, 4096, 0, kind), 132) for kind in ("split", "whole"))
    assert whole == replace(split, splits=1)
    assert split.splits > 1 or rows > 1024
    assert min(rows, MAX_FEW_ROWS) <= split.block_m


@pytest.mark.parametrize(
    ("size", "depth", "kind"), [(1024, 3072, "split"), (6144, 1024, "whole"), (96, 96, "split")]
)
def test_between_two_steps_of_rows_the_kernels_are_the_same(size, depth, kind) -> None:
    shape, most = FP8Shape(1, size, depth, 0, kind), 20000
    steps = sorted({*row_steps([shape], most, 132), most})
    plans = {rows: default_plan(replace(shape, rows=rows), 132) for rows in range(1, most + 1)}
    for rows, plan in plans.items():
        representative = next(step for step in steps if rows <= step)
        assert plan == plans[representative]
    assert len(steps) < 30
