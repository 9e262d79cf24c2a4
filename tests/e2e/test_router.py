"""``segue router`` in front of real engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.served import Served, serve
from tests.server.live import LiveServer
from tests.support.child import start_child
from tests.support.held_steps import StepGate
from tests.support.polling import rest


@contextmanager
def routing(*engines: Served | LiveServer, **options: str) -> Iterator[str]:
    """Runs a router until the block ends; yields its URL once every engine serves.

    An option whose value is empty is a flag.
    """
    words = ["--port", "0", "--log-level", "warning", "--worker", *(engine.url for engine in engines)]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", *([value] if value else [])]
    command = [sys.executable, "-m", "segue", "router", *words]
    with start_child(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = next(word for word in line.split() if word.startswith("http://"))
            until(url, "/health", lambda reply: reply.json().get("serving") == len(engines))
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


def until(url: str, path: str, is_so: Any) -> None:
    """Waits until the answer of a GET is as it should be."""
    began = time.monotonic()
    while not is_so(reply := httpx.get(url + path, timeout=60)):
        assert time.monotonic() < began + 60, reply.text
        rest(began)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> StepGate:
    """The gate of the engines' steps: while it is closed, no request can end."""
    return StepGate(tmp_path_factory.mktemp("gate") / "steps")


@pytest.fixture(scope="module")
def engines(tiny_model: Path, gate: StepGate) -> Iterator[tuple[Served, Served]]:
    options = ("--model", str(tiny_model), "--load-format", "dummy", "--device", "cpu")
    with serve(*options, gate=gate) as first, serve(*options, gate=gate) as second:
        yield first, second


def test_all_apis_give_what_an_engine_gives(engines: tuple[Served, Served]) -> None:
    body = {"text": "Once upon", "sampling_params": {"temperature": 0, "max_new_tokens": 12}}
    with routing(*engines) as url:
        direct, routed = (
            httpx.post(f"{base}/generate", json=body, timeout=30) for base in (engines[0].url, url)
        )
        assert routed.json()["output_ids"] == direct.json()["output_ids"]
        body["sampling_params"] |= {"temperature": 1, "sampling_seed": 3, "n": 3}  # type: ignore[operator]
        choices, routed_choices = (
            [each["output_ids"] for each in httpx.post(f"{base}/generate", json=body, timeout=30).json()]
            for base in (engines[0].url, url)
        )
        assert routed_choices == choices and len(set(map(tuple, choices))) == 3, (
            "they draw by seed and number"
        )
        texts = []
        for base in (engines[0].url, url):
            client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=30)
            model = client.models.list().data[0].id
            chat = [{"role": "user", "content": "Hello"}]
            parts = client.chat.completions.create(
                model=model,
                messages=chat,
                stream=True,
                temperature=0,
                max_tokens=12,  # type: ignore[arg-type]
            )
            texts.append("".join(part.choices[0].delta.content or "" for part in parts if part.choices))
        assert texts[0] == texts[1] and texts[0]
        tokenized, rendered = (
            [httpx.post(base + path, json=body, timeout=30).json() for base in (engines[0].url, url)]
            for path, body in (
                ("/tokenize", {"prompt": "Once upon"}),
                ("/v1/completions/render", {"model": model, "prompt": "Once upon", "max_tokens": 12}),
            )
        )
        assert tokenized[0] == tokenized[1]
        ids = tokenized[1]["tokens"]
        assert [each["token_ids"] for (each,) in rendered] == [ids, ids]
        params = {"temperature": 0, "max_tokens": 12, "logprobs": 0}
        asked = {"token_ids": ids, "sampling_params": params, "return_token_ids": True}
        generated = httpx.post(f"{url}/inference/v1/generate", json=asked, timeout=30).json()
        assert generated["choices"][0]["token_ids"] == direct.json()["output_ids"]
        lines = lines_of(url, asked | {"stream": True}, 0, lambda: None, path="/inference/v1/generate")
        chunks = [json.loads(line[6:]) for line in lines[:-1]]
        streamed = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert streamed == direct.json()["output_ids"] and chunks[0]["prompt_token_ids"] == ids
        assert lines[-1] == "data: [DONE]"


def test_both_engines_work_for_concurrent_requests(engines: tuple[Served, Served]) -> None:
    body = {"text": "Once upon", "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
    before = [engine.state()["num_generated_tokens"] for engine in engines]
    with routing(*engines, policy="round_robin") as url, ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda _: httpx.post(f"{url}/generate", json=body, timeout=60), range(8)))
        assert [reply.status_code for reply in replies] == [200] * 8
    made = [engine.state()["num_generated_tokens"] - old for engine, old in zip(engines, before, strict=True)]
    assert made == [160, 160]


def test_a_client_that_leaves_ends_its_request_on_the_engine(engines: tuple[Served, Served]) -> None:
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
    with routing(engines[0]) as url:
        httpx.post(f"{engines[0].url}/pause_generation", json={"mode": "wait"})
        httpx.post(f"{engines[0].url}/continue_generation", json={})
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=30) as reply:
            next(reply.iter_lines())
        until(engines[0].url, "/health", lambda answer: answer.json() == {"status": "ok"})
        until(url, "/workers", lambda answer: answer.json()["workers"][0]["in_flight"] == 0)


def lines_of(
    url: str, body: dict[str, Any], after: int, then: Callable[[], None], path: str = "/v1/completions"
) -> list[str]:
    """Returns the events of a stream; ``then`` is called once there are ``after`` of them."""
    lines: list[str] = []
    with httpx.stream("POST", url + path, json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            if line:
                lines.append(line)
                if len(lines) == after:
                    then()
    return lines


def kill(engine: Served) -> None:
    for pid in (*engine.workers(), engine.process.pid):
        os.kill(pid, signal.SIGKILL)


def text_of(lines: list[str]) -> str:
    assert lines[-1] == "data: [DONE]", lines[-1]
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])


def test_control_routes_reach_real_engines(engines: tuple[Served, Served], gate: StepGate) -> None:
    generate = {"text": "Once", "sampling_params": {"max_new_tokens": 2}}
    with routing(*engines) as url, httpx.Client(base_url=url, timeout=60) as client:
        assert client.post("/generate", json=generate).status_code == 200
        paused = client.post("/pause_generation", json={"mode": "retract"}).json()
        assert (paused["status"], paused["num_running"], len(paused["workers"])) == ("ok", 0, 2)
        for engine in engines:
            assert httpx.get(f"{engine.url}/is_paused").json() == {"is_paused": True}
        assert client.get("/is_paused").json()["is_paused"] is True
        flushed = client.post("/flush_cache?timeout=5")
        assert flushed.text.startswith("Cache flushed.\nFlushed items: "), flushed.text
        assert client.post("/continue_generation").json()["status"] == "ok"
        assert client.post("/pause?mode=keep").json()["status"] == "paused"
        assert client.post("/resume").json()["status"] == "resumed"
        assert client.post("/abort_request", json={"abort_all": True}).content == b""
        body = {"prompt": "x", "rid": "mine", "stream": True, "max_tokens": 100, "ignore_eos": True}
        gate.close_after(50)
        with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            assert '"id":"mine"' in next(lines)
            client.post("/abort_request", json={"rid": "mine"})
            gate.open()
            assert any('"finish_reason":"abort"' in line for line in lines)
        info = client.get("/server_info").json()
        assert (info["dp_size"], len(info["internal_states"]), info["status"]) == (2, 2, "ready")
        assert client.get("/model_info").json()["weight_version"] == "0"
        assert client.get("/health_generate").json()["well"] == 2
        wrong = client.post("/pause_generation", json={"mode": "nap"})
        assert wrong.status_code == 400 and wrong.json()["message"].startswith("mode='nap'")
        assert client.post("/update_weight_version", json={"new_version": "1"}).status_code == 400
    with routing(engines[0]) as url:
        changed = httpx.post(f"{url}/update_weight_version", json={"new_version": "7"}, timeout=60)
        assert changed.json()["success"] is True
        assert httpx.get(f"{engines[0].url}/weight_version").json() == {"weight_version": "7"}
        httpx.post(f"{url}/update_weight_version", json={"new_version": "0"}, timeout=60)


# --- the last tests end engines that all share ---


def test_an_engine_that_is_killed_costs_no_request_that_had_not_begun(engines: tuple[Served, Served]) -> None:
    body = {"text": "Once upon", "sampling_params": {"max_new_tokens": 8}}
    with routing(*engines) as url:
        kill(engines[1])
        replies = [httpx.post(f"{url}/generate", json=body, timeout=30) for _ in range(6)]
        assert [reply.status_code for reply in replies] == [200] * 6
        until(url, "/health", lambda reply: reply.json() == {"status": "ok", "workers": 2, "serving": 1})


@pytest.mark.parametrize(
    "roles", [("both", "both"), pytest.param(("prefill", "decode", "decode"), marks=pytest.mark.slow)]
)  # `test_fleet_faults` kills engines of pairs
def test_a_stream_goes_on_where_a_killed_engine_was(
    tiny_model: Path, engines: tuple[Served, Served], gate: StepGate, roles: tuple[str, ...]
) -> None:
    options = ("--model", str(tiny_model), "--load-format", "dummy", "--device", "cpu")
    body = {
        "model": "tiny",
        "prompt": "Once upon a time",
        "max_tokens": 480,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    with ExitStack() as stack:
        group = [engines[0]] if roles[0] == "both" else []
        group += [
            stack.enter_context(
                serve(*options, "--role", role, "--disaggregation-bootstrap-port", "0", gate=gate)
            )
            for role in roles[len(group) :]
        ]
        url = stack.enter_context(routing(*group))
        body["model"] = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
        expected = text_of(lines_of(url, body, 0, lambda: None))

        def kill_the_answering_one() -> None:
            workers = httpx.get(f"{url}/workers", timeout=30).json()["workers"]
            (answering,) = (each["url"] for each in workers if each["in_flight"])
            kill(next(engine for engine in group if engine.url == answering))
            gate.open()

        gate.close_after(240)  # half of the tokens
        assert text_of(lines_of(url, body, 3, kill_the_answering_one)) == expected
        metrics = httpx.get(f"{url}/metrics", timeout=30).text
        assert "segue:router_resumes_total 1.0" in metrics
