"""The processes of a fleet: command lines, keys that are not in them, and probes."""

from __future__ import annotations

from typing import Any

import pytest
import typer.main

from segue.cli.main import app
from segue.cluster.processes import ChildSpec
from segue.config import EngineConfig
from segue.failover.pod import ProbeKind
from segue.integrations.ray.config import TrainerConfig
from segue.integrations.ray.specs import FleetKeys, Place, engine_spec, router_spec, trainer_spec
from segue.router.config import RouterConfig

KEYS = FleetKeys()
ENVIRON = {"PATH": "/bin", "SEGUE_MODEL": "another", "SEGUE_PORT": "1", "OMP_NUM_THREADS": "9"}
PLACE = Place(address="10.0.0.7", port=30001, system_port=30002, environ=ENVIRON)
ENGINE = EngineConfig(device="cpu", tp=2, drain_s=7.0)
ROUTER = RouterConfig(port=30001, api_key="clients'")


def specs() -> dict[str, ChildSpec]:
    return {
        "serve": engine_spec(ENGINE, "a", PLACE, KEYS, "http://10.0.0.1:8000", num_threads=3),
        "router": router_spec(ROUTER, "b", PLACE, KEYS),
        "trainer": trainer_spec(TrainerConfig(model="/models/x", cpus=2.0), "c", PLACE),
    }


@pytest.mark.parametrize("name", specs())
def test_the_command_line_is_one_of_segue_and_has_no_key(name: str) -> None:
    spec = specs()[name]
    words = list(spec.command[spec.command.index("segue") + 1 :])
    command: Any = typer.main.get_command(app)
    assert words[0] == name
    command.commands[name].make_context(name, words[1:])
    for secret in (KEYS.engines, KEYS.admin, "clients'"):
        assert not any(secret in word for word in spec.command)


def test_an_engine_registers_and_both_have_what_the_other_one_asks_for() -> None:
    engine, router = specs()["serve"], specs()["router"]
    assert {"--register=http://10.0.0.1:8000", "--register-url=http://10.0.0.7:30001"} <= {*engine.command}
    assert "--system-host=127.0.0.1" in engine.command and "--host=10.0.0.7" in engine.command
    assert engine.environment["SEGUE_REGISTER_KEY"] == router.environment["SEGUE_ADMIN_API_KEY"] == KEYS.admin
    assert engine.environment["SEGUE_API_KEY"] == router.environment["SEGUE_WORKER_API_KEY"] == KEYS.engines
    assert router.environment["SEGUE_API_KEY"] == "clients'"


def test_options_of_the_actor_s_environment_do_not_reach_a_process_and_threads_are_those_reserved() -> None:
    found = specs()
    for spec in found.values():
        assert "SEGUE_MODEL" not in spec.environment and "SEGUE_PORT" not in spec.environment
        assert spec.environment["PATH"] == "/bin"
    assert found["serve"].environment["OMP_NUM_THREADS"] == "3"
    assert found["trainer"].environment["OMP_NUM_THREADS"] == "2"


def test_probes_ask_where_the_process_listens() -> None:
    engine, router = specs()["serve"].health, specs()["router"].health
    assert engine is not None and router is not None
    assert engine.probes.keys() == {ProbeKind.STARTUP, ProbeKind.LIVENESS}
    assert (engine.ports, engine.host) == ({"system": 30002}, "127.0.0.1")
    assert router.probes.keys() == {ProbeKind.LIVENESS}
    assert (router.ports, router.host) == ({"http": 30001}, "10.0.0.7")
