"""SmolLM2 in float32 is compared with transformers, token by token, with default options and under stress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import segue
from tests.e2e.teacher import Verdict, greedy, judge
from tests.fixtures import reference
from tests.fixtures.reference import NUM_TOKENS, NUM_TOP, Case

pytestmark = pytest.mark.timeout(300)

REFERENCE = reference.load()
CASES = REFERENCE.cases
LOGPROB_TOLERANCE = 1e-4
WITH_LOGPROBS: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": NUM_TOP}
# KV tokens for the longest request (584) and little more, so that running requests are preempted.
TIGHT = 1000
LONG = ("harbour-ferry", "harbour-summary")  # prompts that share their first 400 tokens
LAPS: dict[str, Any] = {
    "enable_laps_scheduler": True,
    "laps_length_threshold": 32,
    "laps_max_blocking_ms": 50.0,
    "chunked_prefill_size": 64,
}


@dataclass(frozen=True, slots=True)
class Setup:
    """Options of an engine, and the events that a run needs to be a valid test of them."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    logprobs: bool = False  # whether requests ask for logprobs, which takes another sampling mode
    preempts: bool = False
    caches: bool = True
    cases: Sequence[Case] = CASES


SETUPS = (
    Setup("plain"),
    Setup(
        "page-1-chunk-16-no-prefix-cache",
        {"page_size": 1, "chunked_prefill_size": 16, "disable_prefix_cache": True},
        caches=False,
    ),
    Setup(
        "page-4-chunk-16-preempted-logprobs",
        {"page_size": 4, "chunked_prefill_size": 16, "num_kv_tokens": TIGHT},
        logprobs=True,
        preempts=True,
    ),
    Setup(
        "page-16-preempted-no-prefix-cache-no-overlap",
        {"page_size": 16, "num_kv_tokens": TIGHT, "disable_prefix_cache": True, "disable_overlap": True},
        preempts=True,
        caches=False,
    ),
    Setup("tp-3-logprobs", {"tp": 3}, logprobs=True),
    Setup("laps-chunk-64-preempted", {**LAPS, "num_kv_tokens": TIGHT}, preempts=True),
    Setup("laps-no-overlap-tp-3", {**LAPS, "disable_overlap": True, "tp": 3}),
)


def shortened() -> Iterator[Any]:
    """Yields the setups: the short run has some prompts of that with the most stress, and half of them plain.

    Of the long prompts, which take most of the time, that run has two. The slow run has every setup with all
    prompts.
    """
    few = [
        case
        for index, case in enumerate(CASES)
        if case.name in LONG or (index % 3 != 2 and len(case.prompt_ids) < 100)
    ]
    for setup in SETUPS:
        is_stressed = setup.preempts and setup.caches and not setup.options.get("enable_laps_scheduler")
        if setup is SETUPS[0] or is_stressed:
            yield pytest.param(replace(setup, cases=few if is_stressed else few[::2]), id=setup.name)
        yield pytest.param(setup, id=f"{setup.name}-all", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=shortened())
def running(request: pytest.FixtureRequest) -> Iterator[tuple[Setup, Any]]:
    """Yields one engine per setup; pytest runs all tests of a setup before it starts the next."""
    setup: Setup = request.param
    with segue.Engine(dtype="float32", **setup.options) as engine:
        yield setup, engine


@pytest.fixture(scope="module")
def verdict(running: tuple[Setup, Any]) -> Verdict:
    """Judges all prompts of the setup at once."""
    setup, engine = running
    return judge(engine, setup.cases, **(WITH_LOGPROBS if setup.logprobs else {}))


def state(engine: Any) -> dict[str, Any]:
    internal: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return internal


def test_every_token_equals_the_reference(verdict: Verdict) -> None:
    print("excused as near ties:", verdict.excused or "none")
    assert verdict.wrong == []


def test_free_running_text_equals_the_reference(running: tuple[Setup, Any], verdict: Verdict) -> None:
    assert len(verdict.different_texts) <= len(running[0].cases) // 15, verdict.different_texts


def test_logprobs_equal_the_reference(running: tuple[Setup, Any], verdict: Verdict) -> None:
    setup, engine = running
    cases, replies = setup.cases, verdict.first_round
    if not setup.logprobs:
        cases = [case for case in CASES if len(case.prompt_ids) <= 40][::3]
        prompts = [case.prompt_ids for case in cases]
        replies = engine.generate(input_ids=prompts, sampling_params=greedy(NUM_TOKENS), **WITH_LOGPROBS)
    compared, worst = 0, 0.0
    for case, reply in zip(cases, replies, strict=True):
        chosen = reply["meta_info"]["output_token_logprobs"]
        alternatives = reply["meta_info"]["output_top_logprobs"]
        for position, token in enumerate(reply["output_ids"]):
            if token != case.output_ids[position]:
                break
            ours = [chosen[position][0], *(entry[0] for entry in alternatives[position])]
            theirs = [case.logprobs[position], *case.top_logprobs[position]]
            worst = max(worst, *(abs(a - b) for a, b in zip(ours, theirs, strict=True)))
            assert chosen[position][1] == token
            compared += 1
    print(f"{compared} positions, largest difference {worst:.2e}")
    assert compared >= 0.9 * len(cases) * NUM_TOKENS
    assert worst <= LOGPROB_TOLERANCE


def test_prompt_logprobs_equal_the_reference(running: tuple[Setup, Any], verdict: Verdict) -> None:
    """The reference's output has the same logprobs as part of a prompt as when it was generated."""
    case = REFERENCE.case("turns")
    start = len(case.prompt_ids)
    reply = running[1].generate(
        input_ids=case.prompt_ids + case.output_ids,
        sampling_params=greedy(1),
        return_logprob=True,
        logprob_start_len=start - 1,
    )
    found = reply["meta_info"]["input_token_logprobs"][-NUM_TOKENS:]
    assert [entry[1] for entry in found] == case.output_ids
    assert (
        max(abs(entry[0] - right) for entry, right in zip(found, case.logprobs, strict=True))
        <= LOGPROB_TOLERANCE
    )


def test_the_stress_took_place(running: tuple[Setup, Any], verdict: Verdict) -> None:
    setup, engine = running
    assert (state(engine)["num_preemptions"] > 0) == setup.preempts
    if setup.options.get("enable_laps_scheduler"):
        assert min(state(engine)["laps"]["picks"][reason] for reason in ("short", "long")) > 0
    else:
        assert state(engine)["laps"] is None
    case = REFERENCE.case("turns")
    for _ in range(2):
        reply = engine.generate(input_ids=case.prompt_ids, sampling_params=greedy(1))
    assert (reply["meta_info"]["cached_tokens"] > 0) == setup.caches


def test_no_request_remains(running: tuple[Setup, Any], verdict: Verdict) -> None:
    internal = state(running[1])
    assert (internal["running_batch_size"], internal["waiting_queue_size"]) == (0, 0)
    assert internal["req_to_token_pool_used"] == 0
