"""A whole server process: start, readiness, signals and the death of its workers."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import least_measured
from tests.launch.test_processes import is_alive
from tests.server.conftest import MODEL
from tests.server.events import parse_events
from tests.support.child import start_child

PROGRAM = Path(__file__).with_name("fake_server.py")
STREAM = {"model": MODEL, "prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True}


class ServerProcess:
    """The server in a process of its own; leaving the ``with`` block kills it if it still runs."""

    def __init__(
        self,
        model: Path,
        environment: dict[str, str] | None = None,
        *,
        open_files: tuple[int, int] | None = None,  # soft and hard limit
        **options: Any,
    ) -> None:
        given = {"model": str(model), "load_format": "dummy", "port": 0, "log_level": "error", **options}
        self.process = start_child(
            [sys.executable, str(PROGRAM), json.dumps(given)],
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=open_files and partial(resource.setrlimit, resource.RLIMIT_NOFILE, open_files),
        )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ready(self) -> str:
        """Waits until the server serves; returns its URL."""
        assert self.line().startswith("bound ")
        word, url = self.line().split()
        assert word == "ready"
        return url

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(("number", "options"), [(signal.SIGINT, {}), (signal.SIGTERM, {"drain_s": 0.0})])
def test_a_signal_ends_the_server_and_its_streams_within_two_seconds(
    tiny_model: Path, number: int, options: dict[str, Any]
) -> None:
    assert least_measured(2.0, partial(seconds_of_an_end, tiny_model, number, options)) < 2.0


def seconds_of_an_end(tiny_model: Path, number: int, options: dict[str, Any]) -> float:
    """The time from a signal until the server has ended, which ends its streams and workers."""
    with ServerProcess(tiny_model, {"FAKE_STEP_S": "0.02"}, **options) as server:
        url = server.ready()
        children = server.children()
        with httpx.stream("POST", f"{url}/v1/completions", json=STREAM) as response:
            events = parse_events(response.iter_lines())
            next(events)
            began = time.monotonic()
            os.killpg(server.process.pid, number)  # as the terminal does for Ctrl-C
            *_, last, done = events
        assert server.process.wait(60) == 0
        seconds = time.monotonic() - began
        assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
        assert children
        assert not any(is_alive(child) for child in children)
        return seconds


class RunningRequests:
    """One plain and one streamed request, each in a thread of its own; both have begun."""

    def __init__(self, url: str, **fields: Any) -> None:
        self._pool = ThreadPoolExecutor()
        body = STREAM | fields
        self.whole = self._pool.submit(
            httpx.post, f"{url}/v1/completions", json=body | {"stream": False}, timeout=60
        )
        self._started = threading.Event()
        self._stream = self._pool.submit(self._read, url, body)
        assert self._started.wait(60)
        deadline = time.monotonic() + 60
        while httpx.get(f"{url}/health").json().get("num_requests", 0) + self._num_ended() < 2:
            assert time.monotonic() < deadline, "the plain request has not begun"

    def _num_ended(self) -> int:
        return self.whole.done() + self._stream.done()

    def reasons(self) -> list[str]:
        """Returns the finish reasons of the two requests."""
        reply, (last, done) = self.whole.result(60), self._stream.result(60)
        assert (reply.status_code, done) == (200, "[DONE]")
        return [each["choices"][0]["finish_reason"] for each in (reply.json(), last)]

    def _read(self, url: str, body: dict[str, Any]) -> list[Any]:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            events = parse_events(response.iter_lines())
            next(events)
            self._started.set()
            return list(events)[-2:]


def until_draining(url: str) -> None:
    """Waits until the server answers that it begins no more requests."""
    deadline = time.monotonic() + 60
    with httpx.Client(base_url=url, verify=False) as client:
        while True:
            assert time.monotonic() < deadline, "the server does not drain"
            with suppress(
                httpx.TransportError
            ):  # as it begins to drain, it closes connections without a request
                if client.get("/ready").status_code == 503:
                    return


def is_open(connection: socket.socket) -> bool:
    """Whether the server still has not closed the connection after up to a minute."""
    connection.settimeout(60)
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return True


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(tiny_model: Path, slow_while: Path) -> None:
    with ServerProcess(tiny_model, {"FAKE_STEP_S": "0.02"}) as server:
        url = server.ready()
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as idle:
            idle.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while b"version" not in idle.recv(4096):
                pass
            requests = RunningRequests(url, max_tokens=50)
            # While the engine is paused, no request can end, however long the checks take.
            assert httpx.post(f"{url}/pause_generation", json={"mode": "in_place"}).status_code == 200
            slow_while.unlink()
            os.kill(server.process.pid, signal.SIGTERM)
            assert not is_open(idle), "an idle connection keeps clients from going elsewhere"
        for path in ("/ready", "/health"):
            response = httpx.get(url + path)
            assert (response.status_code, response.json()["status"]) == (503, "draining")
        refused = httpx.post(f"{url}/v1/completions", json=STREAM)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "draining"
        assert not requests.whole.done()
        assert httpx.post(f"{url}/continue_generation").status_code == 200
        assert requests.reasons() == ["length", "length"]
        assert server.process.wait(60) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_aborts_running_requests(tiny_model: Path, second: int) -> None:
    with ServerProcess(tiny_model, {"FAKE_STEP_S": "0.02"}) as server:
        url = server.ready()
        requests = RunningRequests(url)
        os.kill(server.process.pid, signal.SIGTERM)
        until_draining(url)
        os.kill(server.process.pid, second)
        assert requests.reasons() == ["abort", "abort"]
        assert server.process.wait(60) == 0


def test_a_drain_ends_after_drain_s_and_aborts_the_rest(tiny_model: Path) -> None:
    with ServerProcess(tiny_model, {"FAKE_STEP_S": "0.02"}, drain_s=0.5) as server:
        requests = RunningRequests(server.ready())
        began = time.monotonic()
        os.kill(server.process.pid, signal.SIGTERM)
        assert requests.reasons() == ["abort", "abort"]
        assert server.process.wait(60) == 0
        assert time.monotonic() - began >= 0.5


def test_a_drain_waits_until_a_paused_engine_continues(tiny_model: Path, slow_while: Path) -> None:
    with ServerProcess(tiny_model, {"FAKE_STEP_S": "0.02"}) as server:
        url = server.ready()
        requests = RunningRequests(url, max_tokens=50)
        assert httpx.post(f"{url}/pause_generation", json={"mode": "retract"}).status_code == 200
        slow_while.unlink()
        os.kill(server.process.pid, signal.SIGTERM)
        until_draining(url)
        assert httpx.get(f"{url}/is_paused").json() == {"is_paused": True}
        assert httpx.post(f"{url}/continue_generation").status_code == 200
        assert requests.reasons() == ["length", "length"]
        assert server.process.wait(60) == 0


def test_a_worker_that_dies_during_a_drain_makes_the_exit_code_1(tiny_model: Path) -> None:
    with ServerProcess(tiny_model, {"FAKE_STEP_S": "0.02"}) as server:
        url = server.ready()
        requests = RunningRequests(url)
        os.kill(server.process.pid, signal.SIGTERM)
        until_draining(url)
        os.kill(server.children()[0], signal.SIGKILL)
        assert requests.whole.result(60).status_code == 503
        assert server.process.wait(60) == 1


def test_a_server_that_was_suspended_does_not_report_its_worker_as_hung(tiny_model: Path) -> None:
    with ServerProcess(tiny_model, ping_s=1.5) as server:
        url = server.ready()
        assert httpx.get(f"{url}/health").status_code == 200
        os.kill(server.process.pid, signal.SIGSTOP)
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{url}/health", timeout=2.5)
        os.kill(server.process.pid, signal.SIGCONT)
        with httpx.Client(base_url=url) as client:
            assert {client.get("/health").status_code for _ in range(200)} == {200}


def test_while_the_model_loads_requests_get_503_and_sigterm_ends_the_server(tiny_model: Path) -> None:
    assert least_measured(2.0, partial(seconds_of_an_end_while_loading, tiny_model)) < 2.0


def seconds_of_an_end_while_loading(tiny_model: Path) -> float:
    with ServerProcess(tiny_model, {"FAKE_START": "hang"}) as server:
        port = server.line().split()[1]
        deadline = time.monotonic() + 60
        while True:
            try:
                response = httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
        assert response.status_code == 503
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        return time.monotonic() - began


def test_a_worker_that_cannot_start_ends_the_server_with_its_error_text(tiny_model: Path) -> None:
    with ServerProcess(tiny_model, {"FAKE_START": "fail"}) as server:
        server.line()
        assert server.line() == "failed only 1 page fits; use more memory"
        assert server.process.wait(60) == 1


def test_with_a_dead_engine_health_is_503_for_the_grace_period_then_the_exit_code_is_1(
    tiny_model: Path,
) -> None:
    assert least_measured(3.0, partial(seconds_with_a_dead_engine, tiny_model)) < 3.0


def seconds_with_a_dead_engine(tiny_model: Path) -> float:
    with ServerProcess(tiny_model, exit_grace=0.7) as server:
        url = server.ready()
        assert httpx.get(f"{url}/health").status_code == 200
        began = time.monotonic()
        os.kill(server.children()[0], signal.SIGKILL)
        statuses = []
        while server.process.poll() is None and time.monotonic() - began < 5:
            try:
                statuses.append(httpx.get(f"{url}/health").status_code)
            except httpx.TransportError:
                break
        assert server.process.wait(60) == 1
        seconds = time.monotonic() - began
        assert seconds >= 0.7
        assert statuses[-1] == 503
        assert 503 in statuses
        return seconds


def test_killing_the_server_ends_its_workers_within_a_second(tiny_model: Path, wait_until: Any) -> None:
    assert least_measured(1.0, partial(seconds_after_a_kill, tiny_model, wait_until)) < 1.0


def seconds_after_a_kill(tiny_model: Path, wait_until: Any) -> float:
    with ServerProcess(tiny_model) as server:
        server.ready()
        children = server.children()
        began = time.monotonic()
        server.process.kill()
        wait_until(lambda: not any(is_alive(child) for child in children))
        return time.monotonic() - began
