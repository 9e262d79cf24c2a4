"""The system port: probes for a supervisor such as the kubelet, metrics, and calls about an engine's life."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from segue.config import EngineConfig
from segue.errors import EngineStartError
from segue.failover.life import STARTING, Life, LifeState
from segue.failover.probes import Vitals, why_not_live, why_not_ready, why_not_started
from segue.failover.system_health import SystemHealth
from segue.launch.runtime import Runtime
from segue.listener import bind, listen, url_of
from segue.logs import logger
from segue.server.access import Access, Routes
from segue.server.connections import ConnectionLimits
from segue.server.guarded_app import guarded_app
from segue.server.http_server import HttpServer
from segue.server.metrics import metrics_of
from segue.server.responses import HEADERS, json_response
from segue.server.shadow import Takeover

HANG_S, CPU_HANG_S = 30.0, 120.0  # that ranks which serve may be silent, on a GPU and on a CPU

probes = Routes(Access.OPEN, "System")
scraped = Routes(Access.METRICS, "System")
calls = Routes(Access.ADMIN, "System")


@dataclass(slots=True, kw_only=True)
class ProbedEngine:
    """The engine behind the system port; it has no runtime and no takeover before it stands by."""

    config: EngineConfig
    life: Life
    health: SystemHealth
    runtime: Runtime | None = None
    takeover: Takeover | None = None

    def vitals(self) -> Vitals:
        """Returns what is known of the engine now."""
        config, life, runtime = self.config, self.life, self.runtime
        trouble = life.trouble if runtime is None else runtime.trouble
        on_cpu = runtime is None or runtime.manager.ready.device == "cpu"
        return Vitals(
            state=life.state,
            is_late=life.is_late,
            silent_s=0.0 if runtime is None else runtime.silent_s,
            stuck_s=life.stuck_s if config.live_during_init == "progress" else None,
            is_healthy=self.health.get_health_status()[0],
            trouble="" if trouble is None else trouble.message,
            hang_timeout_s=config.hang_timeout_s or (CPU_HANG_S if on_cpu else HANG_S),
        )

    def summary(self) -> dict[str, Any]:
        """Returns the state, the epoch, how long each phase of the wake took, and what is missing."""
        epoch = 0 if self.runtime is None else self.runtime.epoch
        phases = {name: round(seconds, 6) for name, seconds in self.life.wake_phases.items()}
        found = {"state": self.life.state.name.lower(), "epoch": epoch, "timings": phases}
        is_lost = self.runtime is not None and self.runtime.owner_lost
        return found | ({"owner_lost": True} if is_lost else {})


def create_system_app(engine: ProbedEngine) -> Starlette:
    """Make the application of the system port."""
    app = guarded_app(engine.config, [*probes, *scraped, *calls])
    app.state.engine = engine
    return app


class SystemServer:
    """Serves the system port from the process's start to its end."""

    def __init__(self, engine: ProbedEngine, port: int) -> None:
        """Listen on the port.

        Raises:
            ConfigError: the port is in use, or needs privileges.
        """
        config = engine.config
        self._listener = bind(config.system_host or config.host, port, port_option="--system-port")
        listen(self._listener, port_option="--system-port")
        limits = ConnectionLimits.of_this_process(config.max_body_mib)
        self._server = HttpServer(create_system_app(engine), limits, config.log_level)
        self._http = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        self.url = url_of(self._listener)
        logger.info("system routes at %s", self.url)

    async def close(self) -> None:
        """Close the port."""
        self._server.should_exit = True
        await self._http


def _engine_of(request: Request) -> ProbedEngine:
    engine: ProbedEngine = request.app.state.engine
    return engine


def _probe(request: Request, why_not: Callable[[Vitals], str | None]) -> Response:
    """Answers 200, or 503 and why."""
    engine = _engine_of(request)
    why = why_not(engine.vitals())
    _, endpoints = engine.health.get_health_status()
    body = engine.summary() | {"endpoints": endpoints}
    if why is None:
        return json_response({"status": "ok"} | body)
    return json_response({"status": "failing", "message": why} | body, 503, HEADERS[503])


@probes.get("/startup")
async def startup(request: Request) -> Response:
    """200 once the model is loaded."""
    return _probe(request, why_not_started)


@probes.get("/live")
async def live(request: Request) -> Response:
    """200 while the process is worth keeping: what that means depends on the engine's state."""
    return _probe(request, why_not_live)


@probes.get("/ready")
async def ready(request: Request) -> Response:
    """200 while requests are taken."""
    return _probe(request, why_not_ready)


@probes.get("/health")
async def health(request: Request) -> Response:
    """200 while the endpoints, or the status that was set, say that the engine is healthy."""
    engine = _engine_of(request)
    is_healthy, endpoints = engine.health.get_health_status()
    body = engine.summary() | {"endpoints": endpoints}
    if is_healthy:
        return json_response({"status": "ready"} | body)
    return json_response({"status": "notready"} | body, 503, HEADERS[503])


@scraped.get("/metrics")
async def metrics(request: Request) -> Response:
    """Returns the metrics in Prometheus' text format; 200 in every state."""
    engine = _engine_of(request)
    return metrics_of(engine.runtime, engine.life, engine.config)


@calls.post("/engine/wake_up")
async def wake_up(request: Request) -> Response:
    """Have an engine that stands by serve, and answer once it does; 423 while another one has the lock."""
    engine = _engine_of(request)
    if engine.takeover is None:
        raise EngineStartError(STARTING)
    await engine.takeover.wake_up()
    return json_response(engine.summary())


@calls.post("/engine/hand_over")
async def hand_over(request: Request) -> Response:
    """Have an engine that serves end, for another one to take over; 409 if none waits for that."""
    engine = _engine_of(request)
    if engine.takeover is None:
        raise EngineStartError(STARTING)
    if engine.life.state is not LifeState.DRAINING:
        engine.takeover.hand_over()
    return json_response(engine.summary(), 202)
