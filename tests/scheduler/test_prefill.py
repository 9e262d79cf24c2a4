"""What the planner makes of a policy's choice, and what it tells the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from segue.laps.cost import StepWork
from segue.laps.pick import PrefillChoice, PrefillView
from segue.messages.control import LapsLimits
from segue.messages.requests import PhaseTimes
from segue.scheduler.internal_state import internal_state
from segue.scheduler.prefill import FirstCome
from segue.scheduler.request import Request
from tests.scheduler.simulation import Simulation

LAPS = LapsLimits(threshold=6, long_share=0.3, slo_s=0.05, blocking_s=0.02, window_s=0.0)


class Seen(FirstCome):
    """Takes short prompts first, and then long ones; it notes what it is asked and told."""

    def __init__(self, room: Callable[[Request, StepWork], int] | None = None) -> None:
        self.views: list[PrefillView[Request]] = []
        self.long_waits: list[bool] = []
        self._room = room

    def pick(self, view: PrefillView[Request], now: float) -> PrefillChoice[Request]:
        self.views.append(view)
        prompts = [*view.started, *[*view.short, *view.long][: view.num_slots]]
        return PrefillChoice(prompts=prompts, budget=view.budget, room=self._room)

    def classify(self, tokens: int, history: int) -> str:  # type: ignore[override]
        return "short" if tokens <= LAPS.threshold else "long"

    def planned(self, work: StepWork, long: StepWork, *, long_waits: bool) -> None:
        self.long_waits.append(long_waits)


def lens(sim: Simulation) -> list[int]:
    """Plan and run a step; returns the tokens of its sequences."""
    plan = sim.launch()
    assert plan is not None
    sim.apply()
    return plan.lens


def test_a_chunk_has_no_more_tokens_than_the_policy_has_room_for() -> None:
    sim = Simulation(Seen(lambda request, beside: 7))
    sim.add("r", [1] * 20, max_new_tokens=1)
    assert [lens(sim), lens(sim), lens(sim)] == [[7], [7], [6]]


def test_a_request_without_room_in_the_step_is_not_admitted() -> None:
    sim = Simulation(Seen(lambda request, beside: 0 if beside.prompt_tokens else 99))
    sim.add("first", [1] * 3)
    sim.add("second", [2] * 3)
    assert lens(sim) == [3]
    assert internal_state(sim.scheduler)["waiting_queue_rids"] == ["second"]


def test_a_request_without_tokens_left_in_the_step_is_not_admitted() -> None:
    sim = Simulation(chunked_prefill_size=12)
    sim.add("first", [1] * 12)
    sim.add("second", [2] * 3)
    assert lens(sim) == [12]
    assert internal_state(sim.scheduler)["waiting_queue_rids"] == ["second"]


def test_nobody_is_admitted_before_a_request_that_waits_for_pages() -> None:
    sim = Simulation(num_pages=25, chunked_prefill_size=64)
    sim.add("runs", [1] * 40, max_new_tokens=40)
    sim.step()
    sim.add("large", [2] * 60, max_new_tokens=1)
    sim.add("small", [3] * 3, max_new_tokens=1)
    sim.step()
    assert internal_state(sim.scheduler)["waiting_queue_rids"] == ["large", "small"]
    sim.run()


def test_a_prompt_may_need_every_page() -> None:
    sim = Simulation(num_pages=25, max_seq_len=100, chunked_prefill_size=128)
    sim.add("r", [1] * 99, max_new_tokens=1)
    assert lens(sim) == [99]


def test_no_more_requests_are_admitted_than_there_are_slots_whatever_a_policy_chooses() -> None:
    class All(FirstCome):
        def pick(self, view: PrefillView[Request], now: float) -> PrefillChoice[Request]:
            return replace(super().pick(view, now), prompts=view.short)

    sim = Simulation(All(), max_running_requests=2)
    for rid in "abc":
        sim.add(rid, [1, 2, 3])
    assert lens(sim) == [3, 3]
    sim.run()


@pytest.mark.parametrize("work", ["nothing", "a step in flight", "a row that decodes"])
def test_a_policy_may_hold_work_back_only_while_that_delays_nobody(work: str) -> None:
    """With ``is_idle`` it knows that nothing is in flight, and that no row decodes."""
    policy = Seen()
    sim = Simulation(policy)
    if work != "nothing":
        sim.add("first", [1] * 30 if work == "a step in flight" else [1] * 3)
        sim.launch()
        if work == "a row that decodes":
            sim.apply()
    sim.add("second", [2] * 3)
    sim.launch()
    assert policy.views[-1].is_idle == (work == "nothing")


def test_a_long_prompt_without_a_slot_waits() -> None:
    """Long prompts earn their share as long as one waits, or has begun."""
    policy = Seen()
    sim = Simulation(policy, max_running_requests=1)
    sim.add("runs", [1] * 3)
    sim.add("long", [2] * 12)
    sim.step()
    assert policy.long_waits == [True]


def test_a_long_prompt_that_has_begun_waits_until_little_is_left_of_it() -> None:
    policy = Seen()
    sim = Simulation(policy, chunked_prefill_size=10)
    sim.add("long", [1] * 25, max_new_tokens=1)
    assert [lens(sim), lens(sim), lens(sim)] == [[10], [10], [5]]
    assert policy.long_waits[1:] == [True, False]


def test_a_retracted_request_reports_what_its_first_admission_found_in_the_cache() -> None:
    sim = Simulation(page_size=4)
    sim.add("r", [1] * 20, max_new_tokens=4)
    sim.step()
    sim.step()
    sim.scheduler.retract(sim.scheduler.requests["r"])
    sim.run()
    assert sim.finished["r"].cached_tokens == 0


def test_a_request_reports_when_it_came_was_admitted_and_had_its_first_token() -> None:
    sim = Simulation(page_size=4, max_running_requests=1)
    for rid, at in (("first", 1.0), ("second", 2.0)):
        sim.pass_time(at - sim.now)
        sim.add(rid, [1] * 8, max_new_tokens=2)
    sim.pass_time(1.0)
    sim.launch()
    sim.pass_time(1.0)
    sim.apply()
    sim.pass_time(1.0)
    sim.run()
    assert sim.finished["first"].times == PhaseTimes(added=1.0, admitted=3.0, prefilled=4.0)
    assert sim.finished["second"].times == PhaseTimes(added=2.0, admitted=5.0, prefilled=5.0)


def test_tokens_that_are_looked_up_and_found_are_counted() -> None:
    sim = Simulation(page_size=4)
    for rid, tokens in (("a", 20), ("b", 20), ("c", 22)):
        sim.add(rid, [1] * tokens, max_new_tokens=1)
        sim.run()
    totals = sim.scheduler.totals
    assert (totals.prompt_tokens, totals.cached_tokens) == (62, 0 + 16 + 20)


def test_a_retracted_prompt_is_classified_anew_and_keeps_its_place() -> None:
    sim = Simulation(laps=LAPS, num_pages=200, max_seq_len=400)
    sim.add("begun", [1] * 40, max_new_tokens=1)
    sim.add("later", [2] * 40, max_new_tokens=1)
    while sim.scheduler.requests["begun"].remaining > 10:
        sim.step()
    sim.scheduler.retract(sim.scheduler.requests["begun"])
    again = sim.scheduler.requests["begun"]
    assert again.prompt_class == "long" or again.expected_hit > 0, "what it has computed is cached"
    assert sim.scheduler.waiting.of(again.prompt_class)[0] is again
    sim.run()


def test_a_long_prompt_that_is_due_holds_waiting_short_ones_back_until_there_are_pages_for_it() -> None:
    sim = Simulation(laps=LAPS, num_pages=30, max_seq_len=100)
    sim.add("runs", [1] * 4, max_new_tokens=60)
    sim.step()
    sim.add("long", [2] * 80, max_new_tokens=1)
    passed: list[str] = []
    for number in range(30):  # each earns the long prompt some time
        sim.add(f"{number}", [3 + number] * 4, max_new_tokens=1)
        sim.step()
        passed += [f"{number}"] if f"{number}" in sim.finished else []
    waiting = [rid for rid in sim.scheduler.requests if rid not in ("runs", "long")]
    assert "long" in sim.scheduler.requests and "long" not in sim.scheduler.running
    assert passed and waiting, "short prompts go first, until the long one is due"
    assert max(map(int, passed)) < min(map(int, waiting)), "from then on none of them begins"
    while "long" not in sim.scheduler.running:
        assert not sim.finished.keys() & set(waiting)
        assert sim.step(), "rows that decode go on, and their end gives the pages"
    sim.run()


def test_a_step_in_which_no_prompt_finds_pages_is_no_decision() -> None:
    sim = Simulation(laps=LAPS, num_pages=30, max_seq_len=100)
    sim.add("runs", [1] * 4, max_new_tokens=60)
    sim.step()
    sim.add("long", [2] * 80, max_new_tokens=1)
    for _ in range(10):
        sim.step()
    laps = sim.scheduler.report_laps()
    assert laps is not None and "long" not in sim.scheduler.running
    assert sum(laps.picks.values()) == 1, "only the first step had a prompt"
    sim.run()
