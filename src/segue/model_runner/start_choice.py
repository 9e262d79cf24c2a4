"""What a rank chooses before it loads anything: device, dtype, sizes, and the backends of its layers."""

from __future__ import annotations

from dataclasses import dataclass

from segue.attention import registry
from segue.attention.base import AttentionShape
from segue.checkpoint.source import ModelSource
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.layers import moe_backend
from segue.model_runner.resolved_config import ResolvedConfig, resolve_config
from segue.models.sharding import Shard, shard


@dataclass(frozen=True, slots=True, kw_only=True)
class StartChoice:
    """The choices of one rank; those of all ranks differ in the number of the device alone."""

    sizes: Shard
    resolved: ResolvedConfig
    setting: registry.Setting  # what the attention backends have to support
    selection: registry.Selection  # of them
    experts: moe_backend.MoEEntry


def choose_start(config: EngineConfig, source: ModelSource, tp: TPInfo) -> StartChoice:
    """Choose; it takes no memory and waits for no other rank.

    Raises:
        ConfigError: an option does not go with the model or the device.
        TensorParallelError: the model cannot be split over so many ranks, or there are too few devices.
    """
    model = source.config
    sizes = shard(model, tp)
    resolved = resolve_config(config, source, tp)
    setting = registry.Setting(
        shape=AttentionShape(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=model.head_dim,
            scale=model.head_dim**-0.5,
        ),
        device=resolved.device,
        dtype=resolved.dtype,
        page_size=resolved.page_size,
        deterministic=resolved.deterministic,
        fp8_kv=resolved.fp8_kv,
        max_requests=resolved.max_running_requests,
    )
    return StartChoice(
        sizes=sizes,
        resolved=resolved,
        setting=setting,
        selection=registry.select(config.attention_backend, setting),
        experts=moe_backend.select(
            "auto", resolved.device, deterministic=resolved.deterministic and model.moe is not None
        ),
    )
