"""The system port over HTTP: each state and each probe, and a real server on its way through the states."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from segue.api.loop_thread import LoopThread
from segue.config import EngineConfig
from segue.errors import ConfigError, EngineDeadError, SegueError
from segue.failover.life import Life, LifeState
from segue.failover.system_health import SystemHealth
from segue.listener import bind
from segue.server.lifecycle import serve
from segue.server.system_app import ProbedEngine, SystemServer
from tests.support.shadows import ShadowProcess, wait_until

PLAIN: dict[str, Any] = {"shadow_mode": False}
PROBES = ("startup", "live", "ready", "health")
PATHS = {
    LifeState.INIT: (),
    LifeState.STANDBY: (LifeState.STANDBY,),
    LifeState.WAKING: (LifeState.STANDBY, LifeState.WAKING),
    LifeState.ACTIVE: (LifeState.STANDBY, LifeState.WAKING, LifeState.ACTIVE),
    LifeState.DRAINED: (LifeState.STANDBY, LifeState.WAKING, LifeState.ACTIVE, LifeState.DRAINED),
    LifeState.DRAINING: (LifeState.STANDBY, LifeState.WAKING, LifeState.ACTIVE, LifeState.DRAINING),
    LifeState.DEAD: (LifeState.DEAD,),
}


def test_a_port_that_both_servers_would_take_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    with closing(bind("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = EngineConfig(shadow_mode=True, failover_dir=str(tmp_path / "f"), port=port, system_port=port)
        with pytest.raises(ConfigError, match=f"system_port={port}: .* choose another with --system-port"):
            asyncio.run(serve(config, listener, lambda runtime, url: None, command=("false",)))


@dataclass
class StandIn:
    """What the probes ask of a runtime."""

    silent_s: float = 0.0
    trouble: SegueError | None = None
    epoch: int = 0
    manager: Any = field(default_factory=lambda: SimpleNamespace(ready=SimpleNamespace(device="cuda:0")))
    owner_lost: bool = False


class Port:
    """The system port of an engine whose parts the test sets."""

    def __init__(self, **options: Any) -> None:
        self.now = 1000.0
        self._thread = LoopThread("test-system")
        self.engine = ProbedEngine(
            config=EngineConfig(**options),
            life=Life(lambda: self.now),
            health=SystemHealth(listed=["generate"]),
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        async def start() -> SystemServer:
            return SystemServer(self.engine, port)

        self._server = self._thread.call(start())
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def close(self) -> None:
        self.http.close()
        self._thread.call(self._server.close())
        self._thread.stop()

    def begin(self, state: LifeState) -> StandIn:
        """Start a new life, and take it to a state."""
        runtime = StandIn()
        self.engine.life = Life(lambda: self.now)
        self.engine.runtime = None if state is LifeState.INIT else runtime  # type: ignore[assignment]
        self.engine.health.set_endpoint("generate", "ready")
        for each in PATHS[state]:
            error = EngineDeadError("gone") if each is LifeState.DEAD else None
            timed = each in (LifeState.WAKING, LifeState.DRAINING)
            self.engine.life.advance(each, error, within_s=10.0 if timed else None)
        return runtime

    def statuses(self) -> tuple[int, ...]:
        return tuple(self.http.get(f"/{probe}").status_code for probe in PROBES)


@pytest.fixture(scope="module")
def shared_port() -> Iterator[Port]:
    with closing(Port()) as port:
        yield port


def test_each_state_has_its_answers(shared_port: Port) -> None:
    port = shared_port
    table = {
        LifeState.INIT: (503, 503, 503, 200),
        LifeState.STANDBY: (200, 200, 503, 200),
        LifeState.WAKING: (200, 200, 503, 200),
        LifeState.ACTIVE: (200, 200, 200, 200),
        LifeState.DRAINED: (200, 200, 503, 200),
        LifeState.DRAINING: (200, 200, 503, 200),
        LifeState.DEAD: (503, 503, 503, 200),
    }
    for state, expected in table.items():
        port.begin(state)
        assert port.statuses() == expected, state
        assert port.http.get("/health").json()["state"] == state.name.lower()


def test_a_late_or_silent_engine_is_not_live(shared_port: Port) -> None:
    port = shared_port
    for state, patience in ((LifeState.STANDBY, 5.0), (LifeState.ACTIVE, 30.0), (LifeState.DRAINED, 30.0)):
        runtime = port.begin(state)
        runtime.silent_s = patience
        assert port.statuses()[1] == 200, state
        runtime.silent_s = patience + 0.1
        assert port.statuses()[1] == 503, state
    for state in (LifeState.WAKING, LifeState.DRAINING):
        port.begin(state).silent_s = 1e6
        assert port.statuses()[1] == 200, "its deadline is what counts"
        port.now += 10.5
        assert port.statuses()[1] == 503, state


def test_active_is_live_by_its_endpoint_and_ready_without_trouble(shared_port: Port) -> None:
    port = shared_port
    runtime = port.begin(LifeState.ACTIVE)
    port.engine.health.set_endpoint("generate", "notready")
    assert port.statuses() == (200, 503, 200, 503)
    assert port.http.get("/health").json()["endpoints"] == {"generate": "notready"}
    port.engine.health.set_endpoint("generate", "ready")
    runtime.trouble = EngineDeadError("poisoned")
    response = port.http.get("/ready")
    assert (port.statuses(), response.json()["message"]) == ((200, 200, 503, 200), "poisoned")


def test_a_start_that_gets_on_is_live_if_that_was_asked_for(shared_port: Port) -> None:
    shared_port.begin(LifeState.INIT)
    assert shared_port.statuses()[1] == 503
    with closing(Port(live_during_init="progress")) as port:
        port.begin(LifeState.INIT)
        assert port.statuses()[:2] == (503, 200)
        port.now += 60.5
        assert port.statuses()[1] == 503
        port.engine.life.note_progress()
        assert port.statuses()[1] == 200


@pytest.mark.parametrize("route", ["wake_up", "hand_over"])
def test_an_engine_that_starts_cannot_be_woken_or_replaced(shared_port: Port, route: str) -> None:
    shared_port.begin(LifeState.INIT)
    response = shared_port.http.post(f"/engine/{route}")
    assert (response.status_code, response.json()["error_code"]) == (503, "engine_not_ready")


def test_calls_need_the_admin_key_and_probes_need_none() -> None:
    with closing(Port(admin_api_key="secret")) as port:
        port.begin(LifeState.INIT)
        assert port.http.get("/startup").status_code == 503
        assert port.http.post("/engine/wake_up").status_code == 401
        key = {"authorization": "Bearer secret"}
        assert port.http.post("/engine/wake_up", headers=key).status_code == 503


def test_metrics_are_answered_in_every_state(shared_port: Port) -> None:
    shared_port.begin(LifeState.INIT)
    text = shared_port.http.get("/metrics").text
    assert 'segue:engine_state{model_name="",state="init"} 1.0' in text
    assert 'segue:engine_state{model_name="",state="active"} 0.0' in text
    assert 'segue:epoch{model_name=""} 0.0' in text


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]

        async def start() -> None:
            SystemServer(ProbedEngine(config=EngineConfig(), life=Life(), health=SystemHealth()), number)

        thread = LoopThread("test-system")
        with pytest.raises(ConfigError, match=f"port {number} .* is in use.*--system-port"):
            thread.call(start())
        thread.stop()


def all_of(server: ShadowProcess) -> tuple[int, ...]:
    return tuple(server.probe(name)[0] for name in PROBES)


def test_a_plain_server_has_the_same_life(tiny_model: Path) -> None:
    """INIT, ACTIVE, DRAINING and DEAD of a real process, which serves without a cohort."""
    options = PLAIN | {"exit_grace": 20.0, "drain_s": 1.0}
    with ShadowProcess(tiny_model, Path("/unused"), "a", {"FAKE_START": "hang"}, **options) as server:
        assert all_of(server) == (503, 503, 503, 503)
        assert server.listens(), "a plain server answers 503 while it loads"
        assert 'state="init"} 1.0' in server.system.get("/metrics").text
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    with ShadowProcess(tiny_model, Path("/unused"), "a", {"FAKE_STEP_S": "0.02"}, **options) as server:
        server.until("active")
        assert all_of(server) == (200, 200, 200, 200)
        assert server.probe("health")[1]["epoch"] == 0
        metrics = server.system.get("/metrics").text
        assert 'state="active"} 1.0' in metrics and 'phase="total"' in metrics
        assert httpx.get(f"{server.url}/metrics").text.count("segue:engine_state{") == len(LifeState)
        assert httpx.post(f"{server.url}/pause_generation", json={"mode": "in_place"}).status_code == 200
        assert all_of(server) == (200, 200, 200, 200), "a paused engine is well"
        server.system.post("/engine/wake_up").raise_for_status()  # it is awake
        assert server.system.post("/engine/hand_over").status_code == 409
    options["hang_timeout_s"] = 1.5
    with ShadowProcess(tiny_model, Path("/unused"), "a", **options) as server:
        server.until("active")
        (worker,) = server.workers()
        os.kill(worker, signal.SIGSTOP)
        wait_until(lambda: server.probe("live")[0] == 503, "the 503 of an engine that hangs")
        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: all_of(server) == (200, 200, 200, 200), "its recovery")
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: server.state == "dead", "its death")
        wait_until(lambda: all_of(server) == (503, 503, 503, 503), "the end of its endpoint")


def test_a_health_check_shows_an_engine_that_does_not_generate(tiny_model: Path) -> None:
    options = {
        "shadow_mode": False,
        "health_check_enabled": True,
        "health_check_interval_s": 0.2,
        "stall_s": 0.5,
    }
    with ShadowProcess(tiny_model, Path("/unused"), "a", {"FAKE_STALL_AT_STEP": "9"}, **options) as server:
        server.until("active")
        wait_until(lambda: server.probe("live")[0] == 503, "the failed check")
        assert server.probe("health")[1]["endpoints"] == {"generate": "notready"}


def test_a_failover_directory_that_cannot_be_used_ends_the_server(tiny_model: Path) -> None:
    with ShadowProcess(
        tiny_model, Path("/unused"), "a", shadow_mode=True, failover_dir="/proc/none"
    ) as server:
        assert server.process.wait(60) == 1
        assert server.process.stdout is not None
        assert "failover_dir='/proc/none'" in server.process.stdout.read()


def test_a_failover_directory_without_shadow_mode_is_refused() -> None:
    config = EngineConfig(failover_dir="/run/segue")
    with bind("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match="add --shadow-mode"):
        asyncio.run(serve(config, listener, lambda runtime, url: None))
