"""``/watch`` over the real server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from segue.messages.fleet import WorkerRecord, WorkerReport
from tests.server.live import LiveServer

decode = msgspec.json.Decoder(WorkerRecord | WorkerReport).decode
WAIT_S = 60  # the most seconds that a test waits for a report


@contextmanager
def lines(server: LiveServer) -> Iterator[Iterator[WorkerRecord | WorkerReport]]:
    with httpx.stream("GET", f"{server.url}/watch", timeout=WAIT_S) as response:
        assert response.status_code == 200
        yield map(decode, response.iter_lines())


def next_report(reports: Iterator[WorkerRecord | WorkerReport]) -> WorkerReport:
    report = next(reports)
    assert isinstance(report, WorkerReport)
    return report


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.005)


def test_the_first_line_says_who_the_engine_is(server: LiveServer) -> None:
    with lines(server) as found:
        record = next(found)
    limits = server.runtime.manager.ready.limits
    assert isinstance(record, WorkerRecord)
    assert (record.role, record.page_size, record.max_seq_len) == (
        "both",
        limits.page_size,
        limits.max_seq_len,
    )
    assert record.incarnation == server.runtime.incarnation
    assert len(record.model) == len(record.tokenizer) == 64


def test_an_engine_that_has_died_begins_no_reports(tiny_model: Path) -> None:
    with LiveServer(tiny_model) as server:
        os.kill(server.runtime.worker_pids[0], signal.SIGKILL)
        wait_for(server.runtime.died.done)
        reply = httpx.get(f"{server.url}/watch", timeout=WAIT_S)
        assert reply.status_code == 503
        assert "SIGKILL" in reply.json()["message"]


def test_reports_follow_while_the_engine_is_idle(server: LiveServer) -> None:
    with lines(server) as found:
        next(found)
        first, second = next_report(found), next_report(found)
    for report in (first, second):
        assert (report.state, report.trouble, report.paused) == ("active", "", False)
        assert report.load.num_pages == server.runtime.manager.ready.limits.num_pages
        assert report.load.decode_rows == 0


def test_a_report_tells_of_a_pause(server: LiveServer) -> None:
    with lines(server) as found:
        next(found)
        server.client.post("/pause_generation", json={})
        assert any(next_report(found).paused for _ in range(WAIT_S * 10))
        server.client.post("/continue_generation", json={})


def test_the_lines_end_when_the_engine_dies(tiny_model: Path) -> None:
    with LiveServer(tiny_model) as server, lines(server) as found:
        next(found)
        next_report(found)
        os.kill(server.runtime.worker_pids[0], signal.SIGKILL)
        assert len(list(found)) < WAIT_S * 10


def test_the_lines_end_when_the_server_is_drained(tiny_model: Path) -> None:
    with LiveServer(tiny_model) as server, lines(server) as found:
        next(found)
        next_report(found)
        server._thread.call(_drain(server))
        states = [report.state for report in found if isinstance(report, WorkerReport)]
        assert set(states[:-1]) <= {"active"}, "reports that were sent before the drain"
        assert states[-1:] in ([], ["active"], ["draining"])


async def _drain(server: LiveServer) -> None:
    server.runtime.drain()


@pytest.mark.parametrize("key", [None, "user"])
def test_the_admin_key_is_needed(tiny_model: Path, key: str | None) -> None:
    with LiveServer(tiny_model, api_key="user", admin_api_key="admin", started=False) as server:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        for method, path in (("GET", "/watch"), ("POST", "/role"), ("POST", "/drain")):
            assert server.client.request(method, path, headers=headers).status_code == 401


# --- /role ---


def generate(server: LiveServer, count: int, **fields: Any) -> httpx.Response:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": count, "ignore_eos": True}}
    return server.client.post("/generate", json=body | fields)


def set_role(server: LiveServer, role: str, **fields: Any) -> httpx.Response:
    return server.client.post("/role", json={"role": role} | fields)


def test_a_new_role_takes_other_work_and_is_told_to_routers(tiny_model: Path) -> None:
    with LiveServer(tiny_model, role="prefill") as server, lines(server) as found:
        record = next(found)
        assert isinstance(record, WorkerRecord) and record.role == "prefill"
        assert generate(server, 5).status_code == 400
        reply = set_role(server, "decode")
        assert (reply.status_code, reply.json()) == (200, {"role": "decode", "kv_address": None})
        assert generate(server, 5).status_code == 200
        record = next(line for line in found if isinstance(line, WorkerRecord))
        assert (record.role, record.incarnation) == ("decode", server.runtime.incarnation)
        with lines(server) as later:
            assert next(later) == record


def test_what_the_old_role_took_is_refused_as_retryable(tiny_model: Path) -> None:
    with LiveServer(tiny_model, role="decode") as server:
        assert set_role(server, "prefill").status_code == 200
        reply = generate(server, 5)
        assert (reply.status_code, reply.json()["type"]) == (503, "overloaded_error")
        assert "this engine's --role is prefill, and the request may have 5" in reply.json()["message"]
        assert generate(server, 1).status_code == 200


def test_an_engine_that_was_started_for_whole_requests_cannot_hand_kv_over(server: LiveServer) -> None:
    reply = set_role(server, "prefill")
    assert reply.status_code == 409
    assert "started with --role both" in reply.json()["message"]
    assert set_role(server, "both").status_code == 200


@pytest.mark.parametrize("body", [{}, {"role": "router"}, {"role": "decode", "timeout": -1}])
def test_a_role_must_be_one_of_three_and_the_timeout_positive(
    server: LiveServer, body: dict[str, Any]
) -> None:
    assert server.client.post("/role", json=body).status_code == 400


def test_after_the_timeout_the_old_role_is_back(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, slow_while: Path
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.02")
    with LiveServer(tiny_model, role="decode") as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, server, 30)
        wait_for(lambda: server.runtime.manager.stats.counters.num_running)
        reply = set_role(server, "prefill", timeout=0.1)
        assert reply.status_code == 409
        assert "after 0.1 s there are 1 requests of the role decode left" in reply.json()["message"]
        slow_while.unlink()
        assert generate(server, 2).status_code == 200, "it takes whole requests again"
        assert running.result().status_code == 200


def test_requests_that_run_end_before_the_role_changes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, slow_while: Path
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.02")
    with LiveServer(tiny_model, role="decode") as server, ThreadPoolExecutor(2) as pool:
        running = pool.submit(generate, server, 30)
        wait_for(lambda: server.runtime.manager.stats.counters.num_running)
        change = pool.submit(set_role, server, "prefill")
        wait_for(lambda: generate(server, 2).status_code == 503)
        assert not change.done(), "new work is refused while the old one ends"
        slow_while.unlink()
        assert change.result().status_code == 200
        assert len(running.result().json()["output_ids"]) == 30


# --- /drain ---


def test_a_drained_engine_refuses_requests_and_ends_those_that_run(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, slow_while: Path
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.02")
    with LiveServer(tiny_model) as server, lines(server) as found, ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, server, 30)
        wait_for(lambda: server.runtime.manager.stats.counters.num_running)
        assert server.client.post("/drain").json() == {"drain": True, "num_requests": 1}
        reply = generate(server, 1)
        assert reply.status_code == 503 and "an operator drains this engine" in reply.json()["message"]
        slow_while.unlink()
        assert len(running.result().json()["output_ids"]) == 30
        assert server.client.get("/health").status_code == 503
        reports = (line for line in found if isinstance(line, WorkerReport))
        assert next(report.state for report in reports if report.trouble) == "draining"
        assert server.client.post("/drain", json={"drain": False}).status_code == 200
        assert next(report.state for report in reports if not report.trouble) == "active"
        assert generate(server, 1).status_code == 200
