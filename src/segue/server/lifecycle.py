"""Runs the server process: load the model, stand by or serve at once, drain and stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Literal

from segue.config import EngineConfig, parse_endpoints
from segue.discovery.opening import parse_backends, parse_targets
from segue.errors import ConfigError, LockLostError, MemoryServiceLostError
from segue.failover.life import Life
from segue.failover.system_health import SystemHealth
from segue.host import freeze_heap
from segue.launch.processes import WORKER_COMMAND
from segue.launch.runtime import Runtime
from segue.logs import logger
from segue.messages.control import StartStep
from segue.server.cohort import CohortMember, directory_of
from segue.server.connections import raise_descriptor_limit
from segue.server.endpoint import EngineEndpoint
from segue.server.http_server import first_of, on_signals
from segue.server.shadow import Takeover
from segue.server.system_app import ProbedEngine, SystemServer

POLL_S = 0.02  # between two looks whether the running requests have ended
REPLIES_S = 0.3  # for the ends of requests to be written to their clients, when another engine takes over


def check_server_options(config: EngineConfig) -> None:
    """Refuse options of the server that contradict each other.

    Raises:
        ConfigError: the system port is the API's, a failover directory is given without shadow mode or is
            missing with it, or an option of discovery is wrong.
    """
    if config.probed_port and config.probed_port == config.port:
        text = f"system_port={config.probed_port}: the API has this port (--port)"
        raise ConfigError(f"{text}; choose another with --system-port", param="system_port")
    if config.failover_dir is not None and not config.shadow_mode:
        raise ConfigError(
            f"failover_dir={config.failover_dir!r}: without --shadow-mode an engine takes no lock, so that "
            "several would serve at once; add --shadow-mode, or leave --failover-dir out",
            param="failover_dir",
        )
    if config.shadow_mode:
        names = parse_backends(config.discovery, "discovery")
        parse_targets(names, config.discovery_target, directory_of(config))


async def serve(
    config: EngineConfig,
    listener: socket.socket,
    on_ready: Callable[[Runtime, str], None],
    command: Sequence[str] = WORKER_COMMAND,
    on_start: Callable[[StartStep | None], None] | None = None,
) -> int:
    """Serve until a signal or the engine's death; returns the exit code: 0 after a signal or hand-over.

    ``on_ready`` is called with the engine and the server's URL, and ``command`` starts a worker process.
    ``on_start`` shows how the start gets on; without it, workers log that.

    While the model loads, requests are answered 503; with ``--shadow-mode`` the API port refuses connections
    until the engine serves. SIGTERM first lets running requests end, for at most ``--drain-s`` seconds,
    unless another engine takes over; SIGINT and any second signal abort them at once. The soft limit of open
    files is raised for this process and its workers.

    Raises:
        ConfigError: the system port is the API's, or a failover directory is given without shadow mode.
        SegueError: the port was taken meanwhile, or the engine cannot start or cannot wake.
    """
    check_server_options(config)
    membership = CohortMember(config) if config.shadow_mode else None
    raise_descriptor_limit()
    listed = parse_endpoints(config.system_use_endpoint_health_status, "system_use_endpoint_health_status")
    health = SystemHealth(config.system_starting_health_status, listed)
    engine = ProbedEngine(config=config, life=Life(), health=health)
    system = None if config.probed_port is None else SystemServer(engine, config.probed_port)
    endpoint = EngineEndpoint(config, listener, health, membership, "" if system is None else system.url)
    if membership is None:
        endpoint.listen()
    stop, at_once = on_signals()
    starting = asyncio.create_task(
        Runtime.start(config, command=command, life=engine.life, on_start=on_start)
    )
    stopping = asyncio.create_task(stop.wait())
    try:
        await first_of(starting, stopping, endpoint.closed)
        if not starting.done():
            return 0 if stop.is_set() else 1
        runtime = engine.runtime = starting.result()
        freeze_heap()  # what the start has made stays until the end
        health.set_health_status("ready")
        engine.takeover = Takeover(runtime, endpoint, membership)
        server = _Server(runtime, endpoint, engine.takeover, membership)
        return await server.run(stopping, at_once, lambda: on_ready(runtime, endpoint.url))
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if engine.takeover is not None:
            await engine.takeover.close()
        await endpoint.withdraw()
        if engine.runtime is not None:
            await engine.runtime.shutdown()
        if membership is not None:
            await membership.close()
        await endpoint.close()
        if system is not None:
            await system.close()


class _Server:
    """An engine that stands by or serves, and all that can happen to it."""

    def __init__(
        self, runtime: Runtime, endpoint: EngineEndpoint, takeover: Takeover, membership: CohortMember | None
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._takeover = takeover
        self._membership = membership
        self._config = runtime.config

    async def run(
        self, stopping: asyncio.Task[Literal[True]], at_once: asyncio.Event, on_ready: Callable[[], None]
    ) -> int:
        """Return the exit code once the engine has ended, or is to end; call ``on_ready`` when it serves.

        Raises:
            SegueError: the engine cannot wake.
        """
        runtime, closed = self._runtime, self._endpoint.closed
        await first_of(self._takeover.task, stopping, closed, runtime.died)
        if self._takeover.task.done() and not runtime.died.done():
            self._takeover.task.result()
            on_ready()
            asked = asyncio.create_task(self._takeover.hand_over_asked.wait())
            await first_of(stopping, closed, runtime.died, asked)
            asked.cancel()
        is_asked = stopping.done() or self._takeover.hand_over_asked.is_set()
        if runtime.died.done():
            await self._die(stopping)
        elif is_asked and self._takeover.task.done():
            if self._membership is not None and not at_once.is_set() and self._membership.has_standby:
                await self._hand_over(self._membership)
            else:
                await self._drain(lambda: at_once.is_set() or closed.done())
                if runtime.control_notes is not None:  # a pause ends with an engine that none takes over from
                    runtime.control_notes.remove(runtime.epoch)
        return 0 if is_asked and not runtime.died.done() else 1

    async def _die(self, stopping: asyncio.Task[Literal[True]]) -> None:
        """Let another engine take over at once, and show for ``--exit-grace`` that this one is dead."""
        runtime, grace_s = self._runtime, self._config.exit_grace
        await self._endpoint.withdraw()
        await runtime.workers_gone()
        if self._membership is not None:
            self._membership.lock.release()
        if isinstance(runtime.life.error, LockLostError | MemoryServiceLostError):
            return  # another engine serves, or shall be started soon, and clients must not find this one
        logger.error("the engine is dead; /health answers 503 for %g s, then the server ends", grace_s)
        await first_of(stopping, self._endpoint.closed, timeout=grace_s)

    async def _hand_over(self, membership: CohortMember) -> None:
        """End the requests so that a router sends them to the engine that waits, and let that one wake."""
        runtime, server = self._runtime, self._endpoint.server
        logger.info("another engine takes over")
        runtime.drain(self._config.drain_s)
        await self._endpoint.withdraw()
        await runtime.end_requests()
        deadline = asyncio.get_running_loop().time() + REPLIES_S
        while server.server_state.tasks and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_S / 10)
        runtime.kill_workers()
        await runtime.workers_gone()
        membership.lock.release()

    async def _drain(self, is_over: Callable[[], bool]) -> None:
        """Refuse new requests; return when the running ones have ended, or must be aborted.

        They must be aborted after ``--drain-s``, or as soon as ``is_over`` says that there is no more time.
        """
        runtime, server, seconds = self._runtime, self._endpoint.server, self._config.drain_s
        manager = runtime.manager
        runtime.drain(seconds)
        for connection in list(server.server_state.connections):
            connection.shutdown()  # closes an idle connection now, others after their reply
        if manager.num_requests and seconds and not is_over():
            text = "%d requests have %g s to end; another signal ends them at once"
            logger.info(text, manager.num_requests, seconds)
        deadline = asyncio.get_running_loop().time() + seconds
        while manager.num_requests or server.server_state.tasks:  # in flight, or replies not yet written
            if is_over() or runtime.died.done() or asyncio.get_running_loop().time() >= deadline:
                return
            await asyncio.sleep(POLL_S)
