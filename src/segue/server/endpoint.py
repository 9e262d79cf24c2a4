"""The API port of an engine, and all by which others find it, such as its registrations at routers."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress

from segue.config import EngineConfig
from segue.discovery.base import DiscoveryBackend
from segue.discovery.record import EngineRecord
from segue.errors import DiscoveryError
from segue.failover.life import LifeState
from segue.failover.system_health import SystemHealth
from segue.host import boot_id
from segue.launch.runtime import Runtime
from segue.listener import listen, url_of
from segue.logs import logger
from segue.server import canary
from segue.server.app import create_app
from segue.server.connections import ConnectionLimits
from segue.server.http_server import HttpServer
from segue.server.registration import keep_registered

NAME = "generate"  # of the endpoint, for `SystemHealth`
IDLE_POLL_S = 0.5  # between two looks whether an idle engine is due for a health check


class EngineRecords:
    """The record of one engine, where routers look for it."""

    def __init__(self, discovery: DiscoveryBackend, engine_id: str) -> None:
        self._discovery = discovery
        self._engine_id = engine_id

    async def put(self, runtime: Runtime, url: str, epoch: int) -> None:
        """Put the record. A backend that cannot be reached does not keep an engine from serving."""
        config = runtime.config
        host = config.system_host or config.host
        record = EngineRecord(
            cohort=config.cohort,
            engine=self._engine_id,
            epoch=epoch,
            url=url,
            system_url=f"http://{f'[{host}]' if ':' in host else host}:{config.probed_port}",
            model=runtime.name,
            tp=config.tp,
            role=runtime.manager.role,
            weight_version=runtime.manager.weights.version or "",
            boot_id=boot_id(),
            started_at=float(runtime.started_at),
        )
        try:
            await self._discovery.put(record)
        except DiscoveryError as error:
            logger.error("%s; routers do not find this engine there", error)

    async def close(self) -> None:
        """Remove the record; nothing happens if it was removed."""
        with suppress(DiscoveryError):  # then its time to live ends it
            await self._discovery.close()


class EngineEndpoint:
    """Makes an engine reachable. Nothing else listens on the API port, or registers the engine anywhere."""

    def __init__(
        self,
        config: EngineConfig,
        listener: socket.socket,
        health: SystemHealth,
        records: EngineRecords | None = None,
    ) -> None:
        """``listener`` is bound, and does not listen yet; ``records``: of an engine that is in a cohort.

        Raises:
            ConfigError: an allowed host or an origin in the options is not valid.
        """
        self.url = url_of(listener)
        self.own_url = config.register_url or self.url  # as others reach it
        self.app = create_app(config)
        limits = ConnectionLimits.of_this_process(config.max_body_mib)
        self.server = HttpServer(self.app, limits, config.log_level)
        self.closed: asyncio.Future[None] = asyncio.Future()  # the HTTP server ended
        self._config = config
        self._listener = listener
        self._health = health
        self._records = records
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
        """
        life = runtime.life
        if life.state is not LifeState.WAKING or epoch != runtime.epoch:
            state = f"an engine that is {life.state.name}, with epoch {runtime.epoch}"
            raise ValueError(f"{state}, cannot serve with epoch {epoch}: only one that is WAKING can")
        if self._http is None:
            self.listen()
        await self.server.accepts.wait()
        self.app.state.runtime = runtime
        if self._records is not None:
            await self._records.put(runtime, self.own_url, epoch)
        self._health.set_endpoint(NAME, "ready")
        register = keep_registered(self._config, self.url, epoch=epoch)
        self._background.append(asyncio.create_task(register))
        if self._config.has_health_check:
            self._health.add_health_check(NAME)
            self._background.append(asyncio.create_task(self._check_when_idle(runtime)))

    async def withdraw(self) -> None:
        """End record and registrations; clients that know the engine are answered as before."""
        if self._records is not None:
            await self._records.close()
        background, self._background = self._background, []
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)

    async def close(self) -> None:
        """End the registrations, and close the port once every reply is written, or at the limit for that."""
        await self.withdraw()
        self.server.should_exit = True
        if self._http is not None:
            await self._http
        self._listener.close()

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
