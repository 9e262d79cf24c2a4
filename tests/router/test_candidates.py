"""What each worker would cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from segue.laps.cost import StepWork, seconds_of
from segue.router.candidates import BLOCKS, LACKING_S, TAKEN_S, Candidates, find_candidates, recomputing
from segue.router.choice import Ask, RoutingRules
from segue.router.fleet import SAME_HOST_BYTES_S, FleetSnapshot, Held, WorkerView
from tests.router.workers import DEVICE, KV_BYTES, PAGE, ask, view


def found(request: Ask, *workers: WorkerView, held: Any = None, **rules: Any) -> Candidates:
    return find_candidates(
        request, FleetSnapshot(workers=workers, held=held or {}), 0.0, RoutingRules(**rules)
    )


def prompt_s(tokens: int, history: int = 0) -> float:
    return seconds_of(DEVICE, StepWork().plus(tokens, history))


def test_a_prefill_worker_costs_what_waits_what_was_sent_since_and_the_prompt() -> None:
    held = {"p": Held(3, 250_000, 0)}
    (candidate,) = found(ask(2000), view("p", "prefill", queued_s=1.0), held=held).prefill
    assert candidate.cost == pytest.approx(1.0 + 0.25 + prompt_s(2000))
    assert candidate.seconds == pytest.approx(prompt_s(2000)) and not candidate.is_whole


def test_tokens_in_the_prefix_cache_cost_only_as_history() -> None:
    (candidate,) = found(ask(2000, hits={"p": 1000}), view("p", "prefill")).prefill
    assert candidate.hit == 960  # whole pages
    assert candidate.seconds == pytest.approx(prompt_s(1040, 960))


def test_the_last_token_is_never_in_the_cache() -> None:
    (candidate,) = found(ask(2 * PAGE, hits={"p": 2 * PAGE}), view("p", "prefill")).prefill
    assert candidate.hit == PAGE


def test_a_decode_worker_costs_its_taken_pages_its_steps_and_the_transfer() -> None:
    held = {"d": Held(1, 0, 10 * PAGE)}
    worker = view("d", "decode", taken_pages=30, num_pages=100, step_s=0.02)
    (candidate,) = found(ask(20 * PAGE, hits={"d": 4 * PAGE}), worker, held=held).decode
    way = 16 * PAGE * KV_BYTES / SAME_HOST_BYTES_S
    assert candidate.cost == pytest.approx(0.6 * TAKEN_S + 0.02 + way)


def test_pages_that_lack_cost_much_more_than_taken_ones() -> None:
    worker = view(
        "d", "decode", taken_pages=100, num_pages=100, step_s=0.0, record_fields={"kv_bytes_per_token": 0}
    )
    (candidate,) = found(ask(20 * PAGE), worker).decode
    assert candidate.cost == pytest.approx(1.2 * TAKEN_S + 0.2 * LACKING_S)


def test_a_worker_for_whole_requests_costs_both_without_a_transfer() -> None:
    worker = view("u", taken_pages=30, num_pages=100, step_s=0.02, queued_s=0.5)
    (candidate,) = found(ask(20 * PAGE), worker).prefill
    assert candidate.is_whole
    assert candidate.cost == pytest.approx(0.5 + prompt_s(20 * PAGE) + 0.5 * TAKEN_S + 0.02)


def test_one_token_is_made_by_a_prefill_worker_alone() -> None:
    (candidate,) = found(ask(max_new_tokens=1), view("p", "prefill")).prefill
    assert candidate.is_whole


def test_a_worker_of_the_other_group_costs_the_overflow_more() -> None:
    short, long = replace(view("s", "prefill"), group="short"), replace(view("l", "prefill"), group="long")
    for tokens, inside in ((100, "s"), (5000, "l")):
        for candidate in found(ask(tokens), short, long, laps_overflow_s=0.5).prefill:
            assert candidate.is_outside == (candidate.id != inside)
            more = (
                0.5 if inside == "s" else 0.5 + BLOCKS * prompt_s(tokens)
            )  # a long prompt blocks short ones
            assert candidate.cost == pytest.approx(prompt_s(tokens) + more * candidate.is_outside)
            assert candidate.prompt_class == ("short" if inside == "s" else "long")


def test_the_class_of_a_prompt_depends_on_what_the_worker_has_of_it() -> None:
    long = replace(view("l", "prefill"), group="long")
    (candidate,) = found(ask(5000, hits={"l": 4900}), long).prefill
    assert candidate.prompt_class == "short"


@pytest.mark.parametrize(
    ("tokens", "hit", "rows", "is_local"),
    [
        (1000, 960, 0, True),
        (1000, 0, 0, False),  # nothing is there
        (100, 0, 0, False),  # short prompts belong to prefill workers
        (1000, 640, 0, False),  # 360 tokens are left
        (1000, 768, 400, True),
    ],
)
def test_a_decode_worker_computes_the_end_of_a_prompt_that_it_has(
    tokens: int, hit: int, rows: int, is_local: bool
) -> None:
    worker = view("d", "decode", decode_rows=rows, decode_kv=100 * rows)
    assert bool(found(ask(tokens, hits={"d": hit}), worker).local) == is_local


def test_a_decode_worker_whose_steps_would_grow_too_much_computes_nothing() -> None:
    slow = DEVICE._replace(per_token=1e-4)
    worker = view("d", "decode", decode_rows=100, coefficients=slow)
    request = ask(1000, hits={"d": 768})
    assert not found(request, worker).local  # 232 tokens: 23 ms
    assert found(request, worker, local_growth_s=0.03).local


def test_how_much_a_step_grows_depends_on_what_it_computes_already() -> None:
    """The arithmetic of 232 tokens hides behind the reading of the weights only if few others do."""
    slow, request = DEVICE._replace(per_token=4.5e-5), ask(1000, hits={"d": 768})
    for rows, is_local in ((0, True), (200, False)):
        worker = view("d", "decode", decode_rows=rows, coefficients=slow)
        assert bool(found(request, worker).local) == is_local


def test_computing_again_costs_the_wait_and_the_prompt_instead_of_the_transfer() -> None:
    request, worker = ask(20 * PAGE), view("d", "decode", queued_s=0.3, num_pages=100, step_s=0.0)
    (candidate,) = found(request, worker).decode
    again = recomputing(request, candidate, FleetSnapshot(workers=[worker]), 0.0)
    assert again.seconds == pytest.approx(prompt_s(20 * PAGE))
    assert again.cost == pytest.approx(0.2 * TAKEN_S + 0.3 + prompt_s(20 * PAGE))


def test_a_request_that_does_not_fit_names_both_lengths() -> None:
    small = {"max_seq_len": 1050}
    workers = [view("u", record_fields=small), view("p", "prefill", record_fields=small)]
    candidates = found(ask(1000, 100), *workers)
    assert candidates.reasons == [("u", "the request needs 1100 tokens, and its context has 1050")]
    assert [each.id for each in candidates.prefill] == ["p"]  # it needs room for one token


def test_a_worker_that_has_failed_at_the_request_is_left_out() -> None:
    candidates = found(ask(tried=frozenset({"a"})), view("a"), view("b"))
    assert candidates.reasons == [("a", "it has failed at this request")]
    assert [each.id for each in candidates.prefill] == ["b"]
