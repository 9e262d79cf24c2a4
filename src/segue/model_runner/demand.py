"""The memory that one rank of an engine needs, before its weights are loaded and after."""

from __future__ import annotations

from math import prod

import torch

from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.memory.arena import Layout
from segue.memory.budget import CPU_POOL_LIMIT, GRAPH_RESERVE, Demand, Reserve
from segue.model_runner.batch_state import BatchState
from segue.model_runner.eager import why_unwanted
from segue.model_runner.profile_run import min_activations
from segue.model_runner.resolved_config import ResolvedConfig
from segue.model_runner.sampler import Sampler
from segue.models import weight_map
from segue.models.config import ModelConfig
from segue.models.sharding import shard


def make_demand(
    config: EngineConfig,
    resolved: ResolvedConfig,
    model: ModelConfig,
    *,
    ranks: int,
    free_before: int,
    page_bytes: int,
    parks_kv: bool,
    arena_bytes: int = 0,
    derived: int = 0,
    activations: int,
) -> Demand:
    """Return the sizes that the number of KV pages depends on; those in bytes are of one rank.

    Args:
        config: the options of the user.
        resolved: those that the user left open.
        model: the whole model.
        ranks: the number of ranks of the engine.
        free_before: bytes that were free before the weights were loaded.
        page_bytes: bytes of one KV page.
        parks_kv: whether engines that stand by have two pages of their KV cache alone.
        arena_bytes: of the weights.
        derived: bytes of copies of weights in another layout.
        activations: bytes of one step of the largest size.
    """
    on_cpu = resolved.device.type == "cpu"
    return Demand(
        free_before=free_before,
        memory_ratio=config.memory_ratio,
        arena_bytes=arena_bytes,
        reserve=Reserve(
            batch_state=BatchState.num_bytes(
                max_running_requests=resolved.max_running_requests,
                max_seq_len=resolved.max_len,
                page_size=resolved.page_size,
            ),
            derived=derived,
            activations=activations,
            sampling=Sampler.num_bytes(resolved.max_running_requests, model.vocab_size),
            graphs=0 if why_unwanted(config, resolved.device.type) else GRAPH_RESERVE,
            staging=int(config.weight_staging_gb * 1e9),
        ),
        page_bytes=page_bytes,
        page_size=resolved.page_size,
        max_len=resolved.max_len,
        max_running_requests=resolved.max_running_requests,
        local_ranks=ranks if on_cpu else 1,
        num_engines=1 + config.num_shadows,
        is_arena_shared=config.shares_weights,
        parks_kv=parks_kv,
        pool_limit=CPU_POOL_LIMIT if on_cpu else None,
    )


def least_demand(
    config: EngineConfig, resolved: ResolvedConfig, model: ModelConfig, tp: TPInfo, free_before: int
) -> Demand:
    """Return a lower bound of what rank `tp` will need, for which nothing is loaded and nothing computed.

    A CPU copies the values of weights in FP8. It may make packed copies of others, and steps take more than
    `min_activations` says. The reserve for CUDA graphs is left out, since an engine without room for them
    goes on without.
    """
    sizes, table, dtype = shard(model, tp), weight_map.build(model, tp), resolved.dtype
    copied = table.scales if resolved.device.type == "cpu" else ()
    return make_demand(
        config,
        resolved,
        model,
        ranks=tp.size,
        free_before=free_before,
        page_bytes=resolved.kv_shape(model, sizes, num_pages=0).page_bytes,
        parks_kv=config.parks_kv,
        arena_bytes=Layout.of(table.specs(dtype)).num_bytes,
        derived=sum(prod(table.parameters[name]) for name in copied) * dtype.itemsize,
        activations=min_activations(model, resolved),
    ).without_graphs()


def weight_bytes(model: ModelConfig, tp: TPInfo, dtype: torch.dtype) -> int:
    """Return the bytes of the arena with a rank's weights."""
    return Layout.of(weight_map.build(model, tp).specs(dtype)).num_bytes
