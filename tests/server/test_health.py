from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import segue
from segue.messages.control import FrontendMessage
from segue.messages.requests import AddRequest, Rejected
from segue.messages.weight_update import WeightNotice
from segue.server import health
from tests.conftest import least_seconds
from tests.server.conftest import Api
from tests.server.live import LiveServer
from tests.server.test_metrics import scrape

HEALTH = ("/health", "/ready", "/ping", "/health_generate")
LONG = {"max_new_tokens": 100, "ignore_eos": True}


def tokens(server: LiveServer) -> int:
    """Generated since the start."""
    return server.runtime.manager.stats.counters.output_tokens


@contextmanager
def stopped(server: LiveServer, wait_until: Any) -> Iterator[None]:
    """Its worker does not run, and the server knows."""
    (worker,) = server.runtime.worker_pids
    os.kill(worker, signal.SIGSTOP)
    try:
        wait_until(lambda: server.client.get("/health").status_code == 503)
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


@contextmanager
def generating(server: LiveServer, wait_until: Any, **params: Any) -> Iterator[list[httpx.Response]]:
    """A request that has its first token; its reply is there when the block is left."""
    replies: list[httpx.Response] = []
    body = {"text": "abc", "sampling_params": LONG | params}
    before = tokens(server)
    thread = threading.Thread(target=lambda: replies.append(server.client.post("/generate", json=body)))
    thread.start()
    try:
        wait_until(lambda: tokens(server) > before)
        yield replies
    finally:
        thread.join(60)


def assert_unable(response: httpx.Response, status: str, words: str) -> None:
    body = response.json()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert (body["status"], body["object"], body["code"]) == (status, "error", 503)
    assert words in body["message"]


@pytest.mark.parametrize("path", HEALTH)
def test_a_serving_engine_is_healthy(server: LiveServer, path: str) -> None:
    response = server.client.get(path)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_everything_is_503_while_the_engine_starts(tiny_model: Path) -> None:
    with LiveServer(tiny_model, started=False) as server:
        for path in HEALTH:
            assert_unable(server.client.get(path), "starting", "retry in a moment")
        for path in ("/v1/models", "/server_info"):
            response = server.client.get(path)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        response = server.client.post("/v1/completions", json={})
        assert response.json()["error"]["code"] == "engine_not_ready"
        assert server.client.get("/metrics").status_code == 200


def test_a_dead_engine_is_not_healthy(tiny_model: Path, wait_until: Any) -> None:
    with LiveServer(tiny_model) as server:
        os.kill(server.runtime.worker_pids[0], signal.SIGKILL)
        wait_until(lambda: server.runtime.died.done())
        for path in HEALTH:
            assert_unable(server.client.get(path), "dead", "SIGKILL")
        assert server.client.get("/is_paused").status_code == 503


def test_poisoned_weights_are_not_healthy(tiny_model: Path) -> None:
    with LiveServer(tiny_model) as server:
        server.runtime.manager.weights = WeightNotice(version="1", poisoned="rank 0: no memory")
        for path in HEALTH:
            assert_unable(server.client.get(path), "poisoned", "rank 0: no memory")


def test_a_draining_server_finishes_and_begins_nothing(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any, slow_while: Path
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.01")
    with LiveServer(tiny_model) as server:
        api = Api(server.client)
        with generating(server, wait_until) as replies:
            server.runtime.drain()
            for path in HEALTH:
                assert_unable(server.client.get(path), "draining", "another one")
            refused = [api.complete("abc"), api.complete("abc", stream=True), api.chat("abc")]
            assert [response.status_code for response in refused] == [503] * 3
            assert {response.headers["retry-after"] for response in refused} == {"1"}
            assert {response.json()["error"]["code"] for response in refused} == {"draining"}
            assert api.generate("abc").status_code == 503
            assert server.client.get("/server_info").status_code == 200
            assert not replies
            slow_while.unlink()
        assert replies[0].json()["meta_info"]["finish_reason"]["type"] == "length"


def test_a_worker_that_is_stopped_is_told_of_and_nobody_waits_for_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any, slow_while: Path
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.01")
    with (
        LiveServer(tiny_model, ping_s=0.5) as server,
        generating(server, wait_until) as replies,
        ThreadPoolExecutor() as pool,
    ):
        os.kill(server.runtime.worker_pids[0], signal.SIGSTOP)
        slow_while.unlink()
        try:
            asked = [
                pool.submit(server.client.request, method, path)
                for method, path in (
                    ("GET", "/server_info"),
                    ("POST", "/pause"),
                    ("POST", "/flush_cache"),
                    ("POST", "/begin_weight_update"),
                )
            ]
            for future in asked:
                response = future.result()
                assert (response.status_code, response.headers["retry-after"]) == (503, "1")
                assert "no heartbeat" in response.text and "--ping-s" in response.text
            for path in HEALTH:

                def check(path: str = path) -> None:
                    assert_unable(server.client.get(path), "hung", "worker rank 0 has sent no heartbeat")

                assert least_seconds(check) < 1.0
            for path in ("/is_paused", "/metrics", "/version", "/v1/models"):
                assert server.client.get(path).status_code == 200
            values = scrape(server)
            assert values["engine_hung"] == 1
            assert values["heartbeat_age_seconds:0"] > 0.5

            def check_refusal() -> None:
                refused = Api(server.client).complete("abc")
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.json()["error"]["code"] == "engine_hung"

            assert least_seconds(check_refusal) < 0.5
            assert not replies, "what was in flight waits"
        finally:
            os.kill(server.runtime.worker_pids[0], signal.SIGCONT)
        wait_until(lambda: server.client.get("/health").status_code == 200)
        server.client.post("/continue_generation")  # the pause was not lost
        assert scrape(server)["engine_hung"] == 0
    assert replies[0].json()["meta_info"]["finish_reason"]["type"] in ("length", "abort")


def test_requests_in_flight_outlast_a_worker_that_was_stopped(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any, slow_while: Path
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.01")
    with LiveServer(tiny_model, ping_s=0.5) as server:
        with generating(server, wait_until) as replies, stopped(server, wait_until):
            slow_while.unlink()
            assert not replies
        assert replies[0].json()["meta_info"]["finish_reason"]["type"] == "length"
        assert replies[0].json()["text"] == "abc" * 33 + "a"
        wait_until(lambda: server.client.get("/health").status_code == 200)
        server.assert_nothing_left()


def test_a_paused_engine_is_asked_for_its_pulse_too(tiny_model: Path, wait_until: Any) -> None:
    with LiveServer(tiny_model, ping_s=0.5) as server:
        server.client.post("/pause_generation")
        with stopped(server, wait_until):
            assert_unable(server.client.get("/health_generate"), "hung", "no heartbeat")
        wait_until(lambda: server.client.get("/health").json() == {"status": "paused", "mode": "abort"})


def test_every_rank_has_a_pulse(tiny_model: Path, wait_until: Any) -> None:
    with LiveServer(tiny_model, tp=2, ping_s=0.5) as server:
        assert {"heartbeat_age_seconds:0", "heartbeat_age_seconds:1"} <= set(scrape(server))
        _, follower = server.runtime.worker_pids
        os.kill(follower, signal.SIGSTOP)
        wait_until(lambda: server.client.get("/health").status_code == 503)
        assert "worker rank 1" in server.client.get("/health").json()["message"]
        os.kill(follower, signal.SIGCONT)
        wait_until(lambda: server.client.get("/health").status_code == 200)


def test_a_step_that_does_not_end_is_told_of(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any, slow_while: Path
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.5")
    with LiveServer(tiny_model, ping_s=1.0, stall_s=0.5) as server, ThreadPoolExecutor() as pool:
        reply = pool.submit(Api(server.client).generate, "abc", sampling_params={"max_new_tokens": 1})
        wait_until(lambda: server.client.get("/health").status_code == 503)
        for path in HEALTH:
            assert_unable(server.client.get(path), "hung", "at one step for more than 0.5 s (--stall-s)")
        slow_while.unlink()
        assert reply.result().status_code == 200
        wait_until(lambda: server.client.get("/health").status_code == 200)


def test_long_steps_and_long_pauses_are_healthy(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.4")
    with LiveServer(tiny_model, ping_s=3.0, stall_s=1.5) as server:
        bodies = []
        with generating(server, wait_until, max_new_tokens=7) as replies:
            while not replies:  # longer than any limit, in steps that are shorter
                response = server.client.get("/health")
                bodies.append((response.status_code, response.json()))
        assert set(map(str, bodies)) <= {
            str((200, {"status": "ok", "num_requests": 1})),
            str((200, {"status": "ok"})),
        }
        server.client.post("/pause_generation")
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            assert server.client.get("/ready").json() == {"status": "paused", "mode": "abort"}


def test_one_real_token_and_not_more_than_one_per_second(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert health.FRESH_S == 1.0
    monkeypatch.setattr(health, "FRESH_S", 100.0)  # a busy machine may need more than a second for the calls
    with LiveServer(tiny_model) as server, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.client.get("/health_generate"), range(8)))
        assert {answer.status_code for answer in answers} == {200}
        server.assert_nothing_left()
        assert tokens(server) == 1
        assert server.client.get("/health_generate").json() == {"status": "ok"}
        assert tokens(server) == 1
        server.runtime.manager.stats.last_step_at -= 150
        assert server.client.get("/health_generate").json() == {"status": "ok"}
        assert tokens(server) == 2
        for path in ("/health", "/ready", "/ping"):
            server.runtime.manager.stats.last_step_at -= 150
            assert server.client.get(path).json() == {"status": "ok"}
        assert tokens(server) == 2


def test_no_token_is_asked_for_while_paused_or_updating(tiny_model: Path) -> None:
    with LiveServer(tiny_model) as server:
        server.client.post("/pause_generation", json={"mode": "in_place"})
        assert server.client.get("/health_generate").json() == {"status": "paused", "mode": "in_place"}
        server.client.post("/continue_generation")
        server.client.post("/begin_weight_update")
        assert server.client.get("/health_generate").json() == {"status": "ok", "weight_update": "received"}
        server.client.post("/end_weight_update")
        assert tokens(server) == 0


def test_with_a_full_queue_the_steps_of_others_do(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer(tiny_model) as server:
        manager, refused = server.runtime.manager, list[str]()

        def refuse(message: FrontendMessage) -> None:
            if isinstance(message, AddRequest):
                refused.append(message.rid)
                rejected = Rejected(message.rid, "OverloadedError", "4096 requests wait")
                asyncio.get_running_loop().call_soon(manager.receive, rejected)
                if len(refused) == 2:
                    manager.stats.last_step_at = time.monotonic()

        monkeypatch.setattr(manager, "_send", refuse)
        assert server.client.get("/health_generate").status_code == 200
        assert len(refused) == 2


def test_a_token_that_never_comes_fails_the_probe(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer(tiny_model, stall_s=0.3) as server:
        monkeypatch.setattr(server.runtime.manager, "_send", lambda message: None)  # it is lost on the way
        assert_unable(server.client.get("/health_generate"), "hung", "no step for 0.3 s (--stall-s)")
        assert server.client.get("/health").status_code == 200


def test_is_paused_is_true_as_soon_as_a_pause_is_answered(server: LiveServer) -> None:
    for _ in range(20):
        server.client.post("/pause")
        assert server.client.get("/is_paused").json() == {"is_paused": True}
        server.client.post("/resume")
        assert server.client.get("/is_paused").json() == {"is_paused": False}


def test_version_and_openapi(server: LiveServer) -> None:
    assert server.client.get("/version").json() == {"version": segue.__version__}
    page = server.client.get("/openapi.json").json()
    schema = page["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert "temperature" in schema["properties"]
    assert "$ref" not in str(page["paths"]["/v1/chat/completions"]["post"]["requestBody"])
    body = page["paths"]["/pause_generation"]["post"]["requestBody"]
    modes = body["content"]["application/json"]["schema"]["properties"]["mode"]
    assert (set(modes["enum"]), body["required"]) == (
        {"wait", "in_place", "in-place", "retract", "abort"},
        False,
    )
    for path, method, name in (
        ("/flush_cache", "get", "timeout"),
        ("/flush_cache", "post", "timeout"),
        ("/pause", "post", "mode"),
    ):
        parameter, *_ = page["paths"][path][method]["parameters"]
        assert (parameter["name"], parameter["in"]) == (name, "query")
