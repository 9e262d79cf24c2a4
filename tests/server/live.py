"""The real HTTP server on a real socket, in a thread of the test process, with the fake or a real worker."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from segue.api.loop_thread import LoopThread
from segue.config import EngineConfig
from segue.launch.runtime import Runtime
from segue.listener import bind, url_of
from segue.messages.control import State
from segue.server.app import create_app
from segue.server.connections import ConnectionLimits
from segue.server.http_server import HttpServer
from segue.tls import scheme_of, server_context
from tests.support.fake_engine import FAKE_WORKER

T = TypeVar("T")


class LiveServer:
    """A running server; it stops when the ``with`` block is left."""

    def __init__(
        self,
        model: Path,
        *,
        started: bool = True,
        port: int = 0,
        real: bool = False,
        limits: ConnectionLimits | None = None,
        certificate: Path | None = None,
        **options: Any,
    ) -> None:
        """Start the server; with ``real``, over a scheduler in a thread that runs the model.

        The weights are dummies, unless ``options`` has a ``load_format``. Its client trusts the
        ``certificate``.
        """
        fixed: dict[str, Any] = {"load_format": "dummy", "port": port, "log_level": "error"}
        self.config = EngineConfig.create(model=str(model), **(fixed | options))
        self._thread = LoopThread("test-server")
        self.app = create_app(self.config)
        if started:
            start = Runtime.start_active(self.config, embedded=real, command=FAKE_WORKER)
            self.app.state.runtime = self._thread.call(start)
        listener = bind(self.config.host, self.config.port)
        self.url = url_of(listener, scheme_of(self.config))
        limits = limits or ConnectionLimits.of_this_process(self.config.max_body_mib)
        tls, root_path = server_context(self.config), self.config.root_path
        self._http = HttpServer(self.app, limits, self.config.log_level, tls=tls, root_path=root_path)
        self._serving = self._thread.submit(self._http.serve(sockets=[listener]))
        self._thread.call(asyncio.wait_for(self._http.accepts.wait(), 60))
        trusted = True if certificate is None else ssl.create_default_context(cafile=str(certificate))
        self.client = httpx.Client(base_url=self.url, timeout=60, verify=trusted)

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        if self.app.state.runtime is not None:
            self._thread.call(self.runtime.shutdown())
        self._http.should_exit = True
        self._serving.result(60)
        self._thread.stop()

    @property
    def runtime(self) -> Runtime:
        runtime: Runtime = self.app.state.runtime
        return runtime

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of a coroutine that runs on the server's event loop."""
        return self._thread.call(work)

    def assert_nothing_left(self) -> None:
        """Waits until no request is in flight; asserts that every slot and page is accounted for."""
        manager = self.runtime.manager

        async def settle() -> State:
            await manager.wait_idle()
            while True:  # a surplus step may be in flight
                answer = await manager.calls.get_state(check=True)
                if answer.problems or not answer.state["req_to_token_pool_used"]:
                    return answer

        answer = self._thread.call(asyncio.wait_for(settle(), 60))
        assert answer.problems == []
        assert answer.state["running_batch_size"] == answer.state["waiting_queue_size"] == 0
