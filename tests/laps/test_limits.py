"""The options of LAPS in tokens and seconds."""

from __future__ import annotations

from segue.config import EngineConfig
from segue.laps.limits import laps_limits
from segue.messages.control import LapsLimits


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert laps_limits(EngineConfig(laps_length_threshold=5), on_cpu=True) is None


def test_the_defaults_depend_on_the_device() -> None:
    config = EngineConfig(enable_laps_scheduler=True)
    expected = LapsLimits(threshold=256, long_share=0.2, slo_s=0.4, blocking_s=0.06, window_s=0.0)
    assert laps_limits(config, on_cpu=False) == expected
    cpu = laps_limits(config, on_cpu=True)
    assert cpu is not None and cpu.blocking_s == 0.25


def test_every_option_has_an_effect() -> None:
    config = EngineConfig(
        enable_laps_scheduler=True,
        laps_length_threshold=8,
        laps_long_share=0.5,
        laps_ttft_slo_ms=100.0,
        laps_max_blocking_ms=5.0,
        laps_window_ms=2.0,
    )
    expected = LapsLimits(threshold=8, long_share=0.5, slo_s=0.1, blocking_s=0.005, window_s=0.002)
    assert laps_limits(config, on_cpu=True) == laps_limits(config, on_cpu=False) == expected
