"""Pausing and continuing `segue.Engine`."""

from __future__ import annotations

from typing import Any

import segue
from tests.e2e.engines import begin, greedy, results, state, until
from tests.support.held_steps import StepGate

# Each prompt with its output fits a page of 16 tokens.
PROMPTS = ["Once upon a time", "The capital of France is", "A list of animals:"]
RIDS = ["r0", "r1", "r2"]
COUNT = 10


def assert_complete(replies: list[Any], count: int = COUNT) -> None:
    for reply in replies:
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": count}
        assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"]) == count
        assert reply["text"]


def test_retract_mode(engine: segue.Engine, steps_gate: StepGate) -> None:
    steps_gate.close_after(COUNT - 1)
    futures = begin(engine, PROMPTS, greedy(COUNT))
    before = until(engine, running_batch_rids=RIDS)
    engine.pause_generation()  # the default mode is retract
    steps_gate.open()
    after = state(engine)
    assert (after["engine_paused"], after["pause_mode"]) == (True, "retract")
    assert (after["running_batch_size"], after["running_batch_rids"]) == (0, [])
    assert (after["waiting_queue_size"], after["waiting_queue_rids"]) == (3, before["running_batch_rids"])
    assert after["available_kv_tokens"] > before["available_kv_tokens"], "the requests' KV must be freed"
    assert after["req_to_token_pool_used"] == 0
    assert not any(future.done() for future in futures.values())
    engine.continue_generation()
    assert_complete(results(futures))
    assert not state(engine)["engine_paused"]


def test_in_place_mode(engine: segue.Engine, steps_gate: StepGate) -> None:
    steps_gate.close_after(COUNT - 1)
    futures = begin(engine, PROMPTS, greedy(COUNT))
    before = until(engine, running_batch_rids=RIDS)
    engine.pause_generation("in_place")
    steps_gate.open()
    after = state(engine)
    assert (after["engine_paused"], after["pause_mode"]) == (True, "in_place")
    for name in (
        "running_batch_size",
        "running_batch_rids",
        "waiting_queue_size",
        "waiting_queue_rids",
        "available_kv_tokens",
    ):
        assert after[name] == before[name], name
    assert state(engine)["num_generated_tokens"] == after["num_generated_tokens"]
    engine.continue_generation()
    assert_complete(results(futures))


def test_cycles_of_alternating_modes(engine: segue.Engine, steps_gate: StepGate) -> None:
    count = 40
    steps_gate.close_after(8)
    futures = begin(engine, PROMPTS, greedy(count))
    for mode in ("retract", "in_place", "retract", "in_place"):
        until(engine, running_batch_rids=RIDS)
        paused = engine.pause_generation(mode)
        now = state(engine)
        assert paused.mode == now["pause_mode"] == mode
        where = "waiting_queue_rids" if mode == "retract" else "running_batch_rids"
        assert now[where] == RIDS
        steps_gate.close_after(8)
        engine.continue_generation()
    steps_gate.open()
    assert_complete(results(futures), count)


def test_abort_mode(engine: segue.Engine, steps_gate: StepGate) -> None:
    steps_gate.close_after(COUNT - 1)
    futures = begin(engine, [*PROMPTS, *PROMPTS], greedy(COUNT))  # more requests than slots
    until(engine, running_batch_size=4, waiting_queue_size=2)
    paused = engine.pause_generation("abort")
    steps_gate.open()
    assert paused.num_aborted == 6
    now = state(engine)
    assert (now["running_batch_size"], now["waiting_queue_size"]) == (0, 0)
    for reply in results(futures):
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"]) < COUNT
    engine.continue_generation()
    assert_complete([engine.generate(PROMPTS[0], greedy(COUNT))])
