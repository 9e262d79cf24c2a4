"""Which graphs a starting runner captures, and the memory that is kept for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from segue.attention.base import AttentionBackend
from segue.attention.registry import Selection
from segue.config import EngineConfig, parse_sizes
from segue.distributed.groups import TPGroups
from segue.layers.moe_backend import MoEEntry
from segue.logs import logger
from segue.memory.budget import GRAPH_RESERVE, Demand, afford_graphs, gib
from segue.model_runner.graphs import grid_sizes
from segue.model_runner.resolved_config import ResolvedConfig

if TYPE_CHECKING:
    from segue.model_runner.cuda_executor import CUDAExecutor


def keep_for_graphs(
    demand: Demand,
    config: EngineConfig,
    selection: Selection,
    experts: MoEEntry | None,
    *,
    ranks_meet: bool,
) -> Demand:
    """The demand, with nothing kept for graphs where none can be captured; a warning says why."""
    kept, stuck = demand.reserve.graphs, "every kernel of every step is launched"
    if not kept:
        return demand
    if not selection.graphs:
        logger.warning(
            "attention backend %s cannot be captured in CUDA graphs: %s; choose one that can with "
            "--attention-backend",
            selection.name,
            stuck,
        )
    elif experts is not None and not experts.graph:
        logger.warning("MoE backend %s cannot be captured in CUDA graphs: %s", experts.name, stuck)
    elif not afford_graphs(demand, config.num_kv_tokens):
        logger.warning(
            "no CUDA graphs: the %s kept for them would leave less than that for KV, or no room for "
            "--num-kv-tokens; steps run eagerly. Raise --memory-ratio, lower --num-kv-tokens, "
            "--chunked-prefill-size or --max-running-requests, or free memory",
            gib(kept),
        )
    elif ranks_meet:  # else a warning was given before
        return demand
    return demand.without_graphs()


def grid_of(
    config: EngineConfig,
    resolved: ResolvedConfig,
    backend: AttentionBackend,
    name: str,
    moe: bool,
    *,
    captures: bool,
) -> list[tuple[int, int]]:
    """Sizes of the grid of prefill graphs; none where it is off, a warning where it has to be."""
    if not config.enable_batch_prefill_cuda_graph:
        return []
    if moe:
        logger.warning(
            "--enable-batch-prefill-cuda-graph is ignored: experts tell padding by its place behind all "
            "tokens, and here it lies among them; leave the option out"
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
            "--batch-prefill-seq-lengths fits %d requests, %d prompt tokens a step and "
            "--batch-prefill-max-seq-len %d",
            resolved.max_running_requests,
            resolved.chunked_prefill_size,
            config.batch_prefill_max_seq_len,
        )
    return sizes


def capture(
    executor: CUDAExecutor, grid: list[tuple[int, int]], groups: TPGroups, device: torch.device
) -> int:
    """Capture the graphs; the bytes they took, on the rank where they took most.

    They may take what was kept for them. KV pages and activations have the rest, so that what does not fit is
    left out, on every rank alike: its steps run eagerly, slower and as right.
    """
    free = executor.settle()

    def taken() -> int:
        used = free - torch.cuda.mem_get_info(device)[0]
        return max(values[0] for values in groups.all_gather([used]))

    left_out = executor.capture(grid, lambda: taken() < GRAPH_RESERVE)
    used = taken()
    if left_out:
        logger.warning(
            "CUDA graphs took %s of the %s kept for them after %d; left out, to run eagerly: %s. Lower "
            "--max-running-requests or --chunked-prefill-size, or shorten --batch-prefill-batch-sizes",
            gib(used),
            gib(GRAPH_RESERVE),
            executor.num_graphs,
            "; ".join(left_out),
        )
    return used
