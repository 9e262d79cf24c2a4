"""What an engine whose weights belong to the memory service cannot do yet."""

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
