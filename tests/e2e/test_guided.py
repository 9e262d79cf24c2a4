"""Guided output of a real engine on a small model: it keeps to its grammar, whatever interrupts it."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
import torch

import segue
from bench.guided import BATCH, answer, is_valid, random_schema
from segue.errors import GuideLostError, InvalidRequestError
from segue.guided.follower import Guide
from segue.guided.processes import _Running
from segue.messages.control import PauseMode
from segue.model_runner import runner, startup
from segue.model_runner.executor import CUDAStream
from tests.conftest import WaitUntil
from tests.e2e.engines import state, until
from tests.support.fake_engine import assert_nothing_left
from tests.support.held_steps import hold_here

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "device": "cpu",
    "page_size": 4,
    "num_kv_tokens": 512,
    "max_running_requests": 8,
    "chunked_prefill_size": 24,
    "deterministic": True,
    "log_level": "error",
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PROMPTS = ["Hello world", "The capital of France is", "numbers 0 1 2"]
LONG = [
    {"regex": "([0-9]{3}-){29}[0-9]"},
    {"ebnf": 'root ::= ("x" | "y" [0-9]){60,90}'},
    {"regex": "[ab]{90,120}"},
]


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[segue.Engine]:
    with segue.Engine(model=str(tiny_model), embedded=True, **OPTIONS) as engine:
        yield engine


@pytest.fixture
def engine(shared: segue.Engine) -> Iterator[segue.Engine]:
    yield shared
    shared.continue_generation()
    assert shared.flush_cache(timeout=10).success
    assert_nothing_left(shared)


def drawn(count: int = 100, **more: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "sampling_seed": 3, "max_new_tokens": count} | more


def reason(reply: Any) -> str:
    kind: str = reply["meta_info"]["finish_reason"]["type"]
    return kind


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 5.0},
        {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "frequency_penalty": 1.0},
    ],
)
def test_rows_of_one_batch_keep_each_to_its_own_grammar(
    engine: segue.Engine, options: dict[str, Any]
) -> None:
    params = drawn(50, **options)
    guides: list[dict[str, Any]] = [
        {"json_schema": PERSON},
        {},
        {"regex": "[a-c]{2,4}|é{1,3}x"},
        {"ebnf": 'root ::= "yes" | "no"'},
    ]
    unguided = engine.generate(PROMPTS[0], params)
    replies = engine.generate(PROMPTS[:1] * 4, [params | guide for guide in guides], return_logprob=True)
    jsonschema.validate(json.loads(replies[0]["text"]), PERSON)
    assert replies[1]["output_ids"] == unguided["output_ids"]
    assert re.fullmatch("[a-c]{2,4}|é{1,3}x", replies[2]["text"]) and replies[3]["text"] in ("yes", "no")
    assert [reason(replies[index]) for index in (0, 2, 3)] == ["stop"] * 3
    for reply in replies:  # of the model's own distribution, as with penalties
        assert all(logprob > -100 for logprob, _, _ in reply["meta_info"]["output_token_logprobs"])


def test_random_schemas_are_answered_as_they_want_it(engine: segue.Engine) -> None:
    random = Random(1)
    schemas = [random_schema(random, depth=0) for _ in range(8)]
    params = [drawn(120, temperature=0.5, json_schema=schema) for schema in schemas]
    replies = [engine.generate(PROMPTS[:1] * 4, params[at : at + 4]) for at in (0, 4)]
    pairs = zip([*replies[0], *replies[1]], schemas, strict=True)
    ended = [(reply["text"], schema) for reply, schema in pairs if reason(reply) == "stop"]
    assert len(ended) > 3 and all(is_valid(text, schema) for text, schema in ended), ended


def test_each_of_four_choices_fits_the_schema(engine: segue.Engine) -> None:
    params = drawn(100, json_schema=PERSON, n=4)
    replies = engine.generate(PROMPTS[0], params)
    assert [reason(reply) for reply in replies] == ["stop"] * 4
    for reply in replies:
        jsonschema.validate(json.loads(reply["text"]), PERSON)
    assert len({reply["text"] for reply in replies}) > 1, "each draws with a seed of its own"


def test_limits_and_stops_count_as_ever(engine: segue.Engine) -> None:
    cut = engine.generate(PROMPTS[0], drawn(5, regex="[ab]{20}"))
    assert re.fullmatch("[ab]{5}", cut["text"]) and reason(cut) == "length"
    complete = engine.generate(PROMPTS[0], drawn(5, regex="[ab]{5}"))  # no EOS token need follow
    assert re.fullmatch("[ab]{5}", complete["text"]) and reason(complete) == "stop"
    stopped = engine.generate(PROMPTS[0], drawn(regex="[ab]{20}c", stop="c"))
    assert re.fullmatch("[ab]{20}", stopped["text"]) and reason(stopped) == "stop"


@pytest.mark.parametrize("wish", [{"min_new_tokens": 12}, {"ignore_eos": True}])
def test_an_output_ends_early_only_where_its_grammar_leaves_nothing_else(
    engine: segue.Engine, wish: dict[str, Any]
) -> None:
    long = engine.generate(PROMPTS[0], drawn(20, regex="[ab]*", **wish))
    assert len(long["output_ids"]) >= 12 and re.fullmatch("[ab]+", long["text"])
    short = engine.generate(PROMPTS[0], drawn(20, regex="[ab]{1,3}", **wish))
    assert re.fullmatch("[ab]{3}", short["text"]) and reason(short) == "stop"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_interrupted_output_is_the_uninterrupted_one(
    engine: segue.Engine, mode: PauseMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_here(tmp_path / "steps", monkeypatch)
    params = [drawn(200, **guide) for guide in LONG]
    whole = engine.generate(PROMPTS, params)
    engine.pause_generation(mode)
    with ThreadPoolExecutor(1) as thread:
        replies = thread.submit(engine.generate, PROMPTS, params)
        num_interrupted, made = 0, state(engine)["num_generated_tokens"]
        while not replies.done() and num_interrupted < 5:
            gate.close_after(10)  # however late the pause comes
            engine.continue_generation()
            engine.pause_generation(mode)
            now = state(engine)
            num_interrupted += now["num_generated_tokens"] > made
            made = now["num_generated_tokens"]
        gate.open()
        engine.continue_generation()
    assert num_interrupted > 3
    for reply, expected in zip(replies.result(), whole, strict=True):
        assert (reply["output_ids"], reason(reply)) == (expected["output_ids"], "stop")


def test_a_preempted_output_is_the_uninterrupted_one(engine: segue.Engine) -> None:
    params = [drawn(200, regex=f"([ab{digit}]{{25}}-){{3}}") for digit in range(8)]
    alone = [engine.generate(PROMPTS[0], each) for each in params]
    before = state(engine)["num_preemptions"]
    together = engine.generate(PROMPTS[:1] * 8, params)
    assert state(engine)["num_preemptions"] > before
    assert [each["output_ids"] for each in together] == [each["output_ids"] for each in alone]


class HostStream(CUDAStream):
    """Launches steps on a CPU as `CUDAStream` does on CUDA: on the thread that submits them."""

    num_apart = 0

    def __init__(self, device: torch.device) -> None:
        stream: Any = nullcontext()
        stream.synchronize = lambda: None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "Stream", lambda *_, **__: stream)
            super().__init__(device)

    def submit_halves(self, first: Any, *, apart: bool) -> Any:
        HostStream.num_apart += apart
        return super().submit_halves(first, apart=apart)


@pytest.mark.parametrize("processes", [0, 2])
def test_outputs_are_the_same_where_sampling_is_launched_behind_the_next_plan(
    engine: segue.Engine, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    params = [drawn(100, **guide) for guide in [*LONG, {}, {"regex": "[ab]{2}"}, {"top_k": 3}]]
    expected = engine.generate([*PROMPTS, *PROMPTS], params)
    monkeypatch.setattr(runner, "make_stream", HostStream)
    monkeypatch.setattr(startup, "count_for", lambda *_: processes)
    with segue.Engine(model=str(tiny_model), embedded=True, **OPTIONS) as other:
        replies = other.generate([*PROMPTS, *PROMPTS], params)
        plain = other.generate(PROMPTS[0], drawn(30))
        phases = other.get_server_info()["internal_states"][0]["guided_ms"]
    assert HostStream.num_apart > 90 and list(phases) == ["tokens", "consume", "masks", "wait", "launch"]
    assert plain["output_ids"] == expected[3]["output_ids"][:30]
    for reply, same in zip(replies, expected, strict=True):
        assert (reply["output_ids"], reason(reply)) == (same["output_ids"], reason(same))


def test_after_the_end_of_a_process_the_next_guided_request_is_answered(
    engine: segue.Engine, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [drawn(100, **LONG[0]), drawn(100)]
    expected = engine.generate(PROMPTS[:2], params)
    gate = hold_here(tmp_path / "steps", monkeypatch)
    monkeypatch.setattr(runner, "make_stream", HostStream)
    monkeypatch.setattr(startup, "count_for", lambda *_: 2)
    with (
        ThreadPoolExecutor(2) as pool,
        segue.Engine(model=str(tiny_model), embedded=True, **OPTIONS) as other,
    ):
        other.generate(PROMPTS[0], drawn(1, **LONG[0]))  # from then on the processes are ready
        other.pause_generation("in_place")
        guided, plain = (pool.submit(other.generate, PROMPTS[row], params[row]) for row in range(2))
        until(other, waiting_queue_size=2)
        gate.close_after(10)  # however late the other one came, neither has ended before the kill
        other.continue_generation()
        until(other, running_batch_size=2)
        (running,) = (each for each in gc.get_objects() if type(each) is _Running and not each.exit_codes())
        running.processes[0].kill()
        gate.open()
        with pytest.raises(GuideLostError, match="a process that follows grammars has ended by signal"):
            guided.result()
        again = other.generate(PROMPTS[0], params[0])
    assert [again["output_ids"], plain.result()["output_ids"]] == [each["output_ids"] for each in expected]


@pytest.mark.parametrize("mode", ["finished", "aborted"])
def test_what_a_grammar_needs_is_freed_with_its_request(
    engine: segue.Engine, wait_until: WaitUntil, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_here(tmp_path / "steps", monkeypatch)
    with ThreadPoolExecutor(1) as thread:
        if mode == "aborted":
            gate.close_after(10)
        reply = thread.submit(engine.generate, PROMPTS[0], drawn(20, regex="[ab]{499}"))
        if mode == "aborted":
            until(engine, running_batch_size=1)
            engine.pause_generation("abort")
            gate.open()
        assert reason(reply.result()) == ("length" if mode == "finished" else "abort")
    wait_until(lambda: num_matchers() == 0, what="its matcher is freed, although no step follows")


def num_matchers() -> int:
    """Requests whose place in a grammar the engine in this process keeps."""
    return sum(type(each) is Guide and each.matcher is not None for each in gc.get_objects())


def test_a_wrong_grammar_is_an_error_before_anything_is_queued(engine: segue.Engine) -> None:
    for fields, param in (({"regex": "("}, "regex"), ({"json_schema": {"not": {}}}, "json_schema")):
        with pytest.raises(InvalidRequestError) as raised:
            engine.generate([PROMPTS[0]] * 2, [drawn(), drawn(**fields)])
        assert raised.value.param == param
    until(engine, running_batch_size=0, waiting_queue_size=0)


@pytest.mark.slow
def test_two_ranks_draw_what_one_draws(tiny_model: Path, engine: segue.Engine) -> None:
    params = [drawn(200, **guide) for guide in LONG]
    whole = engine.generate(PROMPTS, params)
    with segue.Engine(model=str(tiny_model), tp=2, **OPTIONS) as two:
        assert [each["text"] for each in two.generate(PROMPTS, params)] == [each["text"] for each in whole]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_bundled_model_answers_200_schemas_as_they_want_it(temperature: float) -> None:
    random = Random(0)
    schemas = [random_schema(random) for _ in range(200)]
    with segue.Engine(max_running_requests=BATCH, embedded=True, log_level="error") as bundled:
        outcome = answer(bundled, schemas, temperature)
    assert (len(outcome["ids"]), outcome["wrong"], outcome["cut"]) == (200, [], [])
