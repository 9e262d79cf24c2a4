"""The real server while its worker is stopped, and when it gets a signal while it answers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.conftest import WaitUntil
from tests.e2e.served import STORY, Client, greedy, serve
from tests.support.held_steps import StepGate
from tests.support.tiny_model import write_model

COUNT = 1000  # tokens; such a model makes five hundred to two thousand per second


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Yields a client of a server with a drain period; the last test ends that server."""
    model = write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    options = [f"--model={model}", "--load-format=dummy", "--dtype", "float32"]
    gate = StepGate(tmp_path_factory.mktemp("gate") / "steps")
    with serve(*options, "--ping-s", "1.5", "--drain-s", "60", gate=gate) as served:
        client = Client(served, gate)
        yield client
        client.close()


def test_a_stopped_worker_is_reported_and_continues_where_it_stopped(
    client: Client, wait_until: WaitUntil
) -> None:
    whole = client.generate(STORY, greedy(COUNT))
    (worker,) = client.served.workers()
    assert client.gate is not None
    client.gate.close_after(COUNT - 1)  # it cannot end before the worker is stopped
    stream = client.stream(STORY, greedy(COUNT))
    stream.wait(5)
    os.kill(worker, signal.SIGSTOP)
    try:
        assert client.http.get("/server_info").status_code == 503
        for path in ("/health", "/ready", "/ping", "/health_generate"):
            response = client.http.get(path)
            assert (response.status_code, response.json()["status"]) == (503, "hung")
        for path in ("/metrics", "/is_paused"):
            assert client.http.get(path).status_code == 200
        refused = client.http.post("/generate", json={"text": STORY})
        assert (refused.status_code, "no heartbeat" in refused.text) == (503, True)
        assert not stream.ended
    finally:
        os.kill(worker, signal.SIGCONT)
        client.gate.open()
    assert stream.result()["output_ids"] == whole["output_ids"]
    wait_until(lambda: client.http.get("/health").status_code == 200)
    assert client.http.get("/health_generate").json() == {"status": "ok"}


def test_sigterm_lets_running_answers_finish(client: Client) -> None:
    assert client.gate is not None
    client.pause("in_place")
    reply = client.start(STORY, greedy(COUNT), rid="whole")
    client.waiting("whole")  # a request on its way may come too late
    stream = client.stream(STORY, greedy(COUNT), rid="stream")
    client.waiting("whole", "stream")
    client.gate.close_after(COUNT - 1)  # they begin together, and neither can end
    client.proceed()
    stream.wait(5)
    client.served.process.send_signal(signal.SIGTERM)
    while True:
        response = httpx.get(f"{client.served.url}/ready")
        if response.status_code == 503:
            break
    assert response.json()["status"] == "draining"
    refused = httpx.post(f"{client.served.url}/generate", json={"text": STORY})
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    client.gate.open()
    for ended in (stream.result(), reply.result(30)):
        assert ended["meta_info"]["finish_reason"]["type"] == "length"
        assert len(ended["output_ids"]) == COUNT
    assert client.served.process.wait(60) == 0
