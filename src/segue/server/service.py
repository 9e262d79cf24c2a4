"""What the routes work with."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from starlette.requests import Request

from segue.config import EngineConfig
from segue.errors import EngineStartError
from segue.frontend.life import STARTING
from segue.frontend.tokenizer_manager import TokenizerManager
from segue.launch.runtime import Runtime


@dataclass
class Service:
    """The configuration, and the engine once it runs."""

    config: EngineConfig
    runtime: Runtime | None = None
    started_at: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch
    check: asyncio.Task[None] | None = None  # whether the engine generates; the calls share it

    @property
    def running(self) -> Runtime:
        """The engine.

        Raises:
            EngineStartError: it is still starting.
        """
        if self.runtime is None:
            raise EngineStartError(STARTING)
        return self.runtime

    @property
    def manager(self) -> TokenizerManager:
        """Where requests go; raises as :attr:`running` does."""
        return self.running.manager


def service_of(request: Request) -> Service:
    """The application's service."""
    service: Service = request.app.state.service
    return service
