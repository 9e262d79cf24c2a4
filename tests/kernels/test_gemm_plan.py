"""The cost model of GEMM plans: what it ranks first, and what it never proposes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import segue
from segue.kernels.gemm_plan import (
    ROWS,
    DeviceFacts,
    GemmPlan,
    GemmShape,
    candidates,
    choose_fastest,
    fewest_rows,
    fit_stages,
    predict,
    round_log2,
    row_buckets,
    split_steps,
    tile,
    valid_plans,
)

H200 = DeviceFacts(
    name="an H200",
    capability=(9, 0),
    num_sms=132,
    shared_bytes=227 << 10,
    memory_bytes=140 << 30,
    bandwidth=4.16e12,
)
A100 = replace(H200, capability=(8, 0), num_sms=108, shared_bytes=163 << 10, bandwidth=1.7e12)
L40S = replace(H200, capability=(8, 9), num_sms=142, shared_bytes=99 << 10, bandwidth=0.75e12)
B200 = replace(H200, capability=(10, 0), num_sms=148, bandwidth=6.8e12)
DEVICES = [A100, L40S, H200, B200]
# N, K and kind of the GEMMs of Llama-3.2-1B, Qwen3-4B, Qwen3-14B, Llama-3.1-8B and Mistral-7B.
UNMEASURED = [
    (3072, 2048, "split"),
    (2048, 2048, "split"),
    (2048, 8192, "split"),
    (6144, 2560, "split"),
    (2560, 4096, "split"),
    (2560, 9728, "split"),
    (5120, 17408, "split"),
    (4096, 14336, "split"),
    (19456, 2560, "gated"),
    (34816, 5120, "gated"),
    (28672, 4096, "gated"),
    (128256, 2048, "whole"),
    (151936, 5120, "whole"),
    (32768, 4096, "whole"),
]
PLAN = GemmPlan(False, 16, 64, 128, splits=1, stages=3, warps=4)


def shapes(rows=ROWS):
    return [GemmShape(n, *each) for each in UNMEASURED for n in rows if each[2] != "gated" or n <= 64]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.capability}")
def test_every_candidate_can_run(device) -> None:
    for shape, found in candidates(shapes(), device).items():
        assert 4 <= len(found) <= 8, shape
        for plan in found:
            assert shape.size % plan.block_n == 0
            assert shape.depth % plan.block_k == 0
            assert split_steps(shape.depth, plan.block_k, plan.splits) >= 2
            assert plan.shared_bytes <= device.shared_bytes
            assert not plan.tma or device.capability >= (9, 0)
            assert plan.splits == 1 or shape.kind == "split"
            assert not (plan.tma and shape.kind == "gated")  # half of a tile's rows lie elsewhere
            assert plan.swap
            assert not plan.group_m


def test_measured_plans_are_among_the_candidates() -> None:
    """Of the plans that were measured as the best, most have to be seen: the timing at start can only choose
    among candidates."""
    table = Path(segue.__path__[0]) / "kernels" / "triton" / "gemm.json"
    [stored] = json.loads(table.read_text())
    wanted = {}
    for name, by_rows in stored["plans"].items():
        size, depth = map(int, name.split("x"))
        kind = "whole" if size >= 32768 else "split"  # the head takes no partials
        for rows, by_kind in by_rows.items():
            if by_kind[kind]:
                wanted[GemmShape(int(rows), size, depth, kind)] = GemmPlan(**by_kind[kind])
    assert len(wanted) > 100
    found = candidates(wanted, H200, {tile(plan) for plan in wanted.values()})
    missed = [shape for shape, plan in wanted.items() if plan not in found[shape]]
    assert len(missed) < len(wanted) * 0.11, missed  # splits of unequal length were not measured


def test_no_prediction_is_faster_than_the_memory() -> None:
    for device in DEVICES:
        for shape in shapes(rows=(1, 256)):
            read = shape.size * shape.depth * 2 / device.bandwidth
            assert all(predict(plan, shape, device) > read for plan in valid_plans(shape, device))


def test_a_gemm_with_few_columns_is_split() -> None:
    few, many = GemmShape(8, 2560, 9728, "split"), GemmShape(8, 151936, 2560, "split")
    found = candidates([few, many], H200)
    assert found[few][0].splits > 1
    assert found[many][0].splits == 1


def test_splits_of_unequal_length_fill_the_device() -> None:
    """40 blocks of columns times 3 splits are 120 programs for 132 SMs; 2 and 4 splits leave more idle."""
    assert split_steps(9728, 128, 3) == 26  # 26, 26 and 24 of 76 steps
    assert split_steps(2560, 128, 9) == 0  # 3 steps each are gone after seven splits
    for rows in (8, 32, 64, 128):
        first = candidates([GemmShape(rows, 2560, 9728, "split")], H200)
        assert next(iter(first.values()))[0].splits == 3, rows


def test_partials_of_more_rows_cost_more() -> None:
    split = replace(PLAN, block_m=64, splits=4)
    few, many = (predict(split, GemmShape(rows, 4096, 4096, "split"), H200) for rows in (64, 256))
    whole = replace(PLAN, block_m=64)
    assert many - few > predict(whole, GemmShape(256, 4096, 4096, "split"), H200) - predict(
        whole, GemmShape(64, 4096, 4096, "split"), H200
    )


def test_a_shape_that_no_tile_divides_has_no_candidates() -> None:
    odd = [GemmShape(1, 100, 4096, "split"), GemmShape(1, 4096, 100, "split")]
    assert candidates(odd, H200) == {shape: [] for shape in odd}


def test_a_tile_that_won_elsewhere_goes_first_among_equals() -> None:
    shape = GemmShape(8, 6144, 2560, "split")
    first, second = candidates([shape], H200)[shape][:2]
    assert candidates([shape], H200, {tile(second)})[shape][0] == second
    assert first != second


def test_shapes_share_kernels() -> None:
    """Each kernel takes time to compile, so a kernel that another shape needs is preferred to a new one."""
    own = [GemmShape(rows, 6144, 2560, "split") for rows in (16, 12)]
    together = candidates(own, H200)
    apart = {shape: candidates([shape], H200)[shape] for shape in own}
    assert set(together[own[1]]) == set(together[own[0]])
    assert len({plan for plans in together.values() for plan in plans}) <= len(
        {plan for plans in apart.values() for plan in plans}
    )


def test_plans_that_differ_in_their_number_of_splits_share_a_kernel() -> None:
    qwen = [(6144, 2560), (2560, 4096), (2560, 9728)]
    own = [GemmShape(rows, *sizes, "split") for sizes in qwen for rows in ROWS]

    def kernels(found):
        return {(tile(plan), plan.splits > 1, shape.rows <= 8) for shape in found for plan in found[shape]}

    apart = {shape: candidates([shape], H200)[shape] for shape in own}
    assert len(kernels(candidates(own, H200))) < 0.9 * len(kernels(apart))


@pytest.mark.parametrize(
    ("times", "library", "best"),
    [
        ({PLAN: 10.0, replace(PLAN, stages=4): 9.0}, 12.0, replace(PLAN, stages=4)),
        ({PLAN: 10.0}, 10.0, None),  # as fast as the library: not worth a kernel of its own
        ({PLAN: 10.0}, 10.1, None),  # almost
        ({PLAN: 10.0}, 9.0, None),
        ({}, 9.0, None),
        ({PLAN: float("inf")}, 9.0, None),
        ({PLAN: float("nan")}, 9.0, None),
    ],
)
def test_a_chosen_plan_is_faster_than_the_library(times, library, best) -> None:
    assert choose_fastest(times, library) == best


def test_a_plan_serves_all_rows_between_two_of_the_table() -> None:
    assert [fewest_rows(rows) for rows in ROWS] == [2, 9, 17, 33]
    for rows in range(2, 65):
        [own] = row_buckets(rows, rows)
        assert fewest_rows(own) <= rows <= own


def test_row_buckets_serve_every_number_of_rows() -> None:
    assert row_buckets(1, 1 << 30) == list(ROWS)
    assert row_buckets(1, 20) == [8, 16, 32]  # 17 to 20 rows take the plan up to 32
    assert row_buckets(33, 1 << 30) == [64]
    assert row_buckets(65, 1 << 30) == []


def test_stages_are_cut_to_the_shared_memory() -> None:
    large = GemmPlan(True, 128, 256, 64, splits=1, stages=4, warps=8, swap=False, group_m=8)
    assert fit_stages(large, H200.shared_bytes) == large
    assert fit_stages(large, A100.shared_bytes) == replace(large, stages=3)
    assert fit_stages(large, L40S.shared_bytes) == replace(large, stages=2)
    assert fit_stages(large, 64 << 10) is None


@pytest.mark.parametrize(
    ("sms", "programs"), [(132, 256), (108, 256), (148, 256), (58, 128), (24, 64), (1, 2)]
)
def test_decode_is_split_over_about_two_programs_per_sm(sms, programs) -> None:
    assert replace(H200, num_sms=sms).max_split_programs == programs


def test_round_log2_rounds_by_ratio() -> None:
    assert [round_log2(value) for value in (1, 2, 3, 5, 6, 181, 182)] == [0, 1, 2, 2, 3, 7, 8]
