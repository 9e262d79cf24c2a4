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


STANDS_BY = {"gms_dir": "/run/gms", "shadow_mode": True, "failover_dir": "/run/segue", "kv_owner": "gms"}


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"gms_dir": None}, "give --gms-dir"),
        ({"gms_mode": "off"}, "without --gms-mode off"),
        ({"shadow_mode": False}, "give --shadow-mode"),
        ({"role": "decode"}, "use --role both"),
        ({"enable_laps_scheduler": True}, "enable_laps_scheduler=True"),
    ],
)
def test_kv_memory_of_the_service_is_for_engines_that_stand_by(changes: dict[str, Any], remedy: str) -> None:
    check_shared_weights(EngineConfig.create({}, **STANDS_BY), embedded=False)
    config = EngineConfig.create({}, **STANDS_BY | changes)
    with pytest.raises(ConfigError, match=f"kv_owner='gms': .*{remedy}") as caught:
        check_shared_weights(config, embedded=False)
    assert caught.value.param == "kv_owner"
    unasked = EngineConfig.create({}, **STANDS_BY | changes | {"kv_owner": "auto"})
    check_shared_weights(unasked, embedded=False)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"gms_dir": None}, "give --gms-dir"),
        ({"gms_mode": "off"}, "without --gms-mode off"),
        ({"shadow_mode": False}, "give --shadow-mode"),
        ({"role": "prefill"}, "use --role both"),
        ({"enable_laps_scheduler": True}, "enable_laps_scheduler=True"),
        ({"kv_owner": "private"}, "leave --kv-owner out"),
        ({"disable_prefix_cache": True}, "disable_prefix_cache=True"),
    ],
)
def test_warm_kv_is_for_a_prefix_cache_in_memory_of_the_service(changes: dict[str, Any], remedy: str) -> None:
    options = STANDS_BY | {"warm_kv": True, "kv_owner": "auto"}
    check_shared_weights(EngineConfig.create({}, **options), embedded=False)
    with pytest.raises(ConfigError, match=f"warm_kv=True: .*{remedy}.*leave --warm-kv out") as caught:
        check_shared_weights(EngineConfig.create({}, **options | changes), embedded=False)
    assert caught.value.param == "warm_kv"


@pytest.mark.parametrize("mode", ["rw", "ro"])
def test_a_mode_without_a_service_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match="give --gms-dir"):
        check_shared_weights(EngineConfig.create({}, gms_mode=mode), embedded=False)
