"""How a process of the router ends: it refuses new requests, and lets those in flight end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from segue.router.router import Router
from segue.server.http_server import HttpServer

POLL_S = 0.02  # between two looks whether the running requests have ended


async def drain(router: Router, server: HttpServer, seconds: float, is_over: Callable[[], bool]) -> None:
    """Refuse new requests; return when the running ones have ended, or there is no more time for them."""
    router.is_draining = True
    for connection in list(server.server_state.connections):
        connection.shutdown()  # closes an idle connection now, others after their reply
    deadline = asyncio.get_running_loop().time() + seconds
    while router.registry.holds.num_requests or server.server_state.tasks:
        if is_over() or asyncio.get_running_loop().time() >= deadline:
            return
        await asyncio.sleep(POLL_S)
