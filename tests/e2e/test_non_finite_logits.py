"""A model that overflows after one token: requests with that token get an error, all others a reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import segue
from segue.errors import NonFiniteLogitsError
from tests.e2e.overflowing_model import POISON, write_overflowing_model
from tests.e2e.served import Served, serve
from tests.support.held_steps import StepGate

OPTIONS = {"dtype": "float32", "page_size": 4, "num_kv_tokens": 2048}
CLEAN, POISONED = [70, 71, 72, 73, 74, 75], [70, 71, 72, 73, POISON, 75]
TO_POISON = {"logit_bias": {str(POISON): 100.0}}  # makes it the first token of the output
SOON_POISON = {"max_new_tokens": 300, "temperature": 1.0, "logit_bias": {str(POISON): 3.0}}  # after a while
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {"temperature": 1.0},
    "filtered": {"temperature": 1.0, "top_k": 5},
    "full": {"temperature": 1.0, "presence_penalty": 0.5},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_overflowing_model(tmp_path_factory.mktemp("overflowing") / "tiny")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> StepGate:
    """The gate of the server's steps."""
    return StepGate(tmp_path_factory.mktemp("gate") / "steps")


@pytest.fixture(scope="module")
def served(model: Path, log: Path, gate: StepGate) -> Iterator[Served]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    with log.open("w") as file, serve("--model", str(model), *options, log=file, gate=gate) as served:
        yield served


@pytest.fixture(scope="module", params=[{}, {"deterministic": True}, {"disable_overlap": True}], ids=str)
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[segue.Engine]:
    with segue.Engine(str(model), embedded=True, **OPTIONS, **request.param) as engine:
        yield engine


def generate(served: Served, ids: Any, **fields: Any) -> httpx.Response:
    params = {"max_new_tokens": 6, "ignore_eos": True} | fields.pop("params", {})
    body = {"input_ids": ids, "sampling_params": params} | fields
    return httpx.post(f"{served.url}/generate", json=body, timeout=30)


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_overflows_is_an_error_and_a_clean_prompt_is_not(
    engine: segue.Engine, kind: str
) -> None:
    params = {"max_new_tokens": 4, "ignore_eos": True} | KINDS[kind]
    with pytest.raises(NonFiniteLogitsError, match="output token 1 of request mine are not finite"):
        engine.generate(input_ids=POISONED, sampling_params=params, rid="mine")
    params["sampling_seed"] = 7  # with other seeds the poison may be drawn
    assert len(engine.generate(input_ids=CLEAN, sampling_params=params)["output_ids"]) == 4
    with pytest.raises(NonFiniteLogitsError):
        list(engine.generate(input_ids=POISONED, sampling_params=params, stream=True))


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_overflows_is_an_error(engine: segue.Engine, kind: str) -> None:
    params = {"max_new_tokens": 4, "ignore_eos": True} | KINDS[kind]
    with pytest.raises(NonFiniteLogitsError, match="output token 2 of"):
        engine.generate(input_ids=CLEAN, sampling_params=params | {"logit_bias": {POISON: 100.0}})


def test_prompt_logprobs_that_overflow_are_an_error(engine: segue.Engine) -> None:
    with pytest.raises(NonFiniteLogitsError):
        engine.generate(
            input_ids=POISONED,
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )


def test_requests_beside_an_overflowing_one_get_the_replies_that_they_get_alone(engine: segue.Engine) -> None:
    params = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
    prompts = [[*CLEAN, token] for token in range(80, 84)]
    alone = [engine.generate(input_ids=prompt, sampling_params=params)["output_ids"] for prompt in prompts]

    def ask(prompt: list[int]) -> Any:
        try:
            return engine.generate(input_ids=prompt, sampling_params=params)["output_ids"]
        except NonFiniteLogitsError:
            return None

    assert engine.flush_cache(timeout=10).success
    with ThreadPoolExecutor(8) as pool:
        mixed = [each for prompt in prompts for each in (prompt, [*POISONED, prompt[-1]])]
        results = list(pool.map(ask, mixed))
    assert results[::2] == alone
    assert results[1::2] == [None] * 4


def test_http_answers_500_with_the_code(served: Served) -> None:
    native = generate(served, POISONED)
    assert (native.status_code, native.json()["type"]) == (500, "non_finite_logits")
    for route, prompt in (
        ("completions", {"prompt": POISONED}),
        ("chat/completions", {"messages": [{"role": "user", "content": "Hello"}], **TO_POISON}),
    ):
        body = {"model": "tiny", "max_tokens": 6, "ignore_eos": True, **prompt}
        reply = httpx.post(f"{served.url}/v1/{route}", json=body, timeout=30)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "non_finite_logits")


def streamed(served: Served, gate: StepGate, path: str, **body: Any) -> str:
    """Returns a stream's lines. The tokens behind the first ones come once the client has an event."""
    gate.close_after(5)
    with httpx.stream("POST", f"{served.url}{path}", json=body | {"stream": True}, timeout=30) as reply:
        lines = reply.iter_lines()
        first = next(lines)
        gate.open()
        return "\n".join([first, *lines])


def test_a_stream_ends_with_an_error_event(served: Served, gate: StepGate) -> None:
    params = {"ignore_eos": True, "sampling_seed": 1, **SOON_POISON}
    native = streamed(served, gate, "/generate", input_ids=CLEAN, sampling_params=params)
    *before, last = events(native)
    assert (last["object"], last["type"]) == ("error", "non_finite_logits")
    assert len(before[-1]["output_ids"]) > 5
    body = {"model": "tiny", "prompt": CLEAN, "ignore_eos": True, "seed": 1, "max_tokens": 300}
    reply = streamed(served, gate, "/v1/completions", **body, logit_bias=SOON_POISON["logit_bias"])
    assert events(reply)[-1]["error"]["code"] == "non_finite_logits"
    assert "[DONE]" not in native + reply


def test_a_stream_that_fails_before_its_first_token_is_a_500(served: Served) -> None:
    reply = generate(served, POISONED, stream=True)
    assert (reply.status_code, reply.json()["type"]) == (500, "non_finite_logits")


def test_overflows_are_counted_each_time_and_logged_once(served: Served, log: Path) -> None:
    def counted() -> float:
        lines = served.get("/metrics").text.splitlines()
        return float(
            next(line for line in lines if line.startswith("segue:non_finite_logits_total")).split()[-1]
        )

    before = counted()
    for _ in range(3):
        generate(served, POISONED)
    assert counted() == before + 3
    assert log.read_text().count("logits were not finite") == 1
    assert served.get("/health").status_code == 200
