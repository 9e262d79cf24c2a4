"""A fleet without Ray: the errors say what to do. `tests/clients/test_ray.py` runs one with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from segue.errors import ConfigError
from segue.extras import RAY
from segue.integrations.ray import FleetConfig, RayFleet, TrainerConfig, fleet


def test_without_ray_the_error_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = replace(RAY, modules=("no_such_module",))
    monkeypatch.setattr(fleet, "RAY", missing)
    with pytest.raises(ConfigError, match=r"install 'segue\[ray\]'"):
        RayFleet.start(FleetConfig())


def test_each_process_reserves_what_it_was_given() -> None:
    config = FleetConfig(
        engines=2, engine_cpus=4, engine_gpus=2, router_cpus=0.5, trainer=TrainerConfig(cpus=3, gpus=1)
    )
    assert fleet._bundles(config) == [
        {"CPU": 0.5},
        {"CPU": 4, "GPU": 2},
        {"CPU": 4, "GPU": 2},
        {"CPU": 3, "GPU": 1},
    ]
