"""Runs the router: listen, watch the workers, serve, drain and stop; in one process or in several."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from segue.discovery.opening import NONE, open_discovery
from segue.host import freeze_heap
from segue.listener import BACKLOG, listen, url_of
from segue.logs import logger
from segue.messages.fleet import Registration
from segue.router.app import create_router_app
from segue.router.config import RouterConfig
from segue.router.coordinator import Coordinator
from segue.router.discovery import DiscoveredWorkers, Discovery, FixedWorkers
from segue.router.draining import drain
from segue.router.router import Router
from segue.router.serving_process import DESCRIPTORS_EACH
from segue.server.connections import ConnectionLimits, raise_descriptor_limit
from segue.server.http_server import HttpServer, first_of, on_signals
from segue.tls import scheme_of, server_context

END_S = 6.0  # for processes to end at once, before they are killed


async def route(config: RouterConfig, listener: socket.socket, on_ready: Callable[[str], None]) -> int:
    """Serve until a signal; returns the exit code. ``on_ready`` is called with the router's URL.

    SIGTERM first lets running requests end, for at most ``--drain-s`` seconds; SIGINT and any second signal
    end them at once.

    Raises:
        ConfigError: the port was taken meanwhile, or an option is not valid.
        ChildStartError: one of several processes ended before it was ready for the first time.
    """
    run = _route_alone if config.processes == 1 else _coordinate
    return await run(config, listener, on_ready)


async def _route_alone(config: RouterConfig, listener: socket.socket, on_ready: Callable[[str], None]) -> int:
    """Serve in this process."""
    tls = server_context(config)
    listen(listener)
    raise_descriptor_limit(DESCRIPTORS_EACH)
    app = create_router_app(config)
    router: Router = app.state.router
    server = _server(app, config, tls=tls, root_path=config.root_path)
    stop, at_once = on_signals()
    http = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    _discover(router)
    freeze_heap()
    try:
        on_ready(url_of(listener, scheme_of(config)))
        await first_of(stopping, http)
        if stopping.done():
            _tell_drain(router, at_once.is_set())
            await drain(router, server, config.drain_s, lambda: at_once.is_set() or http.done())
        return 0 if stopping.done() else 1
    finally:
        stopping.cancel()
        server.should_exit = True
        await router.close()
        await http


async def _coordinate(config: RouterConfig, listener: socket.socket, on_ready: Callable[[str], None]) -> int:
    """Serve in processes of their own, which this one starts and coordinates."""
    server_context(config)  # the processes need it; that it cannot be used is said once, and at once
    raise_descriptor_limit(DESCRIPTORS_EACH)
    app = create_router_app(config)
    router: Router = app.state.router
    stop, at_once = on_signals()
    with closing(socket.socket(socket.AF_UNIX)) as inner:
        inner.bind("")  # an abstract address, which the kernel chooses, and which leaves no file behind
        inner.listen(BACKLOG)
        coordinator = Coordinator(router, listener, inner.getsockname())
        server = _server(_settling(app, coordinator), config)
        http = asyncio.create_task(server.serve(sockets=[inner]))
        running = asyncio.create_task(coordinator.run())
        stopping = asyncio.create_task(stop.wait())
        ready = asyncio.create_task(coordinator.is_ready.wait())
        _discover(router)
        try:
            await first_of(ready, stopping, http, running)
            if ready.done():
                freeze_heap()
                on_ready(url_of(listener, scheme_of(config)))
                await first_of(stopping, http, running)
            if stopping.done():
                _tell_drain(router, at_once.is_set())
                router.is_draining = True
                coordinator.end(0.0 if at_once.is_set() else config.drain_s)
                ending = asyncio.create_task(at_once.wait())
                await first_of(ending, running, http)
                ending.cancel()
            if running.done():
                running.result()  # raises its error
            return 0 if stopping.done() else 1
        finally:
            stopping.cancel()
            ready.cancel()
            coordinator.end(0.0)
            await first_of(running, timeout=END_S)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            server.should_exit = True
            await router.close()
            await http


def _server(app: ASGIApp, config: RouterConfig, **of_clients: Any) -> HttpServer:
    """Make a server; ``of_clients`` is what only one that clients connect to has."""
    limits = ConnectionLimits.of_this_process(config.max_body_mib, DESCRIPTORS_EACH)
    return HttpServer(app, limits, config.log_level, **of_clients)


def _discover(router: Router) -> None:
    """Take the workers that the options name, those of discovery, and those that register."""
    config = router.config
    sources: list[Discovery] = [FixedWorkers(Registration(url=url, role=role) for url, role in config.urls)]
    if config.discovery != NONE:
        backend = open_discovery(config.discovery, config.discovery_target)
        sources.append(DiscoveredWorkers(backend))
    router.discover(*sources)


def _tell_drain(router: Router, at_once: bool) -> None:
    """Log what a drain waits for."""
    if (in_flight := router.registry.num_requests()) and router.config.drain_s and not at_once:
        text = "%d requests have %g s to end; another signal ends them at once"
        logger.info(text, in_flight, router.config.drain_s)


def _settling(app: ASGIApp, coordinator: Coordinator) -> ASGIApp:
    """Returns an application that knows what all processes have, and whose answers wait until they know it.

    So counts are exact, and a request that a client sends behind the answer to an operation finds it done,
    whichever process takes the request.
    """

    async def settled(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_settled(message: Message) -> None:
            if message["type"] == "http.response.start" and scope["method"] != "GET":
                await coordinator.settle()
            await send(message)

        await coordinator.settle()
        await app(scope, receive, send_settled)

    return settled
