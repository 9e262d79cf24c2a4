"""Which GEMMs of a model get plans, and that all ranks use the same ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from segue.checkpoint.bundled import CONFIG
from segue.config import EngineConfig
from segue.distributed.collectives import Collectives
from segue.distributed.groups import TPGroups, connect
from segue.distributed.info import TPInfo
from segue.kernels.gemm_plan import ROWS, DeviceFacts
from segue.kernels.ops import FP8Gemm
from segue.kernels.plan_store import PlanCache, Plans, lookup
from segue.layers.blocks import Linear
from segue.model_runner.gemm_plans import model_fp8_gemms, model_gemms, plan_gemms, share
from segue.models.config import ModelConfig
from segue.models.decoder import Decoder, build_model
from tests.kernels.test_gemm_plan import H200

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
        (3072, 576, "gated"): list(ROWS),
        (3072, 576, "split"): [],  # of many rows
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
    assert found[576, 192, "split"] == list(ROWS)
    assert found.get((576, 192, "whole"), []) == []


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


def fp8_on_cuda(dtype: torch.dtype) -> Decoder:
    model = build_model(SMOLLM2, dtype=dtype)
    for module in model.modules():
        if isinstance(module, Linear) and not module.float32_output:
            module.make_fp8(128)
            module.packed = FP8Gemm(module.weight, module.scale, module.block)
    return model


def test_only_activations_in_bfloat16_have_plans_for_weights_in_fp8() -> None:
    assert model_fp8_gemms(fp8_on_cuda(torch.float16)) == []


def test_weights_in_fp8_get_plans_of_their_own() -> None:
    model = fp8_on_cuda(torch.bfloat16)
    found = {(*gemm.weights[0][0].shape, gemm.kind): gemm for gemm in model_fp8_gemms(model)}
    assert rows_of(found) == {
        (960, 576, "split"): list(ROWS),
        (576, 576, "split"): list(ROWS),
        (3072, 576, "gated"): list(ROWS),
        (3072, 576, "split"): [],
        (576, 1536, "split"): list(ROWS),
    }
    assert {(len(gemm.weights), gemm.block) for gemm in found.values()} == {(30, 128)}
    assert found[576, 1536, "split"].weights[0][1].shape == (576, 12)
    assert [gemm.kind for gemm in model_gemms(model)] == ["whole"]


# The control flow of a start, with a search that is not the real one: that needs Triton and a GPU.

PLANS: Plans = {"4096x4096": {"8": {"split": {"tma": True}, "whole": None}}}


class Search:
    """Stands for `kernels.triton.plan_timing` and `plan_tasks`: finds PLANS, unless the cache has them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.late: list[Any] = []  # the tasks that there is no time for
        self.timed = 0
        self.used: list[Plans] = []
        launch = SimpleNamespace(device_facts=lambda: H200)
        for name, module in {
            "triton": SimpleNamespace(__version__="3.6"),
            "segue.kernels.triton.launch": launch,
            "segue.kernels.triton.plan_tasks": self,
            "segue.kernels.triton.plan_timing": self,
        }.items():
            monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]

    def plan_tasks(self, gemms: Sequence[Any], known: Plans, device: DeviceFacts) -> list[Any]:
        assert gemms and device is H200
        return self.late if known else [SimpleNamespace(place=("4096x4096", "8", "split"))]

    def find_plans(self, gemms: Sequence[Any], cache: PlanCache) -> tuple[Plans, str]:
        self.timed += 1
        return cache.add(PLANS), "1 of 1 timed"

    def use_plans(self, plans: Plans) -> None:
        self.used.append(plans)


@pytest.fixture
def search(monkeypatch) -> Search:
    return Search(monkeypatch)


def plan(tmp_path: Path, groups: TPGroups | None = None, *, may_time: bool = True, **options: Any) -> str:
    config = EngineConfig.create(**{"cache_dir": str(tmp_path), "gemm_plans": "auto"} | options)
    model = build_model(SMOLLM2, dtype=torch.bfloat16)
    return plan_gemms(config, model, groups or TPGroups(TPInfo(), Collectives()), may_time=may_time)


def test_only_the_first_start_times_plans(search, tmp_path) -> None:
    assert plan(tmp_path) == "1 of 1 timed"
    assert plan(tmp_path) == "all are stored or cached"
    assert search.timed == 1
    assert search.used == [PLANS, PLANS]


def test_beside_an_engine_that_may_serve_nothing_is_timed(search, tmp_path) -> None:
    assert "another engine" in plan(tmp_path, may_time=False)
    assert (search.timed, search.used) == (0, [{"4096x4096": {"8": {"split": None}}}])
    plan(tmp_path)
    assert plan(tmp_path, may_time=False) == "all are stored or cached"
    assert search.used[-1] == PLANS


@pytest.mark.parametrize("may_time", [True, False])
def test_rows_that_there_is_no_time_for_do_not_take_the_plan_of_more_rows(search, tmp_path, may_time) -> None:
    plan(tmp_path)
    search.late = [SimpleNamespace(place=("4096x4096", "1", "split"))]
    plan(tmp_path, may_time=may_time)
    [used] = search.used[1:]
    assert lookup([(used, "split")], "4096x4096", 1) is None
    assert lookup([(used, "split")], "4096x4096", 2) == {"tma": True}


def test_stored_plans_alone(search, tmp_path) -> None:
    assert "--gemm-plans" in plan(tmp_path, gemm_plans="stored")
    assert (search.timed, search.used) == (0, [])


def test_only_rank_0_times_plans(search, tmp_path) -> None:
    texts = both_ranks(tmp_path, lambda groups: plan(tmp_path, groups))
    assert texts == ["1 of 1 timed", "those of rank 0"]
    assert search.timed == 1
    assert search.used == [PLANS, PLANS]


def both_ranks(tmp_path: Path, run: Callable[[TPGroups], Any]) -> list[Any]:
    """Return what `run` returns on each of two ranks, which are threads with groups over gloo."""

    def rank(number: int) -> Any:
        device, timeout = torch.device("cpu"), timedelta(seconds=20)
        tp = TPInfo(rank=number, size=2)
        return run(connect(tp, rendezvous=tmp_path / "rendezvous", device=device, timeout=timeout))

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(rank, (0, 1)))


@pytest.mark.parametrize("plans", [{}, PLANS])
def test_all_ranks_get_the_plans_of_rank_0(plans, tmp_path) -> None:
    def run(groups: TPGroups) -> Plans:
        return share(plans if groups.tp.is_first else {"ignored": {}}, groups)

    assert both_ranks(tmp_path, run) == [plans, plans]
