"""When the next step is launched behind one in flight."""

from __future__ import annotations

import pytest

from segue.laps.cost import NO_WORK, Coefficients
from segue.messages.control import LapsLimits
from segue.messages.steps import StepPlan
from segue.scheduler.pace import LEAD_S, NUM_LAUNCHES
from segue.scheduler.prefill import FirstCome
from segue.scheduler.request import Step
from tests.scheduler.simulation import Simulation

LAPS = LapsLimits(threshold=6, long_share=0.3, slo_s=0.05, blocking_s=0.02, window_s=0.0)


@pytest.mark.parametrize("tokens, waits", [(16, False), (600, True)])
def test_the_next_step_is_launched_late_behind_a_long_one(tokens: int, waits: bool) -> None:
    sim = Simulation(num_pages=1000, max_seq_len=2000, chunked_prefill_size=1000, max_running_requests=8)
    for index in range(3):
        sim.add(f"{index}", [index] * tokens, max_new_tokens=1)
        sim.launch()
        sim.pass_time(0.1)
        sim.apply()
    sim.add("last", [9] * tokens, max_new_tokens=1)
    sim.launch()
    at = sim.scheduler.launch_at(sim.now)
    assert at == (pytest.approx(sim.now + 0.1 - LEAD_S, abs=0.01) if waits else sim.now)


def test_behind_a_chunk_the_next_step_waits_if_a_short_prompt_is_likely() -> None:
    sim = Simulation(laps=LAPS, num_pages=1000, max_seq_len=2000, chunked_prefill_size=20)
    sim.add("long", [1] * 1000)
    for _ in range(4):
        sim.step()
    sim.launch()
    assert sim.scheduler.launch_at(sim.now) == sim.now
    for index in range(10):
        sim.add(f"{index}", [5], max_new_tokens=1)
    assert sim.scheduler.launch_at(sim.now) > sim.now


@pytest.mark.parametrize(("likely", "tokens", "lead"), [(True, 600, 0.013), (False, 600, 0), (True, 500, 0)])
def test_a_launch_behind_a_chunk_is_over_when_the_chunk_ends(likely: bool, tokens: int, lead: float) -> None:
    scheduler = Simulation(Expects(likely)).scheduler
    scheduler.cost._coefficients = Coefficients(per_token=0.1 / 600)
    large = NO_WORK.plus(600, 0)
    before = Step(StepPlan(0), "1", planned_at=9.0, work=NO_WORK.plus(tokens, 0))
    scheduler.in_flight.append(before)
    scheduler.launched(9.013)
    scheduler.in_flight[0] = Step(StepPlan(1), "1", planned_at=10.0, work=large, long_work=large)
    assert scheduler.launch_at(10.001) == pytest.approx(10.1 - LEAD_S - lead)


def test_the_longest_of_the_last_launches_counts() -> None:
    scheduler = Simulation(Expects(True)).scheduler
    scheduler.cost._coefficients = Coefficients(per_token=0.1 / 600)
    large = NO_WORK.plus(600, 0)
    step = Step(StepPlan(1), "1", planned_at=10.0, work=large, long_work=large)
    scheduler.in_flight.append(step)
    for seconds in (2.0, 0.01, *[0.001] * (NUM_LAUNCHES - 1)):  # the first compiled kernels
        scheduler.launched(10.0 + seconds)
    assert scheduler.launch_at(10.001) == pytest.approx(10.1 - LEAD_S - 0.01)


class Expects(FirstCome):
    """First come, first served, with short prompts that are likely to come, or not."""

    def __init__(self, likely: bool) -> None:
        self._likely = likely

    def expects_short(self, seconds: float, now: float) -> bool:
        return self._likely


@pytest.mark.parametrize(
    ("prompt", "long", "decode", "seconds", "likely", "waits"),
    [
        (600, 0, 0, 0.06, False, True),
        (600, 0, 0, 0.03, True, False),  # short prompts alone: the next ones go on behind it
        (400, 0, 0, 0.06, True, False),  # few tokens, so the time is that of decode rows beside them
        (0, 0, 1000, 0.06, True, False),
        (300, 300, 0, 0.03, True, True),
        (300, 300, 0, 0.03, False, False),
        (300, 300, 0, 0.005, True, False),  # too short to be worth a late launch
    ],
)
def test_which_steps_the_next_launch_waits_for(
    prompt: int, long: int, decode: int, seconds: float, likely: bool, waits: bool
) -> None:
    scheduler = Simulation(Expects(likely)).scheduler
    scheduler.cost._coefficients = Coefficients(per_token=seconds / (prompt + decode))
    work = NO_WORK.plus(prompt, 0)._replace(decode_rows=decode)
    step = Step(StepPlan(1), "1", planned_at=10.0, work=work, long_work=NO_WORK.plus(long, 0))
    scheduler.in_flight.append(step)
    expected = 10.0 + seconds - LEAD_S if waits else 10.001
    assert scheduler.launch_at(10.001) == pytest.approx(expected)
    before = Step(StepPlan(0), "1", planned_at=9.0)
    # The device began with the step in flight only when the one before it had ended.
    assert scheduler._pace.ended(before, 10.02) == pytest.approx(1.02)
    assert scheduler.launch_at(10.021) == pytest.approx(10.02 + seconds - LEAD_S if waits else 10.021)
