from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from segue.checkpoint.source import resolve
from segue.config import EngineConfig
from segue.errors import (
    DrainingError,
    EngineDeadError,
    EngineStartError,
    OutOfMemoryError,
    TensorParallelError,
)
from segue.failover.life import LifeState
from segue.launch.runtime import Runtime
from segue.messages.control import StartFailed
from tests.launch.test_processes import SLEEPER


def run(model: Path, work: Callable[[Runtime], Awaitable[None]]) -> None:
    """Run ``work`` with a runtime whose workers are not started."""

    async def whole() -> None:
        config = EngineConfig(model=str(model), load_format="dummy")
        source = resolve(config.model, config.load_format, config.cache_dir)
        runtime = Runtime(config, source, embedded=False, command=SLEEPER)
        try:
            await work(runtime)
        finally:
            await runtime.shutdown()

    asyncio.run(asyncio.wait_for(whole(), 60))


def make_active(runtime: Runtime) -> None:
    """Take an engine whose workers were not started through the states before ACTIVE."""
    for state in (LifeState.STANDBY, LifeState.WAKING, LifeState.ACTIVE):
        runtime.life.advance(state)


def test_a_workers_last_message_is_the_reason_even_after_its_exit(tiny_model: Path) -> None:
    async def work(runtime: Runtime) -> None:
        runtime._on_worker_exit("worker rank 0 ended with exit code 0")
        runtime._receive(StartFailed("OutOfMemoryError", "only 1 page fits"))
        with pytest.raises(OutOfMemoryError, match="only 1 page"):
            await runtime._ready

    run(tiny_model, work)


def test_an_exit_after_the_last_message_is_not_a_second_failure(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(runtime: Runtime) -> None:
        runtime._receive(StartFailed("OutOfMemoryError", "only 1 page fits"))
        runtime._on_worker_exit("worker rank 0 ended with exit code 0")
        assert not runtime.died.done()

    run(tiny_model, work)
    assert caplog.text == ""


def test_a_runtime_alone_moves_its_life(tiny_model: Path) -> None:
    async def work(runtime: Runtime) -> None:
        runtime.drain()
        assert runtime.life.state is LifeState.INIT, "only an active engine drains"
        make_active(runtime)
        runtime.drain()
        runtime.drain()
        assert runtime.life.state is LifeState.DRAINING
        runtime._ready.set_exception(EngineStartError("unused"))
        runtime._die(EngineDeadError("worker rank 0 ended"))
        runtime._die(EngineDeadError("worker rank 1 ended"))
        await runtime.shutdown()
        await runtime.shutdown()
        assert runtime.life.state is LifeState.DEAD
        assert runtime.life.error is runtime.died.result()
        assert runtime.died.result().message == "worker rank 0 ended"

    run(tiny_model, work)


def test_an_operator_drains_an_active_engine_and_ends_that(tiny_model: Path) -> None:
    async def work(runtime: Runtime) -> None:
        with pytest.raises(EngineStartError):
            runtime.set_drained(True)
        make_active(runtime)
        for drained, state in (
            (True, LifeState.DRAINED),
            (True, LifeState.DRAINED),
            (False, LifeState.ACTIVE),
        ):
            runtime.set_drained(drained)
            assert runtime.life.state is state
        runtime.set_drained(True)
        runtime.drain()
        with pytest.raises(DrainingError, match="the server is shutting down"):
            runtime.set_drained(False)
        runtime._ready.set_exception(EngineStartError("unused"))

    run(tiny_model, work)


def test_a_shutdown_is_the_end_of_a_life_and_nobodys_death(tiny_model: Path) -> None:
    async def work(runtime: Runtime) -> None:
        await runtime.shutdown()
        assert runtime.life.state is LifeState.DEAD and not runtime.died.done()

    run(tiny_model, work)


def test_an_error_on_a_message_is_the_engines_death(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(runtime: Runtime) -> None:
        make_active(runtime)
        runtime._on_error(ValueError("a bug"))
        text = "the frontend failed: ValueError: a bug; the engine has ended, start it again"
        assert runtime.died.result().message == text

    run(tiny_model, work)
    assert "ValueError: a bug" in caplog.text


def test_without_a_last_message_the_exit_is_the_reason(tiny_model: Path) -> None:
    async def work(runtime: Runtime) -> None:
        runtime._on_worker_exit("worker rank 0 ended with exit code 5")
        with pytest.raises(EngineStartError, match="exit code 5 before it was ready"):
            await runtime._ready

    run(tiny_model, work)


def test_a_model_that_cannot_be_sharded_is_refused_before_a_worker_is_started(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runtime, "__init__", lambda *_, **__: pytest.fail("an engine was made"))
    config = EngineConfig(model=str(tiny_model), load_format="dummy", tp=64)
    with pytest.raises(TensorParallelError, match=r"size 64 does not fit .* Sizes that fit: 1, 2, 4"):
        asyncio.run(Runtime.start(config))
