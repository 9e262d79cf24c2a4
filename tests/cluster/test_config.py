"""The options of a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from segue.cluster.config import ClusterConfig, ClusterSize
from segue.config import EngineConfig
from segue.errors import ClusterSizeError, ConfigError


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({}, "workers=0, prefill=0, decode=0: a cluster needs workers; give --workers N, or --prefill P"),
        ({"prefill": 2}, "prefill workers need at least one decode worker; give --decode N, or --workers 2"),
        ({"decode": 1}, "decode workers need at least one prefill worker; give --prefill N, or --workers 1"),
        ({"workers": 1, "decode": 1}, "give --prefill N, or --workers 2 instead"),
        ({"workers": 1, "prefill": 1}, "give --decode N, or --workers 2 instead"),
    ],
)
def test_workers_that_cannot_serve_are_refused(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ClusterSizeError, match=text):
        ClusterConfig.create({}, **sizes)


@pytest.mark.parametrize(
    "sizes", [{"workers": 1}, {"prefill": 1, "decode": 3}, {"workers": 2, "prefill": 2, "decode": 1}]
)
def test_workers_that_can_serve_are_counted(sizes: dict[str, int]) -> None:
    assert ClusterSize(**sizes).total == sum(sizes.values())


def test_numbers_are_bounded() -> None:
    with pytest.raises(ConfigError, match="workers=257: must be at most 256"):
        ClusterSize(workers=257)


def test_address_and_keys_are_the_routers_and_all_else_is_the_workers() -> None:
    config = ClusterConfig.create(
        {}, workers=2, host="0.0.0.0", port=1, api_key="k", admin_api_key="a", cors_origin="*", tp=2, seed=7
    )
    router, engine = config.router, config.engine
    assert (router.host, router.port, router.api_key, router.admin_api_key) == ("0.0.0.0", 1, "k", "a")
    assert router.cors_origin == "*" and engine.cors_origin is None
    assert (engine.host, engine.api_key, engine.admin_api_key) == ("127.0.0.1", None, None)
    assert (engine.tp, engine.seed) == (2, 7)


def test_what_concerns_every_process_goes_to_all_of_them() -> None:
    config = ClusterConfig.create({}, workers=1, drain_s=3.0, max_body_mib=5, log_level="error")
    for part in (config.router, config.engine):
        assert (part.drain_s, part.max_body_mib, part.log_level) == (3.0, 5, "error")


def test_the_environment_sets_options_too() -> None:
    environ = {"SEGUE_PREFILL": "1", "SEGUE_DECODE": "2", "SEGUE_PORT": "9", "SEGUE_PAGE_SIZE": "32"}
    config = ClusterConfig.create(environ, decode=3)
    assert (config.size.prefill, config.size.decode) == (1, 3)
    assert (config.router.port, config.engine.port, config.engine.page_size) == (9, 30000, 32)


def test_what_the_cluster_chooses_itself_is_no_option() -> None:
    environ = {"SEGUE_ROLE": "prefill", "SEGUE_WORKER": "http://a:1", "SEGUE_DISAGGREGATION_MODE": "decode"}
    config = ClusterConfig.create(environ, workers=1)
    assert config.engine.role == "both" and config.router.worker is None
    for name in ("role", "worker", "worker_admin_key", "disaggregation_bootstrap_port", "register"):
        with pytest.raises(ConfigError, match=f"unknown option '{name}'"):
            ClusterConfig.create({}, workers=1, **{name: "1"})


def test_serve_with_shadows_gives_the_router_what_clients_notice() -> None:
    engine = EngineConfig(port=7, host="0.0.0.0", api_key="k", tp=2, model="m", drain_s=3.0, cors_origin="*")
    environ = {"SEGUE_RESUME_TIMEOUT_S": "9", "SEGUE_WORKER": "http://a:1", "SEGUE_PORT": "1"}
    environ["SEGUE_WORKER_API_KEY"] = "trainers"
    config = ClusterConfig.with_shadows(engine, 2, environ)
    router = config.router
    assert (config.size.workers, config.size.shadows, config.size.num_engines) == (1, 2, 3)
    assert (router.port, router.host, router.api_key, router.cors_origin) == (7, "0.0.0.0", "k", "*")
    assert (router.resume_timeout_s, router.worker, router.drain_s) == (9.0, None, 3.0)
    assert router.worker_api_key == "trainers"
    assert (config.engine.model, config.engine.tp, config.engine.drain_s) == ("m", 2, 3.0)
    assert (config.engine.host, config.engine.api_key, config.engine.cors_origin) == ("127.0.0.1", None, None)


@pytest.mark.parametrize(
    "option",
    [
        {"role": "prefill"},
        {"register": "http://router:8000"},
        {"shadow_mode": True, "failover_dir": "/run/x"},
        {"cohort": "mine"},
        {"system_port": 9},
        {"discovery": "etcd"},
    ],
)
def test_options_that_belong_to_one_engine_are_refused_with_shadows(option: dict[str, object]) -> None:
    engine = EngineConfig.create({}, **option)
    with pytest.raises(ConfigError, match="with --shadows, Segue chooses this option of each engine"):
        ClusterConfig.with_shadows(engine, 1, {})


@pytest.mark.parametrize(
    "option", [{"gms_mode": "rw"}, {"gms_mode": "ro"}, {"gms_mode": "rw", "gms_dir": "/g"}]
)
def test_engines_with_shadows_neither_all_load_nor_all_read(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"with shadows, .* leave --gms-mode out"):
        ClusterConfig.with_shadows(EngineConfig.create({}, **option), 1, {})
    with pytest.raises(ConfigError, match=r"with shadows, .* leave --gms-mode out"):
        ClusterConfig.create({}, workers=1, shadows=1, **option)
    assert ClusterConfig.create({}, workers=1, **option).size.shadows == 0


def test_engines_with_shadows_may_read_what_another_engine_has_loaded() -> None:
    config = ClusterConfig.create({}, workers=1, shadows=1, gms_mode="ro", gms_dir="/g")
    assert config.engine.gms_mode == "ro"


def test_each_option_is_listed_once_as_the_router_has_it() -> None:
    listed = {each.name: each for each, _ in ClusterConfig.listed()}
    assert len(listed) == len(ClusterConfig.listed())
    assert listed["port"].default == 8000 and {"workers", "policy", "model", "pd_key"} <= listed.keys()
