"""Decides which graphs a starting runner captures, reserves memory for them, and captures them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from segue.attention.registry import Selection
from segue.config import EngineConfig
from segue.distributed.groups import TPGroups
from segue.layers.moe_backend import MoEEntry
from segue.logs import logger
from segue.memory.budget import GRAPH_RESERVE, Demand, afford_graphs, gib

if TYPE_CHECKING:
    from segue.model_runner.cuda_executor import CUDAExecutor


def reserve_for_graphs(
    demand: Demand,
    config: EngineConfig,
    selection: Selection,
    experts: MoEEntry | None,
    *,
    can_capture_collectives: bool,
) -> Demand:
    """Return the demand, without memory for graphs if none can be captured; a warning says why.

    `can_capture_collectives` is False where a warning has been logged already.
    """
    reserved, slow = demand.reserve.graphs, "all steps run eagerly and launch every kernel"
    if not reserved:
        return demand
    if not selection.graphs:
        logger.warning(
            "attention backend %s cannot be captured in CUDA graphs: %s; choose another one with "
            "--attention-backend",
            selection.name,
            slow,
        )
    elif experts is not None and not experts.graph:
        logger.warning("MoE backend %s cannot be captured in CUDA graphs: %s", experts.name, slow)
    elif not afford_graphs(demand, config.num_kv_tokens):
        logger.warning(
            "no CUDA graphs: the %s reserved for them would leave less than that for KV, or no room for "
            "--num-kv-tokens; steps run eagerly. Raise --memory-ratio, lower --num-kv-tokens, "
            "--chunked-prefill-size or --max-running-requests, or free memory",
            gib(reserved),
        )
    elif can_capture_collectives:
        return demand
    return demand.without_graphs()


def capture(executor: CUDAExecutor, groups: TPGroups, device: torch.device) -> int:
    """Capture the graphs and return the bytes that they take, on the rank where they take most.

    The graphs may take `GRAPH_RESERVE` bytes, because KV pages and activations have the rest. Sizes that do
    not fit are left out on every rank alike: their steps run eagerly, slower but with correct results.
    """
    free = executor.warm_up()

    def taken() -> int:
        used = free - torch.cuda.mem_get_info(device)[0]
        return max(values[0] for values in groups.all_gather([used]))

    left_out = executor.capture(lambda: taken() < GRAPH_RESERVE)
    used = taken()
    if left_out:
        logger.warning(
            "%d CUDA graphs took %s of the %s reserved for them; sizes left out, to run eagerly: %s. Lower "
            "--max-running-requests or --chunked-prefill-size, or shorten --batch-prefill-batch-sizes",
            executor.num_graphs,
            gib(used),
            gib(GRAPH_RESERVE),
            "; ".join(left_out),
        )
    return used
