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
    if config.warm_kv:
        check_warm_kv(config)
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
    if reason := config.why_kv_is_private:
        raise ConfigError(f"kv_owner='gms': {reason}, or leave --kv-owner out", param="kv_owner")


def check_warm_kv(config: EngineConfig) -> None:
    """Refuse options that `--warm-kv` does not go with.

    Raises:
        ConfigError: the KV cache does not outlive the engine, or there is no prefix cache.
    """
    reason = config.why_kv_is_private
    if config.kv_owner == "private":
        reason = "the KV cache of kv_owner='private' ends with its engine; leave --kv-owner out"
    elif config.disable_prefix_cache:
        reason = "disable_prefix_cache=True leaves nothing to go on with; use one of the two options"
    if reason:
        raise ConfigError(f"warm_kv=True: {reason}, or leave --warm-kv out", param="warm_kv")
