"""The API port of an engine, and all by which others find it, such as its registrations at routers."""

from __future__ import annotations

import asyncio
import socket
import time
from urllib.parse import urlsplit

from segue.config import EngineConfig
from segue.discovery.opening import parse_backends
from segue.discovery.record import EngineRecord
from segue.errors import ConfigError
from segue.failover.life import LifeState
from segue.failover.system_health import SystemHealth
from segue.host import boot_id
from segue.http_guard import is_loopback
from segue.launch.runtime import Runtime
from segue.listener import listen, url_of, with_host_of
from segue.logs import logger
from segue.options import stands_for_all
from segue.server import canary
from segue.server.app import create_app
from segue.server.cohort import CohortMember
from segue.server.connections import ConnectionLimits
from segue.server.http_server import HttpServer
from segue.server.registration import keep_registered
from segue.tls import scheme_of, server_context

NAME = "generate"  # of the endpoint, for `SystemHealth`
IDLE_POLL_S = 0.5  # between two looks whether an idle engine is due for a health check


class EngineEndpoint:
    """Makes an engine reachable. Nothing else listens on the API port, or registers the engine anywhere."""

    def __init__(
        self,
        config: EngineConfig,
        listener: socket.socket,
        health: SystemHealth,
        membership: CohortMember | None,
        system_url: str,
    ) -> None:
        """Prepare all of it.

        Args:
            config: the options.
            listener: a socket that is bound, and does not listen yet.
            health: is told whether the endpoint is ready.
            membership: in a cohort; None: the engine is in none.
            system_url: of the system port; "": there is none.

        Raises:
            ConfigError: an allowed host or an origin in the options is not valid, the certificate or its key
                cannot be used, or the engine's record would have no address that a router can connect to.
        """
        tls = server_context(config)
        self.url = url_of(listener, scheme_of(config))
        self.own_url = config.register_url or self.url  # as others reach it
        if membership is not None:
            _check_record_url(config, self.own_url)
        self.app = create_app(config)
        limits = ConnectionLimits.of_this_process(config.max_body_mib)
        self.server = HttpServer(self.app, limits, config.log_level, tls=tls, root_path=config.root_path)
        self.closed: asyncio.Future[None] = asyncio.Future()  # the HTTP server ended
        self._config = config
        self._listener = listener
        self._health = health
        self._membership = membership
        self._system_url = (
            with_host_of(system_url, self.own_url) if stands_for_all(system_url) else system_url
        )
        self._http: asyncio.Task[None] | None = None
        self._background: list[asyncio.Task[None]] = []

    def listen(self) -> None:
        """Answer clients from now on: 503, until :meth:`serve` is called.

        Raises:
            ConfigError: another process listens on the port since it was bound.
        """
        listen(self._listener)
        self._http = asyncio.create_task(self.server.serve(sockets=[self._listener]))
        self._http.add_done_callback(lambda _: self.closed.set_result(None))

    async def serve(self, runtime: Runtime, epoch: int) -> None:
        """Give clients the engine, and tell everybody who should know where it is.

        The engine must be waking, under the ``epoch`` that it has claimed, 0 if it is in no cohort: so an
        engine that stands by cannot become known.

        Raises:
            ConfigError: another process listens on the port since it was bound.
            DiscoveryError: the engine's record can be put nowhere.
        """
        life = runtime.life
        if life.state is not LifeState.WAKING or epoch != runtime.epoch:
            state = f"an engine that is {life.state.name}, with epoch {runtime.epoch}"
            raise ValueError(f"{state}, cannot serve with epoch {epoch}: only one that is WAKING can")
        if self._http is None:
            self.listen()
        await self.server.accepts.wait()
        self.app.state.runtime = runtime
        self._health.set_endpoint(NAME, "ready")
        register = keep_registered(self._config, self.url, epoch=epoch)
        self._background.append(asyncio.create_task(register))
        if self._config.has_health_check:
            self._health.add_health_check(NAME)
            self._background.append(asyncio.create_task(self._check_when_idle(runtime)))
        if self._membership is not None:
            await self._membership.put(self._record_of(runtime, self._membership))

    async def withdraw(self) -> None:
        """End what lets others find the engine; clients that know it are answered as before."""
        if self._background:
            self._health.set_endpoint(NAME, "notready")
        background, self._background = self._background, []
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        if self._membership is not None:
            await self._membership.remove()

    async def close(self) -> None:
        """End the registrations, and close the port once every reply is written, or at the limit for that."""
        await self.withdraw()
        self.server.should_exit = True
        if self._http is not None:
            await self._http
        self._listener.close()

    def _record_of(self, runtime: Runtime, membership: CohortMember) -> EngineRecord:
        """Returns what routers find of the engine."""
        return EngineRecord(
            cohort=membership.cohort,
            engine=membership.engine_id,
            epoch=runtime.epoch,
            url=self.own_url,
            system_url=self._system_url,
            model=runtime.name,
            tp=self._config.tp,
            role=runtime.manager.role,
            weight_version=runtime.manager.weights.version,
            boot_id=boot_id(),
            started_at=runtime.started_at,
        )

    async def _check_when_idle(self, runtime: Runtime) -> None:
        """Generate the test request whenever no step has ended for ``--health-check-interval-s``."""
        interval_s, manager = self._config.health_check_interval_s, runtime.manager
        due = time.monotonic() + interval_s
        while True:
            await asyncio.sleep(min(IDLE_POLL_S, interval_s))
            if time.monotonic() - manager.stats.last_step_at < interval_s:
                self._health.set_endpoint(NAME, "ready")  # requests show it
                due = manager.stats.last_step_at + interval_s
            elif time.monotonic() >= due and canary.may_generate(runtime):
                self._health.set_endpoint(NAME, await canary.status(runtime))
                due = time.monotonic() + interval_s


def _check_record_url(config: EngineConfig, url: str) -> None:
    """Check that routers which find the engine's record can reach it.

    Raises:
        ConfigError: it listens on all addresses, none of which the options name.
    """
    places = parse_backends(config.discovery, "discovery")
    if not places:
        return
    if stands_for_all(url):
        raise ConfigError(
            f"host={config.host!r}: this stands for all addresses, and the engine's record (--discovery "
            f"{config.discovery}) must name one at which routers reach it; give --register-url, such as "
            "http://10.0.0.7:30000, or a --host that is one address",
            param="register_url",
        )
    if places != ["file"] and is_loopback(urlsplit(url).hostname or ""):
        text = "the engine's record will say %s, which routers on other hosts cannot reach; for them give "
        logger.warning(text + "--register-url, and a --host that they reach", url)
