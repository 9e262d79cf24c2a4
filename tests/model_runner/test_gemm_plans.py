"""Which GEMMs of a model get plans, and that all ranks use the same ones."""

from __future__ import annotations

from threading import Barrier, Thread
from typing import Any

import pytest
import torch

from segue.checkpoint.bundled import CONFIG
from segue.distributed.collectives import Collectives
from segue.distributed.groups import TPGroups
from segue.distributed.info import TPInfo
from segue.kernels.gemm_plan import ROWS
from segue.model_runner.gemm_plans import model_gemms, share
from segue.models.config import ModelConfig
from segue.models.decoder import build_model

SMOLLM2 = ModelConfig.from_hf(CONFIG)


class FusedAllReduce:
    max_rows = 100


def gemms(collectives: Collectives | None = None, **changes: Any) -> dict[tuple[Any, ...], Any]:
    """The GEMMs by N, K and kind."""
    config = ModelConfig.from_hf(CONFIG | changes)
    found = model_gemms(build_model(config, dtype=torch.bfloat16, collectives=collectives))
    by_name = {(*gemm.weights[0].shape, gemm.kind): gemm for gemm in found}
    assert len(by_name) == len(found)
    return by_name


def rows_of(found: dict[tuple[Any, ...], Any]) -> dict[tuple[Any, ...], list[int]]:
    return {name: [shape.rows for shape in gemm.shapes()] for name, gemm in found.items()}


def test_the_gemms_of_a_dense_model() -> None:
    found = gemms()
    assert rows_of(found) == {
        (960, 576, "split"): list(ROWS),
        (576, 576, "split"): list(ROWS),
        (3072, 576, "gated"): [1, 8, 16, 32, 64],
        (3072, 576, "split"): [96, 128, 192, 256],
        (576, 1536, "split"): list(ROWS),
        (49152, 576, "whole"): list(ROWS),
    }
    assert {len(gemm.weights) for gemm in found.values()} == {30, 1}  # layers are timed in turns
    head = found[49152, 576, "whole"]
    assert head.dtype == torch.float32
    assert found[960, 576, "split"].dtype == torch.bfloat16


def test_ranks_sum_partials_of_few_rows_only() -> None:
    """The fused all-reduce adds split-K partials up, and NCCL does not."""
    collectives = Collectives(TPInfo(rank=1, size=3))
    found = rows_of(gemms(collectives))
    assert found[576, 192, "whole"] == list(ROWS)
    assert (576, 192, "split") not in found
    collectives.fused_all_reduce = FusedAllReduce()  # type: ignore[assignment]
    found = rows_of(gemms(collectives))
    assert found[576, 192, "split"] == [1, 8, 16, 32, 64, 96, 128]
    assert found[576, 192, "whole"] == [128, 192, 256]


def test_a_gate_up_gemm_with_a_bias_is_never_gated() -> None:
    found = gemms(mlp_bias=True)
    assert (3072, 576, "gated") not in found
    assert rows_of(found)[3072, 576, "split"] == list(ROWS)
    assert found[3072, 576, "split"].bias is not None


def test_weights_that_are_packed_get_no_plans() -> None:
    """That is so on a CPU, and in deterministic mode."""
    model = build_model(SMOLLM2, dtype=torch.bfloat16)
    for layer in model.layers:
        layer.attn.qkv.packed = layer.attn.o.packed = layer.mlp.gate_up.packed = layer.mlp.down.packed = (
            object()
        )
    assert [gemm.kind for gemm in model_gemms(model)] == ["whole"]


class Ranks:
    """Gathers what two ranks give, each in a thread of its own."""

    def __init__(self) -> None:
        self.barrier = Barrier(2, timeout=20)
        self.given: dict[int, list[int]] = {}

    def groups(self, rank: int) -> TPGroups:
        ranks = self

        class Groups(TPGroups):
            def all_gather(self, values: Any) -> list[list[int]]:
                ranks.given[rank] = list(values)
                ranks.barrier.wait()
                gathered = [ranks.given[0], ranks.given[1]]
                ranks.barrier.wait()
                assert len({len(part) for part in gathered}) == 1
                return gathered

        tp = TPInfo(rank=rank, size=2)
        return Groups(tp, Collectives(tp))


@pytest.mark.parametrize("plans", [{}, {"4096x4096": {"8": {"split": {"tma": True}, "whole": None}}}])
def test_all_ranks_get_the_plans_of_rank_0(plans) -> None:
    ranks = Ranks()
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        found[rank] = share(plans if rank == 0 else {"ignored": {}}, ranks.groups(rank))

    threads = [Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {0: plans, 1: plans}
