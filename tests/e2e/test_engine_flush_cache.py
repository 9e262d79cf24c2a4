"""Flushing the cache of `segue.Engine` restores the state of its start."""

from __future__ import annotations

from typing import Any

import pytest

import segue
from tests.e2e.engines import greedy, state

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4  # several pages
COUNT = 8
RESTORED = (
    "available_kv_tokens",
    "tree_cache_size",
    "req_to_token_pool_used",
    "forward_ct_decode",
    "new_token_ratio",
)
SCHEDULING: dict[str, Any] = {
    "running_batch_size": 0,
    "waiting_queue_size": 0,
    "cur_batch_is_none": True,
    "last_batch_is_none": True,
    "chunked_req_is_none": True,
    "chunked_req_rids": [],
}


@pytest.fixture
def start(engine: segue.Engine) -> dict[str, Any]:
    """Returns the state of an engine that has not run since its last flush, which is that of a new engine."""
    now = state(engine)
    assert [now[name] for name in RESTORED] == [1024, 0, 0, 0, now["init_new_token_ratio"]]
    return {name: now[name] for name in RESTORED}


def assert_restored(engine: segue.Engine, start: dict[str, Any]) -> None:
    now = state(engine)
    assert {name: now[name] for name in RESTORED} == start


def test_a_flush_after_a_generation_restores_the_state(engine: segue.Engine, start: dict[str, Any]) -> None:
    engine.generate(PROMPT, greedy(COUNT))
    used = state(engine)
    assert used["available_kv_tokens"] < start["available_kv_tokens"]
    assert used["tree_cache_size"] > 0 and used["forward_ct_decode"] > 0
    assert used["new_token_ratio"] != start["new_token_ratio"]
    flushed = engine.flush_cache()
    assert (flushed.success, flushed.error_msg) == (True, "")
    assert flushed.flushed_items == used["tree_cache_size"]
    assert_restored(engine, start)


def test_a_flush_clears_the_scheduling_state(engine: segue.Engine, start: dict[str, Any]) -> None:
    engine.generate([PROMPT, "Once upon a time"], greedy(COUNT))
    assert engine.flush_cache().success
    now = state(engine)
    assert {name: now[name] for name in SCHEDULING} == SCHEDULING
    assert_restored(engine, start)


def test_generation_after_a_flush_gives_the_same_tokens(engine: segue.Engine) -> None:
    before = engine.generate(PROMPT, greedy(COUNT))
    assert engine.flush_cache().success
    after = engine.generate(PROMPT, greedy(COUNT))
    assert (after["text"], after["output_ids"]) == (before["text"], before["output_ids"])
    assert len(after["output_ids"]) == COUNT
    assert after["meta_info"]["cached_tokens"] == 0, "the cache must be empty"


def test_repeated_generations_and_flushes_restore_the_state(
    engine: segue.Engine, start: dict[str, Any]
) -> None:
    for number in range(3):
        reply = engine.generate(f"{number}. {PROMPT}", greedy(COUNT))
        assert reply["meta_info"]["completion_tokens"] == COUNT
        assert engine.flush_cache().success
        assert_restored(engine, start)
        now = state(engine)
        assert {name: now[name] for name in SCHEDULING} == SCHEDULING
