"""Finds the plans of a model's GEMMs and experts at the start of an engine, or reads those of earlier starts.

Rank 0 decides and the others use its plans, so all ranks compute their shards in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from segue.config import EngineConfig
from segue.distributed.groups import TPGroups
from segue.kernels.gemm_plan import MAX_GATED_ROWS, ROWS, Kind
from segue.kernels.model_gemm import ModelExperts, ModelFP8Gemm, ModelGemm, Planned
from segue.kernels.ops import FP8Gemm
from segue.kernels.plan_store import PlanCache, Plans, merge, source_digest, without_plans
from segue.layers import moe_backend
from segue.layers.blocks import Linear, RowParallelLinear
from segue.model_runner.executor import free_garbage
from segue.models.decoder import MLP, Decoder, MoE

_KERNELS = Path(__file__).parents[1] / "kernels"
_SOURCES = [  # what decides how fast a plan is, and how it is timed
    *(_KERNELS / f"{name}.py" for name in ("fp8_plan", "gemm_plan", "moe_plan")),
    *(_KERNELS / "triton" / f"{name}.py" for name in ("fp8_gemm", "gate_up_silu", "gemm", "launch")),
    *(_KERNELS / "triton" / f"{name}.py" for name in ("plan_tasks", "plan_timing")),
    *(_KERNELS / "triton" / f"{name}.py" for name in ("moe", "moe_gemm", "moe_routing")),
]
_MANY = 1 << 30  # rows without a limit
_WAIT_S = 15.0  # for another engine of this host that measures: a little longer than it may take


def plan_gemms(config: EngineConfig, model: Decoder, groups: TPGroups, *, may_time: bool) -> str:
    """Find the plans of the model's GEMMs and experts, and let the kernels use them; returns a line of log.

    All ranks call it. Without `may_time` only plans in the cache are used.
    """
    if config.gemm_plans == "stored":
        return "stored ones alone: --gemm-plans says so"
    import triton

    from segue.kernels.triton.launch import device_facts
    from segue.kernels.triton.plan_tasks import plan_tasks
    from segue.kernels.triton.plan_timing import find_plans, use_plans

    plans: Plans = {}
    text = "those of rank 0"
    if groups.tp.is_first:
        versions = {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "kernels": source_digest(_SOURCES),
        }
        cache = PlanCache.of(Path(config.cache_dir), device_facts(), versions)
        plans, text = cache.load(), "all are stored or cached"
        gemms: list[Planned] = [*model_gemms(model), *model_fp8_gemms(model), *model_experts(model)]
        if not gemms:
            text = "none: the weights are packed"
        if plan_tasks(gemms, plans, device_facts()):
            text = "those stored and cached: another engine may serve on this device"
            if may_time:
                with cache.measuring(_WAIT_S):
                    plans, text = find_plans(gemms, cache)
                free_garbage()
        untimed = plan_tasks(gemms, plans, device_facts())
        plans = merge(without_plans(task.place for task in untimed), plans)
    use_plans(share(plans, groups))
    return text


def share(plans: Plans, groups: TPGroups) -> Plans:
    """Return rank 0's plans on every rank; all ranks call it."""
    if groups.tp.size == 1:
        return plans
    data = json.dumps(plans).encode() if groups.tp.is_first else b""
    size = groups.all_gather([len(data)])[0][0]
    found: Plans = json.loads(bytes(groups.all_gather(data.ljust(size))[0]))
    return found


def model_gemms(model: Decoder) -> list[ModelGemm]:
    """Return the GEMMs by plain weights of a model; those of equal layers are one."""
    return [
        ModelGemm(
            weights=[module.weight for module in modules],
            bias=modules[0].bias,
            kind=use.kind,
            dtype=torch.float32 if modules[0].float32_output else modules[0].weight.dtype,
            first_rows=use.first_rows,
            last_rows=use.last_rows,
        )
        for use, modules in _equal_layers(model, lambda module: module.packed is None)
    ]


def model_fp8_gemms(model: Decoder) -> list[ModelFP8Gemm]:
    """Return the GEMMs by weights in FP8 of a model in bfloat16 on CUDA; those of equal layers are one."""
    if model.embed.weight.dtype != torch.bfloat16:  # `choose_fp8` has no plans for others
        return []
    return [
        ModelFP8Gemm(
            weights=[
                (own.weight, own.scales) for module in modules if isinstance(own := module.packed, FP8Gemm)
            ],
            block=modules[0].block,
            bias=modules[0].bias,
            kind=use.kind,
            first_rows=use.first_rows,
            last_rows=use.last_rows,
        )
        for use, modules in _equal_layers(model, lambda module: isinstance(module.packed, FP8Gemm))
    ]


class _Use(NamedTuple):
    """What a model asks a layer's GEMM for, with the least and the greatest number of rows."""

    kind: Kind
    first_rows: int
    last_rows: int


def _equal_layers(model: Decoder, is_wanted: Callable[[Linear], bool]) -> Iterator[tuple[_Use, list[Linear]]]:
    """Yield the layers whose GEMMs have the same plans, once per use."""
    gate_ups = {module.gate_up for module in model.modules() if isinstance(module, MLP)}
    found: dict[tuple[object, ...], tuple[_Use, list[Linear]]] = {}
    for module in model.modules():
        if isinstance(module, Linear) and is_wanted(module):
            for use in _uses(module, module in gate_ups):
                key = (*use, module.weight.shape, module.float32_output, module.bias is None)
                found.setdefault(key, (use, []))[1].append(module)
    yield from found.values()


def model_experts(model: Decoder) -> list[ModelExperts]:
    """Return the experts of a model's layers, if Triton's kernels run them; those of equal layers are one."""
    found: dict[tuple[object, ...], list[MoE]] = {}
    for module in model.modules():
        if isinstance(module, MoE) and module.backend is moe_backend.run_triton:
            key = module.experts["down"].shape, module.moe.num_experts_per_tok
            found.setdefault(key, []).append(module)
    return [
        ModelExperts(
            weights=[(module.weights("gate_up"), module.weights("down")) for module in modules],
            per_token=modules[0].moe.num_experts_per_tok,
        )
        for modules in found.values()
    ]


def _uses(module: Linear, is_gate_up: bool) -> Iterator[_Use]:
    """Yield the uses of a layer's GEMM."""
    split_rows = _MANY if module.may_split or is_gate_up else 0
    first = 1
    if is_gate_up and module.bias is None:
        yield _Use("gated", first, MAX_GATED_ROWS)
        first = MAX_GATED_ROWS + 1
    elif isinstance(module, RowParallelLinear):
        split_rows = module.max_split_rows
    if first <= split_rows:
        yield _Use("split", first, split_rows)
    if split_rows < ROWS[-1]:
        yield _Use("whole", max(first, split_rows + 1), _MANY)
