"""Routers of other projects, unmodified, before two engines: dialects, flushes, loads, a killed engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.clients.environments import interpreter
from tests.clients.routers import ROUTERS, RouterProgram, running, until_healthy
from tests.conftest import WaitUntil
from tests.e2e.served import Client, greedy, serve
from tests.support.streams import ReplyGroup, ReplyInParts
from tests.support.tiny_model import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "tiny-model"
OPTIONS = {
    "load-format": "dummy",
    "device": "cpu",
    "dtype": "float32",
    "num-kv-tokens": "65536",
    "max-running-requests": "64",
    "exit-grace": "0.1",
}
WORDS = "the river ran past a small stone house"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": WORDS}]}
GREEDY = {"temperature": 0, "ignore_eos": True}
Request = tuple[str, dict[str, Any]]


def requests_of(program: RouterProgram, tokens: int) -> list[Request]:
    """Requests of every dialect that the router has, streamed and whole; each has one reply only."""
    drawn = {"temperature": 0.8, "seed": 7, "ignore_eos": True, "max_tokens": tokens}
    native = {"max_new_tokens": tokens} | GREEDY
    seeded = {"max_new_tokens": tokens, "temperature": 0.8, "sampling_seed": 7, "ignore_eos": True}
    seeded = seeded if program.native_seeds else native
    openai = {"max_tokens": tokens} | GREEDY
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    found: list[Request] = [
        ("/generate", {"text": WORDS, "sampling_params": native}),
        ("/generate", {"input_ids": [5, 6, 7], "sampling_params": seeded, "return_logprob": True}),
        ("/generate", {"text": WORDS, "sampling_params": native, "return_logprob": True, "stream": True}),
        ("/generate", {"input_ids": [5, 6, 7], "sampling_params": seeded, "stream": True}),
        ("/v1/chat/completions", CHAT | openai),
        ("/v1/chat/completions", CHAT | drawn | {"logprobs": True, "top_logprobs": 2} | streamed),
        ("/v1/completions", {"model": MODEL, "prompt": WORDS} | openai | {"logprobs": 1}),
        ("/v1/completions", {"model": MODEL, "prompt": [WORDS, "and"]} | openai),
        ("/v1/completions", {"model": MODEL, "prompt": WORDS} | drawn | {"logprobs": 2} | streamed),
    ]
    if program.tokens:
        params = drawn | {"logprobs": 1}
        found += [
            ("/v1/completions", {"model": MODEL, "prompt": [5, 6, 7]} | openai | {"return_token_ids": True}),
            ("/inference/v1/generate", {"model": MODEL, "token_ids": [5, 6, 7], "sampling_params": params}),
            (
                "/inference/v1/generate",
                {"model": MODEL, "token_ids": [5, 6, 7], "sampling_params": params} | streamed,
            ),
        ]
    return found


@dataclass
class Routed:
    """A router, and its engines."""

    program: RouterProgram
    url: str
    engines: list[Client]


@pytest.fixture(scope="module", params=ROUTERS, ids=lambda program: program.environment)
def routed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start_engine: Any
) -> Iterator[Routed]:
    interpreter(request.param.environment)  # skips before any engine is started
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        engines = list(threads.map(lambda _: start_engine(stack), range(2)))
        log = tmp_path_factory.mktemp("router") / f"{request.param.environment}.log"
        urls = [engine.served.url for engine in engines]
        yield Routed(request.param, stack.enter_context(running(request.param, urls, log)), engines)


@pytest.fixture(scope="module")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = write_model(tmp_path_factory.mktemp("model") / MODEL, max_position_embeddings=4096)

    def start(stack: ExitStack, port: int = 0) -> Client:
        options = [f"--{name}={value}" for name, value in OPTIONS.items()]
        options += [f"--model={model}", "--deterministic", f"--port={port}"]
        client = Client(stack.enter_context(serve(*options)))
        stack.callback(client.close)
        return client

    return start


def contents(url: str, requests: list[Request]) -> list[Any]:
    return ReplyGroup.send(url, requests).end()


def test_replies_are_those_that_an_engine_gives(routed: Routed) -> None:
    requests = requests_of(routed.program, 24)
    expected = contents(routed.engines[0].served.url, requests)
    for _ in range(2):  # the router's turn begins at either engine
        for request, reply, content in zip(requests, contents(routed.url, requests), expected, strict=True):
            assert reply == content and not isinstance(reply, str), f"{request}: {reply}"
        httpx.post(f"{routed.url}/generate", json={"text": "x", "sampling_params": greedy(1)})
    served = [engine.state()["num_generated_tokens"] for engine in routed.engines]
    assert min(served[0] - 24 * len(requests), served[1]) > 0, "the router sent everything to one engine"


def code_of(reply: httpx.Response) -> str:
    body = reply.json()
    code: str = body["error_code"] if "error_code" in body else body["error"]["code"]
    return code


def test_errors_arrive_as_they_are(routed: Routed) -> None:
    """An error of the client is not tried again, and does not count against the engine."""
    for path, body in [
        ("/generate", {"input_ids": [5, 100_000]}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 100_000}),
        ("/v1/completions", {"model": MODEL, "prompt": WORDS, "max_tokens": 100_000}),
    ]:
        direct = routed.engines[0].http.post(path, json=body)
        through = httpx.post(routed.url + path, json=body)
        assert (through.status_code, code_of(through)) == (400, code_of(direct))
    until_healthy(routed.url, 2)


def test_a_flush_reaches_all_engines(routed: Routed) -> None:
    for engine in routed.engines:
        engine.generate(WORDS, greedy(64))
        assert engine.state()["tree_cache_size"] > 0
    assert httpx.post(f"{routed.url}/flush_cache", timeout=30).status_code == 200
    assert [engine.state()["tree_cache_size"] for engine in routed.engines] == [0, 0]


def test_loads_are_those_of_the_engines(routed: Routed, wait_until: WaitUntil) -> None:
    if routed.program.loads is None:
        pytest.skip("this router cannot read Segue's loads")
    idle, busy = (engine.served.url for engine in routed.engines)
    seen: list[Any] = []

    def found() -> bool:
        assert routed.program.loads is not None
        seen.append(httpx.get(f"{routed.url}/get_loads", timeout=10).json())
        loads = routed.program.loads(seen[-1])
        return loads.get(idle) == 0 and loads.get(busy, 0) > 0

    future = routed.engines[1].begin(WORDS, greedy(4000), rid="long")
    try:
        wait_until(found, 10, f"the router tells the engines' loads, and not {seen[-1:]}")
    finally:
        routed.engines[1].abort("long")
        future.result(30)


def test_a_client_that_leaves_ends_its_request(routed: Routed) -> None:
    body = {"text": WORDS, "sampling_params": greedy(4000), "stream": True}
    with httpx.stream("POST", f"{routed.url}/generate", json=body, timeout=30) as reply:
        assert reply.status_code == 200, reply.read()
        lines = reply.iter_lines()  # whoever drops it leaves
        next(lines)
        assert sum(engine.state()["running_batch_size"] for engine in routed.engines) == 1
        before = sum(engine.state()["num_generated_tokens"] for engine in routed.engines)
    for engine in routed.engines:
        engine.until(running_batch_size=0)
    after = sum(engine.state()["num_generated_tokens"] for engine in routed.engines)
    assert after < before + 2000, "the request went on to its end"


def rid_of(reply: ReplyInParts) -> str:
    """The id by which the engine knows a stream's request."""
    event = reply.events[0][1]
    fields = event["meta_info"] if reply.path == "/generate" else event
    rid: str = fields["request_id"] if reply.path == "/inference/v1/generate" else fields["id"]
    return rid


def test_a_killed_engine_takes_only_its_own_requests_with_it(
    routed: Routed, start_engine: Any, wait_until: WaitUntil
) -> None:
    lives, dies = routed.engines
    long = [(path, body) for path, body in requests_of(routed.program, 256) if body.get("stream")] * 3
    short = [(path, body) for path, body in requests_of(routed.program, 8) if "stream" not in body] * 4
    expected, expected_short = (contents(lives.served.url, each) for each in (long, short))
    streams = ReplyGroup.send(routed.url, long)
    wait_until(lambda: streams.have_begun(1), 30, "every stream has begun")
    dying = set(dies.state()["running_batch_rids"])
    for pid in [*dies.served.workers(), dies.served.process.pid]:
        os.kill(pid, signal.SIGKILL)
    assert contents(routed.url, short) == expected_short, "a request that came after the kill was lost"
    complete = [reply == content for reply, content in zip(streams.end(), expected, strict=True)]
    own = [rid_of(reply) in dying for reply in streams.replies]
    assert complete == [not each for each in own]
    assert len(long) / 4 < sum(own) < len(long), "the engine that was killed had hardly any request"

    with ExitStack() as stack:
        start_engine(stack, port=httpx.URL(dies.served.url).port)
        until_healthy(routed.url, 2)
        assert contents(routed.url, short) == expected_short
