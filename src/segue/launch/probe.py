"""One real token, to see that the engine generates."""

from __future__ import annotations

import asyncio
import time
import uuid

from segue.errors import EngineHungError, OverloadedError, PausedError
from segue.frontend.request import MAX_PRIORITY, GenerateRequest
from segue.frontend.sampling_options import SamplingOptions
from segue.launch.runtime import Runtime

FRESH_S = 1.0  # a step that ended so lately is proof enough
POLL_S = 0.02
RETRY_S = 0.2  # until a token is asked for again, where the queue was full or a client has aborted all
ONE_TOKEN = SamplingOptions(max_tokens=1, temperature=0.0, ignore_eos=True)


class Probe:
    """Sees whether an engine generates. Whoever asks while another does shares its token.

    Nobody needs a key to ask, so there is at most one request of this kind at a time, and none within a
    second of a step.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._asked: asyncio.Task[None] | None = None

    async def generates(self) -> None:
        """Return once a step has ended, lately or now, or nothing may run.

        Raises:
            SegueError: why the engine cannot serve, or why its token failed.
            EngineHungError: no step ended within ``--stall-s``.
        """
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._see())
            self._asked.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._asked)

    async def _see(self) -> None:
        began = time.monotonic()
        token: asyncio.Task[None] | None = None
        try:
            while not (self._is_excused or self._runtime.manager.stats.last_step_at >= began - FRESH_S):
                if (trouble := self._runtime.trouble) is not None:
                    raise trouble
                if time.monotonic() - began > self._runtime.config.stall_s:
                    raise EngineHungError(
                        f"the engine has ended no step for {self._runtime.config.stall_s:g} s (--stall-s); "
                        "look at its log, and restart it if it stays so"
                    )
                if token is None or token.done():
                    token = asyncio.create_task(self._token())
                await asyncio.wait({token}, timeout=POLL_S)
                if token.done():
                    token.result()
        finally:
            if token is not None:
                token.cancel()

    @property
    def _is_excused(self) -> bool:
        """Whether generation is paused, or the weights are being updated: nothing may be asked of it."""
        manager = self._runtime.manager
        return manager.stats.counters.paused is not None or manager.weights.state != "idle"

    async def _token(self) -> None:
        """One token, ahead of the queue. Where the engine has no room for it, the steps of others must do."""
        request = GenerateRequest(
            rid=f"health-{uuid.uuid4().hex}", prompt=[0], options=ONE_TOKEN, priority=MAX_PRIORITY
        )
        try:
            with await self._runtime.manager.submit(request) as stream:
                output = await stream.result()
        except (OverloadedError, PausedError):
            await asyncio.sleep(RETRY_S)
            return
        if not output.token_ids:  # a client has aborted all
            await asyncio.sleep(RETRY_S)
