"""The logging of commands that print their own results."""

from __future__ import annotations

from dataclasses import replace

from segue.config import EngineConfig
from segue.logs import configure


def quiet(config: EngineConfig) -> EngineConfig:
    """Set up logging, and return the options with its level: by default, only warnings are logged."""
    if config.log_level == "info":
        config = replace(config, log_level="warning")
    configure(config.log_level)
    return config
