"""What a scheduler tells routers of its load."""

from __future__ import annotations

import pytest

from segue.config import EngineConfig
from segue.laps.cost import Coefficients
from segue.messages.control import EngineLimits
from segue.messages.requests import AddRequest, SamplingParams, pack_ids
from segue.scheduler.load import load_of, queued_seconds
from segue.scheduler.scheduler import Scheduler

LIMITS = EngineLimits(
    num_pages=64, page_size=4, max_seq_len=128, max_running_requests=4, chunked_prefill_size=16
)
COSTS = Coefficients(floor=0.01, start=0.002, per_token=0.001, per_pair=0.0, per_kv=0.0)


def test_prompts_that_share_a_step_pay_its_floor_once() -> None:
    assert queued_seconds(COSTS, 8, 0.0, 16) == pytest.approx(0.01)
    assert queued_seconds(COSTS, 64, 0.0, 16) == pytest.approx(4 * 0.002 + 64 * 0.001)
    assert queued_seconds(COSTS, 0, 0.0, 16) == 0.0


def test_pairs_of_attention_come_on_top() -> None:
    costs = COSTS._replace(per_pair=0.5)
    assert queued_seconds(costs, 8, 10.0, 16) == pytest.approx(5.01)


def test_an_idle_scheduler_has_no_work_and_free_pages() -> None:
    found = load_of(Scheduler(LIMITS, EngineConfig()), 7, {})
    assert (found.call, found.load.queued_s, found.load.decode_rows, found.load.taken_pages) == (7, 0.0, 0, 0)
    assert (found.load.num_pages, found.num_flushes, found.identity.commits) == (64, 0, 0)


def test_a_request_that_was_planned_takes_pages_and_decodes() -> None:
    scheduler = Scheduler(LIMITS, EngineConfig())
    prompt = pack_ids(list(range(6)))
    scheduler.add(AddRequest(rid="r", prompt=prompt, params=SamplingParams(max_new_tokens=9)), 0.0)
    assert scheduler.plan(0.0) is not None
    load = load_of(scheduler, 1, {}).load
    assert (load.decode_rows, load.decode_kv) == (1, 6)
    assert load.taken_pages >= 2


def test_a_flush_is_counted() -> None:
    scheduler = Scheduler(LIMITS, EngineConfig())
    scheduler.forget_cache()
    assert load_of(scheduler, 1, {}).num_flushes == 1
