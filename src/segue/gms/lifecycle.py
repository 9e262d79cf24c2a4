"""Runs the memory service until a signal."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable

from segue.gms.config import GmsConfig, vmms_of
from segue.gms.holder import Holder
from segue.gms.holding import HolderLink
from segue.gms.server import GmsServer
from segue.gms.service import MemoryService
from segue.gms.store import SlabStore
from segue.logs import LogFormat, configure


async def serve(config: GmsConfig, on_ready: Callable[[MemoryService, str], None]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    ``on_ready`` is called once clients can connect, with the service and the path of its socket.

    Raises:
        MemoryServiceError: the directory is not safe, or another service has it.
        ConfigError: a device is not there.
    """
    store = SlabStore(vmms_of(config.devices))
    link = HolderLink(config.gms_dir)
    service = MemoryService(store, link)
    server = GmsServer(service, config.gms_dir, allowed_uids=config.uids, token=config.gms_token)
    link.open(service)
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
        link.close()
        store.close()
    return 0


def hold(directory: str, log_level: str, log_format: LogFormat, on_ready: Callable[[str], None]) -> None:
    """Hold descriptors for the service of a directory, until SIGTERM or SIGINT.

    Raises:
        MemoryServiceError: the directory is not safe, or has a holder.
    """
    configure(log_level, log_format)
    holder = Holder(directory)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
    on_ready(holder.path)
    try:
        holder.run()
    finally:
        holder.close()
