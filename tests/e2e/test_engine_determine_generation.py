"""Interrupted generation of `segue.Engine` gives the tokens of uninterrupted generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import segue
from tests.e2e.engines import begin, bits, greedy, interrupted, results, until
from tests.support.held_steps import hold_here
from tests.support.sensitive_model import write_sensitive_model

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "A list of animals: a dog, a cat,",
    "My favourite book is",
    "In the year 2050",
    "Two and two make",
]
COUNT = 60
LOGPROBS = {"return_logprob": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "deterministic": {"deterministic": True, "chunked_prefill_size": 64},
    "small chunks and pages": {  # not batch-invariant: only tokens and texts must be equal
        "chunked_prefill_size": 4,
        "page_size": 4,
        "precompile_bs_paddings": [4],
        "precompile_token_paddings": [4],
    },
}


@pytest.fixture(
    scope="module", params=["deterministic", pytest.param("small chunks and pages", marks=pytest.mark.slow)]
)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[segue.Engine]:
    model = write_sensitive_model(tmp_path_factory.mktemp("model") / "sensitive-model")
    options = {"dtype": "float32", "num_kv_tokens": 1024, "max_running_requests": 6, "log_level": "warning"}
    with segue.Engine(str(model), embedded=True, **options, **SETTINGS[request.param]) as engine:
        yield engine


@pytest.fixture(scope="module")
def baseline(engine: segue.Engine) -> list[Any]:
    """Returns all replies without a pause."""
    return results(begin(engine, PROMPTS, greedy(COUNT), **LOGPROBS))


def assert_same(engine: segue.Engine, replies: list[Any], baseline: list[Any]) -> None:
    for reply, expected in zip(replies, baseline, strict=True):
        assert reply["output_ids"] == expected["output_ids"]
        assert reply["text"] == expected["text"]
    if engine.config.deterministic:
        assert bits(replies) == bits(baseline)


def aborted(engine: segue.Engine, prompts: list[str]) -> list[Any]:
    """Returns the replies of requests that a pause aborts once all of them run."""
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        gate = hold_here(Path(directory) / "steps", patch)
        gate.close_after(COUNT - 1)  # none can end before the pause
        futures = begin(engine, prompts, greedy(COUNT), **LOGPROBS)
        until(engine, running_batch_rids=list(futures), chunked_req_is_none=True)
        engine.pause_generation("abort")
    replies = results(futures)
    engine.continue_generation()
    return replies


def assert_prefixes(replies: list[Any], baseline: list[Any]) -> None:
    for reply, expected in zip(replies, baseline, strict=True):
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(reply["output_ids"]) < COUNT
        assert reply["output_ids"] == expected["output_ids"][: len(reply["output_ids"])]
        assert expected["text"].startswith(reply["text"])


def test_one_retracted_request_equals_the_uninterrupted_one(
    engine: segue.Engine, baseline: list[Any]
) -> None:
    replies = interrupted(engine, PROMPTS[:1], greedy(COUNT), pauses=2, random=Random(1), **LOGPROBS)
    assert_same(engine, replies, baseline[:1])


def test_one_aborted_request_is_a_prefix_of_the_uninterrupted_one(
    engine: segue.Engine, baseline: list[Any]
) -> None:
    assert_prefixes(aborted(engine, PROMPTS[:1]), baseline[:1])
    assert_same(engine, [engine.generate(PROMPTS[0], greedy(COUNT), **LOGPROBS)], baseline[:1])


def test_many_retracted_requests_equal_the_uninterrupted_ones(
    engine: segue.Engine, baseline: list[Any]
) -> None:
    replies = interrupted(engine, PROMPTS, greedy(COUNT), pauses=3, random=Random(2), **LOGPROBS)
    assert_same(engine, replies, baseline)


def test_many_aborted_requests_are_prefixes_of_the_uninterrupted_ones(
    engine: segue.Engine, baseline: list[Any]
) -> None:
    assert_prefixes(aborted(engine, PROMPTS), baseline)
    assert_same(engine, results(begin(engine, PROMPTS, greedy(COUNT), **LOGPROBS)), baseline)
