"""Pausing, continuing and flushing with ``segue.Engine``: over the fake worker, and with a real model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import segue
from segue.errors import EngineDeadError, InvalidRequestError
from tests.support.fake_engine import FakeEngine, assert_nothing_left
from tests.support.held_steps import StepGate, hold_here

PARAMS = {"max_new_tokens": 25, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def slow_while(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, the fake engine's steps take ten times as long: no request ends meanwhile."""
    return tmp_path_factory.mktemp("worker") / "slow"


@pytest.fixture(scope="module")
def engine(tiny_model: Path, slow_while: Path) -> Iterator[FakeEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_STEP_S", "0.01")
        patch.setenv("FAKE_SLOW_WHILE", str(slow_while))
        with FakeEngine(str(tiny_model), load_format="dummy", log_level="error") as engine:
            yield engine


@pytest.fixture(autouse=True)
def nothing_left(engine: segue.Engine, slow_while: Path) -> Iterator[None]:
    Generating.slow_while = slow_while
    yield
    slow_while.unlink(missing_ok=True)
    engine.continue_generation()
    assert_nothing_left(engine)


def state_of(engine: segue.Engine) -> dict[str, Any]:
    state: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return state


class Generating:
    """`generate` in a thread of its own, stopped at some point by a pause from this one.

    Steps are slow from its beginning until somebody waits for its result.
    """

    slow_while: ClassVar[Path]

    def __init__(self, engine: segue.Engine, prompt: Any = "abc", **params: Any) -> None:
        self.slow_while.touch()
        self._replies: list[Any] = []
        self._thread = threading.Thread(
            target=lambda: self._replies.append(engine.generate(prompt, PARAMS | params))
        )
        self._thread.start()

    def result(self) -> Any:
        self.slow_while.unlink(missing_ok=True)
        self._thread.join(60)
        return self._replies[0]


@pytest.mark.parametrize("mode", ["in_place", "in-place", "retract"])
def test_a_pause_from_another_thread_and_a_continue(engine: segue.Engine, wait_until: Any, mode: str) -> None:
    check_pause_and_continue(engine, wait_until, mode, 25)


def test_the_same_with_a_real_model(
    tiny_model: Path, wait_until: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_here(tmp_path / "steps", monkeypatch)
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "log_level": "error"}
    with segue.Engine(str(tiny_model), embedded=True, num_kv_tokens=4096, **options) as engine:
        for mode in ("in_place", "retract"):
            check_pause_and_continue(engine, wait_until, mode, 300, gate)
        assert_nothing_left(engine)
        assert engine.flush_cache().flushed_items > 0
        state = state_of(engine)
        assert state["available_kv_tokens"] == 4096
        assert (state["tree_cache_size"], state["forward_ct_decode"]) == (0, 0)


def check_pause_and_continue(
    engine: segue.Engine, wait_until: Any, mode: str, count: int, gate: StepGate | None = None
) -> None:
    """Token ids are those of an uninterrupted generation, and none is made while paused.

    The ``gate`` keeps the request from ending before the pause.
    """
    whole = engine.generate("abc", PARAMS | {"max_new_tokens": count})
    if gate is not None:
        gate.close_after(count - 1)
    work = Generating(engine, max_new_tokens=count)
    wait_until(lambda: state_of(engine)["running_batch_size"] == 1)
    result = engine.pause_generation(mode)
    if gate is not None:
        gate.open()
    retracted = int(mode == "retract")
    assert result.mode == mode.replace("-", "_")
    assert (result.num_running, result.num_waiting) == (1 - retracted, retracted)
    assert (result.num_retracted, result.num_aborted) == (retracted, 0)
    assert result.drained_ms >= 0
    paused = state_of(engine)
    assert (paused["engine_paused"], paused["running_batch_size"]) == (True, 1 - retracted)
    assert state_of(engine)["num_generated_tokens"] == paused["num_generated_tokens"]
    engine.continue_generation()
    assert work.result()["output_ids"] == whole["output_ids"]


def test_the_default_takes_back_kv_so_that_a_flush_succeeds(engine: segue.Engine, wait_until: Any) -> None:
    work = Generating(engine, ["abc", "def"])
    wait_until(lambda: state_of(engine)["running_batch_size"] == 2)
    refused = engine.flush_cache()
    assert (refused.success, refused.flushed_items) == (False, 0)
    assert "2 requests run" in refused.error_msg
    assert engine.pause_generation().mode == "retract"
    flushed = engine.flush_cache()
    assert (flushed.success, flushed.error_msg) == (True, "")
    state = state_of(engine)
    assert (state["tree_cache_size"], state["req_to_token_pool_used"]) == (0, 0)
    engine.continue_generation()
    assert [each["meta_info"]["completion_tokens"] for each in work.result()] == [25, 25]


def test_an_abort_pause_ends_replies_and_then_continues(engine: segue.Engine, wait_until: Any) -> None:
    work = Generating(engine)
    wait_until(lambda: state_of(engine)["running_batch_size"] == 1)
    assert engine.pause_generation("abort").num_aborted == 1
    meta = work.result()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["completion_tokens"] < 25
    engine.continue_generation()
    assert engine.generate("abc", PARAMS)["meta_info"]["completion_tokens"] == 25


def test_a_pause_that_waits_returns_when_replies_have_ended(engine: segue.Engine, wait_until: Any) -> None:
    work = Generating(engine)
    wait_until(lambda: state_of(engine)["running_batch_size"] == 1)
    work.slow_while.unlink()
    result = engine.pause_generation("wait")
    assert (result.mode, result.num_running) == ("wait", 0)
    assert work.result()["meta_info"]["completion_tokens"] == 25


def test_a_pause_ends_by_itself_after_its_time_to_live(engine: segue.Engine) -> None:
    engine.pause_generation(ttl_s=0.05)
    assert engine.generate("abc", {"max_new_tokens": 1})["meta_info"]["completion_tokens"] == 1


def test_abort_all_reaches_what_waits(engine: segue.Engine, wait_until: Any) -> None:
    engine.pause_generation()
    work = Generating(engine)
    wait_until(lambda: state_of(engine)["waiting_queue_size"] == 1)
    engine.abort_request(abort_all=True)
    finish = work.result()["meta_info"]["finish_reason"]
    assert finish == {"type": "abort", "message": "Abort before prefill"}


def test_the_same_from_an_event_loop(engine: segue.Engine) -> None:
    async def work() -> None:
        Generating.slow_while.touch()
        task = asyncio.ensure_future(engine.async_generate("abc", PARAMS))
        while not (await engine.async_get_server_info())["internal_states"][0]["running_batch_size"]:
            await asyncio.sleep(0.001)
        assert (await engine.async_pause_generation()).num_retracted == 1
        Generating.slow_while.unlink()
        assert (await engine.async_flush_cache()).success
        await engine.async_continue_generation()
        assert (await task)["meta_info"]["completion_tokens"] == 25
        assert (await engine.async_flush_cache(timeout=10)).success

    asyncio.run(asyncio.wait_for(work(), 60))


def test_wrong_values_name_the_rule(engine: segue.Engine) -> None:
    with pytest.raises(InvalidRequestError, match=r"mode='stop'.*retract"):
        engine.pause_generation("stop")
    with pytest.raises(InvalidRequestError, match=r"ttl_s=0: .*greater than 0"):
        engine.pause_generation(ttl_s=0)
    with pytest.raises(InvalidRequestError, match=r"timeout=-1"):
        engine.flush_cache(timeout=-1)


def test_an_engine_that_was_shut_down_says_so(tiny_model: Path) -> None:
    engine = FakeEngine(str(tiny_model), load_format="dummy", log_level="error")
    engine.shutdown()
    for call in (engine.pause_generation, engine.continue_generation, engine.flush_cache):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()
