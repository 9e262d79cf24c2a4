"""Roles and drains of real engines behind ``segue router``, while requests run."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from segue.messages.control import PauseMode
from tests.e2e.served import greedy
from tests.e2e.test_router import routing, until
from tests.server.live import LiveServer
from tests.support.held_steps import hold_here
from tests.support.shared_client import shared_client

NUM_CLIENTS = 4
PROMPTS = [[*range(start, start + 20)] for start in range(5, 11)]
GUIDES: list[dict[str, Any]] = [  # of outputs of 60 to 250 tokens
    {"regex": "([0-9]{3}-){29}[0-9]", "sampling_seed": 1},
    {"ebnf": 'root ::= ("x" | "y" [0-9]){60,90}', "sampling_seed": 2},
    {"regex": "[ab]{90,120}", "sampling_seed": 3},
    {
        "json_schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 30, "maxItems": 30},
        "sampling_seed": 4,
    },
    {"regex": "(a{2}[bc]{3}){20}", "temperature": 0.0},
    {"regex": "([d-f]{25}-){3}", "sampling_seed": 6},
]
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "deterministic": True,
    "page_size": 4,
    "num_kv_tokens": 2048,
    "disaggregation_bootstrap_port": 0,
}


def body_of(prompt: list[int]) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": greedy(12)}


class Load:
    """Clients that send one request after the other to a router; every reply is checked."""

    def __init__(self, url: str, expected: list[list[int]]) -> None:
        self._url, self._expected = url, expected
        self._numbers = itertools.count()
        self.num_replies = 0
        self._has_ended = threading.Event()

    def run(self) -> None:
        """Be one client."""
        with httpx.Client(timeout=60) as http:
            while not self._has_ended.is_set():
                index = next(self._numbers) % len(PROMPTS)
                reply = http.post(f"{self._url}/generate", json=body_of(PROMPTS[index]))
                assert reply.status_code == 200, reply.text
                assert reply.json()["output_ids"] == self._expected[index]
                self.num_replies += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs the clients for the block; at its end each must have had the right replies only."""
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            clients: list[Future[None]] = [threads.submit(self.run) for _ in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                self._has_ended.set()
                for client in clients:
                    client.result(60)

    def go_on(self, wait_until: Any, count: int = 8) -> None:
        """Wait for further replies."""
        goal = self.num_replies + count
        wait_until(lambda: self.num_replies >= goal, what="further replies")


@pytest.fixture(scope="module")
def fleet(tiny_model: Path) -> Iterator[tuple[str, list[LiveServer]]]:
    """A router, a process of its own, and the prefill engine and the two decode engines behind it."""
    with ExitStack() as stack:
        engines = [
            stack.enter_context(LiveServer(tiny_model, real=True, role=role, **OPTIONS))
            for role in ("prefill", "decode", "decode")
        ]
        yield stack.enter_context(routing(*engines)), engines


def roles(url: str) -> Counter[str]:
    workers = httpx.get(f"{url}/workers", timeout=30).json()["workers"]
    return Counter(worker["record"]["role"] for worker in workers if worker["serves"])


def ask(engine: LiveServer, body: dict[str, Any]) -> httpx.Response:
    return engine.client.post("/generate", json=body)


def num_generated(engines: list[LiveServer]) -> int:
    """The output tokens that all engines have made so far."""
    infos = [engine.client.get("/server_info").json() for engine in engines]
    return sum(info["internal_states"][0]["num_generated_tokens"] for info in infos)


def num_adopted(engine: LiveServer) -> int:
    found: int = engine.client.get("/server_info").json()["internal_states"][0]["handover"]["num_adopted"]
    return found


def test_no_request_fails_while_roles_change_and_engines_drain(
    fleet: tuple[str, list[LiveServer]], wait_until: Any
) -> None:
    url, engines = fleet
    names = [engine.url.partition("://")[2] for engine in engines]
    expected = [ask(engines[1], body_of(prompt)).json()["output_ids"] for prompt in PROMPTS]
    load = Load(url, expected)
    with load.running(), httpx.Client(base_url=url, timeout=60) as http:
        load.go_on(wait_until)
        for worker, role in [(2, "prefill"), (0, "decode"), (0, "prefill"), (2, "decode")]:
            reply = http.post(f"/workers/{names[worker]}/role", json={"role": role})
            assert (reply.status_code, reply.json()["role"]) == (200, role), reply.text
            assert (reply.json()["kv_address"] is not None) == (role == "prefill")
            load.go_on(wait_until)
        until(url, "/workers", lambda _: roles(url) == {"prefill": 1, "decode": 2})

        assert http.post(f"/workers/{names[1]}/drain").json()["serves"] is False
        load.go_on(wait_until)
        assert http.post(f"/workers/{names[1]}/drain", json={"drain": False}).json()["serves"] is True

        assert engines[1].client.post("/drain", json={}).json()["drain"] is True
        assert ask(engines[1], body_of(PROMPTS[0])).json()["error_code"] == "draining"
        until(url, "/workers", lambda _: roles(url) == {"prefill": 1, "decode": 1})
        load.go_on(wait_until)
        engines[1].client.post("/drain", json={"drain": False})
        until(url, "/workers", lambda _: roles(url) == {"prefill": 1, "decode": 2})
        load.go_on(wait_until)
    handed_over = sum(num_adopted(engine) for engine in engines)
    assert handed_over > 0


@pytest.mark.parametrize(
    "mode",
    ["in_place", "retract", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("wait", "abort"))],
)
def test_guided_output_that_is_handed_over_and_paused_is_that_of_one_engine(
    fleet: tuple[str, list[LiveServer]],
    mode: PauseMode,
    wait_until: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, engines = fleet
    # Of no other test: a decode engine that has computed the beginning of a prompt may compute the rest, too.
    first = 40 + 50 * get_args(PauseMode).index(mode)
    prompts = [[*range(first + index, first + index + 20)] for index in range(len(GUIDES))]
    gate = hold_here(tmp_path / "steps", monkeypatch)
    holds = mode in ("in_place", "retract")  # a pause of another kind ends the requests
    bodies = [
        {"input_ids": prompt, "sampling_params": {"temperature": 1.0, "max_new_tokens": 250} | guide}
        for prompt, guide in zip(prompts, GUIDES, strict=True)
    ]
    expected = [ask(engines[1], body).json() for body in bodies]
    adopted = sum(map(num_adopted, engines))
    with shared_client(base_url=url, timeout=60) as http, ThreadPoolExecutor(len(bodies)) as threads:
        gate.close_after(40)  # of all engines together: none of the requests can end
        futures = [threads.submit(http.post, "/generate", json=body) for body in bodies]
        wait_until(lambda: sum(map(num_adopted, engines)) > adopted, what="a hand-over")
        num_interrupted, made = 0, num_generated(engines)
        if holds:
            gate.close_after(10)  # until the next pause
        else:
            gate.open()
        while num_interrupted < 6 and not all(future.done() for future in futures):
            now = num_generated(engines)
            if now == made:
                continue
            assert http.post("/pause_generation", json={"mode": mode}).status_code == 200
            num_interrupted, made = num_interrupted + 1, num_generated(engines)
            if holds:
                gate.close_after(10)
            assert http.post("/continue_generation", json={}).status_code == 200
        gate.open()
        replies = [future.result().json() for future in futures]
    assert num_interrupted > (0 if mode in ("wait", "abort") else 3)
    for reply, whole, guide in zip(replies, expected, GUIDES, strict=True):
        assert whole["meta_info"]["finish_reason"]["type"] == "stop"
        if mode == "abort":
            assert whole["text"].startswith(reply["text"])
        else:
            assert reply["output_ids"] == whole["output_ids"], guide
            assert reply["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
