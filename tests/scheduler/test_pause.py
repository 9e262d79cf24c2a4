"""Pausing, continuing, aborting and flushing on the pure scheduler: the cases that are easy to get wrong.

Beside each test's asserts, the simulation checks after every turn that nothing is lost, repeated, moved or
freed too early, and at the end of every test that each request has all its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from segue.messages.control import Paused, PauseMode
from segue.messages.requests import AddRequest, Rejected, SamplingParams, pack_ids
from segue.scheduler.internal_state import internal_state
from segue.scheduler.invariants import find_problems
from segue.scheduler.request import RequestPhase
from tests.scheduler.pausing import MODES, PausingSimulation
from tests.scheduler.simulation import HoldBack, next_token

PROMPT = list(range(10))


class Loop(PausingSimulation):
    """A simulation of the normal or the overlap loop; the latter keeps a step in flight after every turn."""

    overlap = False

    def turns(self, count: int) -> None:
        for _ in range(count):
            if self.overlap:
                self.overlapped_step()
            else:
                self.step()
            self.check()

    def until_idle(self) -> None:
        """Run until nothing more can run."""
        while self.overlapped_step() if self.overlap else self.step():
            self.check()

    def drained(self, mode: PauseMode, ttl_s: float | None = None) -> Paused:
        """Pause and run until idle; returns the answer."""
        call = self.pause(mode, ttl_s)
        self.until_idle()
        return self.paused(call)

    def state(self) -> dict[str, object]:
        return internal_state(self.scheduler)


def make(page_size: int, prefix: bool, overlap: bool, **options: int | str) -> Loop:
    num_pages = 256 // page_size
    sim = Loop(
        **({"page_size": page_size, "num_pages": num_pages, "disable_prefix_cache": not prefix} | options)
    )
    sim.overlap = overlap
    return sim


def end(sim: Loop) -> None:
    """Run all requests to their end, and assert that a flush then finds every page free."""
    while sim.results:
        sim.apply()
    sim.proceed()
    sim.run(overlap=sim.overlap)
    assert not sim.live and not sim.owed
    assert sim.flushed(sim.flush()).success


# (page size, prefix cache, overlap)
CONFIGURATIONS = [(1, True, True), (4, True, True), (16, True, True), (4, True, False), (1, False, True)]
NAMES = [
    f"pages of {size}, {'cache' if prefix else 'no cache'}, {'overlap' if overlap else 'normal'}"
    for size, prefix, overlap in CONFIGURATIONS
]
each_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(params=CONFIGURATIONS, ids=NAMES)
def sim(request: pytest.FixtureRequest) -> Iterator[Loop]:
    sim = make(*request.param)
    yield sim
    end(sim)


# --- a step in flight ---


@each_mode
def test_a_step_in_flight_is_awaited_and_its_tokens_are_delivered(sim: Loop, mode: PauseMode) -> None:
    sim.add("ends", PROMPT[:5], max_new_tokens=3)
    sim.add("goes on", PROMPT[5:], max_new_tokens=20)
    while len(sim.outputs["ends"]) < 2:
        sim.step()
    sim.launch()
    call = sim.pause(mode)
    assert call in sim.owed
    sim.apply()
    assert sim.finished["ends"].reason == "length"
    assert len(sim.outputs["goes on"]) == 3
    sim.until_idle()
    answer = sim.paused(call)
    assert (answer.mode, answer.num_running) == (mode, 1 if mode == "in_place" else 0)
    assert answer.num_waiting == answer.num_retracted == (1 if mode == "retract" else 0)
    assert answer.num_aborted == (1 if mode == "abort" else 0)
    assert len(sim.outputs["goes on"]) == (20 if mode == "wait" else 3)


def test_two_steps_in_flight_are_both_awaited(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.launch()
    sim.launch()
    call = sim.pause("retract")
    sim.apply()
    assert call in sim.owed
    sim.apply()
    assert sim.paused(call).num_retracted == 1
    assert len(sim.outputs["r"]) == 2


def test_the_answer_says_how_long_the_drain_took(sim: Loop) -> None:
    sim.add("r", PROMPT)
    sim.launch()
    call = sim.pause("in_place")
    sim.pass_time(0.25)
    sim.apply()
    assert sim.paused(call).drained_ms == 250


@each_mode
def test_an_idle_engine_is_paused_at_once(sim: Loop, mode: PauseMode) -> None:
    answer = sim.paused(sim.pause(mode))
    assert (answer.mode, answer.num_running, answer.num_waiting, answer.drained_ms) == (mode, 0, 0, 0)
    assert (sim.state()["engine_paused"], sim.state()["pause_mode"]) == (True, mode)


def test_nothing_runs_while_paused(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.turns(3)
    sim.drained("in_place")
    count, steps = len(sim.outputs["r"]), sim.scheduler.totals.num_steps
    assert not sim.scheduler.has_work, "the loop must sleep"
    sim.pass_time(1000)
    sim.turns(5)
    assert (len(sim.outputs["r"]), sim.scheduler.totals.num_steps) == (count, steps)


# --- the modes ---


def test_abort_ends_every_request_with_the_tokens_it_has(sim: Loop) -> None:
    for name in "abcdef":  # four run, two wait
        sim.add(name, [*PROMPT, ord(name) % 50], max_new_tokens=30)
    sim.turns(4)
    answer = sim.drained("abort")
    assert (answer.num_aborted, answer.num_running, answer.num_waiting) == (6, 0, 0)
    assert all(sim.finished[name].num_tokens == len(sim.outputs[name]) for name in "abcdef")
    assert (sim.finished["a"].message, sim.finished["f"].message) == (None, "Abort before prefill")
    assert sim.state()["req_to_token_pool_used"] == 0


def test_retract_frees_slots_and_pages_and_keeps_the_order_of_arrival(sim: Loop) -> None:
    for name in "abcdef":
        sim.add(name, [*PROMPT, ord(name) % 50], max_new_tokens=30)
    sim.turns(4)
    available = sim.scheduler.resources.num_available
    answer = sim.drained("retract")
    assert (answer.num_retracted, answer.num_waiting) == (4, 6)
    state = sim.state()
    assert state["waiting_queue_rids"] == list("abcdef")
    assert (state["running_batch_rids"], state["req_to_token_pool_used"]) == ([], 0)
    assert len(sim.scheduler.resources.free_pages) == sim.limits.num_pages > available
    sim.proceed()
    sim.turns(4)
    assert sim.state()["running_batch_rids"] == list("abcd")


def test_in_place_keeps_requests_slots_and_pages(sim: Loop) -> None:
    for name in "abcdef":
        sim.add(name, [*PROMPT, ord(name) % 50], max_new_tokens=30)
    sim.turns(4)
    answer = sim.drained("in_place")
    assert (answer.num_running, answer.num_waiting, answer.num_retracted) == (4, 2, 0)
    before = sim.state()
    sim.proceed()
    sim.drained("in_place")
    after = sim.state()
    for name in ("running_batch_rids", "waiting_queue_rids", "available_kv_tokens", "tree_cache_size"):
        assert before[name] == after[name]


def test_wait_admits_no_request_and_lets_running_ones_finish(sim: Loop) -> None:
    for name in "abcdef":
        sim.add(name, [*PROMPT, ord(name) % 50], max_new_tokens=12)
    sim.turns(4)
    call = sim.pause("wait")
    sim.add("late", PROMPT)
    sim.turns(3)
    assert call in sim.owed
    sim.until_idle()
    assert set(sim.finished) == set("abcd")
    assert (sim.paused(call).num_running, sim.paused(call).num_waiting) == (0, 3)
    assert sim.state()["waiting_queue_rids"] == ["e", "f", "late"]


def test_wait_lets_half_prefilled_prompts_finish(sim: Loop) -> None:
    sim.add("long", list(range(40)), max_new_tokens=2)
    sim.turns(1)
    sim.drained("wait")
    assert sim.finished["long"].reason == "length"


# --- cases ---


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_in_the_middle_of_a_chunked_prefill(sim: Loop, mode: PauseMode) -> None:
    sim.add("long", list(range(40)), max_new_tokens=4)  # in chunks of 16
    sim.step()
    sim.drained(mode)
    state = sim.state()
    if mode == "in_place":
        assert state["chunked_req_rids"] == state["running_batch_rids"] == ["long"]
        assert sim.scheduler.running["long"].launched == 16, "the cursor stays"
        sim.proceed()
        plan = sim.launch()
        assert plan is not None and (plan.starts, plan.new_slots) == ([16], [])
    else:
        assert (state["waiting_queue_rids"], state["chunked_req_is_none"]) == (["long"], True)
        free = (state["available_kv_tokens"], state["req_to_token_pool_available"])
        assert free == (256, 4), "the partial chunk is freed"


@each_mode
def test_a_request_that_arrives_while_paused_is_queued_and_visible(sim: Loop, mode: PauseMode) -> None:
    sim.drained(mode)
    sim.add("late", PROMPT)
    sim.turns(3)
    assert sim.state()["waiting_queue_rids"] == ["late"]
    assert not sim.outputs["late"]
    sim.proceed()
    sim.until_idle()
    assert sim.finished["late"].reason == "length"


def test_a_request_that_arrives_while_paused_is_rejected_if_the_paused_policy_is_reject() -> None:
    sim = make(4, True, True, paused_policy="reject")
    sim.add("early", PROMPT, max_new_tokens=6)
    sim.turns(2)
    message = AddRequest(rid="late", prompt=pack_ids(PROMPT), params=SamplingParams(max_new_tokens=4))
    sim.pause("in_place")
    for _ in range(2):  # while pausing, and paused
        rejected = sim.scheduler.add(message, sim.now)
        assert isinstance(rejected, Rejected) and rejected.kind == "PausedError"
        assert "paused" in rejected.message and "--paused-policy" in rejected.message
        sim.until_idle()
    sim.proceed()
    assert sim.scheduler.add(message, sim.now) is None
    sim.scheduler.abort_all()
    assert find_problems(sim.scheduler) == []


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("victim", ["decoding", "prefilling", "queued", "late"])
def test_an_abort_or_a_disconnect_while_paused_acts_at_once_in_every_phase(
    sim: Loop, mode: PauseMode, victim: str
) -> None:
    sim.add("decoding", PROMPT, max_new_tokens=30)
    sim.add("other", PROMPT[::-1], max_new_tokens=30)
    sim.turns(2)
    sim.add("prefilling", list(range(40, 0, -1)), max_new_tokens=5)
    for index in range(3):  # the last one finds no free slot
        sim.add("queued" if index == 2 else f"short {index}", [30 + index], max_new_tokens=30)
    sim.turns(1)
    sim.drained(mode)
    sim.add("late", PROMPT)
    if mode == "in_place":
        phases = {rid: sim.scheduler.requests[rid].phase for rid in ("decoding", "prefilling", "queued")}
        assert list(phases.values()) == [RequestPhase.DECODE, RequestPhase.PREFILL, RequestPhase.WAITING]
    owned = len(sim.scheduler.requests[victim].own_pages)
    free = len(sim.scheduler.resources.free_pages)
    sim.abort(victim)
    sim.check()
    assert len(sim.scheduler.resources.free_pages) == free + owned, "its KV is free at once"
    assert sim.state()["engine_paused"], "the pause goes on"
    assert len(sim.live) == 6


def test_a_pause_that_was_continued_during_a_commit_is_not_answered_with_the_next_one(sim: Loop) -> None:
    sim.add("a", PROMPT, max_new_tokens=20)
    sim.turns(2)
    sim.begin_commit()
    first = sim.pause("in_place", settle=False)
    sim.proceed(settle=False)
    second = sim.pause("retract")
    sim.until_idle()
    sim.end_commit("1")
    assert sim.paused(first).mode is None
    assert sim.paused(second).mode == "retract"
    sim.proceed()


@pytest.mark.parametrize("mode", ["in_place", "retract", "wait"])
def test_abort_all_while_paused(sim: Loop, mode: PauseMode) -> None:
    for name in "abcdef":
        sim.add(name, [*PROMPT, ord(name) % 50], max_new_tokens=20)
    sim.turns(3)
    sim.drained(mode)
    sim.abort()
    sim.check()
    assert sim.state()["req_to_token_pool_used"] == 0
    assert sim.scheduler.resources.num_available == sim.limits.num_pages


def test_abort_all_lets_a_pause_of_mode_wait_take_effect(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=50)
    sim.turns(3)
    call = sim.pause("wait")
    sim.turns(3)
    assert call in sim.owed
    sim.abort()
    sim.until_idle()
    assert sim.paused(call).mode == "wait"


def test_a_flush_while_paused_by_retract_succeeds(sim: Loop) -> None:
    for name in "abcdef":
        sim.add(name, [*PROMPT, ord(name) % 50], max_new_tokens=20)
    sim.turns(3)
    sim.drained("retract")
    answer = sim.flushed(sim.flush())
    assert (answer.success, answer.error_msg) == (True, "")
    state = sim.state()
    assert (state["available_kv_tokens"], state["tree_cache_size"]) == (256, 0)
    assert state["waiting_queue_rids"] == list("abcdef")


def test_a_flush_while_paused_in_place_with_running_requests_is_refused_with_the_remedy(sim: Loop) -> None:
    for name in "abcdef":
        sim.add(name, [*PROMPT, ord(name) % 50], max_new_tokens=20)
    sim.turns(3)
    sim.drained("in_place")
    answer = sim.flushed(sim.flush())
    assert not answer.success
    assert all(part in answer.error_msg for part in ("4 requests run", "2 wait", "retract"))
    sim.drained("retract")
    assert sim.flushed(sim.flush()).success


def test_a_flush_while_paused_in_place_with_only_waiting_requests_succeeds(sim: Loop) -> None:
    sim.drained("in_place")
    sim.add("waits", PROMPT)
    assert sim.flushed(sim.flush()).success


def test_a_flush_while_requests_run_or_wait_is_refused_with_the_counts(sim: Loop) -> None:
    for name in "abcdef":
        sim.add(name, [*PROMPT, ord(name) % 50], max_new_tokens=20)
    waits = sim.flush()
    assert "0 requests run and 6 wait" in sim.flushed(waits).error_msg
    sim.turns(3)
    runs = sim.flush()
    sim.turns(2)
    assert "4 requests run and 2 wait" in sim.flushed(runs).error_msg


def test_a_flush_with_a_timeout_waits_until_nothing_runs_or_waits(sim: Loop) -> None:
    for name in "abcdef":
        sim.add(name, [*PROMPT, ord(name) % 50], max_new_tokens=9)
    sim.turns(3)
    call = sim.flush(timeout_s=5)
    sim.pass_time(4.9)
    assert call in sim.owed
    sim.until_idle()
    assert sim.flushed(call).success
    assert not sim.live


def test_a_flush_gives_up_after_its_timeout(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=50)
    sim.turns(3)
    call = sim.flush(timeout_s=5)
    sim.pass_time(5)
    sim.turns(2)
    assert not sim.flushed(call).success


def test_a_waiting_flush_succeeds_when_a_pause_retracts_the_last_request(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=50)
    sim.turns(3)
    call = sim.flush(timeout_s=5)
    sim.drained("retract")
    assert sim.flushed(call).success
    assert sim.live == ["r"]


def test_a_flush_waits_for_the_step_in_flight(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=3)
    while len(sim.outputs["r"]) < 2:
        sim.step()
    sim.launch()
    call = sim.flush()
    assert call in sim.owed
    sim.apply()
    assert sim.flushed(call).success


def test_a_surplus_step_of_an_ended_request_does_not_make_a_flush_fail(sim: Loop) -> None:
    stop = next_token(PROMPT)
    sim.add("r", PROMPT, max_new_tokens=20, stop_token_ids=(stop,))
    sim.launch()
    sim.launch()  # a surplus step, because the first token ends the request
    sim.apply()
    assert sim.finished["r"].reason == "stop"
    call = sim.flush()
    assert call in sim.owed
    sim.apply()
    assert sim.flushed(call).success


def test_a_flush_waits_for_a_surplus_step_that_was_launched_after_it(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=20, stop_token_ids=(next_token(PROMPT),))
    sim.launch()
    call = sim.flush()
    sim.launch()
    sim.apply()
    assert "r" in sim.finished and call in sim.owed
    sim.apply()
    assert sim.flushed(call).success


def test_a_flush_resets_the_state_to_that_of_the_start(sim: Loop) -> None:
    start = sim.state()
    for name in "abcdef":
        sim.add(name, list(range(40)), max_new_tokens=9)
    sim.until_idle()
    assert sim.state()["forward_ct_decode"] and sim.state()["new_token_ratio"] != start["new_token_ratio"]
    answer = sim.flushed(sim.flush())
    assert (answer.flushed_items > 0) != sim.scheduler.config.disable_prefix_cache
    counted = ("num_generated_tokens", "num_steps", "eager", "num_flushes")
    totals = {name: sim.state()[name] for name in counted}
    assert sim.state() == start | totals
    sim.add("again", list(range(40)))
    sim.until_idle()
    assert sim.finished["again"].cached_tokens == 0


def test_pause_twice_changes_nothing(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.turns(3)
    first = sim.drained("in_place")
    again = sim.paused(sim.pause("in_place"))
    assert (again.mode, again.num_running, again.num_retracted) == (first.mode, 1, 0)


def test_two_pauses_in_one_turn_are_both_answered(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.turns(3)
    weak = sim.pause("in_place", settle=False)
    strong = sim.pause("retract", settle=False)
    sim.until_idle()
    assert sim.paused(weak).mode == sim.paused(strong).mode == "retract"


def test_continue_when_not_paused_does_nothing(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.turns(3)
    running = sim.state()
    sim.answered(sim.proceed())
    assert sim.state() == running


def test_a_pause_that_is_continued_before_it_takes_effect_is_answered(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.step()
    sim.launch()
    call = sim.pause("retract")
    sim.proceed()
    assert sim.paused(call).mode is None
    sim.apply()
    assert sim.scheduler.requests["r"].phase is RequestPhase.DECODE, "it was not retracted"


@pytest.mark.parametrize(
    ("present", "weaker"), [(s, w) for s, w in product(MODES, MODES) if MODES.index(w) < MODES.index(s)]
)
def test_a_weaker_mode_changes_nothing_and_reports_the_present_mode(
    sim: Loop, present: PauseMode, weaker: PauseMode
) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.turns(3)
    sim.drained(present)
    sim.add("late", PROMPT)
    before = sim.state()
    assert sim.drained(weaker).mode == present
    assert sim.state() == before


def test_a_pause_can_be_made_stronger_step_by_step(sim: Loop) -> None:
    for name in "ab":
        sim.add(name, [*PROMPT, ord(name) % 50], max_new_tokens=30)
    sim.turns(3)
    wait = sim.pause("wait")
    sim.turns(2)
    assert wait in sim.owed
    in_place = sim.drained("in_place")
    assert sim.paused(wait).mode == "in_place", "a waiting pause is answered with the stronger mode"
    assert in_place.num_running == 2
    retract = sim.drained("retract")
    assert (retract.num_running, retract.num_waiting, retract.num_retracted) == (0, 2, 2)
    abort = sim.drained("abort")
    assert (abort.num_waiting, abort.num_aborted) == (0, 2)


def test_many_pauses_do_not_change_the_tokens_of_a_request(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=40, seed=3)
    sim.add("logprobs", list(range(40)), max_new_tokens=10, prompt_logprobs_start=0)
    for index in range(12):
        sim.turns(1 + index % 3)
        sim.drained(["retract", "in_place"][index % 2])  # type: ignore[arg-type]
        sim.proceed()
    sim.until_idle()
    assert len(sim.outputs["r"]) == sim.finished["r"].num_tokens == 40
    assert sim.prompt_logprobs["logprobs"] == list(range(1, 40)), "one entry per prompt token"


def test_a_stop_token_ends_a_request_after_pauses_as_without_pauses(sim: Loop) -> None:
    tokens = list(PROMPT)
    for _ in range(12):
        tokens.append(next_token(tokens))
    sim.add("r", PROMPT, max_new_tokens=40, stop_token_ids=(tokens[-1],))
    for mode in ("retract", "in_place", "retract"):
        sim.turns(2)
        sim.drained(mode)  # type: ignore[arg-type]
        sim.proceed()
    sim.until_idle()
    assert sim.finished["r"].reason == "stop"
    assert sim.outputs["r"] == tokens[10:][: len(sim.outputs["r"])]


@each_mode
def test_with_a_ttl_the_pause_ends_by_itself(sim: Loop, mode: PauseMode) -> None:
    sim.drained(mode, ttl_s=30)
    sim.add("r", PROMPT)
    sim.pass_time(29.9)
    assert sim.state()["engine_paused"]
    sim.pass_time(0.1)
    assert not sim.state()["engine_paused"]
    sim.until_idle()
    assert sim.finished["r"].reason == "length"


def test_the_ttl_of_the_latest_pause_counts(sim: Loop) -> None:
    sim.drained("in_place", ttl_s=10)
    sim.drained("in_place", ttl_s=100)
    sim.pass_time(99)
    assert sim.state()["engine_paused"]
    sim.drained("in_place")
    sim.pass_time(1000)
    assert sim.state()["engine_paused"], "a pause without a ttl lasts until continue"


def test_a_ttl_does_not_outlive_its_pause(sim: Loop) -> None:
    sim.drained("in_place", ttl_s=10)
    sim.proceed()
    sim.drained("in_place")
    sim.pass_time(1000)
    assert sim.state()["engine_paused"]


def test_a_ttl_does_not_end_a_weight_commit(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.turns(2)
    sim.drained("in_place", ttl_s=10)
    sim.begin_commit()
    assert sim.state()["engine_paused"]
    sim.pass_time(1000)
    assert not sim.state()["engine_paused"], "the user's pause has ended"
    assert sim.launch() is None, "the commit still holds the engine"
    sim.end_commit("1")
    assert sim.launch() is not None


def test_continue_during_a_weight_commit_ends_only_the_users_hold(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.turns(2)
    sim.drained("in_place")
    sim.begin_commit()
    sim.answered(sim.proceed())
    assert (sim.state()["engine_paused"], sim.state()["pause_mode"]) == (False, None)
    assert sim.launch() is None
    sim.end_commit("1")
    assert sim.launch() is not None


def test_clients_do_not_see_a_weight_commit_as_a_pause(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.turns(2)
    sim.begin_commit()
    sim.until_idle()
    counters = sim.scheduler.output().counters
    assert (counters.paused, counters.is_paused) == (None, False)
    state = sim.state()
    assert (state["engine_paused"], state["pause_mode"], state["pause_state"]) == (False, None, "running")
    assert sim.launch() is None, "the commit holds the engine"
    sim.end_commit("1")


def test_a_pause_of_mode_wait_is_still_pausing_during_a_weight_commit(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.turns(3)
    call = sim.pause("wait")
    sim.begin_commit()
    sim.until_idle()
    counters = sim.scheduler.output().counters
    assert (counters.paused, counters.is_paused) == ("wait", False)
    assert (sim.state()["engine_paused"], sim.state()["pause_state"]) == (False, "pausing")
    sim.end_commit("1")
    sim.until_idle()
    assert sim.paused(call).mode == "wait"
    assert sim.scheduler.output().counters.is_paused


@pytest.mark.parametrize(("mode", "left"), [("retract", ["r"]), ("abort", [])])
def test_if_continued_during_a_weight_commit_only_a_pause_of_mode_abort_takes_effect(
    sim: Loop, mode: PauseMode, left: list[str]
) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.step()
    sim.launch()
    call = sim.pause(mode)
    sim.begin_commit()
    sim.proceed()
    sim.apply()
    assert sim.paused(call).mode is None
    assert sim.state()["running_batch_rids"] == left
    sim.end_commit("1")


def test_a_pause_of_mode_wait_goes_on_after_a_weight_commit(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.turns(3)
    call = sim.pause("wait")
    sim.begin_commit()
    sim.until_idle()
    assert sim.live == ["r"]
    assert call not in sim.answers, "the running request has not ended"
    sim.end_commit("1")
    sim.until_idle()
    assert sim.finished["r"].reason == "length"
    assert (sim.paused(call).mode, sim.paused(call).num_running) == ("wait", 0)
    assert (sim.state()["engine_paused"], sim.state()["pause_mode"]) == (True, "wait")


def test_a_pause_is_answered_when_the_awaited_requests_end_during_a_weight_commit(sim: Loop) -> None:
    for rid in ("stopped", "aborted"):
        sim.add(rid, PROMPT, max_new_tokens=20)
    sim.turns(3)
    call = sim.pause("wait")
    sim.begin_commit()
    sim.until_idle()
    sim.stop("stopped", 1)
    assert call not in sim.answers, "one of the two requests has not ended"
    sim.abort("aborted")
    assert (sim.paused(call).num_running, sim.paused(call).num_waiting) == (0, 0)
    sim.end_commit("1")
    assert (sim.state()["engine_paused"], sim.state()["pause_mode"]) == (True, "wait")


def test_a_pause_of_mode_wait_that_is_continued_during_a_weight_commit_is_answered(sim: Loop) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.turns(3)
    call = sim.pause("wait")
    sim.begin_commit()
    sim.until_idle()
    sim.proceed()
    assert sim.paused(call).num_running == 1
    sim.end_commit("1")
    sim.until_idle()
    assert sim.finished["r"].reason == "length"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_the_end_of_a_weight_commit_does_not_end_the_users_pause(sim: Loop, mode: PauseMode) -> None:
    sim.add("r", PROMPT, max_new_tokens=20)
    sim.turns(4)
    sim.drained(mode)
    count = len(sim.outputs["r"])
    sim.begin_commit()
    sim.end_commit("1")
    assert (sim.state()["engine_paused"], sim.state()["pause_mode"]) == (True, mode)
    end(sim)
    assert sim.finished["r"].versions == [("0", 0, count), ("1", count, 20)]


def test_a_weight_commit_does_not_abort_requests_that_came_after_an_abort_pause(sim: Loop) -> None:
    sim.drained("abort")
    sim.add("late", PROMPT)
    sim.begin_commit()
    sim.end_commit("1")
    assert sim.live == ["late"]


def test_a_second_abort_pause_aborts_the_requests_queued_since_the_first(sim: Loop) -> None:
    sim.drained("abort")
    sim.add("late", PROMPT)
    assert sim.paused(sim.pause("abort")).num_aborted == 1
    assert sim.finished["late"].message == "Abort before prefill"


def test_a_rid_may_be_used_again_once_its_request_has_ended(sim: Loop) -> None:
    message = AddRequest(rid="r", prompt=pack_ids(PROMPT), params=SamplingParams(max_new_tokens=8))
    sim.add("r", PROMPT)
    sim.turns(2)
    sim.drained("retract")
    rejected = sim.scheduler.add(message, sim.now)
    assert rejected is not None and "in flight" in rejected.message
    sim.abort("r")
    sim.check()
    first = sim.finished.pop("r")
    sim.add("r", PROMPT)
    sim.proceed()
    sim.until_idle()
    assert (first.reason, sim.finished["r"].reason) == ("abort", "length")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pauses_while_every_slot_is_taken(sim: Loop, mode: PauseMode) -> None:
    for name in "abcdefghij":
        sim.add(name, [*PROMPT, ord(name) % 50], max_new_tokens=12)
    sim.turns(4)
    assert sim.state()["req_to_token_pool_available"] == 0
    for _ in range(8):
        sim.turns(3)
        sim.drained(mode)
        sim.proceed()


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
@pytest.mark.parametrize(("page_size", "prefix", "overlap"), CONFIGURATIONS, ids=NAMES)
def test_pauses_while_kv_is_exactly_full(
    page_size: int, prefix: bool, overlap: bool, mode: PauseMode
) -> None:
    num_pages = {1: 60, 4: 16, 16: 4}[page_size]
    sim = make(page_size, prefix, overlap, num_pages=num_pages, max_seq_len=48)
    for name in range(2):
        sim.add(f"r{name}", [name] * 8, max_new_tokens=24)
    while sim.state()["available_kv_tokens"]:
        sim.turns(1)
        assert len(sim.live) == 2
    sim.drained(mode)
    sim.check()
    if mode != "in_place":
        assert sim.flushed(sim.flush()).success
        assert sim.state()["available_kv_tokens"] == num_pages * page_size
    end(sim)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pauses_of_requests_with_a_cached_prompt(sim: Loop, mode: PauseMode) -> None:
    stem = list(range(48))
    sim.add("first", stem)
    sim.until_idle()
    for name in "abcd":
        sim.add(name, [*stem, ord(name) % 50], max_new_tokens=12)
    sim.turns(3)
    sim.drained(mode)
    if not sim.scheduler.config.disable_prefix_cache:
        assert all(sim.scheduler.requests[name].cached_tokens >= 32 for name in "abcd")
    if mode == "retract":
        sim.flush()  # the shared pages are gone


def test_priorities_order_retracted_and_later_requests(sim: Loop) -> None:
    sim.add("low", PROMPT, priority=-1, max_new_tokens=30)
    sim.add("high", PROMPT, priority=1, max_new_tokens=30)
    sim.turns(3)
    sim.drained("retract")
    sim.add("middle", PROMPT)
    sim.add("higher", PROMPT, priority=2)
    assert sim.state()["waiting_queue_rids"] == ["higher", "high", "middle", "low"]


def test_the_limit_of_the_queue_does_not_reject_retracted_requests() -> None:
    sim = make(4, True, True, max_queued_requests=2)
    for name in "abcd":
        sim.add(name, [*PROMPT, ord(name) % 50], max_new_tokens=20)
        sim.turns(1)
    sim.drained("retract")
    assert sim.state()["waiting_queue_size"] == 4
    end(sim)


@pytest.mark.parametrize("overlap", [False, True])
def test_wait_lets_requests_finish_that_are_preempted_meanwhile(overlap: bool) -> None:
    sim = make(4, True, overlap, num_pages=25)
    sim.scheduler.new_token_ratio.value = 0.1  # admits more requests than there is room for
    for name in "abcd":
        sim.add(name, [ord(name) % 50] * 8, max_new_tokens=60)
    sim.turns(4)
    call = sim.pause("wait")
    sim.add("late", PROMPT)
    sim.until_idle()
    assert sim.scheduler.totals.num_preemptions > 0
    assert set(sim.finished) == set("abcd") and sim.paused(call).num_waiting == 1
    end(sim)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_pause_that_is_continued_before_it_takes_effect_still_aborts(overlap: bool) -> None:
    sim = make(4, True, overlap)
    sim.add("r", PROMPT, max_new_tokens=50)
    sim.turns(3)
    while not sim.results:
        sim.launch()
    call = sim.pause("abort", settle=False)
    sim.proceed()
    assert sim.finished["r"].reason == "abort"
    assert (sim.paused(call).mode, sim.paused(call).num_aborted) == (None, 1)
    end(sim)


# --- requests that begin with output tokens ---


def test_a_pause_of_mode_wait_awaits_a_request_that_came_with_outputs(sim: Loop) -> None:
    sim.add("fresh", PROMPT, max_new_tokens=5)
    sim.add("continued", PROMPT, max_new_tokens=9, num_known=4)
    paused = sim.drained("wait")
    assert "continued" in sim.finished and sim.live == ["fresh"]
    assert (paused.num_running, paused.num_waiting) == (0, 1)


@each_mode
def test_a_request_with_outputs_that_comes_during_a_pause_waits_for_its_end(
    sim: Loop, mode: PauseMode
) -> None:
    sim.drained(mode)
    sim.add("continued", PROMPT, max_new_tokens=9, num_known=4)
    sim.until_idle()
    assert len(sim.outputs["continued"]) == 4
    assert sim.state()["engine_paused"] is True
    sim.proceed()
    sim.until_idle()
    assert "continued" in sim.finished


@each_mode
def test_a_retracted_request_that_came_with_outputs_keeps_all_its_tokens(sim: Loop, mode: PauseMode) -> None:
    sim.add("r", PROMPT, max_new_tokens=20, num_known=4)
    sim.turns(5)
    sim.drained(mode)
    sim.proceed()
    sim.until_idle()
    assert mode == "abort" or sim.finished["r"].reason == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_a_policy_holds_back_goes_on_waiting_during_a_pause(overlap: bool) -> None:
    patient = Loop(HoldBack(5))
    patient.overlap = overlap
    patient.add("r", PROMPT)
    patient.drained("retract")
    patient.pass_time(5)
    patient.proceed()
    patient.until_idle()
    assert "r" in patient.finished
