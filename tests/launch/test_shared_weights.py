"""Options that an engine with shared weights refuses, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from segue.config import EngineConfig
from segue.errors import ConfigError
from segue.launch.shared_weights import check_shared_weights


@pytest.mark.parametrize(
    ("options", "embedded", "param"),
    [
        ({"enable_memory_saver": True}, False, "enable_memory_saver"),
        ({}, True, "gms_dir"),
    ],
)
def test_what_is_not_built_yet_is_refused(options: dict[str, Any], embedded: bool, param: str) -> None:
    config = EngineConfig.create({}, gms_dir="/run/gms", **options)
    with pytest.raises(ConfigError, match="/run/gms") as caught:
        check_shared_weights(config, embedded=embedded)
    assert caught.value.param == param
    check_shared_weights(
        EngineConfig.create({}, gms_dir="/run/gms", gms_mode="off", **options), embedded=embedded
    )
    check_shared_weights(EngineConfig.create({}, **options), embedded=embedded)


def test_a_plain_engine_with_shared_weights_is_taken() -> None:
    check_shared_weights(EngineConfig.create({}, gms_dir="/run/gms"), embedded=False)


@pytest.mark.parametrize("mode", ["rw", "ro"])
def test_a_mode_without_a_service_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match="give --gms-dir"):
        check_shared_weights(EngineConfig.create({}, gms_mode=mode), embedded=False)
