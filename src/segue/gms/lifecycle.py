"""Runs the memory service until a signal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from segue.gms.config import GmsConfig, vmms_of
from segue.gms.server import Server
from segue.gms.service import MemoryService
from segue.gms.store import SlabStore


async def serve(config: GmsConfig, on_ready: Callable[[MemoryService, str], None]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    ``on_ready`` is called once clients can connect, with the service and the path of its socket.

    Raises:
        MemoryServiceError: the directory is not safe, or another service has it.
        ConfigError: a device is not there.
    """
    store = SlabStore(vmms_of(config.devices))
    service = MemoryService(store)
    server = Server(service, config.gms_dir, allowed_uids=config.uids, token=config.gms_token)
    task = asyncio.create_task(server.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    on_ready(service, server.path)
    try:
        await task
    except asyncio.CancelledError:
        return 0
    finally:
        store.close()
    return 0
