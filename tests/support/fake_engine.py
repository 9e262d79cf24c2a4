"""An engine with the fake worker, and the checks for the end of a test."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from segue.api.engine import Engine

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


class FakeEngine(Engine):
    """The real engine with the fake worker."""

    _worker_command = FAKE_WORKER


def assert_nothing_left(engine: Engine) -> None:
    thread, manager = engine._thread, engine._runtime.manager

    async def settle() -> Any:
        await manager.wait_idle()
        while True:  # a surplus step may be in flight
            answer = await manager.calls.get_state(check=True)
            if answer.problems or not answer.state["req_to_token_pool_used"]:
                return answer

    answer = thread.call(asyncio.wait_for(settle(), 60))
    assert answer.problems == []
    assert answer.state["running_batch_size"] == answer.state["waiting_queue_size"] == 0
