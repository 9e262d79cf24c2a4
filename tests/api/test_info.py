"""The shapes of loads and configurations, from what an engine says of itself."""

from __future__ import annotations

from typing import Any

import pytest

from segue.api.info import LoadsQuery, get_load, load_of, loads
from segue.api.validation import parse
from segue.errors import InvalidRequestError
from segue.messages.control import Counters, EngineLimits, Ready

READY = Ready(
    limits=EngineLimits(
        num_pages=10, page_size=16, max_seq_len=64, max_running_requests=4, chunked_prefill_size=32
    ),
    vocab_size=9,
    device="cpu",
    dtype="float32",
    attention_backend="cpu",
    weight_bytes=1 << 30,
    kv_bytes=1 << 29,
    init_steps=[],
)
STATE = {
    "running_batch_size": 2,
    "waiting_queue_size": 1,
    "num_waiting_uncached_tokens": 30,
    "num_used_tokens": 80,
    "retracted_queue_size": 1,
    "last_gen_throughput": 5.5,
    "engine_paused": True,
    "role": "decode",
    "disagg_prefill_bootstrap_queue_size": 0,
    "disagg_prefill_inflight_queue_size": 0,
    "disagg_decode_prealloc_queue_size": 3,
    "disagg_decode_transfer_queue_size": 0,
}


def load(in_flight: int = 3) -> dict[str, Any]:
    counters = Counters(prompt_tokens=200, cached_tokens=50)
    return load_of(STATE, READY, counters, in_flight=in_flight, now=7.0)


def test_a_load_has_what_routers_read() -> None:
    found = load()
    assert (found["num_running_reqs"], found["num_waiting_reqs"], found["num_total_reqs"]) == (2, 1, 3)
    assert (found["num_used_tokens"], found["num_total_tokens"]) == (80, 110)
    assert (found["max_total_num_tokens"], found["token_usage"], found["utilization"]) == (160, 0.5, 0.5)
    assert (found["cache_hit_rate"], found["gen_throughput"], found["dp_rank"]) == (0.25, 5.5, 0)
    assert found["memory"] == {"weight_gb": 1, "kv_cache_gb": 0.5, "graph_gb": 0, "token_capacity": 160}
    assert (found["disaggregation"]["mode"], found["disaggregation"]["decode_prealloc_queue_reqs"]) == (
        "decode",
        3,
    )
    assert found["queues"] == {"waiting": 1, "grammar": 0, "paused": 3, "retracted": 1}


def test_requests_that_the_scheduler_does_not_have_yet_count_as_waiting() -> None:
    assert load(in_flight=7)["num_waiting_reqs"] == 5


@pytest.mark.parametrize(
    ("include", "has"),
    [
        (None, {"memory", "disaggregation", "queues"}),
        ("all", {"memory", "disaggregation", "queues"}),
        ("core", set()),
        ("core, queues", {"queues"}),
        ("disagg,spec,lora", {"disaggregation"}),
    ],
)
def test_sections_are_left_out(include: str | None, has: set[str]) -> None:
    (shown,) = loads([load()], LoadsQuery(include=include), 2)["loads"]
    assert {name for name in shown if isinstance(shown[name], dict)} == has
    assert shown["num_total_reqs"] == 3


def test_the_ranks_are_added_up_and_can_be_chosen() -> None:
    ranks = [load(), load() | {"dp_rank": 1, "num_running_reqs": 0, "token_usage": 0.1}]
    answer = loads(ranks, LoadsQuery(), 2)
    assert (answer["dp_rank_count"], answer["num_accelerators"]) == (2, 2)
    assert answer["aggregate"]["total_running_reqs"] == 2
    assert answer["aggregate"]["avg_token_usage"] == pytest.approx(0.3)
    assert [each["dp_rank"] for each in loads(ranks, LoadsQuery(dp_rank=1), 2)["loads"]] == [1]
    assert loads(ranks, LoadsQuery(dp_rank=5), 2)["loads"] == []
    assert get_load(ranks)[1] == {"dp_rank": 1, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 110}


@pytest.mark.parametrize(
    ("query", "word"),
    [({"include": "core,cores"}, "'cores'; choose of core"), ({"format": "prometheus"}, "/metrics")],
)
def test_a_wrong_query_is_named(query: dict[str, str], word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        parse(LoadsQuery, query, coerces=True)
