"""What an engine whose weights or KV cache belong to the memory service cannot do."""

from __future__ import annotations

from segue.config import EngineConfig
from segue.errors import ConfigError


def check_shared_weights(config: EngineConfig, *, embedded: bool) -> None:
    """Refuse options that `--gms-dir` does not go with.

    Raises:
        ConfigError: an option would write to the weights, or needs memory that the service does not give yet,
            or asks a service that is not named.
    """
    if config.gms_dir is None and config.gms_mode in ("rw", "ro"):
        raise ConfigError(
            f"gms_mode={config.gms_mode!r} asks a memory service for the weights, and none is named; give "
            "--gms-dir, or leave --gms-mode out",
            param="gms_mode",
        )
    if config.kv_owner == "gms":
        check_kv_owner(config)
    if not config.shares_weights:
        return
    if embedded:
        raise ConfigError(
            f"gms_dir={config.gms_dir!r}: an embedded engine cannot use the memory service yet; use "
            "embedded=False, or gms_mode='off'",
            param="gms_dir",
        )
    if config.enable_memory_saver:
        raise ConfigError(
            f"gms_dir={config.gms_dir!r} with enable_memory_saver=True: to release weights that other "
            "engines read is not built yet; use one of the two options",
            param="enable_memory_saver",
        )


def check_kv_owner(config: EngineConfig) -> None:
    """Refuse options that `--kv-owner gms` does not go with.

    Raises:
        ConfigError: the engine has no service, or needs its KV cache before it wakes.
    """
    if not config.shares_weights:
        reason = "no memory service has the weights; give --gms-dir, without --gms-mode off"
    elif not config.shadow_mode:
        reason = "only engines that stand by for each other get its memory; give --shadow-mode"
    elif config.role != "both":
        reason = f"other engines map the KV cache of one with role={config.role!r}; use --role both"
    elif config.enable_laps_scheduler:
        reason = "enable_laps_scheduler=True times steps at the start, which write to the KV cache; use one"
    else:
        return
    raise ConfigError(
        f"kv_owner='gms': {reason}, or leave --kv-owner out",
        param="kv_owner",
    )
