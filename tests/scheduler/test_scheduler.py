"""The pure scheduler, one behaviour per test; the simulation's device checks every KV read."""

import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from segue.config import EngineConfig
from segue.errors import GuidedOutputError, GuideLostError, SegueError
from segue.laps.cost import NO_WORK, Coefficients, StepTime, seconds_of
from segue.laps.pick import PrefillChoice, PrefillPolicy, PrefillView
from segue.messages.control import LapsLimits
from segue.messages.guided import GrammarSpec, LostGuide
from segue.messages.leg import RETRYABLE
from segue.messages.requests import (
    Abort,
    AddRequest,
    Finish,
    Handoff,
    Rejected,
    SamplingParams,
    TokenLogprob,
    pack_ids,
)
from segue.messages.steps import NON_FINITE
from segue.scheduler.internal_state import internal_state
from segue.scheduler.invariants import find_problems
from segue.scheduler.prefill import FirstCome
from segue.scheduler.request import Request, RequestPhase
from segue.scheduler.scheduler import _GIVES_BACK, GUIDES_LOOK_S, Scheduler
from tests.scheduler.simulation import HoldBack, Simulation, expected_output, next_token


@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_do_not_depend_on_overlap(overlap: bool) -> None:
    sim = Simulation()
    for index in range(7):
        sim.add(f"r{index}", [index, 1, 2] * (index + 1), max_new_tokens=10 + index)
    sim.run(overlap=overlap)
    assert all(finished.reason == "length" for finished in sim.finished.values())


def test_decode_and_prefill_share_a_step_with_decode_first() -> None:
    sim = Simulation()
    sim.add("old", [1, 2, 3])
    sim.step()
    sim.add("new", [4, 5, 6, 7])
    plan = sim.launch()
    assert plan is not None
    assert (plan.num_decode, plan.lens, plan.samples) == (1, [1, 4], [True, True])


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_chunk_samples() -> None:
    sim = Simulation(chunked_prefill_size=16)
    sim.add("r", list(range(40)))
    plans = []
    for _ in range(3):
        plans.append(sim.launch())
        sim.apply()
    assert [(p.starts, p.lens, p.num_logits, p.samples) for p in plans if p] == [
        ([0], [16], [0], [False]),
        ([16], [16], [0], [False]),
        ([32], [8], [1], [True]),
    ]


def test_the_budget_that_one_requests_last_chunk_leaves_goes_to_the_next_request() -> None:
    sim = Simulation(chunked_prefill_size=16)
    sim.add("a", [1] * 20)
    sim.add("b", [2] * 20)
    sim.step()
    plan = sim.launch()
    assert plan is not None and plan.lens == [4, 12]


def test_a_finished_request_leaves_its_pages_to_the_prefix_cache() -> None:
    sim = Simulation(page_size=4)
    sim.add("first", list(range(10)))
    sim.run()
    sim.add("second", list(range(10)))
    sim.run()
    assert (sim.finished["first"].cached_tokens, sim.finished["second"].cached_tokens) == (0, 8)


def test_the_pages_of_a_chunked_prompt_are_shared_before_it_is_complete() -> None:
    sim = Simulation(page_size=4, chunked_prefill_size=16)
    sim.add("first", list(range(40)))
    sim.step()
    sim.add("second", list(range(40)))
    sim.run()
    assert sim.finished["second"].cached_tokens >= 16


def test_equal_prompts_sent_together_are_computed_once() -> None:
    sim = Simulation(page_size=4, chunked_prefill_size=64)
    for index in range(4):
        sim.add(f"r{index}", list(range(14)), max_new_tokens=5)
    plan = sim.launch()
    assert plan is not None and plan.lens == [14, 2, 2, 2]
    sim.apply()
    sim.run()


@pytest.mark.parametrize("chunk", [8, 16, 64])
def test_choices_of_a_chunked_prompt_compute_it_once(chunk: int) -> None:
    sim = Simulation(chunked_prefill_size=chunk, num_pages=256)
    prompt = [(7 * i) % 40 + 1 for i in range(62)]
    for choice in range(4):
        sim.add(f"r-{choice}", prompt, max_new_tokens=3, seed=choice)
    sim.run()
    totals = sim.scheduler.totals
    assert totals.prompt_tokens - totals.cached_tokens == 62 + 3 * 2  # the others: what fills no page of 4
    assert [sim.finished[f"r-{choice}"].cached_tokens for choice in range(4)] == [0, 60, 60, 60]


def test_pages_that_two_requests_computed_are_merged() -> None:
    sim = Simulation(page_size=4, chunked_prefill_size=16)
    sim.add("first", list(range(30)), max_new_tokens=20)
    sim.step()
    sim.add("second", list(range(30)), max_new_tokens=20)
    for _ in range(8):  # both compute the second chunk, and then the same output
        sim.step()
    first, second = (request.pages[:8] for request in sim.scheduler.running.values())
    assert first == second
    sim.run()


def test_the_last_token_of_a_cached_prompt_is_computed_again() -> None:
    sim = Simulation(page_size=4)
    sim.add("first", list(range(8)))
    sim.run()
    sim.add("second", list(range(8)))
    plan = sim.launch()
    assert plan is not None and (plan.starts, plan.lens) == ([4], [4])


def test_steps_are_counted_as_graph_hits_or_eager_by_reason() -> None:
    sim = Simulation()
    sim.add("r", [1, 2, 3], max_new_tokens=4)
    for graph, eager, padding in (
        ("forward", None, 5),
        (None, "tokens", 0),
        ("decode", None, 7),
        (None, "tokens", 0),
    ):
        sim.launch()
        sim.results[0] = msgspec.structs.replace(
            sim.results[0], graph=graph, eager=eager, padded_tokens=padding
        )
        counters = sim.apply().counters
    hits = {"forward": 1, "decode": 1}
    assert (counters.graph_hits, counters.eager_steps, counters.padded_tokens) == (hits, {"tokens": 2}, 12)
    state = internal_state(sim.scheduler)
    assert (state["graph_hit"], state["graph_hit_by_kind"]) == (2, hits)
    assert (state["eager"], state["padded_tokens"]) == ({"tokens": 2}, 12)


def test_kv_of_old_weights_is_not_shared() -> None:
    sim = Simulation(page_size=4)
    sim.add("first", list(range(10)))
    sim.run()
    sim.scheduler.weights.commit("1", flush_cache=False)
    sim.add("second", list(range(10)))
    sim.run()
    assert sim.finished["second"].cached_tokens == 0


def test_every_token_is_attributed_to_the_weights_that_made_it() -> None:
    sim = Simulation()
    sim.add("r", [1, 2, 3], max_new_tokens=5)
    sim.step()
    sim.step()
    sim.scheduler.weights.commit("7", flush_cache=False)
    sim.run()
    assert sim.finished["r"].versions == [("0", 0, 2), ("7", 2, 5)]


def test_when_pages_run_out_requests_are_retracted_and_none_fails() -> None:
    sim = Simulation(num_pages=25, page_size=4, chunked_prefill_size=64)
    sim.scheduler.new_token_ratio.value = sim.scheduler.new_token_ratio.minimum = 0.0
    for index in range(4):
        sim.add(f"r{index}", [index] * 12, max_new_tokens=60)
    sim.run(overlap=True)
    assert internal_state(sim.scheduler)["num_preemptions"] > 0
    assert all(len(sim.outputs[f"r{index}"]) == 60 for index in range(4))


def test_a_lower_priority_is_retracted_first() -> None:
    sim = Simulation(num_pages=25, page_size=4, chunked_prefill_size=64)
    sim.scheduler.new_token_ratio.value = sim.scheduler.new_token_ratio.minimum = 0.0
    sim.add("low", [1] * 12, max_new_tokens=60, priority=-1)
    sim.add("high", [2] * 12, max_new_tokens=60, priority=1)
    sim.add("middle", [3] * 12, max_new_tokens=60)
    while not internal_state(sim.scheduler)["num_preemptions"]:
        assert sim.step()
    assert internal_state(sim.scheduler)["waiting_queue_rids"] == ["low"]


def test_a_surplus_step_retracts_no_request() -> None:
    sim = Simulation(num_pages=25, page_size=4, chunked_prefill_size=64)
    sim.scheduler.new_token_ratio.value = sim.scheduler.new_token_ratio.minimum = 0.0
    for index in range(4):
        sim.add(f"r{index}", [index] * 12, max_new_tokens=60)
    while sim.launch() is not None:
        if len(sim.results) == 2:
            sim.apply()
    assert sim.results and internal_state(sim.scheduler)["num_preemptions"] == 0


def test_admission_is_by_priority_then_by_arrival() -> None:
    sim = Simulation(max_running_requests=1)
    for rid, priority in (("a", 0), ("b", 0), ("c", 5)):
        sim.add(rid, [1, 2, 3], priority=priority)
    sim.run()
    assert list(sim.finished) == ["c", "a", "b"]


def test_admission_keeps_the_reserve_free() -> None:
    sim = Simulation(num_pages=25, page_size=4, chunked_prefill_size=64)
    sim.add("first", [1] * 12, max_new_tokens=80)
    sim.add("second", [2] * 12, max_new_tokens=80)
    sim.step()
    assert internal_state(sim.scheduler)["waiting_queue_rids"] == ["second"]


def test_an_end_by_length_gets_no_surplus_step() -> None:
    sim = Simulation()
    sim.add("r", [1, 2, 3], max_new_tokens=2)
    sim.launch()
    sim.launch()
    sim.apply()
    assert sim.launch() is None


def test_a_stop_token_ends_the_request_and_its_surplus_token_is_dropped() -> None:
    sim = Simulation()
    output = expected_output([1, 2, 3], SamplingParams(max_new_tokens=5), 100)
    stop = next(token for token in output[1:] if token != output[0])
    sim.add("r", [1, 2, 3], max_new_tokens=50, stop_token_ids=(stop,))
    sim.run(overlap=True)
    assert (sim.finished["r"].reason, sim.finished["r"].matched) == ("stop", stop)
    assert sim.outputs["r"] == output[: output.index(stop) + 1]


def test_a_stop_token_before_min_new_tokens_does_not_end_the_request() -> None:
    sim = Simulation()
    stop = next_token([1, 2, 3])
    sim.add("r", [1, 2, 3], max_new_tokens=3, min_new_tokens=3, stop_token_ids=(stop,))
    sim.run()
    assert len(sim.outputs["r"]) == 3


def test_a_stop_string_cuts_the_output() -> None:
    sim = Simulation()
    sim.add("r", [1, 2, 3], max_new_tokens=50)
    for _ in range(5):
        sim.step()
    (finished,) = sim.scheduler.finish(Finish("r", 3))
    assert (finished.reason, finished.num_tokens, finished.versions) == ("stop", 3, [("0", 0, 3)])
    assert sim.scheduler.finish(Finish("r", 3)) == []


def test_an_abort_in_flight_frees_pages_only_when_the_step_is_applied() -> None:
    sim = Simulation(disable_prefix_cache=True)
    sim.add("r", [1, 2, 3])
    sim.launch()
    sim.end(sim.scheduler.abort(Abort("r")))
    assert len(sim.scheduler.resources.free_pages) < sim.limits.num_pages
    sim.apply()
    assert len(sim.scheduler.resources.free_pages) == sim.limits.num_pages
    assert sim.outputs["r"] == []


def test_abort_of_a_waiting_request_says_it_never_ran() -> None:
    sim = Simulation()
    sim.add("r", [1, 2, 3])
    (finished,) = sim.scheduler.abort(Abort("r"))
    assert (finished.reason, finished.message) == ("abort", "Abort before prefill")


def test_abort_all_and_abort_of_an_unknown_request() -> None:
    sim = Simulation(max_running_requests=1)
    sim.add("a", [1, 2, 3])
    sim.add("b", [1, 2, 3])
    sim.step()
    assert sim.scheduler.abort(Abort("unknown")) == sim.scheduler.abort(Abort()) == []
    assert {finished.rid for finished in sim.scheduler.abort(Abort(abort_all=True))} == {"a", "b"}
    assert find_problems(sim.scheduler) == []


def test_prompt_logprobs_cover_the_prompt_once_with_chunks_and_with_a_cached_prefix() -> None:
    sim = Simulation(page_size=4, chunked_prefill_size=16)
    prompt = list(range(40))
    sim.add("warm", prompt)
    sim.run()
    sim.add("all", prompt, prompt_logprobs_start=0)
    sim.add("end", prompt, prompt_logprobs_start=30)
    sim.run()
    assert sim.prompt_logprobs["all"] == prompt[1:]
    assert sim.prompt_logprobs["end"] == prompt[30:]
    assert (sim.finished["all"].cached_tokens, sim.finished["end"].cached_tokens) == (0, 28)


def test_requests_share_kv_with_those_of_the_same_salt_only() -> None:
    sim = Simulation()
    prompt = list(range(20))
    for rid, salt in (("a", "one"), ("b", "other"), ("c", ""), ("d", "one"), ("e", "")):
        sim.add(rid, prompt, salt=salt)
        sim.run()
    assert [sim.finished[rid].cached_tokens for rid in "abcde"] == [0, 0, 0, 16, 16]


def test_a_retracted_request_finds_its_pages_under_its_salt() -> None:
    sim = Simulation()
    sim.add("r", list(range(20)), salt="one")
    for _ in range(4):
        sim.step()
    sim.scheduler.retract(sim.scheduler.running["r"])
    plan = sim.launch()
    assert plan is not None and plan.starts == [20]
    sim.apply()
    sim.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_for_no_token_ends_when_its_prompt_is_computed(overlap: bool) -> None:
    sim = Simulation()
    prompt = list(range(40))  # three chunks
    sim.add("scored", prompt, max_new_tokens=0, prompt_logprobs_start=0)
    sim.run(overlap=overlap)
    end = sim.finished["scored"]
    assert (end.reason, end.num_tokens, end.matched, end.versions) == ("length", 0, None, [("0", 0, 0)])
    assert sim.outputs["scored"] == [] and sim.prompt_logprobs["scored"] == prompt[1:]
    sim.add("after", prompt, max_new_tokens=1)  # the prompt's pages stay in the cache
    sim.run()
    assert sim.finished["after"].cached_tokens == 36


def test_a_request_for_no_token_has_nothing_to_hand_over() -> None:
    sim = Simulation(role="prefill")
    message = AddRequest(
        rid="r",
        prompt=pack_ids([1, 2]),
        params=SamplingParams(max_new_tokens=0),
        handoff=Handoff(id=1, part="prefill"),
    )
    answer = sim.scheduler.add(message, 0.0)
    assert isinstance(answer, Rejected) and "asks for no token" in answer.message
    assert sim.scheduler.add(structs.replace(message, handoff=None), 0.0) is None


def test_a_retracted_request_with_complete_prompt_logprobs_finds_its_output_in_the_cache() -> None:
    sim = Simulation(num_pages=25, page_size=4, chunked_prefill_size=64)
    sim.add("r", list(range(8)), max_new_tokens=60, prompt_logprobs_start=0)
    while len(sim.outputs["r"]) < 20:
        sim.step()
    sim.scheduler.retract(sim.scheduler.running["r"])
    plan = sim.launch()
    assert plan is not None and plan.starts == [24]
    sim.apply()
    sim.run()
    assert sim.prompt_logprobs["r"] == list(range(1, 8))


@pytest.mark.parametrize(
    ("prompt_len", "queued", "kind"),
    [(0, 0, "ContextLengthError"), (100, 0, "ContextLengthError"), (3, 100, "OverloadedError")],
)
def test_a_request_that_cannot_run_is_rejected(prompt_len: int, queued: int, kind: str) -> None:
    sim = Simulation(max_seq_len=100, max_queued_requests=100)
    for index in range(queued):
        sim.add(f"r{index}", [1])
    params = SamplingParams(max_new_tokens=1)
    rejected = sim.scheduler.add(AddRequest(rid="r", prompt=pack_ids([1] * prompt_len), params=params), 0.0)
    assert isinstance(rejected, Rejected) and rejected.kind == kind


def test_a_rid_in_flight_is_rejected_and_accepted_again_after_its_end() -> None:
    sim = Simulation()
    sim.add("r", [1])
    again = AddRequest(rid="r", prompt=pack_ids([1]), params=SamplingParams(max_new_tokens=1))
    rejected = sim.scheduler.add(again, 0.0)
    assert isinstance(rejected, Rejected) and rejected.kind == "InvalidRequestError"
    sim.run()
    assert sim.scheduler.add(again, 0.0) is None


def test_the_invariants_find_a_lost_page() -> None:
    sim = Simulation()
    sim.scheduler.resources.take_pages(1)
    assert find_problems(sim.scheduler) == ["pages [0] have no owner"]


def test_the_scheduler_does_not_import_torch() -> None:
    code = "import sys, segue.scheduler.scheduler, segue.worker.loop; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_step_has_the_sampling_mode_of_its_most_demanding_request():
    sim = Simulation()
    seen = []
    for rid, params in (
        ("a", {}),
        ("b", {"top_p": 0.9}),
        ("c", {"frequency_penalty": 0.1}),
        ("d", {"top_k": 3}),
    ):
        sim.add(rid, [1, 2, 3], max_new_tokens=30, **params)
        plan = sim.launch()
        assert plan is not None
        seen.append(plan.sampling_mode)
        sim.apply()
    assert seen == ["plain", "filtered", "full", "full"]


def make_non_finite(sim: Simulation, index: int = 0) -> None:
    """Make the oldest step in flight sample ``NON_FINITE`` for one of its sequences."""
    tokens = list(sim.results[0].tokens)
    tokens[index] = NON_FINITE
    sim.results[0] = msgspec.structs.replace(sim.results[0], tokens=tokens)


@pytest.mark.parametrize("overlap", [False, True])
def test_non_finite_logits_end_only_their_own_request(overlap: bool) -> None:
    sim = Simulation()
    for index in range(3):
        sim.add(f"r{index}", [index, 1, 2], max_new_tokens=9)
    for _ in range(4):
        sim.overlapped_step() if overlap else sim.step()
    if not overlap:
        sim.launch()
    make_non_finite(sim, 1)
    output = sim.apply()
    (end,) = output.finished
    assert (end.rid, end.reason, end.error) == ("r1", "error", "NonFiniteLogitsError")
    assert "request r1 are not finite" in (end.message or "")
    assert output.rids == ["r0", "r2"]
    assert output.counters.non_finite_logits == 1
    sim.run(overlap=overlap)
    assert [sim.finished[rid].reason for rid in ("r0", "r2")] == ["length", "length"]


def test_kv_that_led_to_non_finite_logits_is_not_shared() -> None:
    sim = Simulation(page_size=4, chunked_prefill_size=64)
    sim.add("left", [1] * 12, max_new_tokens=9)  # computes pages, and is aborted before it has sampled
    sim.launch()
    sim.end(sim.scheduler.abort(Abort("left")))
    sim.apply()
    sim.add("non-finite", [1] * 12)
    plan = sim.launch()
    assert plan is not None and plan.starts == [8]
    make_non_finite(sim)
    sim.apply()
    sim.add("next", [1] * 12)
    sim.run()
    assert sim.finished["next"].cached_tokens == 0
    sim.add("last", [1] * 12)
    sim.run()
    assert sim.finished["last"].cached_tokens == 8


def test_requests_that_share_pages_with_a_non_finite_request_go_on() -> None:
    sim = Simulation(page_size=4, chunked_prefill_size=64)
    for rid in ("a", "b"):
        sim.add(rid, [1] * 13, max_new_tokens=20)
    sim.step()
    sim.launch()
    make_non_finite(sim, 0)
    sim.apply()
    assert "a" in sim.finished
    sim.run()
    assert sim.finished["b"].reason == "length"


@pytest.mark.parametrize("chunk", [4, 64])
def test_non_finite_prompt_logprobs_end_their_request(chunk: int) -> None:
    sim = Simulation(chunked_prefill_size=chunk)
    sim.add("r", [1] * 12, prompt_logprobs_start=0)
    sim.launch()
    entries = dict(sim.results[0].prompt_logprobs)
    (slot,) = entries
    entries[slot] = [*entries[slot][:-1], TokenLogprob(1, float("nan"))]
    sim.results[0] = msgspec.structs.replace(sim.results[0], prompt_logprobs=entries)
    output = sim.apply()
    assert (output.finished[0].error, output.rids, output.prompt_logprobs) == ("NonFiniteLogitsError", [], {})
    sim.run()


@pytest.mark.parametrize(
    ("why", "error", "remedy"),
    [
        ("too many", GuidedOutputError, "Give a"),
        (LostGuide("it ended"), GuideLostError, "Send the request again"),
    ],
)
def test_a_lost_guide_is_not_the_requests_fault(why: str, error: type[SegueError], remedy: str) -> None:
    sim = Simulation()
    sim.add("r", [1, 2, 3], grammar=GrammarSpec("regex", "a"))
    sim.launch()
    sim.results[0] = msgspec.structs.replace(sim.results[0], failures={0: why})
    (finished,) = sim.apply().finished
    assert finished.error == error.__name__ and f"{why}. {remedy}" in (finished.message or "")
    assert (error.status, error.code in RETRYABLE) == (
        (503, True) if isinstance(why, LostGuide) else (400, False)
    )
    sim.run()


def test_a_prompt_logprob_of_minus_infinity_does_not_end_the_request() -> None:
    sim = Simulation()
    sim.add("r", [1] * 3, prompt_logprobs_start=0)
    sim.launch()
    entries = {slot: [TokenLogprob(1, float("-inf"))] * 2 for slot in sim.results[0].prompt_logprobs}
    sim.results[0] = msgspec.structs.replace(sim.results[0], prompt_logprobs=entries)
    assert not sim.apply().finished


# --- the order of prefill work ---


def test_another_policy_changes_the_order_and_nothing_else() -> None:
    sims = {name: Simulation(policy, max_running_requests=1) for name, policy in POLICIES.items()}
    for sim in sims.values():
        sim.add("long", [1] * 30)
        sim.add("short", [2] * 3)
        sim.add("middle", [3] * 9)
        sim.run()
    assert list(sims["first come"].finished) == ["long", "short", "middle"]
    assert list(sims["shortest first"].finished) == ["short", "middle", "long"]
    assert sims["first come"].outputs == sims["shortest first"].outputs


POLICIES: dict[str, PrefillPolicy[Request]] = {"first come": FirstCome(), "shortest first": HoldBack(0)}


def test_a_policy_may_hold_work_back_and_says_until_when() -> None:
    sim = Simulation(HoldBack(5))
    sim.add("a", [1, 2, 3])
    sim.pass_time(2)
    sim.add("b", [1, 2, 3])
    assert (sim.launch(), sim.scheduler.wake_at) == (None, 5)
    sim.pass_time(3)
    plan = sim.launch()
    assert plan is not None and len(plan.new_slots) == 1
    assert sim.scheduler.wake_at == 7
    sim.apply()
    assert (sim.step(), sim.scheduler.wake_at) == (True, 7), "running requests go on meanwhile"
    sim.run()
    assert sim.scheduler.wake_at is None


def test_a_pause_ends_the_wait_of_a_policy() -> None:
    sim = Simulation(HoldBack(5))
    sim.add("a", [1, 2, 3])
    sim.step()
    assert sim.scheduler.wake_at == 5
    sim.scheduler.control.hold("user")
    assert (sim.step(), sim.scheduler.wake_at) == (False, None)


def test_guided_requests_alone_wait_until_grammars_can_be_followed() -> None:
    sim, grammar = Simulation(), GrammarSpec("regex", "a")
    sim.scheduler.can_guide = False
    sim.add("guided", [1, 2, 3], grammar=grammar, priority=1)
    assert (sim.launch(), sim.scheduler.wake_at) == (None, GUIDES_LOOK_S), "an idle loop asks again"
    sim.add("plain", [4, 5, 6], max_new_tokens=2)
    assert sim.step() and sim.step()
    assert set(sim.finished) == {"plain"} and not sim.scheduler.running
    sim.scheduler.can_guide = True
    sim.run()
    assert sim.finished["guided"].reason == "length" and sim.scheduler.wake_at is None


def test_a_policy_can_give_a_step_fewer_tokens() -> None:
    class Few(FirstCome):
        def pick(self, view: PrefillView[Request], now: float) -> PrefillChoice[Request]:
            return replace(super().pick(view, now), budget=min(view.budget, 5))

    sim = Simulation(Few(), chunked_prefill_size=16)
    sim.add("r", [1] * 12)
    lens = []
    while (plan := sim.launch()) is not None and not plan.num_decode:
        lens.append(plan.lens)
        sim.apply()
    assert lens == [[5], [5], [2]]
    sim.apply()
    sim.run()


def test_a_policy_may_return_the_queue_itself() -> None:
    class All(FirstCome):
        def pick(self, view: PrefillView[Request], now: float) -> PrefillChoice[Request]:
            return replace(super().pick(view, now), prompts=view.short)

    sim = Simulation(All())
    for rid in "abcd":
        sim.add(rid, [1, 2, 3])
    plan = sim.launch()
    assert plan is not None and len(plan.new_slots) == 4
    sim.apply()
    sim.run()


def test_the_queue_is_ordered_by_priority_then_deadline_then_arrival() -> None:
    sim = Simulation()
    for rid, priority in (("a", 0), ("b", 0), ("c", 0), ("d", 1)):
        sim.add(rid, [1], priority=priority)
    assert [request.rid for request in sim.scheduler.waiting] == ["d", "a", "b", "c"]
    sim.step()
    sim.scheduler.requests["c"].deadline = 3.0
    for request in reversed(list(sim.scheduler.running.values())):
        sim.scheduler.retract(request)
    assert [request.rid for request in sim.scheduler.waiting] == ["d", "c", "a", "b"]


# --- a request that begins with output tokens ---


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_request_goes_on_from_its_outputs(count: int, overlap: bool) -> None:
    sim = Simulation(chunked_prefill_size=4)
    sim.add("r", [1, 2, 3], num_known=count, max_new_tokens=10, seed=5)
    sim.run(overlap=overlap)
    assert sim.outputs["r"] == sim.expected("r") and len(sim.outputs["r"]) == 10
    finished = sim.finished["r"]
    assert (finished.num_tokens, finished.versions) == (10, [("0", count, 10)])


def test_the_outputs_that_a_request_begins_with_are_found_in_the_cache() -> None:
    sim = Simulation(page_size=4)
    sim.add("whole", list(range(10)), max_new_tokens=20)
    sim.run()
    sim.add("again", list(range(10)), max_new_tokens=20, num_known=15)
    plan = sim.launch()
    assert plan is not None and (plan.starts, plan.lens) == ([24], [1])
    sim.apply()
    sim.run()
    assert sim.finished["again"].cached_tokens == 10, "no more than the prompt"


def test_outputs_that_end_the_request_end_it_at_once() -> None:
    sim = Simulation()
    sim.add("length", [1, 2, 3], max_new_tokens=5, num_known=5)
    stop = next_token([1, 2, 3])
    sim.add("stop", [1, 2, 3], max_new_tokens=5, stop_token_ids=(stop,), num_known=1)
    ends = {rid: (f.reason, f.matched, f.num_tokens) for rid, f in sim.finished.items()}
    assert ends == {"length": ("length", None, 5), "stop": ("stop", stop, 1)}
    assert not sim.scheduler.has_work and sim.scheduler.output().counters.num_accepted == 2
    sim.check()


def test_a_stop_token_among_the_outputs_before_min_new_tokens_does_not_end_the_request() -> None:
    sim = Simulation()
    stop = next_token([1, 2, 3])
    sim.add("r", [1, 2, 3], max_new_tokens=3, min_new_tokens=3, stop_token_ids=(stop,), num_known=1)
    sim.run()
    assert len(sim.outputs["r"]) == 3


@pytest.mark.parametrize(
    ("prompt_len", "max_new_tokens", "most"), [(3, 5, 5), (90, 50, 10)], ids=["own limit", "context"]
)
def test_a_request_with_too_many_outputs_is_rejected(prompt_len: int, max_new_tokens: int, most: int) -> None:
    sim = Simulation(max_seq_len=100)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    prompt, outputs = pack_ids([1] * prompt_len), pack_ids([1] * (most + 1))
    rejected = sim.scheduler.add(AddRequest(rid="r", prompt=prompt, params=params, outputs=outputs), 0.0)
    assert isinstance(rejected, Rejected) and rejected.kind == "InvalidRequestError"
    assert f"begins with {most + 1} output tokens, but may have {most}" in rejected.message


def test_prompt_logprobs_cover_the_prompt_of_a_request_that_begins_with_outputs() -> None:
    sim = Simulation(chunked_prefill_size=5)
    prompt = list(range(12))
    sim.add("r", prompt, num_known=6, max_new_tokens=9, prompt_logprobs_start=4)
    sim.run()
    assert sim.prompt_logprobs["r"] == prompt[4:]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_may_draw_fewer_tokens_here_than_it_asked_for(overlap: bool) -> None:
    sim = Simulation()
    sim.add("r", [1, 2, 3], max_new_tokens=50)
    sim.scheduler.requests["r"].most_outputs = 1
    num_decode = 0
    while sim.scheduler.has_work:
        plan = sim.launch()
        num_decode += plan.num_decode if plan else 0
        if not overlap or plan is None:
            sim.apply()
    assert num_decode == 0, "the last chunk of its prompt draws the token"
    assert sim.outputs["r"] == [next_token([1, 2, 3])] and "r" in sim.finished


# --- the exit of requests, and the account of pages ---


def test_every_phase_but_the_last_has_an_entry_in_the_table_of_what_is_given_back() -> None:
    assert set(_GIVES_BACK) == set(RequestPhase) - {RequestPhase.FINISHED}


@pytest.mark.parametrize("phase", [RequestPhase.WAITING, RequestPhase.PREFILL, RequestPhase.DECODE])
def test_a_request_that_ends_in_any_phase_gives_back_all_that_it_has(phase: RequestPhase) -> None:
    sim = Simulation(chunked_prefill_size=4, disable_prefix_cache=True)
    sim.add("r", [1] * 12)
    request = sim.scheduler.requests["r"]
    while request.phase is not phase:
        sim.step()
    sim.end(sim.scheduler.abort(Abort("r")))
    scheduler = sim.scheduler
    assert request.phase is RequestPhase.FINISHED
    assert not scheduler.requests and not scheduler.waiting and not scheduler.running
    assert scheduler.resources.num_available == sim.limits.num_pages
    assert len(scheduler.resources.free_slots) == sim.limits.max_running_requests
    assert find_problems(scheduler) == []


def test_the_invariants_find_a_page_and_a_slot_with_two_owners() -> None:
    sim = Simulation(disable_prefix_cache=True)
    sim.add("r", [1, 2, 3])
    sim.step()
    (request,) = sim.scheduler.running.values()
    sim.scheduler.resources.free(request.pages)
    sim.scheduler.resources.free_slots.append(request.slot)
    assert find_problems(sim.scheduler) == [
        f"page {request.pages[0]} belongs to the free list and to request r",
        f"slot {request.slot} belongs to the free list and to request r",
    ]


# --- length-aware prefill ---

LAPS = LapsLimits(threshold=6, long_share=0.3, slo_s=0.05, blocking_s=0.02, window_s=0.0)


def test_first_tokens_of_long_prompts_are_marked() -> None:
    sim = Simulation(laps=LAPS)
    sim.add("short", [1, 2, 3])
    sim.add("long", [4] * 30)
    marked = []
    while sim.launch() is not None:
        marked += sim.apply().long
    assert marked == ["long"]


def test_the_rest_of_a_cached_prompt_decides_its_class() -> None:
    sim = Simulation(laps=LAPS)
    sim.add("first", [1] * 40)
    sim.run()
    sim.add("again", [1] * 40 + [2, 3])
    assert sim.scheduler.requests["again"].prompt_class == "short"
    sim.add("other", [2] * 40)
    assert [r.rid for r in sim.scheduler.waiting.of("long")] == ["other"]
    sim.run()


def test_steps_that_were_timed_at_start_decide_the_class_of_the_first_prompt() -> None:
    device = Coefficients(floor=0.005, start=0.001, per_token=1e-4)  # the floor is that of 40 tokens
    works = [NO_WORK.plus(tokens, 0) for tokens in (1, 1, 1, 1, 50, 100, 200)]
    times = [StepTime(work, seconds_of(device, work)) for work in works]
    classes = []
    for known in ([], times):
        limits = structs.replace(Simulation(laps=LAPS).limits, max_seq_len=500)
        scheduler = Scheduler(limits, EngineConfig(), step_times=known)
        for rid, tokens in (("hidden behind the weights", 25), ("long", 100)):
            message = AddRequest(
                rid=rid, prompt=pack_ids([1] * tokens), params=SamplingParams(max_new_tokens=1)
            )
            scheduler.add(message, 1.0)
            classes.append(scheduler.requests[rid].prompt_class)
    assert classes == ["long", "long", "short", "long"]


def test_a_long_prompt_becomes_short_when_another_request_has_computed_it() -> None:
    sim = Simulation(laps=LAPS, max_running_requests=1)
    sim.add("first", [1] * 40, max_new_tokens=20)
    sim.step()
    sim.add("again", [1] * 40, max_new_tokens=2)
    assert sim.scheduler.requests["again"].prompt_class == "long"
    for _ in range(20):
        sim.step()
    assert sim.scheduler.requests["again"].prompt_class == "short"
    sim.run()
