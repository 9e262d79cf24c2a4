"""Probes whether the engine generates, by generating one token."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import suppress

from segue.errors import EngineHungError, OverloadedError, PausedError
from segue.frontend.request import MAX_PRIORITY, GenerateRequest
from segue.frontend.sampling_options import SamplingOptions
from segue.launch.runtime import Runtime

FRESH_S = 1.0  # a step that ended less than this ago shows that the engine generates
POLL_S = 0.02
RETRY_S = 0.2  # before another try for a token, if the queue was full or a client aborted all requests
ONE_TOKEN = SamplingOptions(max_tokens=1, temperature=0.0, ignore_eos=True)


class Probe:
    """Checks whether an engine generates. Concurrent calls share one check.

    The calls need no API key. So there is at most one probe request at a time, and none within a second of
    the end of a step.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._check: asyncio.Task[None] | None = None

    async def generates(self) -> None:
        """Return once a step has ended, or if one ended lately, or if no step may run.

        Raises:
            SegueError: the engine cannot serve, or the probe request failed.
            EngineHungError: no step ended within ``--stall-s``.
        """
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._wait_for_step())
            self._check.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._check)

    async def _wait_for_step(self) -> None:
        began = time.monotonic()
        token: asyncio.Task[None] | None = None
        try:
            while not (self._may_not_run or self._runtime.manager.stats.last_step_at >= began - FRESH_S):
                if (trouble := self._runtime.trouble) is not None:
                    raise trouble
                if time.monotonic() - began > self._runtime.config.stall_s:
                    raise EngineHungError(
                        f"the engine has ended no step for {self._runtime.config.stall_s:g} s (--stall-s); "
                        "look at its log, and restart the engine if this persists"
                    )
                if token is None or token.done():
                    token = asyncio.create_task(self._generate_token())
                await asyncio.wait({token}, timeout=POLL_S)
                if token.done():
                    token.result()
        finally:
            if token is not None:
                token.cancel()

    @property
    def _may_not_run(self) -> bool:
        """Whether generation is paused, or weights are being updated, so that no step can be expected."""
        manager = self._runtime.manager
        return manager.stats.counters.paused is not None or manager.weights.state != "idle"

    async def _generate_token(self) -> None:
        """Generate one token, ahead of the queue. If the engine has no room for it, other steps must do."""
        request = GenerateRequest(
            rid=f"health-{uuid.uuid4().hex}", prompt=[0], options=ONE_TOKEN, priority=MAX_PRIORITY
        )
        with suppress(OverloadedError, PausedError), await self._runtime.manager.submit([request]) as call:
            if (await call.outputs())[0].token_ids:
                return
        await asyncio.sleep(RETRY_S)  # there was no room, or a client aborted all requests
