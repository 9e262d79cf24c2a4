"""The reader's side of NIXL: a registered pool, and the thread that lets NIXL work.

Whoever has the pool's blob can write to it. The reader cannot tell who does, nor stop it, so pages that a
lost writer may still write to are left alone for a while (`TransportTraits.proves_gone`).
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from segue.disagg.transports.nixl_agent import NixlAgent, PollPace
from segue.errors import TransportError
from segue.kvcache.pool import KVPool

logger = logging.getLogger(__name__)

IDLE_S = 10e-3  # between two calls of NIXL while no pages come


class NixlExport:
    """A KV pool that others write to by NIXL (`ExportedPool`)."""

    def __init__(self, pool: KVPool) -> None:
        """Register the pool, and start the thread that lets NIXL work.

        Raises:
            ConfigError: NIXL is not installed, or does not start.
        """
        blob: Future[bytes] = Future()
        self._has_stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(pool, blob), name="segue-kv-nixl", daemon=True
        )
        self._thread.start()
        self.blob = blob.result()

    def close(self) -> None:
        """Let NIXL work no more; over RDMA, those who know the pool may still write to the memory."""
        self._has_stopped.set()
        self._thread.join()

    def _run(self, pool: KVPool, blob: Future[bytes]) -> None:
        """The thread: over TCP, pages are stored only while it lets NIXL work."""
        try:
            agent = NixlAgent(pool)
            blob.set_result(agent.blob)
        except BaseException as error:
            blob.set_exception(error)
            return
        pace = PollPace(IDLE_S)

        def work() -> None:
            try:
                agent.work()
            except TransportError as error:
                logger.warning("%s", error.message)

        while not self._has_stopped.wait(pace.pause_s):
            pace.call(work)
