"""Decides which graphs a starting runner captures, reserves memory for them, and captures them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from segue.attention.base import AttentionBackend
from segue.attention.registry import Selection
from segue.config import EngineConfig
from segue.distributed.groups import TPGroups
from segue.layers.moe_backend import MoEEntry
from segue.logs import logger
from segue.memory.budget import GRAPH_RESERVE, Demand, afford_graphs, gib
from segue.model_runner.graphs import grid_sizes
from segue.model_runner.resolved_config import ResolvedConfig
from segue.options import parse_sizes

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


def resolve_grid(
    config: EngineConfig,
    resolved: ResolvedConfig,
    backend: AttentionBackend,
    name: str,
    moe: bool,
    *,
    captures: bool,
) -> list[tuple[int, int]]:
    """Return the sizes of the grid of prefill graphs.

    There are none if the option is off, or if the grid cannot be used; in the second case a warning says why.
    """
    if not config.enable_batch_prefill_cuda_graph:
        return []
    if moe:
        logger.warning(
            "--enable-batch-prefill-cuda-graph is ignored: a mixture of experts needs all padding behind the "
            "last token, and here every prompt is padded at its front; leave the option out"
        )
        return []
    if not backend.supports_batch_prefill_cuda_graph():
        logger.warning(
            "--enable-batch-prefill-cuda-graph is ignored: attention backend %r does not support it; choose "
            "one that does with --attention-backend, or leave the option out",
            name,
        )
        return []
    if not captures:
        logger.warning("--enable-batch-prefill-cuda-graph is ignored: no CUDA graphs are captured")
        return []
    sizes = grid_sizes(
        parse_sizes(config.batch_prefill_batch_sizes, "batch_prefill_batch_sizes"),
        parse_sizes(config.batch_prefill_seq_lengths, "batch_prefill_seq_lengths"),
        max_len=config.batch_prefill_max_seq_len,
        rows=resolved.max_running_requests,
        tokens=resolved.max_running_requests + resolved.chunked_prefill_size,
    )
    if not sizes:
        logger.warning(
            "--enable-batch-prefill-cuda-graph is ignored: no size of --batch-prefill-batch-sizes and "
            "--batch-prefill-seq-lengths fits %d requests, %d prompt tokens per step and "
            "--batch-prefill-max-seq-len %d",
            resolved.max_running_requests,
            resolved.chunked_prefill_size,
            config.batch_prefill_max_seq_len,
        )
    return sizes


def capture(
    executor: CUDAExecutor, grid: list[tuple[int, int]], groups: TPGroups, device: torch.device
) -> int:
    """Capture the graphs and return the bytes that they take, on the rank where they take most.

    The graphs may take `GRAPH_RESERVE` bytes, because KV pages and activations have the rest. Sizes that do
    not fit are left out on every rank alike: their steps run eagerly, slower but with correct results.
    """
    free = executor.warm_up()

    def taken() -> int:
        used = free - torch.cuda.mem_get_info(device)[0]
        return max(values[0] for values in groups.all_gather([used]))

    left_out = executor.capture(grid, lambda: taken() < GRAPH_RESERVE)
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
