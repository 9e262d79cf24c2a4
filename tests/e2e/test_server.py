"""`segue serve` with the real model and the official client, and its end by `kill -9`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bench.disconnects import soak
from bench.tools import is_perfect, measure, write_template
from tests.conftest import WaitUntil, is_within
from tests.e2e.served import MODEL, Served, serve
from tests.support.held_steps import StepGate
from tests.support.tiny_model import write_model

QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True}
ENDLESS = {
    "model": "small",
    "prompt": "Once upon a time",
    "max_tokens": 8000,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = write_template(tmp_path_factory.mktemp("template"))
    options = ("--dtype", "float32", "--chunked-prefill-size", "256", "--chat-template", str(template))
    with serve(*options) as served:
        yield served


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns the options of a server that starts fast, for what does not depend on the model."""
    model = write_model(tmp_path_factory.mktemp("models") / "small", max_position_embeddings=8192)
    return [f"--model={model}", "--load-format=dummy"]


@pytest.fixture
def served(shared: Served, wait_until: WaitUntil) -> Iterator[Served]:
    yield shared
    wait_until(lambda: shared.state()["req_to_token_pool_used"] == 0, what="an empty engine after the test")


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def test_a_streamed_answer_equals_the_whole_answer(served: Served) -> None:
    ask = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 16}
    whole = served.openai.chat.completions.create(**ask)
    chunks = list(
        served.openai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert "Paris" in streamed and streamed == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_seed_repeats_a_sampled_answer_in_any_batch(served: Served) -> None:
    ask = {"model": MODEL, "prompt": "A list of animals:", "seed": 7, "max_tokens": 12, "temperature": 0.9}
    alone = served.openai.completions.create(**ask).choices[0].text
    others = [{**ask, "prompt": f"Number {n}:", "max_tokens": 20, "seed": n} for n in range(3)]
    threads = [threading.Thread(target=served.openai.completions.create, kwargs=each) for each in others]
    for thread in threads:
        thread.start()
    together = served.openai.completions.create(**ask).choices[0].text
    for thread in threads:
        thread.join()
    assert alone == together


def complete(served: Served, prompt: str, **fields: Any) -> str:
    reply = served.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=10, extra_body=fields)
    return reply.choices[0].text


def test_sampling_narrowed_to_one_token_is_greedy(served: Served) -> None:
    prompt, hot = "A list of animals: dog,", {"temperature": 2, "seed": 1}
    greedy = complete(served, prompt, temperature=0)
    assert complete(served, prompt, **hot) != greedy
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}):
        assert complete(served, prompt, **hot, **narrow) == greedy, narrow


def test_a_penalty_ends_a_repetition(served: Served) -> None:
    prompt = "one two one two one two one two"
    assert complete(served, prompt, temperature=0).count("two") > 5
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        assert complete(served, prompt, temperature=0, **{name: 2}).count("two") < 3, name


def test_a_bias_can_force_and_forbid_a_token(served: Served) -> None:
    token = 5000  # " properly"
    assert complete(served, "Hello", logit_bias={token: 100}) == " properly" * 10
    params = {"temperature": 0, "max_new_tokens": 1}

    def first(**fields: Any) -> int:
        body = {"text": "The capital of France is", "sampling_params": {**params, **fields}}
        ids: list[int] = httpx.post(f"{served.url}/generate", json=body, timeout=30).json()["output_ids"]
        return ids[0]

    assert first(logit_bias={str(first()): -100}) != first()


def test_a_second_equal_prompt_is_mostly_cached(served: Served) -> None:
    ask = {"model": MODEL, "prompt": "The same long prompt, word for word. " * 20, "max_tokens": 2}
    served.openai.completions.create(**ask)
    usage = served.openai.completions.create(**ask).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) > 0.8 * usage.prompt_tokens


def test_a_prompt_is_scored_as_an_evaluation_asks(served: Served) -> None:
    prompt = httpx.post(f"{served.url}/tokenize", json={"prompt": "The capital of France is Paris"}).json()
    ask: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    replies = [served.openai.completions.create(prompt=each, **ask) for each in ([prompt["tokens"]], "The")]
    (choice,), logprobs = replies[0].choices, replies[0].choices[0].logprobs
    assert choice.text.startswith("The capital of France is Paris") and logprobs is not None
    assert logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    scored = logprobs.token_logprobs[1:-1]
    assert len(scored) == prompt["count"] - 1
    is_greedy = [
        value == max(top.values()) for value, top in zip(scored, logprobs.top_logprobs[1:-1], strict=True)
    ]
    assert not all(is_greedy) and is_greedy[-1]  # " Paris" is what the model says itself
    assert replies[1].choices[0].text.startswith("The")


def test_a_client_that_disconnects_frees_its_request(served: Served, wait_until: WaitUntil) -> None:
    body = {**LONG, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=30) as reply:
        lines = reply.iter_lines()  # kept, because dropping the iterator would close the stream
        next(lines)
        assert served.state()["running_batch_size"] == 1
    wait_until(lambda: served.state()["running_batch_size"] == 0, what="the request's abort")


def test_a_prompt_that_does_not_fit_is_refused_at_once(served: Served) -> None:
    def ask() -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            served.openai.completions.create(model=MODEL, prompt="word " * 300_000, max_tokens=1)
        assert refused.value.code == "context_length_exceeded"

    assert is_within(3.0, ask)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forced_calls_and_choices_by_a_schema_are_valid(served: Served) -> None:
    figures = measure(served.url, num_prompts=8, num_schemas=4)
    assert {kind: each["replies"] for kind, each in figures.items()} == {
        "required": 4,
        "named": 4,
        "n = 4": 4,
    }
    assert is_perfect(figures), figures


def test_metrics_count_generated_tokens(served: Served) -> None:
    served.openai.completions.create(model=MODEL, prompt="Hello", max_tokens=4)
    lines = served.get("/metrics").text.splitlines()
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}
    tokens = next(value for name, value in values.items() if name.startswith("segue:generation_tokens_total"))
    assert tokens >= 4


def test_a_higher_priority_overtakes_the_queue(
    small: list[str], tmp_path: Path, wait_until: WaitUntil
) -> None:
    gate = StepGate(tmp_path / "steps")
    with serve("--max-running-requests", "1", *small, gate=gate) as served:
        gate.close_after(100)  # no request ends before it is aborted

        def ask(priority: int) -> None:
            params = {"max_new_tokens": 8000, "ignore_eos": True}
            body = {"text": "Once upon a time", "sampling_params": params, "priority": priority}
            body |= {"rid": str(priority)}
            assert httpx.post(f"{served.url}/generate", json=body, timeout=60).status_code == 200

        threads = [threading.Thread(target=ask, args=(priority,)) for priority in (0, -3, 9, 4)]
        with httpx.stream("POST", f"{served.url}/v1/completions", json=ENDLESS) as reply:
            lines = reply.iter_lines()
            next(lines)  # the only slot is taken, so all other requests wait
            for waiting, thread in enumerate(threads, 1):
                thread.start()
                wait_until(lambda n=waiting: served.state()["waiting_queue_size"] == n)
        for rid in ("9", "4", "0", "-3"):
            gate.close_after(100)
            wait_until(lambda rid=rid: served.state()["running_batch_rids"] == [rid], what=f"{rid} is next")
            served.post("/abort_request", {"rid": rid})
        for thread in threads:
            thread.join()


def test_a_dead_worker_fails_its_requests_and_ends_the_server(small: list[str]) -> None:
    with serve("--exit-grace", "5", *small) as served:
        errors: list[object] = []
        started = threading.Event()

        def read() -> None:
            try:
                with httpx.stream("POST", f"{served.url}/v1/completions", json=ENDLESS) as reply:
                    for line in reply.iter_lines():
                        started.set()
                        if '"error"' in line:
                            errors.append(line)
            except httpx.TransportError as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(30)
        (worker,) = served.workers()
        os.kill(worker, signal.SIGKILL)
        reader.join(60)
        assert errors, "the stream must end with an error"
        assert served.get("/health").status_code == 503
        assert served.process.wait(60) == 1


@pytest.mark.parametrize(
    ("tp", "stopped"),
    [(1, False), (1, True), pytest.param(2, False, marks=pytest.mark.slow)],
    ids=["1 worker", "1 stopped worker", "2 workers"],
)
def test_no_worker_survives_a_killed_server(
    small: list[str], tp: int, stopped: bool, wait_until: WaitUntil
) -> None:
    with serve("--tp", str(tp), *small, "--num-kv-tokens", "2048") as served:
        workers = served.workers()
        assert len(workers) == tp
        if stopped:
            os.kill(workers[0], signal.SIGSTOP)
        served.process.kill()
        wait_until(lambda: not any(alive(pid) for pid in workers), what="the end of the workers")


def test_ctrl_c_ends_the_server_and_its_workers_cleanly(small: list[str]) -> None:
    with serve(*small) as served:
        workers = served.workers()
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(60) == 0
        assert not any(alive(pid) for pid in workers)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_half_of_200_streams_may_disconnect() -> None:
    figures = soak([], minutes=0.1, streams=200, recorded=16)
    assert figures["num_faults"] == 0 and not any(figures["held"].values()), figures["missed"]
    assert figures["counts"]["complete and correct"] > 20


def test_a_tp_size_that_does_not_divide_the_heads_is_a_clear_error() -> None:
    command = [sys.executable, "-m", "segue", "serve", "--port", "0", "--tp", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert all(word in ended.stderr for word in ("size 2", "num_attention_heads 9", "num_key_value_heads 3"))
