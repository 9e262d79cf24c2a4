"""Which plans are tried for experts of a shape that nobody measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import segue
from segue.kernels.moe_plan import TOKENS, MoEPlan, MoEShape, TileConfig, candidates, default_plan, is_valid
from tests.kernels.test_gemm_plan import DEVICES, H200, L40S

TABLE = Path(segue.__path__[0]) / "kernels" / "triton" / "moe.json"
[STORED] = [table["plans"] for table in json.loads(TABLE.read_text())]
SHARD = MoEShape(128, 8, 384, 2048)  # of Qwen3-30B-A3B, for one of two ranks
MIXTRAL = MoEShape(8, 2, 14336, 4096)
FP8, BLOCKS = (MoEShape(128, 8, 768, 2048, block) for block in (0, 128))


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.capability}")
@pytest.mark.parametrize("shape", [SHARD, MIXTRAL, FP8, BLOCKS], ids=lambda shape: shape.key)
def test_every_candidate_can_run(device, shape) -> None:
    for tokens in TOKENS:
        found = candidates(shape, tokens, device, STORED)
        assert 1 <= len(found) <= 10
        assert len(set(found)) == len(found)
        assert all(is_valid(plan, shape, device) for plan in found)
        assert device.has_tma or not any(plan.gate_up.tma or plan.down.tma for plan in found)


def test_plans_of_experts_with_about_as_many_tokens_go_first() -> None:
    few = MoEShape(64, 4, 768, 2048)  # as many pairs per expert as the measured shape
    for tokens, plan in STORED["128x8x768x2048"].items():
        assert MoEPlan.of(plan) in candidates(few, int(tokens), H200, STORED)


def test_a_device_without_measured_plans_has_candidates() -> None:
    assert candidates(SHARD, 64, L40S, {})


def test_tiles_that_do_not_divide_the_weights_are_not_valid() -> None:
    config = TileConfig(64, 64, 3, 4)
    assert is_valid(MoEPlan(16, config, config), SHARD, H200)
    assert not is_valid(MoEPlan(16, config, config), MoEShape(8, 2, 96, 128), H200)
    assert not is_valid(MoEPlan(16, TileConfig(64, 128, 6, 4), config), SHARD, L40S)  # too much shared memory


def test_plans_survive_a_table() -> None:
    plan = default_plan(SHARD, 64, is_float32=False)
    assert MoEPlan.of(json.loads(json.dumps(plan.stored()))) == plan
    assert MoEShape.of(SHARD.key) == SHARD


def test_experts_in_fp8_have_plans_of_their_own() -> None:
    shapes = [FP8, BLOCKS, MoEShape(128, 8, 768, 2048)]
    assert len({shape.key for shape in shapes}) == 3
    assert [MoEShape.of(shape.key) for shape in shapes] == shapes
    assert not {FP8.key, BLOCKS.key} & STORED.keys(), "no device was measured with them"


def test_tiles_in_fp8_have_half_the_bytes() -> None:
    plan = MoEPlan(32, TileConfig(64, 128, 3, 4), TileConfig(64, 128, 3, 4))
    assert is_valid(plan, BLOCKS, L40S) and not is_valid(plan, MoEShape(128, 8, 768, 2048), L40S)


def test_with_scales_of_blocks_a_product_has_to_fit_into_registers_beside_the_sums() -> None:
    plan = MoEPlan(128, TileConfig(64, 64, 3, 8), TileConfig(256, 64, 3, 8))
    assert is_valid(plan, FP8, H200) and not is_valid(plan, BLOCKS, H200)


@pytest.mark.parametrize(("tokens", "block"), [(1, 1), (4, 1), (5, 16), (512, 16), (513, 64)])
def test_the_default_plan_depends_on_the_tokens_per_expert(tokens, block) -> None:
    assert default_plan(SHARD, tokens, is_float32=False).block_m == block
    assert default_plan(SHARD, tokens, is_float32=True).block_m == min(block, 16)
