"""Engines over the fake worker."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segue.frontend.engine import Engine
from tests.frontend.tiny_model import write_model

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


class FakeEngine(Engine):
    """The real engine over the fake worker."""

    _worker_command = FAKE_WORKER


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny-model")


@pytest.fixture(scope="module")
def shared_engine(tiny_model: Path) -> Iterator[FakeEngine]:
    with FakeEngine(str(tiny_model), load_format="dummy", log_level="error") as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: FakeEngine) -> Iterator[FakeEngine]:
    """One engine for a module; after each test nothing may be left in it."""
    yield shared_engine
    assert_nothing_left(shared_engine)


def assert_nothing_left(engine: Engine) -> None:
    thread, manager = engine._thread, engine._runtime.manager

    async def settle() -> Any:
        await manager.wait_idle()
        while True:  # a surplus step may be in flight
            answer = await manager.get_state(check=True)
            if answer.problems or not answer.state["req_to_token_pool_used"]:
                return answer

    answer = thread.call(asyncio.wait_for(settle(), 5))
    assert answer.problems == []
    assert answer.state["running_batch_size"] == answer.state["waiting_queue_size"] == 0
