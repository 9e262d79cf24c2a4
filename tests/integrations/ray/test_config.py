"""What a fleet takes, and which options it chooses itself."""

from __future__ import annotations

from typing import Any

import pytest

from segue.config import EngineConfig
from segue.errors import ConfigError
from segue.integrations.ray import FleetConfig
from segue.router.config import RouterConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": EngineConfig(port=1)}, "engine.port has 1, but a fleet in Ray chooses it itself"),
        ({"engine": EngineConfig(api_key="secret-key")}, "engine.api_key has a value, but"),
        ({"engine": EngineConfig(role="decode")}, "engine.role has 'decode', but"),
        ({"router": RouterConfig(worker="http://a:1")}, "router.worker has 'http://a:1', but"),
        ({"engines": 0}, "engines=0: a fleet needs at least 1"),
        ({"name": "My Fleet"}, "name='My Fleet'"),
    ],
)
def test_what_a_fleet_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        FleetConfig(**options)
    assert message in str(error.value) and "secret-key" not in str(error.value)


def test_an_engine_gets_the_gpus_and_cores_of_its_ranks() -> None:
    fleet = FleetConfig(engine=EngineConfig(device="cuda", tp=4), engine_cpus=9)
    assert (fleet.gpus_per_engine, fleet.threads_per_rank) == (4.0, 2)
    assert FleetConfig(engine=EngineConfig(device="cpu", tp=4)).gpus_per_engine == 0.0
    assert FleetConfig(engine_gpus=0.5).gpus_per_engine == 0.5
