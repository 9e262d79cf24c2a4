"""The steps that are timed at start: they give the scheduler its first predictions, and leave no trace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from segue.checkpoint.source import resolve
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.laps.cost import NO_WORK, StepTime, StepWork
from segue.messages.control import EngineLimits, InitStep
from segue.messages.requests import unpack_ids
from segue.messages.steps import StepPlan
from segue.model_runner import step_times
from segue.model_runner.runner import ModelRunner
from segue.model_runner.step_times import describe_times, time_steps, timed_sizes
from segue.scheduler.scheduler import Scheduler
from tests.model_runner import making, tiny
from tests.model_runner.planner import Planner


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, tiny.save_llama(directory)


@pytest.fixture
def runner(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelRunner]:
    monkeypatch.setattr(step_times, "MOST_S", math.inf)  # a busy machine takes long for a tiny step
    runner = making.make_runner(llama[0], enable_laps_scheduler=True)
    yield runner
    runner.close()


class Device:
    """Steps take 1 ms, and 0.1 ms per token; the first step of a size takes a second more."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(step=0)
        self.plans: list[StepPlan] = []
        self.now = 50.0

    def run(self, plan: StepPlan) -> Any:
        assert plan.step == self.state.step + 1
        self.state.step = plan.step
        is_first = not self.plans or (plan.starts, plan.lens) != (self.plans[-1].starts, self.plans[-1].lens)
        self.plans.append(plan)
        self.now += 0.001 + 1e-4 * plan.num_tokens + is_first
        return SimpleNamespace(finished=self.now, result=lambda: None)


def limits(**changes: int) -> EngineLimits:
    sizes = {"num_pages": 8, "page_size": 4, "max_seq_len": 10_000, "max_running_requests": 4}
    return EngineLimits(**sizes | {"chunked_prefill_size": 800} | changes)


def timed(device: Any, gather: Any = lambda mine: [list(mine)], **changes: int) -> list[StepTime]:
    return time_steps(device, limits(**changes), 100, gather)


def test_the_smallest_step_parts_of_a_chunk_and_a_whole_one_are_timed() -> None:
    works = [time.work for time in timed(Device())]
    parts = [NO_WORK.plus(25, 0), NO_WORK.plus(100, 0), NO_WORK.plus(100, 0), NO_WORK.plus(100, 1600)]
    assert works == [NO_WORK.plus(1, 0)] * 4 + parts + [NO_WORK.plus(800, 0)]


def test_the_first_step_of_a_size_is_not_timed_because_it_may_compile_kernels() -> None:
    for work, seconds in timed(Device()):
        assert seconds == pytest.approx(0.001 + 1e-4 * work.tokens, abs=2e-6)


def test_a_step_that_was_disturbed_does_not_count() -> None:
    device = Device()
    run = device.run

    def disturbed(plan: StepPlan) -> Any:
        device.now += 0.5 if len(device.plans) in (2, 8) else 0.0
        return run(plan)

    device.run = disturbed  # type: ignore[method-assign]
    assert timed(device) == timed(Device())


def test_sizes_that_would_take_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "MOST_S", 0.1)  # two steps of a chunk take 0.16 s, one takes 0.08
    works = [time.work for time in timed(Device())]
    assert NO_WORK.plus(100, 1600) in works and NO_WORK.plus(800, 0) not in works


def test_every_rank_takes_the_times_of_rank_0() -> None:
    found = timed(Device(), gather=lambda mine: [[7000] * len(mine), list(mine)])
    assert {time.seconds for time in found} == {0.007}


def test_the_prompts_have_pages_of_the_engine_in_no_step_and_fit_its_context() -> None:
    for most in (2, 50, 900):
        device = Device()
        timed(device, max_seq_len=most)
        for plan in device.plans:
            assert plan.pages == [] and plan.slots == [0] and plan.lens[0] > 0
            assert plan.starts[0] + plan.lens[0] == plan.new_slots[0].prompt_len < most


def test_the_token_ids_are_those_of_the_vocabulary_and_differ() -> None:
    device = Device()
    timed(device)
    assert set(unpack_ids(device.plans[-1].new_slots[0].tokens)) == set(range(100))


def test_the_next_plan_is_the_first_again() -> None:
    device = Device()
    timed(device)
    assert device.state.step == 0


def test_the_log_has_the_time_of_each_size() -> None:
    times = [StepTime(NO_WORK.plus(1024, 0), 0.025)] * 2 + [StepTime(NO_WORK.plus(1024, 16384), 0.028)]
    assert describe_times(times) == "prompt tokens: 1024 in 25.0 ms, 1024 behind 16384 in 28.0 ms"


def test_the_sizes_of_a_small_engine_have_tokens() -> None:
    for chunk, most in ((1, 2), (1, 100), (8, 3)):
        for size in timed_sizes(limits(chunked_prefill_size=chunk, max_seq_len=most)):
            assert 1 <= size.tokens <= chunk and 0 <= size.history <= most - 1 - size.tokens


def test_timing_leaves_the_pages_of_the_engine_alone(runner: ModelRunner) -> None:
    assert runner.step_times
    written = runner.kv.data.view(runner.kv.data.shape[0], -1).any(dim=1).nonzero().flatten()
    assert written.tolist() == [runner.kv.scratch_page]


def test_a_runner_that_was_timed_gives_the_tokens_of_transformers(
    runner: ModelRunner, llama: tuple[Path, Any]
) -> None:
    prompt = making.prompt(37)
    assert Planner(runner).generate(prompt, 24, chunk=16).output == tiny.reference(llama[1], prompt, 24)


def test_the_time_is_a_step_of_the_start_with_laps_alone(llama: tuple[Path, Any]) -> None:
    source, last = resolve(str(llama[0]), "auto", ""), {}

    def report(step: InitStep, num_steps: int) -> None:
        last[laps] = step

    for laps in (True, False):
        config = EngineConfig(**making.options(llama[0], enable_laps_scheduler=laps))
        ModelRunner(config, source, TPInfo(), Path("/nonexistent"), report).close()
    assert last[False].name == "CUDA graphs"
    assert last[True].name == "step times" and "8 behind 128 in " in last[True].detail


def test_before_the_first_request_a_scheduler_predicts_in_seconds(runner: ModelRunner) -> None:
    """From the steps that were timed, here with times that no busy machine has changed."""
    times = [time._replace(seconds=1e-3 * time.work.tokens) for time in runner.step_times]
    scheduler = Scheduler(runner.limits, EngineConfig(), step_times=times)
    assert scheduler.cost.is_ready and scheduler.cost.largest == 64
    assert 0.05 < scheduler.cost.seconds(StepWork().plus(64, 0)) < 0.08
