"""Pausing, continuing and flushing over HTTP: routes, bodies, replies. The worker repeats the prompt."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest

from segue.frontend import request as frontend_request
from segue.server import responses
from tests.server.conftest import MODEL, Api
from tests.server.events import parse_events
from tests.server.live import LiveServer
from tests.server.raw import posted
from tests.server.test_metrics import scrape

COUNT = 45  # tokens of a request, one a hundredth of a second
COUNTS = ("mode", "num_running", "num_waiting", "num_retracted", "num_aborted", "num_pages_leaving")
PARAMS = {"max_new_tokens": COUNT, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow_while(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists a step takes a tenth of a second."""
    return tmp_path_factory.mktemp("worker") / "slow"


@pytest.fixture(scope="module")
def shared_slow(tiny_model: Path, slow_while: Path) -> Iterator[LiveServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_STEP_S", "0.01")
        patch.setenv("FAKE_SLOW_WHILE", str(slow_while))
        with LiveServer(tiny_model) as server:
            yield server


@pytest.fixture
def slow(shared_slow: LiveServer) -> Iterator[LiveServer]:
    yield shared_slow
    shared_slow.client.post("/continue_generation")
    shared_slow.assert_nothing_left()


class Running:
    """A request in a thread of its own."""

    def __init__(self, server: LiveServer, rid: str = "one", **params: Any) -> None:
        body = {"text": "abc", "rid": rid, "sampling_params": PARAMS | params}
        self._replies: list[Any] = []
        self._thread = threading.Thread(
            target=lambda: self._replies.append(server.client.post("/generate", json=body).json())
        )
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(60)
        return self._replies[0]


@pytest.fixture
def running(slow: LiveServer, slow_while: Path, wait_until: Any) -> Iterator[Running]:
    """A request that has its first tokens, and needs four seconds for the others while steps are slow."""
    before = slow.runtime.manager.stats.counters.output_tokens
    slow_while.touch()
    one = Running(slow)
    wait_until(lambda: slow.runtime.manager.stats.counters.output_tokens > before + 2)
    yield one
    slow_while.unlink(missing_ok=True)
    slow.client.post("/continue_generation")
    one.result()


def state_of(server: LiveServer) -> dict[str, Any]:
    return cast(dict[str, Any], server.client.get("/server_info").json()["internal_states"][0])


@pytest.mark.parametrize(
    ("asked", "counts"),
    [
        ({"mode": "in_place"}, ("in_place", 1, 0, 0, 0)),
        ({"mode": "in-place", "ttl_s": None, "surprise": 1}, ("in_place", 1, 0, 0, 0)),
        ({"mode": "retract", "ttl_s": 60}, ("retract", 0, 1, 1, 0)),
        ({"mode": "abort"}, ("abort", 0, 0, 0, 1)),
        (None, ("abort", 0, 0, 0, 1)),
        ({"mode": "wait"}, ("wait", 0, 0, 0, 0)),
    ],
)
def test_a_pause_says_what_became_of_the_requests(
    slow: LiveServer, slow_while: Path, running: Running, asked: Any, counts: tuple[Any, ...]
) -> None:
    if counts[0] == "wait":
        slow_while.unlink()
    response = slow.client.post("/pause_generation", json=asked)
    reply = response.json()
    assert response.status_code == 200
    assert (reply.pop("message"), reply.pop("status")) == ("Generation paused successfully.", "ok")
    assert reply.pop("drained_ms") >= 0
    assert reply == dict(zip(COUNTS, (*counts, 0), strict=True))
    state = state_of(slow)
    assert (state["engine_paused"], state["pause_mode"]) == (True, counts[0])
    assert slow.client.get("/is_paused").json() == {"is_paused": True}
    in_flight = {"num_requests": 1} if counts[0] in ("in_place", "retract") else {}
    for path in ("/health", "/health_generate", "/ready", "/ping"):
        health = slow.client.get(path)
        assert (health.status_code, health.json()) == (
            200,
            {"status": "paused", "mode": counts[0]} | in_flight,
        )
    values = scrape(slow)
    assert {name: value for name, value in values.items() if name.startswith("paused")} == {
        f"paused:{mode}": mode == counts[0] for mode in ("wait", "in_place", "retract", "abort")
    }
    slow_while.unlink(missing_ok=True)
    response = slow.client.post("/continue_generation", json={})
    assert (response.status_code, response.json()) == (
        200,
        {"message": "Generation continued successfully.", "status": "ok"},
    )
    end = running.result()["meta_info"]["finish_reason"]["type"]
    assert end == ("abort" if counts[0] == "abort" else "length")
    state = state_of(slow)
    assert (state["engine_paused"], state["pause_mode"]) == (False, None)
    assert slow.client.get("/is_paused").json() == {"is_paused": False}
    assert slow.client.get("/health").json() == {"status": "ok"}


def test_to_continue_what_is_not_paused_is_200(slow: LiveServer) -> None:
    for content in (b"", b"{}", b"anything"):
        response = slow.client.post("/continue_generation", content=content)
        assert (response.status_code, response.json()["status"]) == (200, "ok")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"mode": "stop"}, ["'stop'", "abort", "retract", "in_place", "wait"]),
        ({"mode": None}, ["mode=None", "abort"]),
        ({"mode": 5}, ["mode=5", "abort"]),
        ({"ttl_s": 0}, ["ttl_s=0", "greater than 0"]),
        ({"ttl_s": -1.5}, ["ttl_s=-1.5", "greater than 0"]),
        ({"ttl_s": "5"}, ["ttl_s='5'", "number"]),
        ({"ttl_s": True}, ["ttl_s=True", "number"]),
        ([], ["JSON object"]),
    ],
)
def test_a_wrong_pause_is_400_and_says_why(slow: LiveServer, body: Any, words: list[str]) -> None:
    response = slow.client.post("/pause_generation", json=body)
    error = response.json()
    assert (response.status_code, error["object"], error["code"]) == (400, "error", 400)
    assert all(word in error["message"] for word in words), error["message"]
    assert slow.client.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("content", [b"{", b'{"ttl_s": NaN}', b'{"ttl_s": 1e999}', b"\xff"])
def test_a_pause_that_is_no_json_is_400(slow: LiveServer, content: bytes) -> None:
    assert slow.client.post("/pause_generation", content=content).status_code == 400


def test_a_pause_with_a_time_to_live_ends_by_itself(slow: LiveServer, wait_until: Any) -> None:
    assert slow.client.post("/pause_generation", json={"mode": "retract", "ttl_s": 0.1}).is_success
    wait_until(lambda: slow.client.get("/health").json() == {"status": "ok"})
    assert slow.client.get("/is_paused").json() == {"is_paused": False}


def test_times_beyond_any_calendar_do_no_harm(slow: LiveServer, running: Running) -> None:
    assert slow.client.post("/pause_generation", json={"mode": "in_place", "ttl_s": 1e300}).is_success
    with pytest.raises(httpx.ReadTimeout):
        slow.client.get("/flush_cache?timeout=1e300", timeout=0.1)
    assert slow.client.get("/is_paused").json() == {"is_paused": True}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_flush_tells_what_it_forgot(slow: LiveServer, method: str) -> None:
    assert Api(slow.client).generate("x" * 40, sampling_params={"max_new_tokens": 2}).is_success
    slow.assert_nothing_left()
    cached = state_of(slow)["tree_cache_size"]
    assert cached > 0
    response = slow.client.request(method, "/flush_cache")
    assert (response.status_code, response.text) == (200, f"Cache flushed.\nFlushed items: {cached}\n")
    assert response.headers["content-type"].startswith("text/plain")
    assert state_of(slow)["tree_cache_size"] == 0


@pytest.mark.parametrize(
    ("mode", "status", "words"),
    [
        (None, 400, "Reason: 1 requests run"),
        ("in_place", 400, "Reason: 1 requests run"),
        ("retract", 200, "Cache flushed.\nFlushed items: "),
    ],
)
def test_a_flush_beside_a_live_request(
    slow: LiveServer, running: Running, mode: str | None, status: int, words: str
) -> None:
    if mode is not None:
        slow.client.post("/pause_generation", json={"mode": mode})
    response = slow.client.post("/flush_cache")
    assert response.status_code == status
    assert words in response.text


def test_a_flush_with_a_timeout_waits_for_requests_to_end(
    slow: LiveServer, slow_while: Path, running: Running
) -> None:
    assert slow.client.get("/flush_cache?timeout=0").status_code == 400
    slow_while.unlink()
    assert slow.client.get("/flush_cache?timeout=10").status_code == 200
    assert running.result()["meta_info"]["completion_tokens"] == COUNT


@pytest.mark.parametrize("timeout", ["x", "-1", "nan", "inf", ""])
def test_a_wrong_timeout_of_a_flush_is_400(slow: LiveServer, timeout: str) -> None:
    response = slow.client.get(f"/flush_cache?timeout={timeout}")
    assert (response.status_code, response.json()["object"]) == (400, "error")
    assert f"timeout={timeout!r}" in response.json()["message"]


@pytest.mark.parametrize(
    ("query", "mode"),
    [
        ("", "abort"),
        ("?mode=abort", "abort"),
        ("?mode=keep", "in_place"),
        ("?mode=wait", "wait"),
        ("?wait_for_inflight_requests=true", "wait"),
    ],
)
def test_vllms_names(slow: LiveServer, query: str, mode: str) -> None:
    response = slow.client.post(f"/pause{query}")
    cleared = {} if mode == "in_place" else {"cache_cleared": True}
    assert (response.status_code, response.json()) == (200, {"status": "paused"} | cleared)
    assert state_of(slow)["pause_mode"] == mode
    response = slow.client.post("/resume")
    assert (response.status_code, response.json()) == (200, {"status": "resumed"})
    assert slow.client.get("/is_paused").json() == {"is_paused": False}


def cached(server: LiveServer) -> int:
    return int(state_of(server)["tree_cache_size"])


def test_vllms_pause_empties_the_prefix_cache_unless_requests_are_kept(slow: LiveServer) -> None:
    for query, is_kept in (
        ("?clear_cache=false", True),
        ("?mode=keep", True),
        ("?mode=wait", False),
        ("", False),
    ):
        Api(slow.client).generate("abcdef" * 10, sampling_params={"max_new_tokens": 1})
        assert cached(slow)
        slow.client.post(f"/pause{query}")
        assert (cached(slow) > 0) == is_kept, query
        slow.client.post("/resume")


def test_a_reset_of_the_prefix_cache_can_take_the_kv_of_running_requests(
    slow: LiveServer, slow_while: Path, running: Running
) -> None:
    refused = slow.client.post("/reset_prefix_cache").json()
    assert refused["success"] is False and "1 requests run" in refused["message"]
    before = state_of(slow)["num_flushes"]
    assert slow.client.post("/reset_prefix_cache?reset_running_requests=true").json()["success"]
    assert slow.client.post("/reset_prefix_cache", json={"reset_running_requests": True}).json()["success"]
    assert state_of(slow)["num_flushes"] == before + 2
    assert slow.client.get("/is_paused").json() == {"is_paused": False}
    slow_while.unlink()
    reply = running.result()
    assert reply["meta_info"]["finish_reason"]["type"] == "length", "it goes on by itself"
    assert reply["output_ids"] == (reply["output_ids"][:3] * COUNT)[:COUNT], "the prompt, again and again"
    assert slow.client.post("/reset_prefix_cache?reset_external=true").json()["success"]


@pytest.fixture
def slow_steps(slow: LiveServer, slow_while: Path) -> Iterator[None]:
    """While the test runs, requests of 400 tokens take 40 seconds."""
    slow_while.touch()
    yield
    slow_while.unlink()


@pytest.mark.usefixtures("slow_steps")
def test_vllms_abort_of_some_requests_and_of_all(slow: LiveServer, wait_until: Any) -> None:
    running = {rid: Running(slow, rid, max_new_tokens=400) for rid in ("a", "b", "c")}
    wait_until(lambda: state_of(slow)["running_batch_size"] == 3)
    answer = slow.client.post("/abort_requests", json={"request_ids": ["a", "a", "x"]})
    assert (answer.status_code, answer.json()) == (200, {"status": "aborted", "aborted": 1})
    assert running["a"].result()["meta_info"]["finish_reason"]["type"] == "abort"
    answer = slow.client.post("/abort_requests", json={"request_ids": []})
    assert answer.json() == {"status": "aborted", "aborted": 2}
    for rid in ("b", "c"):
        assert running[rid].result()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.usefixtures("slow_steps")
def test_loads_count_what_runs_and_are_zero_once_all_is_aborted(slow: LiveServer, wait_until: Any) -> None:
    running = [Running(slow, rid, max_new_tokens=400) for rid in ("a", "b")]
    wait_until(lambda: state_of(slow)["running_batch_size"] == 2)
    (load,) = slow.client.get("/v1/loads?include=core").json()["loads"]
    assert (load["num_running_reqs"], load["num_total_reqs"]) == (2, 2)
    assert load["num_used_tokens"] > 0 and "queues" not in load
    (old,) = slow.client.get("/get_load").json()
    assert (old["num_reqs"], old["num_waiting_reqs"]) == (2, 0)
    slow.client.post("/abort_request", json={"abort_all": True})
    wait_until(lambda: slow.client.get("/v1/loads").json()["loads"][0]["num_total_reqs"] == 0)
    assert [each.result()["meta_info"]["finish_reason"]["type"] for each in running] == ["abort"] * 2


def test_an_unknown_mode_of_vllms_names_the_modes(slow: LiveServer) -> None:
    response = slow.client.post("/pause?mode=in_place")
    assert response.status_code == 400
    assert all(mode in response.json()["message"] for mode in ("abort", "wait", "keep"))


def test_a_request_that_comes_while_paused_is_queued_and_seen(slow: LiveServer, wait_until: Any) -> None:
    slow.client.post("/pause_generation", json={"mode": "in_place"})
    one = Running(slow, "late", max_new_tokens=2)
    wait_until(lambda: state_of(slow)["waiting_queue_rids"] == ["late"])
    slow.client.post("/abort_request", json={"rid": "late"})
    finish = one.result()["meta_info"]["finish_reason"]
    assert finish == {"type": "abort", "message": "Abort before prefill"}


BODIES = [
    ("/v1/completions", {"model": MODEL, "prompt": "abc", "max_tokens": 5}),
    ("/generate", {"text": "abc"}),
    ("/v1/completions", {"model": MODEL, "prompt": "abc", "max_tokens": 5, "stream": True}),
    ("/generate", {"text": "abc", "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_disconnect_while_paused_is_noticed_at_once(
    slow: LiveServer, wait_until: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(frontend_request, "ACCEPT_S", 600.0)  # that a stream's status line waits
    manager = slow.runtime.manager
    slow.client.post("/pause_generation", json={"mode": "in_place"})
    with posted(slow, path, body):
        wait_until(lambda: state_of(slow)["waiting_queue_size"] == 1)
    wait_until(lambda: manager.num_requests == 0)
    assert state_of(slow)["waiting_queue_size"] == 0


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_disconnect_while_the_prompt_is_tokenized_is_noticed_at_once(
    slow: LiveServer, wait_until: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    manager, go_on = slow.runtime.manager, threading.Event()
    tokenizer = manager.encoder.tokenizer
    assert tokenizer is not None

    class Held:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert go_on.wait(60)
            return tokenizer.encode("abc", add_special_tokens=add_special_tokens)

    monkeypatch.setattr(manager.encoder, "tokenizer", Held())
    before = state_of(slow)["num_steps"]
    try:
        with posted(slow, path, body | {"text" if path == "/generate" else "prompt": "abc" * 2000}):
            wait_until(lambda: manager.num_requests == 1)
        wait_until(lambda: manager.num_requests == 0, 30)
    finally:
        go_on.set()
    assert state_of(slow)["num_steps"] == before


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_stream_gets_comments_and_then_the_rest(
    slow: LiveServer, slow_while: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    slow_while.touch()  # it cannot end before the pause
    monkeypatch.setattr(responses, "KEEP_ALIVE_S", 0.03)
    body = {"model": MODEL, "prompt": "abc", "max_tokens": COUNT, "stream": True, "ignore_eos": True}
    with slow.client.stream("POST", "/v1/completions", json=body) as response:
        raw = response.iter_lines()
        lines = [next(line for line in raw if line.startswith("data"))]
        slow.client.post("/pause_generation", json={"mode": mode})
        slow_while.unlink()
        comments = 0
        while comments < 3:
            line = next(raw)
            comments += line.startswith(":")
            lines.append(line)
        slow.client.post("/continue_generation")
        *events, done = parse_events(iter([*lines, *raw]))
    assert done == "[DONE]"
    text = "".join(choice["text"] for each in events for choice in each["choices"])
    assert text == "abc" * (COUNT // 3)


def test_openais_client_reads_a_stream_through_a_pause(
    slow: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "KEEP_ALIVE_S", 0.03)
    client = openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0)
    params: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": COUNT}
    text = ""
    with client.completions.create(**params, stream=True, extra_body={"ignore_eos": True}) as stream:
        for chunk in stream:
            if not text:
                slow.client.post("/pause_generation", json={"mode": "retract", "ttl_s": 0.2})
            text += chunk.choices[0].text
    assert text == "abc" * (COUNT // 3)


def test_with_the_policy_reject_what_comes_while_paused_is_503(tiny_model: Path) -> None:
    with LiveServer(tiny_model, paused_policy="reject") as server:
        api = Api(server.client)
        server.client.post("/pause_generation")
        for response in (api.complete("abc"), api.complete("abc", stream=True), api.chat("abc")):
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("overloaded_error", "paused")
            assert "--paused-policy" in error["message"]
        response = api.generate("abc", stream=True)
        assert (response.status_code, response.json()["type"]) == (503, "overloaded_error")
        server.client.post("/continue_generation")
        assert api.complete("abc").is_success
        server.assert_nothing_left()


def test_a_pause_that_waits_when_the_engine_dies_is_503(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.1")
    with LiveServer(tiny_model) as server:
        running = Running(server, max_new_tokens=400)  # it cannot end before the engine does
        wait_until(lambda: server.runtime.manager.stats.counters.output_tokens > 0)
        replies: list[httpx.Response] = []
        pause = threading.Thread(
            target=lambda: replies.append(server.client.post("/pause_generation", json={"mode": "wait"}))
        )
        pause.start()
        wait_until(lambda: server.client.get("/health").json().get("mode") == "wait")
        os.kill(server.runtime.worker_pids[0], signal.SIGKILL)
        pause.join(60)
        assert (replies[0].status_code, "SIGKILL" in replies[0].text) == (503, True)
        assert running.result()["code"] == 503
        for path in ("/pause_generation", "/continue_generation", "/flush_cache", "/pause", "/resume"):
            assert server.client.post(path).status_code == 503
