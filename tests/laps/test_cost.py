"""The cost model against a known truth."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from segue.laps.cost import Coefficients, CostModel, StepWork, prompt_seconds, seconds_of, tokens_within

TRUTH = Coefficients(floor=0.005, start=0.001, per_token=2e-5, per_pair=2e-10, per_kv=4e-8)
SLOWER = Coefficients(*(1.5 * value for value in TRUTH))


def steps(rng: random.Random) -> Iterator[StepWork]:
    """Steps as serving has them: a few short prompts, or a chunk of a long one, beside decode rows."""
    while True:
        rows = rng.randrange(100)
        work = StepWork(decode_rows=rows, decode_kv=rows * rng.randrange(100, 2000))
        if rng.random() < 0.5:
            for _ in range(rng.randint(1, 8)):
                work = work.plus(rng.randint(1, 256), rng.choice([0, 0, 512, 4096]))
        else:
            work = work.plus(rng.randint(256, 8192), rng.choice([0, 2048, 8192]))
        yield work


def learned(
    model: CostModel, truth: Coefficients, count: int, rng: random.Random, noise: float = 0.0
) -> None:
    for work, _ in zip(steps(rng), range(count), strict=False):
        model.add(work, seconds_of(truth, work) * rng.uniform(1 - noise, 1 + noise))
        model.seconds(work)  # as in serving, where each plan asks


def errors(model: CostModel, truth: Coefficients, rng: random.Random) -> list[float]:
    checked = [work for work, _ in zip(steps(rng), range(300), strict=False)]
    return sorted(abs(model.seconds(work) / seconds_of(truth, work) - 1) for work in checked)


@pytest.mark.parametrize("seed", range(5))
def test_it_learns_the_truth(seed: int) -> None:
    rng, model = random.Random(seed), CostModel()
    learned(model, TRUTH, 200, rng, noise=0.05)
    assert errors(model, TRUTH, rng)[270] < 0.03, "nine in ten within 3 %"


@pytest.mark.parametrize("seed", range(5))
def test_it_follows_a_device_that_becomes_slower(seed: int) -> None:
    rng, model = random.Random(seed), CostModel()
    learned(model, TRUTH, 200, rng, noise=0.05)
    learned(model, SLOWER, 200, rng, noise=0.05)
    assert errors(model, SLOWER, rng)[270] < 0.08


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_waited_for_something_else_do_not_count(seed: int) -> None:
    rng, model = random.Random(seed), CostModel()
    for work, number in zip(steps(rng), range(200), strict=False):
        model.add(work, seconds_of(TRUTH, work) * (rng.uniform(3, 30) if number % 10 == 0 else 1))
        model.seconds(work)
    assert errors(model, TRUTH, rng)[270] < 0.03


def test_one_slow_step_and_the_one_behind_it_do_not_change_a_prediction() -> None:
    model = CostModel()
    for seconds in (0.2, 1.7, 0.001, 0.2, 0.2):  # the second compiled a kernel, and meanwhile the third ran
        model.add(StepWork().plus(8192, 0), seconds)
    assert model.seconds(StepWork().plus(8192, 0)) == pytest.approx(0.2, rel=0.05)
    assert model.seconds(StepWork().plus(9000, 0)) == pytest.approx(0.2 * 9000 / 8192, rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_steps_of_a_rare_size_that_seem_too_quick_do_not_count(seed: int) -> None:
    """The step behind a result that was read late seems to have taken no time."""
    rng, model = random.Random(seed), CostModel()
    learned(model, TRUTH, 300, rng, noise=0.05)
    model.add(StepWork().plus(8192, 0), 0.001)
    model.add(StepWork().plus(1024, 8192), 0.001)
    for _ in range(100):
        work = StepWork().plus(rng.randint(1, 256), 0)
        model.add(work, seconds_of(TRUTH, work))
        model.seconds(work)
    assert errors(model, TRUTH, rng)[270] < 0.05


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 1e-200, 1e300, float("inf"), float("nan")])
def test_what_is_no_measurement_is_ignored(seconds: float) -> None:
    model = CostModel()
    model.add(StepWork().plus(100, 0), seconds)
    assert not model.is_ready


def test_short_steps_alone_do_not_make_it_forget_long_ones() -> None:
    rng, model = random.Random(1), CostModel()
    learned(model, TRUTH, 200, rng)
    for _ in range(5000):
        work = StepWork().plus(rng.randint(1, 256), 0)
        model.add(work, seconds_of(TRUTH, work))
        model.seconds(work)
    long = StepWork().plus(8192, 8192)
    assert model.seconds(long) == pytest.approx(seconds_of(TRUTH, long), rel=0.03)


def test_the_first_sample_is_believed_and_nothing_costs_less_with_more_tokens() -> None:
    model = CostModel()
    assert model.seconds(StepWork().plus(100, 0)) == 0 and not model.is_ready
    model.add(StepWork(decode_rows=8, decode_kv=800), 1.0)
    model.add(StepWork().plus(0, 0), 1.0)
    assert not model.is_ready, "steps without prompts are not looked at"
    model.add(StepWork().plus(500, 0), 0.02)
    assert model.is_ready
    assert model.seconds(StepWork().plus(500, 0)) == pytest.approx(0.02, rel=0.01)
    for _ in range(50):
        model.add(StepWork().plus(100, 0), 0.03)  # stranger than fiction: fewer tokens take longer
        model.add(StepWork().plus(1000, 0), 0.01)
    assert min(model.coefficients) >= 0


@pytest.mark.parametrize("seconds", [0.004, 0.0051, 0.008, 0.03, 0.5])
@pytest.mark.parametrize("history", [0, 5000, 100_000])
@pytest.mark.parametrize("beside", [StepWork(), StepWork(64, 4096, 100, 100_000), StepWork(256, 2e7)])
def test_tokens_within_is_the_inverse(seconds: float, history: int, beside: StepWork) -> None:
    tokens = int(tokens_within(TRUTH, seconds, history, beside))
    if tokens:
        assert seconds_of(TRUTH, beside.plus(tokens, history)) <= seconds * (1 + 1e-9)
    assert seconds_of(TRUTH, beside.plus(tokens + 1, history)) > seconds


def test_tokens_within_without_knowledge_is_unbounded() -> None:
    assert tokens_within(Coefficients(), 0.01, 0, StepWork()) == float("inf")


@pytest.mark.parametrize("tokens", [1, 100, 300, 5000])
@pytest.mark.parametrize("history", [0, 64, 10_000])
def test_a_prompt_alone_takes_as_long_as_a_step_with_only_it(tokens: int, history: int) -> None:
    expected = seconds_of(TRUTH, StepWork().plus(tokens, history))
    assert prompt_seconds(TRUTH, tokens, history) == pytest.approx(expected)


def test_errors_of_predictions_are_reported() -> None:
    rng, model = random.Random(3), CostModel()
    assert model.error_p50 == model.error_p90 == 0
    learned(model, TRUTH, 400, rng, noise=0.1)
    assert 0.02 < model.error_p50 < model.error_p90 < 0.4 and model.error_p50 < 0.15


def test_tokens_within_is_bounded_before_it_is_known_what_attention_costs() -> None:
    known = Coefficients(floor=0.005, start=0.001, per_token=2e-5)
    assert tokens_within(known, 0.021, 8192, StepWork()) == pytest.approx(1000)


def test_there_is_no_time_for_tokens_if_the_shortest_step_takes_longer() -> None:
    assert tokens_within(Coefficients(floor=0.005), 0.004, 0, StepWork()) == 0
    assert tokens_within(TRUTH, 0.01, 0, StepWork(decode_rows=8, decode_kv=200_000)) == 0


def test_rows_that_decode_count_as_tokens() -> None:
    work = StepWork(decode_rows=1000).plus(1000, 0)
    assert seconds_of(Coefficients(per_token=1e-5), work) == pytest.approx(0.02)
