"""What the routes work with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

from starlette.requests import Request

from segue.config import EngineConfig
from segue.errors import EngineStartError
from segue.frontend.life import STARTING
from segue.frontend.sampling_options import RequestLimits
from segue.frontend.tokenizer_manager import TokenizerManager
from segue.launch.probe import Probe
from segue.launch.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much a body may ask for."""

    vocabulary: RequestLimits
    max_prompts: int  # in one call


@dataclass
class Service:
    """The configuration, and the engine once it runs."""

    config: EngineConfig
    runtime: Runtime | None = None
    started_at: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch

    @property
    def running(self) -> Runtime:
        """The engine.

        Raises:
            EngineStartError: it is still starting.
        """
        if self.runtime is None:
            raise EngineStartError(STARTING)
        return self.runtime

    @cached_property
    def probe(self) -> Probe:
        """What sees whether the engine generates.

        Raises:
            EngineStartError: it is still starting.
        """
        return Probe(self.running)

    @property
    def manager(self) -> TokenizerManager:
        """Where requests go; raises as :attr:`running` does."""
        return self.running.manager

    @property
    def bounds(self) -> Bounds:
        """How much a body may ask for; raises as :attr:`running` does."""
        return Bounds(vocabulary=self.manager.encoder.limits, max_prompts=self.config.max_queued_requests)


def service_of(request: Request) -> Service:
    """The application's service."""
    service: Service = request.app.state.service
    return service
