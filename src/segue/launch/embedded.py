"""The embedded scheduler: a thread of this process instead of workers, with ``inproc://`` sockets."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import zmq

from segue.config import EngineConfig
from segue.launch.channel import Addresses
from segue.launch.processes import POLL_S
from segue.logs import logger


class EmbeddedScheduler:
    """Runs rank 0's scheduler and model runner in a thread. There is no other rank."""

    addresses = Addresses("inproc://to_scheduler", "inproc://to_frontend")

    def __init__(self, config: EngineConfig, run_dir: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._config = config
        self._run_dir = run_dir
        self._context = context
        self.pids: list[int] = []  # there are no worker processes
        self._thread: threading.Thread | None = None

    def start(self, on_exit: Callable[[str], None]) -> None:
        """Start the thread. When it ends, it calls ``on_exit`` with the reason, a sentence."""
        work = partial(self._run, on_exit)
        self._thread = threading.Thread(target=work, name="segue-scheduler", daemon=True)
        self._thread.start()

    async def stop(self, polite_s: float, patience_s: float) -> bool:
        """Wait until the thread has taken ``Shutdown``. It cannot be killed. Return whether it has ended."""
        deadline = time.monotonic() + max(polite_s, patience_s)
        while self._is_alive and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        shutil.rmtree(self._run_dir, ignore_errors=True)
        return not self._is_alive

    @property
    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, on_exit: Callable[[str], None]) -> None:
        reason = "the embedded scheduler ended"
        try:
            from segue.worker.main import run_scheduler  # torch

            run_scheduler(self._config, self._run_dir, self.addresses, self._context, embedded=True)
        except Exception as error:
            logger.exception("the embedded scheduler failed")
            reason = f"the embedded scheduler failed: {type(error).__name__}: {error}"
        on_exit(reason)
