"""From the options of a user to the limits of LAPS."""

from __future__ import annotations

from segue.config import EngineConfig
from segue.messages.control import LapsLimits

BLOCKING_MS_CPU, BLOCKING_MS_CUDA = 250.0, 60.0  # a chunk that is worth a step takes so long there


def laps_limits(config: EngineConfig, *, on_cpu: bool) -> LapsLimits | None:
    """Return the limits of length-aware prefill in tokens and seconds; None: it is off."""
    if not config.enable_laps_scheduler:
        return None
    default_ms = BLOCKING_MS_CPU if on_cpu else BLOCKING_MS_CUDA
    blocking_ms = config.laps_max_blocking_ms or default_ms
    return LapsLimits(
        threshold=config.laps_length_threshold,
        long_share=config.laps_long_share,
        slo_s=config.laps_ttft_slo_ms / 1e3,
        blocking_s=blocking_ms / 1e3,
        window_s=config.laps_window_ms / 1e3,
    )
